"""A data file's prompts through Ray Data: blocks of them to replicas, answers back line by line.

To be imported when Ray is there (predict.scale_out.cluster).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError

from predict.cli.data import DataItem
from predict.cli.results import Results, result_bytes
from predict.cli.work import Work
from predict.config.engine import EngineConfig
from predict.engine.choices import numbered_seed
from predict.errors import TokenizerError
from predict.request import SamplingParams
from predict.scale_out.answerer import Answerer, Attempts, MakeLLM
from predict.scale_out.cluster import Share, failure_of, on_workers
from predict.system.console import say
from predict.system.progress import Progress
from predict.system.signals import Signals

MAX_ATTEMPTS = 2  # of a block of prompts, and then of each prompt alone
BLOCKS_PER_BATCH = 4  # a replica's answers leave it so often per batch of its engine
BATCHES_AHEAD = 2  # that a replica holds: the one that runs, and what fills it up


@dataclass(frozen=True)
class ReplicaPlan:
    """What answers: how many replicas of which engine, each with what share of a machine."""

    config: EngineConfig
    count: int
    share: Share
    make_llm: MakeLLM | None = None  # None: predict.LLM


@dataclass(frozen=True)
class Round:
    """How prompts are dealt: so many to a block, and so many blocks at a time to a replica."""

    block_size: int
    num_blocks: int

    @classmethod
    def of_batches(cls, batch_size: int) -> Round:
        """Blocks that keep an engine's batch full, and are small beside it."""
        block_size = -(-batch_size // BLOCKS_PER_BATCH)
        return cls(block_size, -(-BATCHES_AHEAD * batch_size // block_size))


class BatchJob:
    """Answers the prompts of `work` that have no result yet."""

    def __init__(self, work: Work, results: Results, replicas: ReplicaPlan) -> None:
        self._work = work
        self._results = results
        self._replicas = replicas
        self._params, self._params_of = distinct(work.params)
        self._seeds = seeds_of(work, replicas.config.model.seed)
        self.num_failed = 0

    def run(self, signals: Signals, progress: Progress) -> None:
        """Puts a result for each, or an error that says why there is none.

        A block that takes replicas down with it is dealt again, prompt by prompt. Raises
        UserError or EngineError where no replica starts, Interrupted between two results.
        """
        left = []
        for index, ids in enumerate(self._work.token_ids):
            if index in self._results.done:
                continue
            if isinstance(ids, TokenizerError):
                self._fail(index, f"prompt {index} failed in stage tokenize: {ids}")
                progress.on_finished()
            else:
                left.append(index)
        batch_size = self._replicas.config.scheduling.batch_size
        for dealt in (Round.of_batches(batch_size), Round(1, 1)):
            if left:
                left = self._deal(left, dealt, signals, progress)
        for index in left:
            self._fail(
                index, f"each of {MAX_ATTEMPTS} replicas ended while it ran this prompt alone"
            )
            progress.on_finished()

    def _deal(
        self, indices: Sequence[int], dealt: Round, signals: Signals, progress: Progress
    ) -> list[int]:
        """Answers these prompts; returns those that have no result after it."""
        left = dict.fromkeys(indices)
        warned = False
        for row in self._answers(indices, dealt):
            signals.check()
            index = row["index"]
            if row["attempt"] > 1 and not warned:
                warned = True
                say("warning: a replica has ended; what it ran runs again on another one")
            if row["answer"] is None or index not in left:
                continue
            with signals.held("the result is kept first"):
                del left[index]
                self._put(index, row["answer"], row["error"])
            progress.on_finished()
            progress.on_step(row["num_prompt_tokens"], row["num_output_tokens"])
        return list(left)

    def _answers(self, indices: Sequence[int], dealt: Round) -> Iterator[dict[str, Any]]:
        """Rows of ANSWERS, as they come."""
        replicas = self._replicas
        _set_up_ray_data()
        attempts = ray.remote(num_cpus=0)(Attempts).remote()
        prompts = [
            {
                "index": index,
                "token_ids": self._work.token_ids[index],
                "params": self._params_of[index],
                "seed": self._seeds[index],
            }
            for index in indices
        ]
        num_blocks = -(-len(prompts) // dealt.block_size)
        # Not from_arrow, which has the blocks looked at by tasks of their own.
        answers = ray.data.from_items(prompts, override_num_blocks=num_blocks).map_batches(
            Answerer,
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=min(replicas.count, num_blocks),
                max_tasks_in_flight_per_actor=dealt.num_blocks,
                max_concurrent_calls_per_actor=dealt.num_blocks,
                enable_true_multi_threading=True,
            ),
            fn_constructor_kwargs={
                "config": on_workers(replicas.config),
                "params": self._params,
                "num_threads": replicas.share.num_cpus,
                "attempts": attempts,
                "max_attempts": MAX_ATTEMPTS,
                **({"make_llm": replicas.make_llm} if replicas.make_llm else {}),
            },
            num_cpus=replicas.share.num_cpus,
            num_gpus=replicas.share.num_gpus,
        )
        try:
            for table in answers.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            ):
                yield from cast(pa.Table, table).to_pylist()
        except RayError as error:
            raise failure_of(str(error), "the replicas cannot go on") from error

    def _fail(self, index: int, error: str) -> None:
        self._put(index, result_bytes({"output": "", "error": error}), error)

    def _put(self, index: int, answer: bytes, error: str | None) -> None:
        item = self._work.items[index]
        self._results.put(index, whole_line(item, answer))
        if error is not None:
            self.num_failed += 1
            say(f"error: {item.where}: {error}")


def distinct(params: Sequence[SamplingParams]) -> tuple[list[SamplingParams], list[int]]:
    """(each of `params` once, for each of `params` which of these it is)."""
    found = {repr(each): each for each in params}
    numbers = {text: number for number, text in enumerate(found)}
    return [*found.values()], [numbers[repr(each)] for each in params]


def seeds_of(work: Work, engine_seed: int) -> list[int | None]:
    """The seed of each prompt, as if one engine ran all of them; None where none is drawn.

    An engine numbers requests as they come, and makes a request's seed from its number.
    """
    seeds: list[int | None] = []
    request_id = 0
    for ids, params in zip(work.token_ids, work.params, strict=True):
        draws = not params.greedy and params.num_beams == 1 and params.seed is None
        seeds.append(numbered_seed(engine_seed, request_id) if draws else None)
        request_id += 1 if isinstance(ids, TokenizerError) else params.num_samples
    return seeds


def whole_line(item: DataItem, answer: bytes) -> bytes:
    """The line of a result, whose JSON `answer` lacks what the data file says itself."""
    return result_bytes({"src": item.src, "tgt": item.tgt})[:-1] + b", " + answer[1:]


def _set_up_ray_data() -> None:
    """Makes Ray Data quiet, and patient: an answer may take long."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
