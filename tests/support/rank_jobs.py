"""What ranks of tests.support.rank_models do: each makes its part of a model, and runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from predict import LLM
from predict.loading.model import read_spec
from predict.nn.cuts import local_spec
from tests.support.golden import check_greedy, config, runs
from tests.support.golden_logits import BLOCK_SIZE, check_logits


@contextmanager
def of_rank(rank: int, size: int, **cut: Any) -> Iterator[None]:
    """Models that are made within are this rank's part."""

    def read(*arguments: Any) -> Any:
        spec, reader = read_spec(*arguments)
        return local_spec(spec, rank, size, **cut), reader

    with mock.patch("predict.build.read_spec", read):
        yield


def check_golden(
    rank: int, size: int, case: str, cut: dict[str, Any] | None = None, **settings: Any
) -> None:
    """The logits of a golden's prompts, and the text behind them. Raises AssertionError."""
    settings = {"inference_model": True, "attention": "append", **settings}
    for max_length, which in runs(case):
        blocks = 8 * max_length // BLOCK_SIZE
        with of_rank(rank, size, **(cut or {})):
            llm = LLM(
                config(
                    case,
                    batch_size=3,
                    num_cache_blocks=blocks,
                    max_length=max_length,
                    **settings,
                )
            )
        check_logits(llm, case, which)
        check_greedy(llm, case, which)
