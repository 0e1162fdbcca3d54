"""The C++ runtime's folder (docs/runtime-format.md): what is written, and its network's logits."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import runtime_folder
from export.export_model import export_model
from export.export_model import main as export_main
from export.export_runtime import export_runtime
from predict import LLM
from predict.errors import UserError
from predict.loading.arrays import Computed, TensorInfo
from predict.loading.safetensors_reader import read_header
from tests.support.golden import CASES, GOLDEN, config, golden, runs
from tests.support.paths import DEMO
from tests.support.runtime_programs import program
from tests.support.runtime_steps import check_bits, steps_of

pytestmark = pytest.mark.usefixtures("compiled")

NUM_BLOCKS = 60
# Latents and experts; composed attention and prompts that run whole; projections and a table of
# positions; parts of a rotary table by the prompt's length.
QUICK = ("deepseek_v2_lite", "chatglm_6b", "opt_350m", "qwen_long")
SLOW = sorted({*CASES} - {*QUICK})
FORMATS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"quant_type": "weight_only_int8", "dtype": "bfloat16"},
    {"quant_type": "weight_only_int4", "cachekv_int8_type": "dynamic"},
    {"quant_type": "a8w8", "cachekv_int8_type": "int4"},
]


def settings(case: str, max_length: int, **changes: Any) -> Any:
    whole = case in ("chatglm_6b", "glm_9b")  # whose prompts run whole
    values: dict[str, Any] = {"batch_size": 3, "attention": "append", "inference_model": True}
    values |= {
        "max_num_batched_tokens": max_length if whole else 40,
        "num_cache_blocks": NUM_BLOCKS,
    }
    return config(case, max_length=max_length, **values, **changes)


def check_static_bits(case: str, folder: Path, **changes: Any) -> None:
    """Raises AssertionError unless all logits are static mode's."""
    for number, (max_length, which) in enumerate(runs(case)):
        own = settings(case, max_length, **changes)
        static, runtime = folder / f"static_{number}", folder / f"runtime_{number}"
        export_model(own, static)
        export_runtime(own, runtime)
        llm = LLM(own.changed(model_name_or_path=str(static), mode="static"))
        steps = steps_of(llm, golden(case)["prompts"][which], 5)
        check_bits(program("runtime_steps"), runtime, steps, NUM_BLOCKS)


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_logits_are_static_modes_bit_for_bit(case: str, tmp_path: Path) -> None:
    check_static_bits(case, tmp_path)


@pytest.mark.parametrize("changes", FORMATS, ids=lambda changes: "-".join(changes.values()))
@pytest.mark.parametrize(
    "case",
    [
        "llama_gqa",
        pytest.param("qwen3_moe_30b", marks=pytest.mark.slow),
        pytest.param("gemma2_9b", marks=pytest.mark.slow),
    ],
)
def test_codes_of_weights_and_caches_give_static_modes_bits(
    case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    check_static_bits(case, tmp_path, **changes)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "folder"
    export_runtime(settings(str(DEMO), 256, dtype="bfloat16"), folder)
    return folder


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / runtime_folder.FILE_NAME).read_text())
    return found


def misplaced(tensors: dict[str, TensorInfo]) -> list[str]:
    is_padding = runtime_folder.PADDING
    return [n for n, info in tensors.items() if info.offset % 64 and not n.startswith(is_padding)]


def test_tensors_begin_at_cache_lines_and_are_all_named(demo: Path) -> None:
    tensors = read_header(demo / "model.safetensors")
    assert misplaced(tensors) == []
    said = (demo / runtime_folder.FILE_NAME).read_text()
    unnamed = [name for name in tensors if f'"{name}"' not in said]
    assert all(name.startswith(runtime_folder.PADDING) for name in unnamed)


