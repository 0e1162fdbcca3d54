"""Runs with drafts, which are made whether they pay or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from predict import LLM, EngineConfig
from predict.device import library
from predict.engine.draft_policy import DraftPolicy
from tests.support.paths import DEMO


class Generous(DraftPolicy):
    """Has as many drafts as it can, whatever they take."""

    def __init__(self, max_length: int, max_rows: int, looks_up: bool):
        super().__init__(max_length, max_rows, looks_up)
        self._seconds = defaultdict(lambda: {(0, 0): 1.0})

    def _length(self, able: Sequence[tuple[int, int]], num_decoding: int, on_way: bool) -> int:
        return min(self.max_length, self.max_rows // len(able))

    def stepped(
        self,
        size: int,
        lengths: Sequence[int],
        num_accepted: int,
        waited: bool,
        seconds: float,
        own: float = 0.0,
    ) -> None:
        """Everything is free."""


# Settings of each method; the draft model is the demo model itself, rounded.
METHODS: dict[str, dict[str, Any]] = {
    "inference_with_reference": {"speculate_max_ngram_size": 3},
    "lookahead": {"speculate_max_ngram_size": 3},
    "draft_model": {
        "draft_model_name_or_path": str(DEMO),
        "draft_model_quant_type": "weight_only_int4",
    },
}
PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a",
    "import os\nimport sys\n\nimport os\nimport",
    "for i in range(10):\n    print(i)\n\nfor j in range(10):\n    print(",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop",
]


def config(directory: Path, settings: Mapping[str, Any]) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32",
        "max_length": 128,
        "block_size": 32,
        "batch_size": 3,
        "attention": "append",
    }
    values |= {"inference_model": library.find() is not None, **settings}
    return EngineConfig(**{"model_name_or_path": str(directory), **values})


def draft_always(llm: LLM) -> None:
    """Drafts whether they pay or not: a draft model as large as the target's does not."""
    before = llm.engine.speculation.policy
    if before is not None:
        llm.engine.speculation.policy = Generous(
            before.max_length, before.max_rows, before.looks_up
        )


def drafting(method: str, num_drafts: int = 5) -> dict[str, Any]:
    return {
        "speculate_method": method,
        "speculate_max_draft_token_num": num_drafts,
        **METHODS[method],
    }


def heldout(count: int) -> list[str]:
    """Pieces of text that the demo model was not trained on, of 20 to 220 characters."""
    text = (DEMO / "heldout.txt").read_text()
    step = len(text) // count
    return [text[index * step : index * step + 20 + index * 7 % 200] for index in range(count)]
