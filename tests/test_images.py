"""Answers to prompts with pictures equal HF transformers' (tests/golden_images)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.config.engine import EngineConfig
from predict.device import library
from predict.engine.request_state import Request
from predict.engine.resources import CacheBlocks
from predict.engine.scheduled import SchedulerConfig
from predict.errors import UserError
from predict.images import opening, placed
from predict.images.placed import Picture, picture_of, with_pictures
from predict.loading import safetensors_writer
from predict.loading.checkpoint import Checkpoint
from predict.loading.model import read_spec
from predict.nn import tower as towers
from predict.nn import vision
from predict.nn.tower import encode
from predict.sight import prompt_parts, reader_of, with_eyes
from predict.text.conversation import PicturePart, picture_part
from tests.support.pictures import (
    GOLDEN_IMAGES,
    SIZES,
    asked_of,
    check_greedy_of,
    check_towers_and_logits_of,
    drawn,
    image_golden,
    image_model,
    needs_pillow_of_goldens,
    pictures_of,
    png_url,
)
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

CASES = [
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "paddleocr_vl", "gemma3", "mistral3"),
    *("internvl", "llava"),
]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "reference": {"inference_model": False},
    "fused": {"inference_model": True, "attention": "append"},
    "block": {"inference_model": True, "attention": "block"},
}


def load(source: str | Path = "qwen2_5_vl", **settings: Any) -> LLM:
    """A golden's checkpoint, or one in a folder."""
    folder = GOLDEN_IMAGES / source
    return LLM(str(folder), **{"batch_size": 3, "max_length": 256, "block_size": 16, **settings})


@needs_pillow_of_goldens
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_towers_logits_and_text_equal_transformers(
    case: str, way: str, compiled: library.Library
) -> None:
    llm = load(image_model(case), num_cache_blocks=64, **WAYS[way])
    check_towers_and_logits_of(llm, case)
    check_greedy_of(llm, case)


def test_pictures_are_the_same_alone_and_packed(compiled: library.Library) -> None:
    for dtype in ("float32", "bfloat16"):
        llm = load(dtype=dtype)
        reader, tower = llm.parts.sight.reader, llm.parts.sight.tower
        assert reader is not None
        assert tower is not None
        pictures = [picture_of(drawn(n, size), reader.pixels) for n, size in enumerate(SIZES)]

        def rows(*some: Picture, tower: Any = tower, llm: LLM = llm, dtype: str = dtype) -> Any:
            patches = np.concatenate([each.patches for each in some])
            made = encode(llm.platform.backend, tower, patches, [p.grid for p in some], dtype)
            return made.astype("float32").numpy()

        alone = np.concatenate([rows(each) for each in pictures])
        np.testing.assert_array_equal(rows(*pictures), alone)


def test_positions_of_a_grid_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until others need their room; packed, they are those of each."""
    spec = read_spec(GOLDEN_IMAGES / "qwen3_vl")[0].vision
    assert spec is not None
    assert spec.learned is not None
    made, resampled = list[tuple[int, int]](), vision.resampled

    def noted(table: Any, grid: tuple[int, int], method: Any) -> Any:
        made.append(grid)
        return resampled(table, grid, method)

    monkeypatch.setattr(towers, "resampled", noted)
    monkeypatch.setattr(towers, "KEPT_PATCHES", 60)
    side = spec.learned.side
    table = np.random.default_rng(1).random((side, side, spec.hidden_size), np.float32)
    kept, grids = towers.KeptPositions(), [(4, 6), (2, 4), (4, 6)]
    rows = kept.of(spec, table, grids, "float32", None).numpy()
    assert sorted(made) == [(2, 4), (4, 6)]
    np.testing.assert_array_equal(rows[:24], rows[32:])
    np.testing.assert_array_equal(kept.of(spec, table, [(2, 4)], "float32", None), rows[24:32])
    assert len(made) == 2
    kept.of(spec, table, [(6, 8)], "float32", None)  # 48 patches: the oldest goes
    kept.of(spec, table, [(2, 4)], "float32", None)
    assert made[2:] == [(6, 8)]
    kept.of(spec, table, [(4, 6)], "float32", None)
    assert made[2:] == [(6, 8), (4, 6)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},
        {"batch_size": 1, "chunked_prefill": False},
        {"batch_invariant": True, "prefix_caching": False},
    ],
    ids=["chunks", "one by one", "invariant"],
)
def test_batches_change_nothing(settings: dict[str, Any], compiled: library.Library) -> None:
    llm = load(**{"attention": "append", **settings})
    for _ in range(2):
        check_greedy_of(llm)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_see_the_same(prefix_caching: bool, compiled: library.Library) -> None:
    """Positions are the request's, and rows that were given back are made again."""
    long = replace(GREEDY, max_new_tokens=70)
    wanted = [each.token_ids for each in load(max_length=320).generate(asked_of(), long)]
    settings: dict[str, Any] = {"prefix_caching": prefix_caching, "attention": "append"}
    llm = load(batch_size=4, num_cache_blocks=24, max_length=320, **settings)
    got = [each.token_ids for each in llm.generate(asked_of(), long)]
    assert llm.stats().num_preemptions > 0
    assert got == wanted
    llm.engine.scheduler.check()


