"""Everything that turns a prompt into text: `LLM` and `SamplingParams`, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predict.answer_form import AnswerForm
    from predict.async_llm import AsyncLLM
    from predict.config.engine import EngineConfig
    from predict.errors import UserError
    from predict.guide import Guide
    from predict.llm import LLM
    from predict.request import RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "AnswerForm",
    "AsyncLLM",
    "EngineConfig",
    "Guide",
    "RequestOutput",
    "SamplingParams",
    "UserError",
]

# Name -> module. Lazy, so that `--help` and the scheduler's tests never import Paddle.
_HOMES = {
    "LLM": "predict.llm",
    "AsyncLLM": "predict.async_llm",
    "EngineConfig": "predict.config.engine",
    "AnswerForm": "predict.answer_form",
    "Guide": "predict.guide",
    "RequestOutput": "predict.request",
    "SamplingParams": "predict.request",
    "UserError": "predict.errors",
}


if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """The public object called `name`; raises AttributeError for any other name."""
        if name not in _HOMES:
            known = sorted(_HOMES)
            raise AttributeError(f"module 'predict' has no attribute {name!r} (has: {known})")
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, those not imported yet included."""
    return sorted([*globals(), *_HOMES])
