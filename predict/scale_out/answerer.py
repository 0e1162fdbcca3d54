"""A replica of a batch: one model, and blocks of prompts that it answers, several at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from predict.async_llm import AsyncLLM
from predict.cli.results import result_bytes
from predict.cli.work import answer_of
from predict.config.engine import EngineConfig
from predict.device import library
from predict.errors import EXIT_FAILURE
from predict.llm import LLM
from predict.request import SamplingParams
from predict.system.console import say
from predict.system.notes import LOG, OnStderr

MakeLLM = Callable[[EngineConfig], LLM]

# A prompt's row has "index" (in the data file), "token_ids", "params" (which of the replica's
# sampling parameters) and "seed" (None: the parameters' own).
ANSWERS = pa.schema(
    [
        ("index", pa.int64()),
        ("attempt", pa.int32()),  # which one of the block it was, from 1
        ("answer", pa.binary()),  # JSON: the result line less src and tgt; None: not tried again
        ("error", pa.string()),  # what went wrong, where it says so
        ("num_prompt_tokens", pa.int64()),
        ("num_output_tokens", pa.int64()),
    ]
)


class Attempts:
    """Counts, for all replicas, how often each block of prompts was begun.

    Ray Data gives a block to another replica when one dies, without end. A prompt that ends every
    replica would end them all, again and again.
    """

    def __init__(self) -> None:
        self._num_begun: dict[int, int] = {}

    def begin(self, block: int) -> int:
        """How often a block was begun, this time included."""
        self._num_begun[block] = self._num_begun.get(block, 0) + 1
        return self._num_begun[block]


class Answerer:
    """Answers blocks of prompts with ANSWERS; what Ray Data makes one of in each replica.

    Blocks run together, each in a thread of its own, so that the next ones fill the batch while the
    last answers to one end. A block is one result: Ray takes what a task that runs again gives for
    what it gave before, by position, and answers of several would get mixed up.
    """

    def __init__(
        self,
        config: EngineConfig,
        params: Sequence[SamplingParams],
        num_threads: int,
        attempts: ActorHandle[Attempts],
        max_attempts: int,
        make_llm: MakeLLM = LLM,
    ) -> None:
        """Loads the model. params: what prompts name by number. num_threads: of CPU operators."""
        on_cpu = config.model.inference_model is not False and config.model.device == "cpu"
        if on_cpu and (loaded := library.load()) is not None:
            loaded.set_num_threads(num_threads)
        self._params = params
        self._attempts = attempts
        self._max_attempts = max_attempts
        LOG.addHandler(OnStderr())
        self._llm = AsyncLLM(config, make_llm)

    def __call__(self, prompts: pa.Table) -> pa.Table:
        """The answers to a block, in its order; all without one when it was begun too often."""
        rows = prompts.to_pylist()
        attempt = ray.get(self._attempts.begin.remote(rows[0]["index"]))
        if attempt > self._max_attempts:
            answers = [_row(row["index"], None, None) for row in rows]
        else:
            answers = asyncio.run(self._answers(rows))
        return pa.Table.from_pylist(
            [{**answer, "attempt": attempt} for answer in answers], schema=ANSWERS
        )

    async def _answers(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer, rows))

    async def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        params: SamplingParams = self._params[row["params"]]
        if row["seed"] is not None:
            params = replace(params, seed=row["seed"])
        try:
            output = await self._llm.generate(row["token_ids"], params)
        except ValueError as error:  # of this prompt alone
            return _row(row["index"], {"output": "", "error": str(error)}, str(error))
        except RuntimeError as error:  # of the engine: Ray puts another replica in this one's place
            say(f"this replica ends: {error}")
            os._exit(EXIT_FAILURE)
        num_output_tokens = sum(len(each.token_ids) for each in output.outputs)
        answer = answer_of(output)
        return _row(
            *(row["index"], answer, answer.get("error")),
            *(len(output.prompt_token_ids), num_output_tokens),
        )


def _row(
    index: int,
    answer: dict[str, Any] | None,
    error: str | None,
    num_prompt_tokens: int = 0,
    num_output_tokens: int = 0,
) -> dict[str, Any]:
    return {
        "index": index,
        "answer": None if answer is None else result_bytes(answer),
        "error": None if error is None else error.encode("utf-8", "replace").decode(),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
    }