def test_prompts_that_share_pictures_share_blocks(
    compiled: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pictures of one size share no block; a picture seen again is not encoded again."""
    llm = load(attention="append")
    eyes, seen = llm.engine.eyes, list[bytes]()
    assert eyes is not None
    write = eyes.encode

    def encode_and_note(pictures: Sequence[Picture], *others: Any) -> Any:
        seen.extend(picture.digest for picture in pictures)
        return write(pictures, *others)

    monkeypatch.setattr(eyes, "encode", encode_and_note)
    prompt = image_golden("qwen2_5_vl")["prompts"][1]["prompt"]
    images = [drawn(number, SIZES[0]) for number in (0, 7, 0)]
    ask: Any = [{"prompt": prompt, "multi_modal_data": {"image": image}} for image in images]
    answers, hits = [], []
    for each in ask:
        answers.append(llm.generate(each, GREEDY)[0].token_ids)
        hits.append(llm.stats().num_prefix_hit_tokens)
    assert hits == [0, 0, 48]  # of 55 tokens
    assert answers[0] == answers[2] != answers[1]
    assert len(seen) == len(set(seen)) == 2
    assert answers == [load().generate(each, GREEDY)[0].token_ids for each in ask]


def published(folder: Path) -> Path:
    """The checkpoint as it was published ahead of transformers 5: other names, a flat config."""
    source = GOLDEN_IMAGES / "qwen2_5_vl"
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "model_type": "qwen2_5_vl"}
    vision = config["vision_config"]
    vision["in_chans"] = vision.pop("in_channels")
    vision |= {"model_type": "qwen2_5_vl", "spatial_patch_size": vision["patch_size"]}
    del vision["rope_parameters"], text["layer_types"]
    (folder / "config.json").write_text(json.dumps(text | config | {"model_type": "qwen2_5_vl"}))
    checkpoint = Checkpoint(source)
    names = {"model.visual.": "visual.", "model.language_model.": "model."}
    tensors = {}
    for name in checkpoint.tensors:
        new = next(
            (new + name[len(old) :] for old, new in names.items() if name.startswith(old)), name
        )
        tensors[new] = ("BF16", checkpoint.read_float((name,)))
    safetensors_writer.write(folder / "model.safetensors", tensors)
    return folder


def test_published_layouts_are_read(compiled: library.Library, tmp_path: Path) -> None:
    check_greedy_of(load(published(tmp_path / "published"), attention="append"))


def test_experts_of_published_files_are_stored_otherwise(
    compiled: library.Library, tmp_path: Path
) -> None:
    """Qwen3-VL's lie [in, out], where transformers 5 saves [out, in]; positions have old names."""
    source = image_model("qwen3_vl_moe")
    shutil.copytree(source, tmp_path / "published")
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    config["vision_config"]["model_type"] = "qwen3_vl_moe"
    del config["vision_config"]["rope_parameters"]
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    stored, tensors = Checkpoint(source).stored, {}
    for name, each in stored.items():
        values = each.read()
        tensors[name] = ("BF16", values.transpose(0, 2, 1) if "experts" in name else values)
    safetensors_writer.write(tmp_path / "published" / "model.safetensors", tensors)
    check_greedy_of(load(tmp_path / "published", attention="append"), "qwen3_vl_moe")


@pytest.mark.parametrize("case", ["qwen3_vl", "mistral3", "internvl"])
def test_rows_follow_chunks(case: str, compiled: library.Library) -> None:
    """DeepStack's are those of a chunk's own tokens; tokens behind rows have none; tiles go on."""
    llm = load(image_model(case), max_num_batched_tokens=7, attention="append")
    for _ in range(2):
        check_greedy_of(llm, case)


@pytest.mark.parametrize("case", ["gemma3", "llava"])
def test_towers_have_other_names_in_older_files(
    case: str, compiled: library.Library, tmp_path: Path
) -> None:
    """As transformers 4 saved them, and as some versions of 5 name modules."""
    source = image_model(case)
    for number, names in enumerate(
        (
            {"vision_tower.": "vision_tower.vision_model."},
            {
                "vision_tower.": "model.vision_tower.",
                "multi_modal_projector.": "model.multi_modal_projector.",
                "language_model.model.": "model.language_model.",
                "language_model.lm_head.": "lm_head.",
            },
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        tensors = {}
        for name, each in Checkpoint(source).stored.items():
            plain = name.replace("vision_model.", "")
            old = next((each for each in names if plain.startswith(each)), "")
            tensors[names.get(old, "") + plain[len(old) :]] = ("BF16", each.read())
        safetensors_writer.write(folder / "model.safetensors", tensors)
        check_greedy_of(load(folder, attention="append"), case)


@pytest.mark.parametrize("budget", [11, 13, 40])
def test_pictures_whose_tokens_see_each_other_are_not_cut(
    budget: int, compiled: library.Library
) -> None:
    """Whatever a step takes; and a hit in the prefix cache may end within one."""
    settings: dict[str, Any] = {"block_size": 16, "batch_size": 3, "attention": "append"}
    llm = load(image_model("gemma3"), max_num_batched_tokens=budget, **settings)
    for _ in range(2):
        check_greedy_of(llm, "gemma3")
    golden, params = image_golden("gemma3")["prompts"][2], replace(GREEDY, max_new_tokens=1)
    ids, pictures = llm.parts.sight.read(golden["prompt"], parts_of(golden))
    assert pictures is not None
    for _ in range(2):  # the second finds blocks of the first, whose border is within a picture
        ask: Any = {"prompt": ids, "multi_modal_data": pictures}
        assert llm.generate(ask, params)[0].token_ids[0] == golden["greedy"][0]
    assert llm.stats().num_prefix_hit_tokens % 16 == 0 < llm.stats().num_prefix_hit_tokens


def parts_of(golden: dict[str, Any]) -> list[PicturePart]:
    return [PicturePart(image) for image in pictures_of(golden)]


def test_what_takes_no_step_with_a_whole_picture_is_refused(compiled: library.Library) -> None:
    llm = load(image_model("gemma3"), max_num_batched_tokens=10, batch_size=3)
    with pytest.raises(UserError, match=r"a picture of 9 tokens .* \(allowed: 8\)"):
        llm.generate(asked_of("gemma3")[1], GREEDY)
    with pytest.raises(UserError, match="prompts with pictures have no logprobs"):
        load(image_model("gemma3")).generate(
            asked_of("gemma3")[1], replace(GREEDY, prompt_logprobs=1)
        )


def test_pictures_of_ranks_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are exchanged on CPUs alone; on GPUs ranks begin with text."""
    monkeypatch.setattr("predict.config.ranks.DEVICES", ("cpu", "gpu"))
    folder = GOLDEN_IMAGES / "qwen2_5_vl"
    config, spec = EngineConfig(model_name_or_path=str(folder)), read_spec(folder)[0]
    two = config.changed(device="gpu", tensor_parallel_degree=2)
    with pytest.raises(UserError, match="not go with --tensor_parallel_degree 2 on GPUs yet"):
        with_eyes(two, spec, on_gpu=True)
    assert with_eyes(two.changed(device="cpu"), spec, on_gpu=False).vision is not None
    assert with_eyes(config.changed(device="gpu"), spec, on_gpu=True).vision is not None


def test_text_alone_runs_where_some_kinds_read_no_pictures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = GOLDEN_IMAGES / "gemma3"
    config, spec = EngineConfig(model_name_or_path=str(folder)), read_spec(folder)[0]
    with caplog.at_level("INFO", "regatta"):
        assert with_eyes(config, spec, on_gpu=True).vision is None
    assert "gemma3 runs with text alone: pictures do not go with --device" in caplog.text
    wanted = config.changed(limit_mm_per_prompt={"image": 1})
    with pytest.raises(UserError, match="gemma3 reads pictures, which do not go with --device"):
        with_eyes(wanted, spec, on_gpu=True)


def test_texts_have_pictures_by_their_marks(compiled: library.Library) -> None:
    llm = load(image_model("gemma3"), mm_processor_kwargs={"do_pan_and_scan": True})
    ask: Any = {"prompt": "a<|vision_start|>b", "multi_modal_data": {"image": drawn(0, (600, 300))}}
    output = llm.generate(ask, GREEDY)[0]
    assert list(output.prompt_token_ids).count(261) == 27  # the whole, and two crops
    assert len(output.token_ids) == 12, output.outputs[0].error


def test_samples_beams_and_adapters_of_numbers_have_pictures(compiled: library.Library) -> None:
    llm = load(attention="append")
    prompt: Any = asked_of()[3]
    greedy = image_golden("qwen2_5_vl")["prompts"][3]["greedy"]
    beams = llm.generate(prompt, SamplingParams(num_beams=3, n=3, max_new_tokens=4))[0]
    assert len({each.token_ids for each in beams.outputs}) == 3
    params = SamplingParams(n=3, temperature=1e-3, seed=1, max_new_tokens=12, logprobs=1)
    for each in llm.generate(prompt, params)[0].outputs:
        assert list(each.token_ids) == greedy
    streamed = [t for piece in llm.stream([prompt], GREEDY) for t in piece.token_ids]
    assert streamed == greedy
    llm.engine.scheduler.check()


@pytest.mark.parametrize("method", ["inference_with_reference", "lookahead"])
def test_drafts_that_are_looked_up_are_no_placeholders(
    method: str, compiled: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens of the prompt stand ahead of its picture, too."""
    llm = load(attention="append", speculate_method=method)
    check_greedy_of(llm)
    proposer, found, verified = llm.engine.speculation.proposer, list[int](), list[int]()
    assert proposer is not None
    propose, schedule = proposer.propose, llm.engine.scheduler.schedule

    def noted(*given: Any) -> Any:
        made = propose(*given)
        found.extend(token for drafts in made for token in drafts)
        return made

    def scheduled(drafts: Any = None) -> Any:
        verified.extend(token for each in (drafts or {}).values() for token in each)
        return schedule(drafts)

    monkeypatch.setattr(proposer, "propose", noted)
    monkeypatch.setattr(llm.engine.scheduler, "schedule", scheduled)
    params = replace(GREEDY, logit_bias={97: 50.0}, max_new_tokens=6)
    ask: Any = {"prompt": [98, 97, 97, 261, 97], "multi_modal_data": {"image": drawn(0, SIZES[0])}}
    answer = llm.generate(ask, params)[0].token_ids
    assert answer == load(attention="append").generate(ask, params)[0].token_ids
    assert 261 in found
    assert 261 not in verified


def test_chats_have_pictures(compiled: library.Library) -> None:
    llm = load(attention="append")
    text = [{"type": "text", "text": "hi "}, {"type": "image_url", "image_url": {"url": None}}]
    for key, part in (
        ("image", drawn(0, SIZES[0])),
        ("image_url", {"url": png_url(drawn(0, SIZES[0]))}),
        ("image_url", png_url(drawn(0, SIZES[0]))),
    ):
        text[1] = {"type": key, key: part}
        answer = llm.chat([{"role": "user", "content": text}], GREEDY)[0]
        assert answer.prompt_token_ids.count(261) == 45
        assert answer.prompt_token_ids[-1] == llm.tokenizer.encode("\n")[0]  # type: ignore[union-attr]
    small: Any = {
        "type": "image_url",
        "image_url": {"url": png_url(drawn(0, SIZES[0])), "max_pixel": 1000},
    }
    answer = llm.chat([{"role": "user", "content": [small]}], GREEDY)[0]
    assert answer.prompt_token_ids.count(261) == 10


def test_text_alone_loads_no_tower(compiled: library.Library) -> None:
    llm = load(limit_mm_per_prompt={"image": 0})
    assert llm.spec.vision is None
    first = image_golden("qwen2_5_vl")["prompts"][0]
    assert list(llm.generate([first["prompt"]], GREEDY)[0].token_ids) == first["greedy"]
    with pytest.raises(UserError, match=r"reads text alone .* leave out limit_mm_per_prompt"):
        llm.generate(asked_of()[1], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ([1, 261], [], "1 placeholders of pictures .token 261., and 0 pictures"),
        ([1, 2], [0], "0 placeholders .* and 1 pictures"),
        ([261, 261], [0, 0], "pictures 1 and 2 of the prompt have no token between"),
        ([261, 1], [b"x"], "picture 1 of the prompt is no picture"),
        ([261, 1] * 6, [0] * 6, r"270 tokens|256|max_length"),
        ([261, 1] * 9, [0] * 9, r"9 pictures \(allowed: up to 8\)"),
        ("<|image_pad|>x", [], "1 placeholders"),
    ],
)
def test_wrong_prompts_are_refused_ahead_of_all(
    prompt: Any, images: Sequence[Any], words: str, small: LLM
) -> None:
    given = [drawn(0, SIZES[0]) if each == 0 else each for each in images]
    ask: Any = [asked_of()[1], {"prompt": prompt, "multi_modal_data": {"image": given}}]
    with pytest.raises(UserError, match=words):
        small.generate(ask, GREEDY)
    assert not small.engine.scheduler.has_unfinished()


@pytest.fixture(scope="module")
def small(compiled: library.Library) -> LLM:
    return load(limit_mm_per_prompt={"image": 8})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculate_method": "mtp"}, "speculate_method mtp yet"),
        ({"mm_processor_kwargs": {"max_pixel": 5}}, "did you mean max_pixels"),
        ({"limit_mm_per_prompt": {"video": 1}}, "limit_mm_per_prompt: video 1"),
    ],
)
def test_what_pictures_do_not_go_with_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(**settings)


