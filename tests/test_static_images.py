"""Exported models with eyes: a program for text, and one for the tower beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.config.engine import EngineConfig
from predict.device import library
from predict.errors import UserError
from predict.images.placed import Picture
from predict.loading.manifest import FileDigest, load_manifest
from predict.loading.program_check import COMMON, COMPILED, OF_PICTURES, PARAMETER
from predict.server.config import ServerConfig
from predict.server.front_model import FrontModel
from tests.support.pictures import (
    IMAGE_CASES,
    SIZES,
    asked_of,
    check_greedy_of,
    check_towers_and_logits_of,
    drawn,
    image_golden,
    image_model,
    needs_pillow_of_goldens,
)

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
# With windows; with values behind several layers and a table of positions; with class tokens; with
# tokens that see each other.
FEW = ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma3")
Exported = Callable[..., Path]


def config(folder: Path, **settings: Any) -> EngineConfig:
    given = {"max_length": 320, "block_size": 16, "batch_size": 3, **settings}
    return EngineConfig(model_name_or_path=str(folder), **given)


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(config(folder, mode="static", **settings))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Exports a golden's checkpoint once; not to be changed."""
    made: dict[tuple[str, bool], Path] = {}

    def export(case: str = "qwen2_5_vl", compiled: bool = True) -> Path:
        if (case, compiled) not in made:
            folder = tmp_path_factory.mktemp("exports") / case
            export_model(config(image_model(case), inference_model=compiled), folder)
            made[case, compiled] = folder
        return made[case, compiled]

    return export


def rows() -> list[Any]:
    """Each kind on both sets of operators; all but a few are slow."""
    return [
        pytest.param(case, compiled, marks=() if case in few else pytest.mark.slow)
        for compiled, few in ((True, FEW), (False, ("internvl",)))
        for case in IMAGE_CASES
    ]


@needs_pillow_of_goldens
@pytest.mark.parametrize(("case", "is_compiled"), rows())
def test_towers_logits_and_text_equal_transformers(
    case: str, is_compiled: bool, exported: Exported, compiled: library.Library
) -> None:
    llm = load(exported(case, is_compiled), num_cache_blocks=64)
    check_towers_and_logits_of(llm, case)
    check_greedy_of(llm, case)


