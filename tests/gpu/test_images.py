"""Pictures on the GPU: towers, logits and text equal transformers', with graphs and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from predict.errors import UserError
from predict.images.placed import picture_of
from tests.support.gpu_engines import SETTINGS, exported, runner_of, without_graphs
from tests.support.pictures import (
    GOLDEN_IMAGES,
    IMAGE_CASES,
    NUM_SAMPLED,
    SIZES,
    asked_of,
    check_greedy_of,
    drawn,
    encoded,
    image_model,
    needs_pillow_of_goldens,
    sampled,
)
from tests.support.tolerances import assert_close

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


def load(case: str, **settings: Any) -> LLM:
    given = {"batch_size": 3, "max_length": 256, "block_size": 16, **SETTINGS, **settings}
    return LLM(str(image_model(case)), **given)


@needs_pillow_of_goldens
@pytest.mark.parametrize("case", IMAGE_CASES)
def test_towers_and_text_equal_transformers(gpu: devices.Device, case: str) -> None:
    """Prompts without a picture, with one and with three; decode steps replay graphs."""
    llm = load(case)
    if llm.parts.sight.reader is None:
        pytest.skip("tokens of a picture that see each other are the CPU's alone")
    golden = np.load(GOLDEN_IMAGES / case / "golden.npz")
    for number, size in enumerate(SIZES):
        picture = picture_of(drawn(number, size), llm.parts.sight.reader.pixels)
        wanted = golden[f"tower_{number}"]
        got = encoded(llm, picture)
        got = got if wanted.ndim > 1 else sampled(got, NUM_SAMPLED)
        np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)
    check_greedy_of(llm, case)
    assert all(shape.max_span == 1 and not shape.pictured for shape in runner_of(llm).graphs)
    assert len(runner_of(llm).graphs)
    check_greedy_of(without_graphs(llm), case)


@needs_pillow_of_goldens
@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_programs_see_the_same(gpu: devices.Device, case: str) -> None:
    """An exported tower beside an exported text, whose steps without pictures replay graphs."""
    llm = exported(load(case))
    assert llm.parts.sight.reader is not None
    golden = np.load(GOLDEN_IMAGES / case / "golden.npz")
    wanted = golden["tower_0"]
    got = encoded(llm, picture_of(drawn(0, SIZES[0]), llm.parts.sight.reader.pixels))
    got = got if wanted.ndim > 1 else sampled(got, NUM_SAMPLED)
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)
    check_greedy_of(llm, case)
    assert len(runner_of(llm).graphs)


@needs_pillow_of_goldens
def test_chunks_and_preemption_change_nothing(gpu: devices.Device) -> None:
    check_greedy_of(load("qwen2_5_vl", max_num_batched_tokens=7), "qwen2_5_vl")
    crowded = load("qwen2_5_vl", batch_size=4, num_cache_blocks=24)
    check_greedy_of(crowded, "qwen2_5_vl")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_operators_of_pictures_equal_the_cpus(gpu: devices.Device, dtype: str) -> None:
    """Rows of 16 bytes and others; embeddings with rows of pictures in place of tokens'."""
    import paddle
    from predict.ops import compiled as ops

    rng, cpu = np.random.default_rng(3), paddle.CPUPlace()
    for width in (24, 7):
        table, x = (rng.standard_normal((n, width)).astype(np.float32) for n in (9, 4))
        rows, ids = np.array([8, 0, 5, 2], np.int32), rng.integers(0, 9, 6).astype(np.int32)
        places = rng.integers(0, 5, (3, 3)).astype(np.int32)
        images = np.array([-1, 3, 0, -1, 8, 1], np.int32)
        found = []
        for place in (gpu.place(), cpu):

            def at(values: Any, kind: str = "int32", place: Any = place) -> Any:
                made = paddle.to_tensor(values, place=cpu).astype(kind)
                return made if place is cpu else made._copy_to(place, True)

            kept = at(table, dtype)
            ops.put_rows(kept, at(rows), at(x, dtype))
            tokens = ops._rows(at(ids), kept, None, None, None, 2.0, kept, at(images))  # type: ignore[arg-type]
            rope = at(np.resize(table, (9, 10)), "float32")
            ops.write_places(rope, at(places), (0, 1, 2, 2, 1), 5)
            pixels = at(np.arange(600) % 256, "uint8")
            scaling = 1 / 255, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
            origins = at(np.array([0, 12, 240], np.int32))
            cut = ops.cut_patches(pixels, origins, at(np.full(3, 20)), (4, 56), scaling, dtype)
            found.append(
                [each.cpu().astype("float32").numpy() for each in (kept, tokens, rope, cut)]
            )
        for got, wanted in zip(*found, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_half_precision_reads_pictures(gpu: devices.Device) -> None:
    """Rows are near those of float32."""
    wanted, got = (load("qwen2_5_vl", dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert wanted.parts.sight.reader is not None
    picture = picture_of(drawn(0, SIZES[0]), wanted.parts.sight.reader.pixels)
    assert_close(encoded(got, picture), encoded(wanted, picture), "bfloat16", 24)
    assert len(got.generate(asked_of("qwen2_5_vl"), GREEDY)) == len(asked_of("qwen2_5_vl"))


def test_pictures_whose_tokens_see_each_other_are_refused(gpu: devices.Device) -> None:
    with pytest.raises(UserError, match="do not go with --device gpu yet"):
        load("gemma3", limit_mm_per_prompt={"image": 1})
    assert load("gemma3").spec.vision is None