def test_pictures_of_too_many_windows_are_refused(compiled: library.Library) -> None:
    llm = load(mm_processor_kwargs={"max_pixels": 1 << 23})
    ask: Any = {"prompt": [261, 1], "multi_modal_data": {"image": drawn(0, (3000, 1500))}}
    with pytest.raises(UserError, match="picture 1 of the prompt is cut into 4418 windows"):
        llm.generate(ask, GREEDY)


def test_fields_of_towers_hold_as_they_are_written(tmp_path: Path) -> None:
    """An empty list of layers that see all is none, and what is no object is refused by name."""
    config = json.loads((GOLDEN_IMAGES / "qwen2_5_vl" / "config.json").read_text())
    config["vision_config"]["fullatt_block_indexes"] = []
    (tmp_path / "config.json").write_text(json.dumps(config))
    vision = read_spec(tmp_path)[0].vision
    assert vision is not None
    assert vision.whole_layers == frozenset()
    config["vision_config"]["rope_parameters"] = ["axial"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"rope_parameters. is"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("options", "sizes", "words"),
    [
        ({"min_pixels": 1 << 28, "max_pixels": 1 << 28}, [(30, 30)], r"1 .* tokens of pictures"),
        ({"min_pixels": 64, "max_pixels": 64}, [(90, 90)] * 9, "9 of .* makes 72900 pixels"),
    ],
    ids=["one grown", "several shrunk"],
)
def test_pictures_are_counted_before_they_are_decoded(
    options: dict[str, int], sizes: list[tuple[int, int]], words: str, monkeypatch: Any
) -> None:
    folder = GOLDEN_IMAGES / "qwen2_vl"
    config = EngineConfig(model_name_or_path=str(folder), max_image_pixels=8100)
    reader = reader_of(config, read_spec(folder)[0])
    assert reader is not None
    decoded, decode = list[str](), opening.as_rgb

    def counted(image: Any, where: str) -> Any:
        decoded.append(where)
        return decode(image, where)

    monkeypatch.setattr(placed, "as_rgb", counted)
    parts = [PicturePart(drawn(number, size), options) for number, size in enumerate(sizes)]
    with pytest.raises(UserError, match=words):
        reader.read([261], parts)
    assert len(decoded) == len(parts) - 1


