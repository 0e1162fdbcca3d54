"""Weight schemes: how a linear's weight is stored. One module per `quant_type`; "dense" is none.

A scheme rounds a float matrix (`quantize`), makes the tensors that its operators read (`tensors`),
multiplies activations by them in plain Paddle (`product`), and restores the matrix (`plain`).
`predict.loading.layouts` reads checkpoints of other programs.

Tensors of a compiled linear, a fixed number (one zero stands for "none"); packed and scales are the
device's own layout of codes, scales and zeros (regatta_pack_quantized):

    dense              weight
    weight_only_*      packed, scales, act, perm int32 [K]
    w4a8               alike
    a8w8               packed, scales, act, smooth [K], shift [K]
    a8w8_fp8           packed, scales, act

act, float32 [1], is the static activation scale; 0: a scale per token is found at run time.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.schemes._quantized import Quantized
from predict.schemes._rounding import RoundWeight, for_row_blocks, round_on_host

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = [
    "Quantized",
    "RoundWeight",
    "Scheme",
    "float_values",
    "for_row_blocks",
    "known_schemes",
    "round_on_host",
    "scheme_of",
]


class Scheme(Protocol):
    """The interface of a module in this package."""

    NAME: str

    def quantize(
        self, weight: Any, group_size: int, round_weight: RoundWeight = round_on_host
    ) -> Quantized:
        """Rounds weight [N, K], without calibration.

        weight: an array (float32, float16, bfloat16 as uint16), or a tensor that `round_weight`
        takes; the codes are at its place. group_size: input features per scale, -1 for all; schemes
        without groups take -1. round_weight: by the scheme's rule (predict.schemes._rounding).
        """

    def tensors(
        self, weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
    ) -> tuple[Tensor, ...]:
        """The tensors of a Linear: packed for the compiled operators, else plain.

        dtype: the activations'. compiled: predict.ops.compiled, which packs them; None: plain.
        place: a GPU's; None for the CPU. Their number is the scheme's.
        """

    def product(self, x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        """float32 x [T, K] W^T, of tensors made with compiled None. Returns float32 [T, N]."""

    def plain(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The [out_features, in_features] matrix of tensors made with compiled None."""


def known_schemes() -> list[str]:
    """The schemes that have a module here."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_"))


@functools.cache  # plain operators ask with every product
def scheme_of(name: str) -> Scheme:
    """The scheme module of that name; raises UserError naming the known ones."""
    if name not in known_schemes():
        raise UserError(
            f"quant_type {name!r} is not supported (known: {', '.join(known_schemes())})"
        )
    return cast(Scheme, importlib.import_module(f"{__name__}.{name}"))


def float_values(name: str, weight: Quantized) -> npt.NDArray[np.float32]:
    """The values of a scheme's codes, [out_features, in_features], columns in their order."""
    scheme = scheme_of(name)
    made = scheme.plain(scheme.tensors(weight, "float32", None))
    values: npt.NDArray[np.float32] = made.astype("float32").numpy()
    return values
