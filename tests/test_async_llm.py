"""AsyncLLM: many tasks at once, failures that stay alone, and ends that leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from predict import LLM, AsyncLLM, EngineConfig, SamplingParams
from predict.engine.samples import StreamOutput
from predict.errors import UserError
from predict.nn.inputs import StepInputs
from tests.support.demo import demo_config
from tests.support.texts import PROMPTS
from tests.support.vectors import FOLDER, IDS, SAID, llm_of

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(demo_config())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(demo_config())


def run(task: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(task, 120))


async def no_blocks_are_used(llm: AsyncLLM) -> None:
    while (await llm.stats()).num_used_blocks:
        await asyncio.sleep(0.01)


def test_streamed_and_whole_answers_are_those_of_a_plain_llm(llm: AsyncLLM, alone: LLM) -> None:
    sampled = SamplingParams(temperature=0.8, seed=5, n=2, max_new_tokens=12, stop="\n\n")

    async def stream(prompt: str) -> list[str]:
        texts = ["", ""]
        async for piece in llm.stream(prompt, sampled):
            texts[piece.index] += piece.text
        return texts

    async def main() -> tuple[list[Any], list[Any]]:
        streams = [stream(prompt) for prompt in PROMPTS]
        whole = [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
        return await asyncio.gather(*streams), await asyncio.gather(*whole)

    streamed, whole = run(main())
    expected = alone.generate(PROMPTS, GREEDY)
    assert [output.text for output in whole] == [output.text for output in expected]
    expected = alone.generate(PROMPTS, sampled)
    assert streamed == [[each.text for each in output.outputs] for output in expected]


def test_a_bad_request_fails_alone(llm: AsyncLLM) -> None:
    bad: list[tuple[Any, SamplingParams, str]] = [
        ("text", SamplingParams(stop_token_ids=(10**6,)), "outside the vocabulary"),
        ([10**6], GREEDY, "outside the vocabulary"),
        ([], GREEDY, "no tokens"),
        ([1] * 300, GREEDY, "300 tokens"),
    ]

    async def main() -> None:
        good = [asyncio.create_task(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]
        for prompt, params, message in bad:
            with pytest.raises(UserError, match=message):
                await llm.generate(prompt, params)
            with pytest.raises(UserError, match=message):
                async for _ in llm.stream(prompt, params):
                    pass
        for task in good:
            assert len((await task).token_ids) == 16
        await no_blocks_are_used(llm)

    run(main())


def test_aborted_answers_end_and_say_so(llm: AsyncLLM) -> None:
    async def main() -> None:
        answer = llm.add(PROMPTS[0], LONG)
        pieces = []
        async for piece in answer:
            pieces.append(piece)
            if len(pieces) == 3:
                llm.abort(answer.request_id)
        assert pieces[-1].finish_reason == "abort"
        assert len(pieces) < 200
        llm.abort(answer.request_id)  # it has ended: nothing happens
        waiting = llm.add(PROMPTS[0], LONG)
        waiting.abort()
        assert (await waiting.output()).finish_reason == "abort"
        await no_blocks_are_used(llm)

    run(main())


def test_cancelled_and_abandoned_consumers_free_their_blocks(llm: AsyncLLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with contextlib.aclosing(llm.stream(PROMPTS[1], LONG)) as stream:
            async for _ in stream:
                break
        await no_blocks_are_used(llm)

    run(main())


@pytest.mark.parametrize("drafts", [False, True])
def test_many_tasks_with_random_ends(drafts: bool, alone: LLM) -> None:
    changes: dict[str, Any] = {"num_cache_blocks": 24}
    if drafts:
        changes |= {"speculate_method": "lookahead", "speculate_max_draft_token_num": 4}
    llm = AsyncLLM(demo_config(**changes))
    rng = random.Random(0)
    expected = {p: o.text for p, o in zip(PROMPTS, alone.generate(PROMPTS, GREEDY), strict=True)}

    async def one(prompt: str, kind: int, delay: float) -> None:
        await asyncio.sleep(delay)
        if kind == 0:
            assert (await llm.generate(prompt, GREEDY)).text == expected[prompt]
        elif kind == 1:
            text = "".join([piece.text async for piece in llm.stream(prompt, GREEDY)])
            assert text == expected[prompt]
        elif kind == 2:
            sampled = SamplingParams(seed=1, n=3, max_new_tokens=30, ignore_eos=True)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(llm.generate(prompt, sampled), delay)
        elif kind == 3:
            answer = llm.add(prompt, LONG)
            await asyncio.sleep(delay)
            answer.abort()
            assert (await answer.output()).finish_reason in ("abort", "length")
        else:
            with pytest.raises(UserError):
                await llm.generate([1] * 999, GREEDY)

    async def main() -> None:
        tasks = [one(rng.choice(PROMPTS), rng.randrange(5), rng.random() * 0.8) for _ in range(150)]
        await asyncio.gather(*tasks)
        await no_blocks_are_used(llm)
        stats = await llm.stats()
        assert stats.num_cache_blocks == 24

    try:
        run(main())
        blocks = llm._llm.engine.scheduler.block_manager  # type: ignore[union-attr]
        assert blocks.num_free_blocks + blocks.num_used_blocks == blocks.num_blocks == 24
    finally:
        llm.close()


def failing_after(num_steps: int) -> Callable[[EngineConfig], LLM]:
    """Makes an LLM whose step number `num_steps` raises."""

    def make(settings: EngineConfig) -> LLM:
        llm = LLM(settings)
        step, left = llm.engine.step, [num_steps]

        def count() -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("the device is gone")
            return step()

        llm.engine.step = count  # type: ignore[method-assign]
        return llm

    return make


def test_a_dead_engine_fails_everybody_with_its_cause() -> None:
    llm = AsyncLLM(demo_config(), failing_after(4))

    async def main() -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        assert (await anext(stream)).token_ids
        tasks = [asyncio.create_task(llm.generate(prompt, LONG)) for prompt in PROMPTS * 3]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(RuntimeError, match="the device is gone"):
            async for _ in stream:
                pass
        for result in results:
            assert isinstance(result, RuntimeError)
            assert isinstance(result.__cause__, OSError)
        with pytest.raises(RuntimeError, match="OSError: the device is gone"):
            llm.add(PROMPTS[0], GREEDY)
        with pytest.raises(RuntimeError, match="the device is gone"):
            await llm.stats()
        llm.abort(0)

    run(main())
    llm.close()
    assert not llm._thread.is_alive()


def test_closing_ends_the_thread_and_all_that_wait() -> None:
    async def main() -> AsyncLLM:
        async with await AsyncLLM.load(demo_config()) as llm:
            task = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
            await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="was closed"):
            await task
        return llm

    before = threading.active_count()
    llm = run(main())
    llm.close()
    assert threading.active_count() == before
    assert llm._llm is not None
    assert llm._llm.stats().num_used_blocks == 0


def test_vectors_and_scores_are_made_beside_answers() -> None:
    plain, (query, *documents) = llm_of("qwen3_embedding"), SAID["texts"]
    wanted: Any = plain.embed(IDS), plain.score(query, documents), plain.rerank(query, documents, 2)

    async def main() -> None:
        sizes: dict[str, Any] = {"max_length": 512, "batch_size": 8, "attention": "append"}
        async with await AsyncLLM.load(FOLDER / "qwen3_embedding", **sizes) as llm:
            answer = asyncio.create_task(llm.generate([5, 6, 7], LONG))
            made: Any = await asyncio.gather(
                *(llm.embed(IDS), llm.score(query, documents), llm.rerank(query, documents, 2)),
                llm.embed([[5] * 513]),
                return_exceptions=True,
            )
            vectors, scores, order, refused = made
            np.testing.assert_allclose(vectors, wanted[0], atol=1e-5, rtol=0)
            np.testing.assert_allclose(scores, wanted[1], atol=1e-5, rtol=0)
            assert [each.index for each in order] == [each.index for each in wanted[2]]
            assert isinstance(refused, UserError)
            with pytest.raises(UserError, match="instructions"):
                await llm.score(query, documents, instructions="a")
            dropped = [asyncio.create_task(llm.embed(IDS * 40)) for _ in range(3)]
            await asyncio.sleep(0.01)
            for task in dropped:
                task.cancel()
            assert (await llm.embed(IDS[:2])).shape == (2, 32)
            assert len((await answer).token_ids) == 200
            await no_blocks_are_used(llm)
            assert not llm._jobs
            waiting = asyncio.create_task(llm.embed(IDS * 200))
            await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="was closed"):
            await waiting

    run(main())


def test_a_model_that_cannot_be_loaded_raises_where_it_was_asked_for() -> None:
    with pytest.raises(UserError, match="nowhere"):
        AsyncLLM(EngineConfig(model_name_or_path="/nowhere"))


def nan_for(token_id: int) -> Callable[[EngineConfig], LLM]:
    """Makes an LLM whose logits behind `token_id` are NaN."""

    def make(settings: EngineConfig) -> LLM:
        import paddle

        llm = LLM(settings)
        network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
        run = network.run

        def run_step(inputs: StepInputs, taps: Sequence[str] = ()) -> Any:
            outputs = run(inputs, taps)
            logits = outputs.logits.numpy()
            logits[inputs.token_ids[inputs.logit_indices] == token_id] = np.nan
            return outputs._replace(logits=paddle.to_tensor(logits))

        network.run = run_step
        return llm

    return make


def failing_seeds(*seeds: int) -> Callable[[EngineConfig], LLM]:
    """Makes an LLM in which requests with these seeds fail at their fourth token."""

    def make(settings: EngineConfig) -> LLM:
        llm = LLM(settings)
        step, requests = llm.engine.step, llm.engine.scheduler._requests

        def run_step() -> Any:
            for request in list(requests.values()):
                if request.sampling_params.seed in seeds and request.num_output_tokens == 3:
                    llm.engine.blame.end(request, OSError("broken"))
            return step()

        llm.engine.step = run_step  # type: ignore[method-assign]
        return llm

    return make


@pytest.mark.parametrize("failing", [(8,), (7,), (7, 8)])
def test_a_failing_sample_is_the_same_event_everywhere(failing: tuple[int, ...]) -> None:
    params = SamplingParams(n=2, seed=7, max_new_tokens=6, ignore_eos=True)
    llm = failing_seeds(*failing)(demo_config())
    (output,) = llm.generate(PROMPTS[0], params)
    reasons = [(each.finish_reason, len(each.token_ids)) for each in output.outputs]
    assert reasons == [("error", 3) if 7 + i in failing else ("length", 6) for i in range(2)]
    errors = [each.error for each in output.outputs]
    assert all("broken" in error for error in errors if error)
    all_fail = len(failing) == 2

    def ends(pieces: Sequence[StreamOutput]) -> dict[int, tuple[Any, Any]]:
        return {p.index: (p.finish_reason, p.error) for p in pieces if p.finish_reason}

    streamed: list[StreamOutput] = []
    with pytest.raises(ValueError, match="broken") if all_fail else contextlib.nullcontext():
        streamed.extend(llm.stream(PROMPTS[0], params))

    async def main() -> None:
        async with AsyncLLM(demo_config(), failing_seeds(*failing)) as engine:
            with (
                pytest.raises(ValueError, match="broken") if all_fail else contextlib.nullcontext()
            ):
                assert (await engine.generate(PROMPTS[0], params)).outputs == output.outputs
            pieces: list[StreamOutput] = []
            with (
                pytest.raises(ValueError, match="broken") if all_fail else contextlib.nullcontext()
            ):
                async for piece in engine.stream(PROMPTS[0], params):
                    pieces.append(piece)
            if not all_fail:
                assert {i: end[0] for i, end in ends(pieces).items()} == {
                    each.index: each.finish_reason for each in output.outputs
                }
                assert ends(pieces).keys() == ends(streamed).keys() == {0, 1}

    run(main())


@pytest.mark.parametrize("compiled_operators", [False, True])
def test_rows_that_cannot_be_drawn_from_end_their_request_alone(
    compiled_operators: bool, alone: LLM, request: pytest.FixtureRequest
) -> None:
    if compiled_operators:
        request.getfixturevalue("compiled")
    settings = demo_config(inference_model=compiled_operators)
    prompts: list[Any] = [PROMPTS[0], [700, 777], PROMPTS[1]]
    llm = nan_for(777)(settings)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "no finite largest logit" in (outputs[1].outputs[0].error or "")
    expected = alone.generate([prompts[0], prompts[2]], GREEDY)
    assert [outputs[0].text, outputs[2].text] == [output.text for output in expected]
    assert llm.stats().num_used_blocks == 0
    with pytest.raises(ValueError, match="no finite largest logit"):
        list(llm.stream([700, 777], GREEDY))

    async def main() -> None:
        async with AsyncLLM(settings, nan_for(777)) as engine:
            results = await asyncio.gather(
                *(engine.generate(prompt, GREEDY) for prompt in prompts), return_exceptions=True
            )
            assert isinstance(results[1], ValueError)
            for index in (0, 2):
                result = results[index]
                assert not isinstance(result, BaseException)
                assert result.text == outputs[index].text

    run(main())