def test_low_detail_has_fewer_tokens_where_sizes_are_free() -> None:
    folder = GOLDEN_IMAGES / "qwen2_vl"
    most = {"max_pixels": 1 << 20}
    config = EngineConfig(model_name_or_path=str(folder), max_length=1 << 15)
    reader = reader_of(config.changed(mm_processor_kwargs=most), read_spec(folder)[0])
    assert reader is not None
    url = {"url": png_url(drawn(0, (1024, 512)))}
    for detail, count in (("low", 4050), ("high", 8192), ("auto", 8192)):
        part = picture_part({"type": "image_url", "image_url": {**url, "detail": detail}})
        assert len(reader.read([261], [part])[0]) == count
    beside = picture_part({"type": "input_image", "image_url": url["url"], "detail": "low"})
    assert beside.is_low
    with pytest.raises(UserError, match="detail is 'lower'"):
        picture_part({"type": "image_url", "image_url": {**url, "detail": "lower"}})


def test_positions_follow_pictures() -> None:
    """Text goes on behind the larger side of a picture, and its tokens have three positions."""
    from predict.images.areas import AreaPixels

    pixels = AreaPixels(patch_size=4, min_pixels=64, max_pixels=3200)
    images = [picture_of(drawn(number, SIZES[number]), pixels) for number in (0, 3)]
    ids, pictures = with_pictures([5, 9, 6, 9, 7], images, 9)
    assert pictures is not None
    assert len(ids) == 3 + 45 + 42
    first, second = pictures.placed
    positions = pictures.positions(0, len(ids))
    assert [positions[0], positions[46], positions[-1]] == [0, 1 + 9, 1 + 9 + 1 + 7]
    np.testing.assert_array_equal(first.places(1, 12)[[0, 8, 9]], [[1, 1, 1], [1, 1, 9], [1, 2, 1]])
    assert second.places(second.start, second.start + 1).tolist() == [[11, 11, 11]]


