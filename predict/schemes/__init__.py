"""Weight schemes: how a linear's weight is stored. One module per `quant_type`; "dense" is none.

A scheme answers four questions: which tensors a checkpoint holds for a linear (`expected`), how
they become the tensors that the compiled ops read (`load` with compiled=True) or the plain ones
(compiled=False), and what the plain [out, in] matrix is (`plain`), for the reference operators.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, Protocol, cast

from predict.errors import UserError
from predict.nn.weights import LinearPlan, WeightSource

if TYPE_CHECKING:
    from paddle import Tensor


class Scheme(Protocol):
    """What a module in this package offers."""

    NAME: str

    def expected(self, plan: LinearPlan) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors for a linear, biases apart."""
        ...

    def load(
        self,
        source: WeightSource,
        plan: LinearPlan,
        dtype: str,
        compiled: bool,
        place: Any = None,
    ) -> list[Tensor]:
        """Reads (and for compiled ops packs) the weight; one to a few tensors.

        place: a GPU's, where nothing is packed; None for the CPU.
        """
        ...

    def plain(self, tensors: list[Tensor]) -> Tensor:
        """The [out_features, in_features] matrix of tensors loaded with compiled=False."""
        ...


def known_schemes() -> list[str]:
    """The schemes that have a module here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def scheme_of(name: str) -> Scheme:
    """The scheme module of that name; raises UserError naming the known ones."""
    if name not in known_schemes():
        raise UserError(
            f"quant_type {name!r} is not supported (known: {', '.join(known_schemes())})"
        )
    return cast(Scheme, importlib.import_module(f"{__name__}.{name}"))
