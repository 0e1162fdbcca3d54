"""Where a model runs and by which operators: the one place that decides it.

The CPU and GPUs have compiled operators. Every other device that Paddle has registered runs the
plain ones, step by step as the CPU does: Paddle has kernels for it, or takes those of the CPU.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from predict.device import devices, library
from predict.device.devices import Device
from predict.errors import UserError
from predict.system.host import available_memory_bytes
from predict.system.notes import LOG


def is_compiled(backend: ModuleType) -> bool:
    """Whether a backend is the compiled operators."""
    return backend.__name__ == "predict.ops.compiled"


@dataclass(frozen=True)
class Platform:
    """A device, which is the process's, and the operators that run there."""

    device: Device
    inference_model: bool  # the compiled operators, where there are any
    num_ranks: int = 1  # processes that share the device's memory

    @property
    def gpu(self) -> Device | None:
        """The device where it is a GPU: with graphs, pinned memory, and a driver to ask."""
        return self.device if self.device.is_gpu else None

    @property
    def place(self) -> Any:
        """Paddle's object for the device; None for the CPU."""
        return None if self.device.is_cpu else self.device.place()

    @cached_property
    def backend(self) -> ModuleType:
        """The operators, compiled where they are asked for and built. Imports Paddle."""
        has_compiled = self.device.is_cpu or self.device.is_gpu
        if self.inference_model and not has_compiled:
            LOG.warning(
                f"there are no compiled operators for {self.device.flag}; the plain-Paddle "
                "operators are in use"
            )
        if self.inference_model and has_compiled and library.load() is not None:
            from predict.ops import compiled as ops

            return ops
        library.import_paddle()
        from predict.ops import plain as reference

        return reference

    @property
    def compiled(self) -> ModuleType | None:
        """The operators where they are the compiled ones, which pack weights."""
        return self.backend if is_compiled(self.backend) else None

    @property
    def packs_pages(self) -> bool:
        """Whether the operators read pages of adapters packed; see predict.nn.adapter_pages."""
        return self.device.is_cpu and self.compiled is not None

    def make_current(self) -> None:
        """Makes the device Paddle's default; another model may have set its own since."""
        paddle = library.import_paddle()
        if paddle.get_device() != self.device.name:
            paddle.set_device(self.device.name)

    def free_bytes(self) -> int:
        """Memory for weights, cache and workspace, but of a GPU; no limit where nobody tells."""
        return available_memory_bytes() // self.num_ranks if self.device.is_cpu else sys.maxsize

    def explained_out_of_memory(self, advice: str) -> AbstractContextManager[None]:
        """See devices.explained_out_of_memory; the CPU has no such error."""
        if self.device.is_cpu:
            return nullcontext()
        return devices.explained_out_of_memory(self.device, advice)


def platform_of(device: str, inference_model: bool | None) -> Platform:
    """The platform that flags ask for, its device activated. None: compiled where there are any.

    Raises UserError where it cannot be used, for a GPU before Paddle is imported.
    """
    if devices.kind_of(device) == "gpu" and inference_model is False:
        raise UserError(
            f"device {device} runs the compiled operators only; leave --inference_model false out"
        )
    chosen = devices.choose(device)
    if not chosen.is_cpu:  # the CPU is every process's from the start
        devices.activate(chosen)
    return Platform(chosen, inference_model is not False)