@pytest.mark.parametrize("prompt", [{"prompt": "a", "prompt_token_ids": [1]}, {"prompt": None}])
def test_a_prompt_has_one_text(prompt: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"has [02] of prompt, prompt_token_ids \(allowed: one"):
        prompt_parts(prompt)


def test_contents_of_blocks_say_which_picture_stands_where() -> None:
    from predict.images.areas import AreaPixels

    pixels = AreaPixels(patch_size=4, min_pixels=64, max_pixels=3200)

    def contents(number: int, before: int = 2) -> Sequence[int]:
        image = picture_of(drawn(number, SIZES[0]), pixels)
        ids, pictures = with_pictures([1] * before + [9, 1], [image], 9)
        return Request(0, ids, SamplingParams(), pictures=pictures).contents

    digests, config = (
        set(),
        SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=16, max_length=64, block_size=16, num_blocks=8
        ),
    )
    for number in (0, 1):  # of a state that is kept behind blocks, too
        ids, pictures = with_pictures([9, 1], [picture_of(drawn(number, SIZES[0]), pixels)], 9)
        request = Request(number, ids, SamplingParams(), pictures=pictures)
        digests.add(CacheBlocks(config).digest(request, 1))
    assert len(digests) == 2
    assert contents(0)[16:32] == contents(0)[16:32] != contents(1)[16:32]
    assert contents(0)[16:32] != contents(0, before=3)[16:32]
    assert contents(0)[0:2] == [1, 1]
    assert len(contents(0)) == 48


