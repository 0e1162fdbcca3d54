"""The answer loop, and its four shells: generate, stream, AsyncLLM, the server's engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from predict import LLM, AsyncLLM, SamplingParams
from predict.engine.samples import Samples, StreamOutput
from predict.errors import EngineError
from predict.server.engine_process import EngineLoop
from tests.server.engines import ScriptedLink, adds
from tests.support.demo import demo_config

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(demo_config(batch_size=3))


def in_tasks(llm: LLM) -> None:
    async def ask() -> None:
        answers = AsyncLLM(demo_config(), lambda _: llm)
        try:
            await asyncio.gather(*(answers.generate(prompt, GREEDY) for prompt in ("a", "b")))
        except RuntimeError as error:
            raise error.__cause__ or error from None
        finally:
            answers.close()

    asyncio.run(asyncio.wait_for(ask(), 60))


SHELLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(["a", "b"], GREEDY),
    "stream": lambda llm: list(llm.stream(["a", "b"], GREEDY)),
    "async": in_tasks,
    "server": lambda llm: EngineLoop(llm, ScriptedLink(adds(2))).run(),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_an_engine_that_stands_still_is_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setattr(llm.engine, "step", lambda: (None, []))
    with pytest.raises(EngineError, match=r"nothing runs, and \d answers have not ended"):
        SHELLS[shell](llm)


def test_streams_and_calls_of_one_model_may_take_turns(llm: LLM) -> None:
    (alone,) = llm.generate("one", GREEDY)
    stream = llm.stream("one", GREEDY)
    pieces = [next(stream)]
    (other,) = llm.generate("two", GREEDY)  # runs the stream's request to its end
    pieces += stream
    assert "".join(piece.text for piece in pieces) == alone.text
    assert pieces[-1].finish_reason == other.finish_reason == "length"
    assert not llm.answers.is_busy


def test_an_answer_whose_text_cannot_be_made_ends_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = Samples.pieces

    def failing(samples: Samples) -> Any:
        if samples.prompt_index == 1:
            raise RuntimeError("no text")
        return pieces(samples)

    monkeypatch.setattr(Samples, "pieces", failing)
    found: list[StreamOutput] = []
    with pytest.raises(ValueError, match="no text"):
        found.extend(llm.stream(["one", "two"], GREEDY))
    assert sum(len(piece.token_ids) for piece in found) == GREEDY.max_new_tokens
    assert [piece.error is None for piece in found].count(False) == 1
    assert llm.stats().num_used_blocks == 0
