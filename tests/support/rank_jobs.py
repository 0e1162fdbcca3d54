"""What ranks of tests.support.rank_models do: each makes its part of a model, and runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from predict import LLM, EngineConfig, SamplingParams
from predict.build import Builder, Running
from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.loading.model import read_spec
from predict.nn.cuts import local_spec
from predict.text.tokenizer import Tokenizer
from tests.support.golden import check_greedy, config, greedy, runs, step_logits
from tests.support.golden_logits import BLOCK_SIZE, check_logits

PROMPTS = [[1, 5, 9, 13, 40, 7, 8, 100, 3, 4, 5], [17, 3], [90, 80, 70, 60, 50]]


@contextmanager
def of_rank(rank: int, size: int, cut: dict[str, Any] | None) -> Iterator[None]:
    """Models that are made within are this rank's part; exported ones say themselves how."""

    class Part(Builder):
        """Of an export for several ranks: what one of them makes."""

        def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None):
            super().__init__(config, tokenizer, rank if config.model.mode == "static" else None)

        def _over_ranks(self) -> Running:
            return self.running()

    def read(*arguments: Any) -> Any:
        spec, reader = read_spec(*arguments)
        return local_spec(spec, rank, size, **(cut or {})), reader

    static = mock.patch("predict.build.Builder", Part)
    with mock.patch("predict.build.read_spec", read) if cut is not None else static:
        yield


def check_golden(
    rank: int, size: int, case: str, cut: dict[str, Any] | None = None, **settings: Any
) -> None:
    """The logits of a golden's prompts, and the text behind them. Raises AssertionError."""
    settings = {"inference_model": True, "attention": "append", **settings}
    for max_length, which in runs(case):
        blocks = 8 * max_length // BLOCK_SIZE
        with of_rank(rank, size, cut or {}):
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


def check_export(rank: int, size: int, case: str, folders: list[str], **settings: Any) -> None:
    """The same of a golden's export for these ranks, in a folder for each of its lengths."""
    for (max_length, which), folder in zip(runs(case), folders, strict=True):
        given: dict[str, Any] = {"mode": "static", "tensor_parallel_degree": size, **settings}
        blocks = 8 * max_length // BLOCK_SIZE
        sizes = {"batch_size": 3, "num_cache_blocks": blocks, "max_length": max_length}
        with of_rank(rank, size, None):
            llm = LLM(config(folder, inference_model=True, attention="append", **sizes, **given))
        check_logits(llm, case, which)
        check_greedy(llm, case, which)


def made(rank: int, size: int, source: str, cut: Any, settings: dict[str, Any]) -> LLM:
    """The rank's part of a model; of one rank the whole."""
    settings = {"batch_size": 3, "inference_model": True, "attention": "append", **settings}
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    with of_rank(rank, size, cut or {}):
        return LLM(config(source, **settings))


def logits_of(rank: int, size: int, source: str, cut: Any = None, **settings: Any) -> Any:
    """float32 logits of PROMPTS, and the greedy text behind them."""
    llm = made(rank, size, source, cut, settings)
    spans = [
        ScheduledSpan(Request(n, prompt, SamplingParams()), len(prompt), 0, [n], True)
        for n, prompt in enumerate(PROMPTS)
    ]
    logits = step_logits(llm, span_inputs(spans, llm.config.cache.block_size))
    return logits.tolist(), greedy(llm, PROMPTS, 6)


def answers_of(
    rank: int, size: int, source: str, requests: Any, cut: Any = None, **settings: Any
) -> Any:
    """Ids of all answers to requests, which are prompts and fields of SamplingParams."""
    llm = made(rank, size, source, cut, settings)
    params = [SamplingParams(**{"ignore_eos": True, "seed": 7, **each}) for _, each in requests]
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    again = llm.generate([prompt for prompt, _ in requests], params)
    return [
        [[list(o.token_ids) for o in each.outputs] for each in which] for which in (outputs, again)
    ]