def test_prompts_cut_anywhere_have_the_same_bits(compiled: library.Library) -> None:
    """With --batch_invariant logprobs do not depend on where a chunk ends, within a picture too."""
    params = replace(GREEDY, max_new_tokens=4, logprobs=3)
    found = []
    for budget in (3, 5, 16, 31, 47, 256):
        one: dict[str, Any] = {"batch_size": 1, "batch_invariant": True, "prefix_caching": False}
        output = load(max_num_batched_tokens=budget, **one).generate(asked_of()[1], params)[0]
        found.append((output.token_ids, output.outputs[0].logprobs))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("inference_model", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_towers_stay_in_the_models_dtype_under_other_schemes(
    dtype: str, inference_model: bool, compiled: library.Library
) -> None:
    llm = load(quant_type="weight_only_int8", dtype=dtype, inference_model=inference_model)
    golden, sight = np.load(GOLDEN_IMAGES / "qwen2_5_vl" / "golden.npz"), llm.parts.sight
    assert isinstance(sight.tower, towers.Tower)
    assert sight.reader is not None
    schemes = (each.scheme for block in sight.tower.layers[0] for each in block.linears().values())
    assert {*schemes} == {"dense"}
    picture = picture_of(drawn(0, SIZES[0]), sight.reader.pixels)
    values = dtype if inference_model else "float32"
    rows = encode(llm.platform.backend, sight.tower, picture.patches, [picture.grid], values)
    num_blocks = sum(map(len, sight.tower.layers)) + 1  # the merger is one
    got = rows.astype("float32").numpy()
    assert_close(got, golden["tower_0"], dtype, roundings=BLOCK_ROUNDINGS * num_blocks)
    output = llm.generate(asked_of()[3], GREEDY)[0]
    assert len(output.token_ids) == 12, output.outputs[0].error
