"""Engines of the demo model."""

from __future__ import annotations

from typing import Any

from predict import EngineConfig
from predict.device import library
from tests.support.paths import DEMO


def demo_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"attention": "append", "block_size": 16, "batch_size": 4}
    values["dtype"] = "float32"
    values["inference_model"] = library.find() is not None  # plain operators are ten times slower
    return EngineConfig(model_name_or_path=str(DEMO), **{"max_length": 256, **values, **changes})
