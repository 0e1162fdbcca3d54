"""Where draft tokens come from: one module per `speculate_method`, each with a `make` function."""

from __future__ import annotations

import importlib
from typing import cast

from predict.config.speculation import check_method
from predict.engine.drafts import Proposer, SpeculativeConfig


def proposer_of(config: SpeculativeConfig) -> Proposer:
    """The proposer of a method; raises UserError naming the known ones."""
    check_method(config.method)
    module = importlib.import_module(f"{__name__}.{config.method}")
    return cast(Proposer, module.make(config))