def test_chunks_and_hits_change_nothing_and_a_picture_is_encoded_once(
    exported: Exported, compiled: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in ("qwen2_5_vl", "qwen3_vl"):
        llm, seen = (
            load(exported(case), max_num_batched_tokens=7, attention="append"),
            list[bytes](),
        )
        eyes = llm.engine.eyes
        assert eyes is not None
        write = eyes.encode

        def encode_and_note(
            pictures: Sequence[Picture], *others: Any, seen: Any = seen, write: Any = write
        ) -> Any:
            seen.extend(picture.digest for picture in pictures)
            return write(pictures, *others)

        monkeypatch.setattr(eyes, "encode", encode_and_note)
        for _ in range(2):
            check_greedy_of(llm, case)
        assert llm.stats().num_prefix_hit_tokens > 0
        assert len(seen) == len(set(seen)) > 0


def test_preempted_requests_see_the_same(exported: Exported, compiled: library.Library) -> None:
    long = replace(GREEDY, max_new_tokens=70)
    llm = load(exported(), batch_size=4, num_cache_blocks=24, attention="append")
    got = [each.token_ids for each in llm.generate(asked_of(), long)]
    assert llm.stats().num_preemptions > 0
    dynamic = LLM(config(image_model("qwen2_5_vl")))
    assert got == [each.token_ids for each in dynamic.generate(asked_of(), long)]
    llm.engine.scheduler.check()


def test_a_shorter_run_reads_the_exports_rotary_rows(
    exported: Exported, compiled: library.Library
) -> None:
    """Rows of pictures lie behind those of the export's max_length, not the run's."""
    check_greedy_of(load(exported(), max_length=200, max_num_batched_tokens=1024))


def test_programs_with_eyes_run_text_alone(exported: Exported, compiled: library.Library) -> None:
    for case in ("qwen2_5_vl", "gemma3"):
        llm = load(exported(case), limit_mm_per_prompt={"image": 0})
        assert llm.parts.sight.tower is None
        first = image_golden(case)["prompts"][0]
        assert list(llm.generate([first["prompt"]], GREEDY)[0].token_ids) == first["greedy"]
        with pytest.raises(UserError, match=r"reads text alone .* leave out limit_mm_per_prompt"):
            llm.generate(asked_of(case)[1], GREEDY)


def test_exports_without_a_tower_run_text_alone(
    tmp_path: Path, compiled: library.Library, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of earlier versions."""
    model, folder = image_model("qwen2_5_vl"), tmp_path / "out"
    export_model(config(model, limit_mm_per_prompt={"image": 0}), folder)
    assert not [path.name for path in folder.iterdir() if "tower" in path.name]
    with caplog.at_level("INFO", "regatta"):
        llm = load(folder)
    assert "runs with text alone: the export in" in caplog.text
    first = image_golden("qwen2_5_vl")["prompts"][0]
    assert list(llm.generate([first["prompt"]], GREEDY)[0].token_ids) == first["greedy"]
    with pytest.raises(UserError, match=r"has no tower, and --limit_mm_per_prompt asks"):
        load(folder, limit_mm_per_prompt={"image": 1})
    assert front_reads(folder) is False


def front_reads(folder: Path) -> bool:
    """Whether a server's front reads pictures."""
    front = FrontModel.load(ServerConfig(engine=config(folder, mode="static")))
    front.close()
    return front.pictures is not None


def test_a_servers_front_reads_pictures_of_programs(exported: Exported) -> None:
    assert front_reads(exported())


def spoiled(folder: Path, source: Path, name: str, old: str, new: str) -> Path:
    """An export with a text replaced in a file, and digests that say so."""
    shutil.copytree(source, folder)
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    if name != "manifest.json":
        made = load_manifest(folder)
        digest = FileDigest.of(folder / name)
        replace(made, files={**made.files, name: digest}).save(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("manifest.json", '"model_tower"', '"other"', "program is other in manifest.json"),
        ("manifest.json", '"model_tower"', '"a/b"', "tower is .*null, or a name"),
        ("model_tower.json", '"whole_positions"', '"positions"', "it takes positions int32"),
        ("model_tower.json", "3.regatta_paged_attention", "1.save_combine", "not on the list"),
        ("model.json", '"D":320', '"D":319', "not behind row 320"),
    ],
)
def test_towers_that_are_not_config_jsons_are_refused(
    name: str, old: str, new: str, words: str, exported: Exported, tmp_path: Path
) -> None:
    folder = spoiled(tmp_path / "out", exported(), name, old, new)
    with pytest.raises(UserError, match=words):
        load(folder)


def test_positions_of_another_size_are_refused(exported: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported("qwen3_vl"), folder)
    path = folder / "model_tower.safetensors"
    path.write_bytes(path.read_bytes().replace(b"learned", b"earnedl"))
    made = load_manifest(folder)
    replace(made, files={**made.files, path.name: FileDigest.of(path)}).save(folder)
    with pytest.raises(UserError, match=r"model_tower\.safetensors holds no positions"):
        load(folder)


def test_list_holds_what_programs_with_eyes_call(exported: Exported) -> None:
    called = set[str]()
    for case in FEW:
        for name in ("model.json", "model_tower.json"):
            program = json.loads((exported(case) / name).read_text())["program"]
            called |= {op["#"] for op in program["regions"][0]["blocks"][0]["ops"]}
    in_16_bits = {"1.cast"}
    assert called - {PARAMETER, *COMMON, *COMPILED} == OF_PICTURES.keys() - in_16_bits


def test_the_same_model_gives_the_same_bytes(exported: Exported, tmp_path: Path) -> None:
    export_model(config(image_model("qwen3_vl"), inference_model=True), tmp_path / "out")
    assert load_manifest(tmp_path / "out").files == load_manifest(exported("qwen3_vl")).files
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["tower"] == "model_tower"


def test_pictures_of_other_shapes_are_packed(exported: Exported, compiled: library.Library) -> None:
    """One pass of several, whose sizes the export never saw."""
    ask: Any = [
        {"prompt": [261, 1], "multi_modal_data": {"image": drawn(number, (width + 60, height + 9))}}
        for number, (width, height) in enumerate(SIZES)
    ]
    llms = load(exported()), LLM(config(image_model("qwen2_5_vl")))
    static, dynamic = ([output.token_ids for output in llm.generate(ask, GREEDY)] for llm in llms)
    assert static == dynamic
