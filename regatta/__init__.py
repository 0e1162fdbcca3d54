"""Regatta's Python API: what `predict` has, under a name that no other package has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import predict

__version__ = "0.1.0"
__all__ = predict.__all__

if TYPE_CHECKING:
    from predict import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """What `predict` has by that name, imported on first use."""
        return getattr(predict, name)


def __dir__() -> list[str]:
    """The public names, those not imported yet included."""
    return sorted([*globals(), *__all__])
