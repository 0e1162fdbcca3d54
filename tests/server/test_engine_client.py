"""The engine in a process of its own: the same answers, ends that leave nothing, deaths told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from predict import LLM, Guide, SamplingParams
from predict.engine.samples import StreamOutput
from predict.errors import UserError
from predict.server.engine_client import Answer, EngineDied
from tests.server.engines import (
    GREEDY,
    LONG,
    Running,
    all_pieces,
    config,
    nothing_runs,
    running,
    texts,
)
from tests.support.paths import ROOT
from tests.support.texts import PROMPTS


@pytest.fixture(scope="module")
def alone(model: Path) -> LLM:
    return LLM(config(model))


@pytest.fixture(scope="module")
def prompts(alone: LLM) -> list[list[int]]:
    assert alone.tokenizer is not None
    return [alone.tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Running]:
    with running(config(model)) as engine:
        engine.run(engine.client.ready())
        yield engine


EACH_KIND = {
    "greedy": GREEDY,
    "samples": SamplingParams(temperature=0.8, seed=5, n=3, max_new_tokens=12),
    "stop": SamplingParams(temperature=0.0, max_new_tokens=40, stop=("\n", "return")),
    "biased": SamplingParams(
        temperature=0.0, max_new_tokens=8, logit_bias={17: 4.0}, bad_words=("self", (5, 6))
    ),
}


@pytest.mark.parametrize("kind", EACH_KIND)
@pytest.mark.parametrize("streamed", [True, False])
def test_answers_are_those_of_a_plain_llm(
    engine: Running, alone: LLM, prompts: list[list[int]], kind: str, streamed: bool
) -> None:
    params = EACH_KIND[kind]

    async def main() -> list[list[str]]:
        asked = (all_pieces(engine.client, prompt, params, streamed) for prompt in prompts)
        return [texts(pieces, params.n) for pieces in await asyncio.gather(*asked)]

    expected = alone.generate(prompts, params)
    assert engine.run(main()) == [[each.text for each in output.outputs] for output in expected]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, seed=1, n=2, best_of=3, max_new_tokens=6, logprobs=2),
        SamplingParams(temperature=0.0, max_new_tokens=4, logprobs=1, prompt_logprobs=2),
        SamplingParams(num_beams=3, n=2, max_new_tokens=6),
    ],
    ids=["best_of", "logprobs", "beams"],
)
def test_whole_answers_have_all_that_an_llm_returns(
    engine: Running, alone: LLM, prompts: list[list[int]], params: SamplingParams
) -> None:
    async def main() -> None:
        answer = engine.client.add(prompts[0], params, streamed=False)
        pieces = [piece async for pieces in answer for piece in pieces]
        (expected,) = alone.generate([prompts[0]], params)
        assert answer.output is not None
        assert answer.output.outputs == expected.outputs
        assert answer.output.prompt_logprobs == expected.prompt_logprobs
        assert [piece.token_ids for piece in pieces] == [o.token_ids for o in expected.outputs]
        assert answer.metrics is not None
        assert answer.metrics.num_prompt_tokens == len(prompts[0])

    engine.run(main())


def test_each_answer_is_measured(engine: Running, prompts: list[list[int]]) -> None:
    engine.ended.clear()
    engine.run(all_pieces(engine.client, prompts[0], GREEDY))
    (metrics,) = engine.ended
    assert metrics.num_output_tokens == 16
    assert metrics.finish_reasons == ("length",)
    times = (metrics.queue_seconds, metrics.time_to_first_token, metrics.seconds)
    assert None not in times
    assert sorted(times) == list(times)  # type: ignore[type-var]


def test_a_refused_request_fails_alone(engine: Running, prompts: list[list[int]]) -> None:
    bad: list[tuple[list[int], SamplingParams, str]] = [
        (prompts[0], SamplingParams(stop_token_ids=(10**6,)), "outside the vocabulary"),
        ([10**6], GREEDY, "outside the vocabulary"),
        ([], GREEDY, "no tokens"),
        ([1] * 300, GREEDY, "300 tokens"),
        (prompts[0], SamplingParams(num_beams=9), "num_beams 9 is more than"),
    ]

    async def main() -> None:
        good = [asyncio.create_task(all_pieces(engine.client, each, GREEDY)) for each in prompts]
        for prompt, params, message in bad:
            for streamed in (True, False):
                with pytest.raises(UserError, match=message):
                    await all_pieces(engine.client, prompt, params, streamed)
        for task in good:
            assert sum(len(piece.token_ids) for piece in await task) == 16
        assert engine.client.num_in_flight == 0
        await nothing_runs(engine.client)

    engine.run(main())


def test_guides_are_compiled_beside_the_steps(engine: Running, prompts: list[list[int]]) -> None:
    def guided(**guide: object) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_new_tokens=40, guide=Guide.of(guide))

    async def main() -> None:
        plain = asyncio.create_task(all_pieces(engine.client, prompts[0], GREEDY))
        for streamed in (True, False):
            pieces = await all_pieces(
                engine.client, prompts[1], guided(choice=("yes", "no")), streamed
            )
            assert texts(pieces)[0] in ("yes", "no")
            with pytest.raises(UserError, match="regex"):
                await all_pieces(engine.client, prompts[1], guided(regex="(unclosed"), streamed)
        gone = engine.client.add(prompts[1], guided(regex="[ab]{30}"), streamed=True)
        gone.abort()
        assert [p.finish_reason async for pieces in gone for p in pieces][-1] == "abort"
        assert len(await plain) == 16
        await nothing_runs(engine.client)

    engine.run(main())


def test_an_aborted_answer_ends_and_frees_its_blocks(
    engine: Running, prompts: list[list[int]]
) -> None:
    async def main() -> None:
        answer = engine.client.add(prompts[0], LONG, streamed=True)
        pieces = []
        async for new in answer:
            pieces += new
            answer.abort()
        assert pieces[-1].finish_reason == "abort"
        assert sum(len(piece.token_ids) for piece in pieces) < 200
        answer.abort()  # it has ended: nothing happens
        waiting = engine.client.add(prompts[0], LONG, streamed=False)
        waiting.abort()
        assert [p.finish_reason async for pieces in waiting for p in pieces] == ["abort"]
        assert engine.client.num_in_flight == 0
        await nothing_runs(engine.client)

    engine.run(main())


def test_a_slow_reader_gets_what_piled_up_at_once(
    engine: Running, prompts: list[list[int]]
) -> None:
    async def main() -> None:
        slow = engine.client.add(prompts[0], GREEDY, streamed=True)
        quick = engine.client.add(prompts[0], LONG, streamed=True)
        async for _ in quick:
            if slow.metrics is not None:  # all of it has come, and nobody has read it
                quick.abort()
        assert [sum(len(p.token_ids) for p in pieces) async for pieces in slow] == [16]

    engine.run(main())


async def rest_of(answer: Answer) -> list[StreamOutput]:
    return [piece async for pieces in answer for piece in pieces]


def test_a_storm_leaves_nothing_behind(engine: Running, prompts: list[list[int]]) -> None:
    """Many clients at once, of which half leave at a random moment."""
    client, rng = engine.client, random.Random(0)

    async def one(index: int, leaves: bool, when: int) -> None:
        answer = client.add(prompts[index % len(prompts)], GREEDY, streamed=index % 3 > 0)
        if leaves:
            asyncio.get_running_loop().call_later(when / 1000, answer.abort)
        pieces = await rest_of(answer)
        if not leaves:
            assert pieces[-1].finish_reason == "length"
            assert sum(len(piece.token_ids) for piece in pieces) == 16

    async def storm() -> None:
        await asyncio.gather(
            *(one(index, index % 2 > 0, rng.randrange(1500)) for index in range(60))
        )
        await nothing_runs(client)
        assert client.num_in_flight == 0

    engine.run(storm())


def test_a_killed_engine_is_told_to_all_who_wait(model: Path, prompts: list[list[int]]) -> None:
    async def main(engine: Running) -> None:
        client = engine.client
        assert client.is_alive
        assert not client.is_ready
        with pytest.raises(RuntimeError, match="not loaded yet"):
            _ = client.info
        await client.ready()
        assert client.is_ready
        answers = [client.add(prompt, LONG, streamed=True) for prompt in prompts]
        for answer in answers:
            await anext(answer)
        os.kill(engine.process.process_id, signal.SIGKILL)
        await client.died()
        for answer in answers:
            with pytest.raises(EngineDied):
                await rest_of(answer)
        assert not client.is_alive
        assert not client.is_ready
        with pytest.raises(EngineDied):
            client.add(prompts[0], GREEDY, streamed=True)
        with pytest.raises(EngineDied):
            await client.stats()
        assert "SIGKILL" in await client.last_words()
        assert client.exit_code == 1

    with running(config(model)) as engine:
        engine.run(main(engine))


def test_an_engine_ends_with_its_front(model: Path) -> None:
    front = (
        "import sys\n"
        "from pathlib import Path\n"
        "from predict.server.engine_client import EngineProcess\n"
        "from tests.server.engines import Running, config\n"
        "engine = Running(config(Path(sys.argv[1])), EngineProcess())\n"
        "engine.run(engine.client.ready())\n"
        "print(engine.process.process_id, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", front, str(model)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert int(process.stdout.readline()) != process.pid
    process.kill()
    # Ends once both have ended: both have it.
    assert "the server's front process has ended" in process.stderr.read()
    process.wait()