def test_digests_are_those_of_the_files_and_of_the_description(demo: Path) -> None:
    text = (demo / runtime_folder.FILE_NAME).read_bytes()
    ahead = text[: text.rindex(b' "digest"')]
    assert described(demo)["digest"] == hashlib.sha256(ahead).hexdigest()
    files = described(demo)["files"]
    assert set(files) == {*os.listdir(demo)} - {runtime_folder.FILE_NAME}
    for name, said in files.items():
        data = (demo / name).read_bytes()
        assert said == {"num_bytes": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}


def test_a_tokenizer_goes_along_or_it_is_said_why_not(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert described(demo)["text"] == {"file": runtime_folder.TEXT_FILE}
    assert described(demo)["stop_ids"] == [1]  # the tokenizer's
    model = Path(shutil.copytree(DEMO, tmp_path / "model", copy_function=os.symlink))
    values = json.loads((DEMO / "tokenizer.json").read_text())
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text(json.dumps(values | {"normalizer": {"type": "NFKC"}}))
    export_runtime(settings(str(model), 256), tmp_path / "made")
    assert "normalizer NFKC" in described(tmp_path / "made")["text"]["why"]
    assert "runs on token ids alone" in caplog.text
    (model / "tokenizer.json").unlink()
    export_runtime(settings(str(model), 256), tmp_path / "none")
    assert described(tmp_path / "none")["text"] == {"why": "the checkpoint has no tokenizer"}


@pytest.mark.parametrize(
    ("says", "sampling"),
    [
        (None, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 9},
            {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ],
)
def test_what_the_model_recommends_goes_along(
    says: dict[str, Any] | None, sampling: dict[str, Any], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(GOLDEN / "llama_gqa", tmp_path / "model"))
    if says is not None:
        (model / "generation_config.json").write_text(json.dumps(says))
    export_runtime(settings(str(model), 128), tmp_path / "made")
    assert described(tmp_path / "made")["sampling"] == sampling


def test_the_same_model_gives_the_same_bytes_and_replaces_what_it_wrote(
    demo: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    for name in os.listdir(demo):
        (again / name).write_bytes((demo / name).read_bytes())
    export_runtime(settings(str(DEMO), 256, dtype="bfloat16"), again)
    for name in os.listdir(demo):
        assert (again / name).read_bytes() == (demo / name).read_bytes()
    (again / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        export_runtime(settings(str(DEMO), 256), again)
    with pytest.raises(UserError, match=r"would remove .*mine\.txt"):
        export_runtime(settings(str(DEMO), 256), again, overwrite=True)


def test_large_folders_are_several_files_with_an_index(tmp_path: Path) -> None:
    def rows(count: int) -> Computed:
        return Computed("U8", (count,), (), lambda: np.full(count, 7, np.uint8))

    arrays = {"a": rows(100), "b": rows(64), "c": rows(1)}
    runtime_folder.write_weights(arrays, tmp_path, max_bytes=200)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["c"] == "model-00002-of-00002.safetensors"
    for file in sorted(set(index["weight_map"].values())):
        assert misplaced(read_header(tmp_path / file)) == []


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama_gqa", {"device": "gpu"}, "--device gpu"),
        ("llama_gqa", {"inference_model": False}, "--inference_model false"),
        ("llama_gqa", {"tensor_parallel_degree": 2}, "--tensor_parallel_degree above 1"),
        ("llama_gqa", {"speculate_method": "inference_with_reference"}, "--speculate_method"),
        ("../golden_hybrids/qwen3_next", {}, "qwen3_next keeps a state of each request"),
    ],
)
def test_what_the_runtime_does_not_run_is_refused_by_name(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        export_runtime(settings(case, 128).changed(**changes), tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--runtime", "--target", "riscv"], "--target 'riscv'"),
        (["--target", "x86_64"], "add --runtime"),
        (["--runtime", "--enable_lora"], "--enable_lora is of static models"),
        (["--runtime", "--task", "embed"], "--task embed is of static models"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_name_or_path", str(DEMO), "--device", "cpu", "--dtype", "float32"]
    assert export_main([*words, "--output_path", str(tmp_path / "made"), *flags]) == 2
    assert message in capsys.readouterr().err


def opened(folder: Path) -> str:
    """What the library says of a folder; "" where it opens."""
    nothing = folder.parent / "nothing"
    nothing.write_bytes(b"")
    command = [str(program("runtime_steps")), str(folder), "4", str(nothing), os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), (done.returncode, done.stderr)
    return "" if done.returncode == 0 else done.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "folder"
    export_runtime(settings("llama_gqa", 128), folder)
    return folder


def first(values: dict[str, Any], block: int) -> Any:
    return values["layers"][0]["blocks"][block]


Edit = Callable[[dict[str, Any]], None]
WEIGHTS = "model.safetensors"
NORM, HEAD_NORM = "layers_0_0_norm_weight", "head_norm_weight"
EDITS: dict[str, tuple[Edit, str]] = {
    "another version": (lambda v: v.update(version=2), "regatta.json has version 2"),
    "another target": (lambda v: v.update(target="sm_90"), 'has target "sm_90"'),
    "another packing": (lambda v: v["packing"].update(dense="rows"), 'packing.dense is "rows"'),
    "a key that is missing": (lambda v: v.pop("head"), 'has no key "head"'),
    "a key that is not known": (lambda v: v.update(heads=1), 'has the key "heads"'),
    "a file that is missing": (
        lambda v: v["files"].update(other={"num_bytes": 0, "sha256": ["0"]}),
        "other is not there",
    ),
    "a file outside": (
        lambda v: v["files"].update({"../x": {"num_bytes": 0, "sha256": ["0"]}}),
        'files."../x" is no name',
    ),
    "another size": (lambda v: v["files"][WEIGHTS].update(num_bytes=9), "regatta.json says 9"),
    "a tensor that is missing": (
        lambda v: first(v, 0)["weights"].__setitem__(0, "other"),
        'layers[0].blocks[0].weights[0] names "other"',
    ),
    "a tensor of another shape": (
        lambda v: first(v, 1)["weights"].reverse(),
        "regatta.json: layers[0]: norm has shape",
    ),
    "a product's tensor of another": (
        lambda v: first(v, 1)["weights"].append(first(v, 1)["weights"].pop(1)),
        "layers[0]: gate_up: ",
    ),
    "a tensor too many": (
        lambda v: first(v, 1)["weights"].append(first(v, 1)["weights"][0]),
        "tensors more than the blocks need",
    ),
    "a record that is not known": (
        lambda v: v["records"].__setitem__(0, v["records"][0].replace("attention", "attend")),
        "kind is 'attend'",
    ),
    "heads of another number": (
        lambda v: v["records"].__setitem__(
            0, v["records"][0].replace(" num_heads=", " num_heads=2")
        ),
        "layers[0]: qkv: ",
    ),
    "a number beyond all": (
        lambda v: v["records"].__setitem__(
            0, v["records"][0].replace("head_dim=", f"head_dim={2**62}0")
        ),
        "head_dim",
    ),
    "a cache of another shape": (
        lambda v: v["layers"][0]["cache"][0]["shape"].__setitem__(1, 77),
        "key_cache has shape",
    ),
    "a cache that nothing reads": (
        lambda v: v["layers"].append({"blocks": [], "cache": v["layers"][0]["cache"]}),
        "tensors more than the blocks need",
    ),
    "a cache of given scales alone": (
        lambda v: [each.update(cache=[{"tensor": NORM}]) for each in v["layers"]].clear(),
        "layers has no layer with a cache",
    ),
    "a block size of another": (lambda v: v.update(block_size=16), "cache[0].shape"),
    "a vocabulary beyond the table": (
        lambda v: v.update(vocab_size=10**6),
        "does not hold 1000000",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_description_is_refused_by_its_key(
    edit: str, small: Path, tmp_path: Path
) -> None:
    change, message = EDITS[edit]
    values = described(small)
    change(values)
    folder = linked(small, tmp_path, runtime_folder.FILE_NAME)
    (folder / runtime_folder.FILE_NAME).write_text(json.dumps(values))
    said = opened(folder)
    assert message in said
    assert str(folder) in said


def linked(source: Path, tmp_path: Path, besides: str) -> Path:
    """A copy of a folder without one of its files."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in source.iterdir():
        if path.name != besides:
            os.link(path, folder / path.name)
    return folder


def header_of(data: bytes) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return read


def with_header(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file with another header, as long as its own."""
    size = int.from_bytes(data[:8], "little")
    header = header_of(data)
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= size
    return data[:8] + text.ljust(size) + data[8 + size :]


def with_scalar(data: bytes) -> bytes:
    """The file with a head whose norm has a weight without a dimension."""
    size = int.from_bytes(data[:8], "little")
    header = header_of(data)
    begin, end = header[HEAD_NORM]["data_offsets"]
    header[HEAD_NORM].update(shape=[], data_offsets=[begin, begin + 4])
    rest = {"dtype": "U8", "shape": [end - begin - 4], "data_offsets": [begin + 4, end]}
    text = json.dumps({**header, "padding.rest": rest}, separators=(",", ":")).encode()
    return (size + 128).to_bytes(8, "little") + text.ljust(size + 128) + data[8 + size :]


HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda _: b"", "it has 0 bytes"),
    "a header beyond the file": (lambda d: (1 << 62).to_bytes(8, "little") + d[8:], "claims"),
    "no JSON": (lambda d: d[:8] + b"{" + b"x" * 20 + d[29:], "is not JSON"),
    "a dtype that is not known": (
        lambda d: with_header(d, lambda h: h[NORM].update(dtype="F8")),
        f'"{NORM}" has dtype "F8"',
    ),
    "a shape that overflows": (
        lambda d: with_header(
            d, lambda h: (h.pop("__metadata__"), h[NORM].update(shape=[2**32, 2**32]))
        ),
        "of more bytes than a number holds",
    ),
    "an overlap": (
        lambda d: with_header(d, lambda h: h[NORM].update(data_offsets=[0, 0], shape=[0])),
        "the tensors ahead of it end",
    ),
    "offsets that turn": (
        lambda d: with_header(d, lambda h: h[NORM]["data_offsets"].reverse()),
        "lies in bytes",
    ),
    "a byte too many": (lambda d: d + b"x", "its tensors end at byte"),
    "the end is cut": (lambda d: d[:-64], "ends at"),
}


@pytest.mark.parametrize("edit", HEADERS)
def test_a_damaged_file_of_weights_is_refused_by_its_tensor(
    edit: str, small: Path, tmp_path: Path
) -> None:
    change, message = HEADERS[edit]
    folder = linked(small, tmp_path, WEIGHTS)
    data = change((small / WEIGHTS).read_bytes())
    (folder / WEIGHTS).write_bytes(data)
    values = described(small)
    values["files"][WEIGHTS]["num_bytes"] = len(data)
    (folder / runtime_folder.FILE_NAME).unlink()
    (folder / runtime_folder.FILE_NAME).write_text(json.dumps(values))
    said = opened(folder)
    assert message in said
    assert WEIGHTS in said


def test_a_tensor_without_a_dimension_is_none_that_a_block_takes(
    small: Path, tmp_path: Path
) -> None:
    folder = linked(small, tmp_path, WEIGHTS)
    data = with_scalar((small / WEIGHTS).read_bytes())
    (folder / WEIGHTS).write_bytes(data)
    values = described(small)
    values["files"][WEIGHTS]["num_bytes"] = len(data)
    (folder / runtime_folder.FILE_NAME).unlink()
    (folder / runtime_folder.FILE_NAME).write_text(json.dumps(values))
    # A head without its norm would run, and give other answers.
    assert f'"{HEAD_NORM}", which has no dimension' in opened(folder)
