"""Decoding and resizing files of pictures, in this process, or in others with limits.

A file of few bytes may ask for seconds of work. A worker that takes more CPU time or memory than it
may ends, and its picture is refused; the next one starts another.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.images.limits import MAX_BYTES, MAX_PIXELS, MOST_PIXELS
from predict.images.opening import opened
from predict.images.pixels import Pixels
from predict.system.guarded import EndedError, GuardedProcess, folders_of

# (a file's bytes, how pictures become patches, where it is) -> [height, width, 3], resized.
Decode: TypeAlias = Callable[[bytes, Pixels, str], npt.NDArray[np.uint8]]

WORKER = Path(__file__).with_name("worker.py")
PACKAGES = ("predict", "numpy", "PIL")
CPU_SECONDS = 10.0  # of a picture; 64 Mpixel of PNG take five
WALL_FACTOR, START_SECONDS = 6.0, 20.0  # of the CPU time, and beside it: a machine may be busy
BASE_BYTES = 512 << 20  # of memory, beside the pixels
BYTES_PER_PIXEL = 16  # decoded, turned and laid on white


def decoded(data: bytes, pixels: Pixels, where: str) -> npt.NDArray[np.uint8]:
    """The resized pixels of a file whose size was checked. Raises UserError. See Decode."""
    return pixels.resized(opened(data, where, MOST_PIXELS).image)


def record_of(pixels: Pixels) -> dict[str, Any]:
    """How pictures become patches, as JSON has it."""
    kind = type(pixels)
    return {"module": kind.__module__, "class": kind.__name__, "fields": asdict(pixels)}


def made_of(record: Mapping[str, Any]) -> Pixels:
    """What `record_of` was given."""
    kind = getattr(import_module(record["module"]), record["class"])
    given = record["fields"]
    values = {each.name: given[each.name] for each in fields(kind)}
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


class DecodingProcess(GuardedProcess):
    """One worker."""

    script = WORKER
    purpose = "pictures are decoded; raise the limits on processes and memory"
    # One thread: several would take address space, and are not started under the limits.
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # noqa: RUF012

    def __init__(self, max_pixels: int, seconds: float) -> None:
        super().__init__()
        self.memory_bytes = BASE_BYTES + BYTES_PER_PIXEL * max_pixels
        self.seconds = seconds

    def settings(self) -> dict[str, Any]:
        return {
            "paths": folders_of(PACKAGES, "pictures need; "),
            "memory_bytes": self.memory_bytes,
            "cpu_seconds": self.seconds,
        }

    def decode(self, data: bytes, pixels: Pixels, where: str) -> npt.NDArray[np.uint8]:
        """See Decode. Raises UserError for what is damaged, and for what takes too much."""
        asked = json.dumps({"where": where, "pixels": record_of(pixels)}).encode("ascii")
        wall, is_whole = WALL_FACTOR * self.seconds + START_SECONDS, False
        with self._lock:
            try:
                # Behind do_resize false pixels are as many as the file has.
                most = 8 * MAX_BYTES + 4096
                said, values = self._exchange(asked, data, most, wall)
                is_whole = said.get("error") != "memory"
            except TimeoutError:
                said = {"error": "wall"}
            except EndedError as error:
                said = {"error": "time" if error.is_out_of_time else error.how}
            finally:
                if not is_whole:  # it may still send a reply, which no later picture may get
                    self.stop()
        if "shape" in said:
            return np.frombuffer(values, np.uint8).reshape(said["shape"])
        refused = {
            "memory": f"more than {self.memory_bytes >> 20} MiB of memory",
            "time": f"more than {self.seconds:g} s of CPU time",
            "wall": f"more than {wall:g} s",
        }
        if (limit := refused.get(said["error"])) is not None:
            raise UserError(f"{where} takes {limit} to decode; shrink it, or save it as PNG")
        if is_whole:
            raise UserError(said["error"])
        raise UserError(
            f"{where} cannot be decoded: the process that does it ended {said['error']}"
        )


@dataclass(eq=False)
class Workers:
    """Workers, as many as threads ask at once. Thread-safe."""

    max_pixels: int = MAX_PIXELS  # of a picture
    seconds: float = CPU_SECONDS  # of CPU time, of a picture
    _idle: list[DecodingProcess] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)

    def decode(self, data: bytes, pixels: Pixels, where: str) -> npt.NDArray[np.uint8]:
        """See Decode. Raises UserError."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        worker = idle or DecodingProcess(self.max_pixels, self.seconds)
        try:
            return worker.decode(data, pixels, where)
        finally:
            with self._lock:
                self._idle.append(worker)
