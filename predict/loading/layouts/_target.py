"""What weights are for: whether its operators hold codes decides which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass

from predict.config.schemes import check_support
from predict.errors import UserError


@dataclass(frozen=True)
class Target:
    """A device, its operators and the activations' dtype."""

    device: str = "cpu"
    compiled: bool = False
    dtype: str = "float32"
    capability: tuple[int, int] | None = None  # of a GPU

    def check(self, scheme: str, group_size: int, in_features: int) -> None:
        """Raises UserError where a linear of that scheme does not run there; see `runs`."""
        check_support(
            scheme, self.device, self.compiled, self.dtype, self.capability, group_size, in_features
        )

    def runs(self, scheme: str, group_size: int, in_features: int) -> bool:
        """Whether a linear of that scheme runs there. group_size: -1 is all input features."""
        try:
            self.check(scheme, group_size, in_features)
        except UserError:
            return False
        return True
