"""What ranks of tests.support.rank_models do: each makes its part of a model, and runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np

from predict import LLM, EngineConfig, SamplingParams
from predict.build import Builder, Running
from predict.device.place import tensor_at
from predict.engine.batch import span_inputs
from predict.engine.choices import GREEDY
from predict.engine.logits_processors import Adjustment
from predict.engine.masks import num_words
from predict.engine.request_state import Request
from predict.engine.runner.host_chooser import HostChooser
from predict.engine.scheduled import ScheduledSpan
from predict.engine.step import Adjusted, Choices
from predict.loading.model import read_spec
from predict.nn.cuts import local_spec
from predict.nn.decoder import StepOutputs
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.shares import Ranks
from predict.nn.spec import DecoderSpec, Share
from predict.ops import compiled
from predict.text.tokenizer import Tokenizer
from tests.support import hybrids
from tests.support.drafts import draft_always
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

        def _over_ranks(self, ranks: Any) -> Running:
            return self.running()

    def read(*arguments: Any) -> Any:
        spec, reader = read_spec(*arguments)
        return local_spec(spec, rank, size, **(cut or {})), reader

    here = mock.patch("predict.build.spawned", return_value=nullcontext())
    static = mock.patch("predict.build.Builder", Part)
    with here, mock.patch("predict.build.read_spec", read) if cut is not None else static:
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


def check_hybrid(
    rank: int, size: int, case: str, wanted: str = "", cut: Any = None, **settings: Any
) -> None:
    """The same of a golden whose layers keep states. wanted: a file of logits, in their place."""
    with of_rank(rank, size, cut or {}):
        llm = LLM(hybrids.config(case, **settings))
    logits = np.load(wanted) if wanted else hybrids.LOGITS[f"{case}/logits"]
    found = hybrids.last_logits(llm, hybrids.PROMPTS)
    np.testing.assert_allclose(found, logits, atol=1e-4 * np.abs(logits).max(), rtol=0)
    if not wanted:
        assert hybrids.greedy(llm, hybrids.PROMPTS) == hybrids.GOLDEN[case]


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


def tokens_of_slices(rank: int, size: int, seed: int) -> list[Any]:
    """Greedy tokens of rows of all kinds, of ranks' slices and of whole logits."""
    generator = np.random.default_rng(seed)
    vocab_size, num_rows = 203, 12  # no multiple of ranks, of bytes, of words
    logits = generator.standard_normal((num_rows, vocab_size)).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2, 7], logits[3, 190], logits[4] = np.nan, np.inf, -np.inf
    logits[5, :120] = -np.inf
    block = AttentionBlock(12, 12, 8, 1.0)
    spec = DecoderSpec("tiny", vocab_size, 96, ((block,),), 64)
    share = Share(spec, Ranks(rank, size))
    begin, end = share.tokens()
    own = np.zeros((num_rows, share.num_rows), np.float32)  # zeros behind: tokens of nobody
    own[:, : end - begin] = logits[:, begin:end]
    params = SamplingParams(
        repetition_penalty=1.5,
        frequency_penalty=0.3,
        no_repeat_ngram_size=1,
        logit_bias={5: 9.0, 200: -4.0},
        bad_words=[[int(logits[9].argmax())]],
    )
    known = generator.integers(0, vocab_size, 40).tolist()
    adjusted = [None] * num_rows
    for row in (6, 7, 9):
        adjustment = Adjustment.of(params, ())
        adjusted[row] = Adjusted(adjustment, row, known, len(known), 9, [])  # type: ignore[call-overload]
    masks = np.full((num_rows, num_words(vocab_size)), -1, np.int32)
    masks[7:9] = generator.integers(-(1 << 31), 1 << 31, masks[7:9].shape)
    masks[10] = 0

    def fill_masks(into: Any) -> None:
        into[...] = masks

    chooser, found = HostChooser(compiled), []
    for given in (Choices([GREEDY] * num_rows), Choices([GREEDY] * num_rows, adjusted)):
        for choices in (given, given._replace(fill_masks=fill_masks)):
            for outputs in (
                StepOutputs(tensor_at(own.copy(), None), share=share),
                StepOutputs(tensor_at(logits.copy(), None)),
            ):
                found.append(chooser.choose(outputs, choices).token_ids)
    return found


def made(rank: int, size: int, source: str, cut: Any, settings: dict[str, Any]) -> LLM:
    """The rank's part of a model; of one rank the whole.

    Each rank has a scheduler of its own here, and all must take the same steps: drafts are not
    left to a policy that goes by time.
    """
    settings = {"batch_size": 3, "inference_model": True, "attention": "append", **settings}
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    with of_rank(rank, size, cut or {}):
        llm = LLM(config(source, **settings))
    draft_always(llm)
    return llm


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
