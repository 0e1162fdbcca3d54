"""Conversions: bit by bit the same both ways, resumed after a kill, never over something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import convert
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.conversion import STATE, Conversion, Options, parse_size
from predict.loading.paddle_checkpoint import is_turned
from predict.loading.safetensors_writer import write
from predict.system.signals import Signals
from tests.support import stored_formats, tiny
from tests.support.paths import ROOT
from tests.support.stored_formats import WRITERS, write_model

GOLDEN = ROOT / "tests" / "golden"
QUANTIZED = ROOT / "tests" / "golden_quantized"
FAMILIES = (
    *("llama_gqa", "llama_sharded", "qwen2_tied", "qwen2_moe_sparse", "qwen3_moe_30b"),
    *("mixtral_8x7b", "gemma2_9b", "deepseek_v2_lite", "bloom_odd_heads", "chatglm_6b"),
    *("chatglm_2_6b", "qwen_7b", "phi3_mini", "gpt_oss_20b", "opt_125m", "opt_350m", "gemma_2b"),
    *("qwen2_moe_a2_7b", "qwen_long", "chatglm_glm4"),
)


def run(source: Path, target: Path, layout: Any = "hf", *words: str) -> None:
    """The command, in this process; its errors are raised."""
    argv = [str(source), str(target), "--format", layout, *words]
    assert convert.run(argv, Signals()) == 0


def same(wanted: Any, got: Any) -> bool:
    """Whether two checkpoints' tensors are the same, bit by bit, as stored."""
    return list(wanted) == list(got) and all(
        array.dtype == got[name].dtype
        and array.shape == got[name].shape
        and array.read().tobytes() == got[name].read().tobytes()
        for name, array in wanted.items()
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_to_paddle_and_back_changes_no_bit(tmp_path: Path, family: str) -> None:
    run(GOLDEN / family, tmp_path / "paddle", "paddle", "--max_shard_size", "100KB")
    run(tmp_path / "paddle", tmp_path / "hf")
    before, between, after = (
        Checkpoint(folder) for folder in (GOLDEN / family, tmp_path / "paddle", tmp_path / "hf")
    )
    assert (before.is_paddle, between.is_paddle, after.is_paddle) == (False, True, False)
    assert same(before.stored, after.stored)
    matrices = [name for name, array in before.stored.items() if len(array.shape) == 2]
    turned = [name for name in matrices if is_turned(name)]
    assert turned
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config.items() >= json.loads((GOLDEN / family / "config.json").read_text()).items()


def test_names_without_a_base_come_back_with_it(tmp_path: Path) -> None:
    run(GOLDEN / "bloom_7b", tmp_path / "paddle", "paddle")
    run(tmp_path / "paddle", tmp_path / "hf")
    before, after = Checkpoint(GOLDEN / "bloom_7b").stored, Checkpoint(tmp_path / "hf").stored
    assert same({f"transformer.{name}": array for name, array in before.items()}, after)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_every_format_is_converted(tmp_path: Path, name: str, layout: str) -> None:
    tensors = write_model(tmp_path / "from", name, tensor_parallel_degree=1)
    run(tmp_path / "from", tmp_path / "to", layout)
    checkpoint = Checkpoint(tmp_path / "to")
    assert checkpoint.is_paddle == (layout == "paddle")
    for tensor, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(tensor), values)
    assert "tensor_parallel_degree" not in (tmp_path / "to" / "config.json").read_text()
    assert not (tmp_path / "to" / STATE).exists()


def test_paddlenlps_layout_has_its_names_shapes_and_mark(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "from", "bin")
    run(tmp_path / "from", tmp_path / "to", "paddle")
    wanted = stored_formats.as_paddle(tensors)
    found = Checkpoint(tmp_path / "to").stored
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name].read(), values)
    assert b'"format":"np"' in (tmp_path / "to" / "model.safetensors").read_bytes()[:200]


def test_shards_hold_no_more_than_asked_and_an_index_names_them(tmp_path: Path) -> None:
    write_model(tmp_path / "from", "bin in shards")
    run(tmp_path / "from", tmp_path / "to", "hf", "--max_shard_size", "60KB")
    index = json.loads((tmp_path / "to" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    for shard in shards:
        size = (tmp_path / "to" / shard).stat().st_size
        assert size < 60_000 + 2000 or list(index["weight_map"].values()).count(shard) == 1
    assert index["metadata"]["total_size"] == sum(
        array.read().nbytes for array in Checkpoint(tmp_path / "to").stored.values()
    )


def test_tokenizer_and_templates_come_along(tmp_path: Path) -> None:
    tiny.write_with_tokenizer(tmp_path / "from")
    (tmp_path / "from" / "chat_template.jinja").write_text("{{ messages }}")
    run(tmp_path / "from", tmp_path / "to", "paddle")
    names = {path.name for path in (tmp_path / "from").iterdir()}
    assert names == {path.name for path in (tmp_path / "to").iterdir()}


def test_floats_become_what_is_asked_for_and_config_says_so(tmp_path: Path) -> None:
    tiny.write(tmp_path / "from", {"torch_dtype": "float32"})
    run(tmp_path / "from", tmp_path / "to", "hf", "--dtype", "bfloat16")
    before, after = Checkpoint(tmp_path / "from"), Checkpoint(tmp_path / "to")
    assert {array.dtype for array in after.tensors.values()} == {"BF16"}
    for name in before.tensors:
        bits = after.read(name).astype(np.uint32) << 16
        np.testing.assert_allclose(bits.view(np.float32), before.read(name), rtol=2**-8)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_values_beyond_a_dtype_are_refused_by_name(tmp_path: Path) -> None:
    tiny.write(tmp_path / "from")
    tensors = {n: a.read() for n, a in Checkpoint(tmp_path / "from").stored.items()}
    tensors["model.norm.weight"][3] = 1e6
    write(tmp_path / "from" / "model.safetensors", {n: ("F32", v) for n, v in tensors.items()})
    with pytest.raises(UserError, match=r"norm.weight has 1 values beyond what F16 holds"):
        run(tmp_path / "from", tmp_path / "to", "hf", "--dtype", "float16")


@pytest.mark.parametrize("name", ["gptq_sym", "ct_fp8_block"])
def test_quantized_checkpoints_are_copied_as_stored_or_refused(tmp_path: Path, name: str) -> None:
    run(QUANTIZED / name, tmp_path / "to", "hf")
    assert same(Checkpoint(QUANTIZED / name).stored, Checkpoint(tmp_path / "to").stored)
    with pytest.raises(UserError, match=r"is quantized .* --format hf copies them as they are"):
        run(QUANTIZED / name, tmp_path / "paddle", "paddle")
    with pytest.raises(UserError, match="--dtype would change its scales"):
        run(QUANTIZED / name, tmp_path / "cast", "hf", "--dtype", "float16")


@pytest.mark.parametrize(
    ("family", "layout", "said"),
    [
        *((f, "paddle", "have no names in PaddleNLP's") for f in ("falcon_7b", "gpt2_small")),
        ("gemma3_4b", "paddle", "have no names in PaddleNLP's layout"),
        ("gpt_paddlenlp", "hf", "no family like PaddleNLP's gpt"),
    ],
)
def test_families_without_names_in_a_layout_are_refused(
    tmp_path: Path, family: str, layout: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        run(GOLDEN / family, tmp_path / "to", layout)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", ["bin", "pdparams of 2 ranks, fused", "safetensors in shards"])
@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, name: str, layout: Any) -> None:
    tensors = write_model(tmp_path / "from", name, intermediate_size=8192)
    largest = max(values.nbytes for values in tensors.values())
    assert sum(values.nbytes for values in tensors.values()) > 6 * largest
    conversion = Conversion(tmp_path / "from", Options(layout, None, 1 << 40))
    tracemalloc.start()
    conversion.run(tmp_path / "to")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # gate and up are one tensor of the file; it, or its parts and it, and what is cut out of it.
    assert most < (4.5 if "fused" in name else 2.5) * largest


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_goes_on_behind_its_last_whole_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    tiny.write(tmp_path / "from", {"num_hidden_layers": 40})
    source, killed = tmp_path / "from", tmp_path / "killed"
    words = ["--format", "paddle", "--max_shard_size", "20KB"]
    run(source, tmp_path / "whole", "paddle", *words[2:])
    command = [sys.executable, "-m", "predict.convert", str(source), str(killed), *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while len(list(killed.glob("*.safetensors"))) < 3 and process.poll() is None:
        time.sleep(0.001)
    os.kill(process.pid, number)
    assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    done = {path.name: path.stat().st_mtime_ns for path in killed.glob("*.safetensors")}
    whole = contents(tmp_path / "whole")
    assert 3 <= len(done) < sum(name.endswith(".safetensors") for name in whole)
    assert (killed / STATE).exists()
    assert not (killed / "config.json").exists()
    (killed / ".model-00077-of-00100.safetensors.abc.part").write_bytes(b"half")
    run(source, killed, "paddle", *words[2:])
    assert {name: (killed / name).stat().st_mtime_ns for name in done} == done
    assert contents(killed) == whole


def interrupted(source: Path, target: Path, options: Options, after: int = 3) -> None:
    """A run that ends before a tensor is written."""
    left = [after]

    def on_tensor() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Conversion(source, options).run(target, on_tensor)


def test_files_of_the_wrong_size_or_header_are_written_again(tmp_path: Path) -> None:
    tiny.write(tmp_path / "from")
    options = Options("hf", None, 60_000)
    interrupted(tmp_path / "from", tmp_path / "to", options, 6)
    first, second, *_ = sorted((tmp_path / "to").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(second.read_bytes().replace(b"F32", b"I32", 1))
    Conversion(tmp_path / "from", options).run(tmp_path / "to")
    assert same(Checkpoint(tmp_path / "from").stored, Checkpoint(tmp_path / "to").stored)


def test_another_run_does_not_go_on_with_what_lies_there(tmp_path: Path) -> None:
    tiny.write(tmp_path / "from")
    interrupted(tmp_path / "from", tmp_path / "to", Options("hf", None, 60_000))
    for options, said in (
        (Options("paddle", None, 60_000), "format was hf and is paddle"),
        (Options("hf", None, 70_000), "max_shard_size was 60000 and is 70000"),
        (Options("hf", "float16", 60_000), "dtype was None and is float16"),
    ):
        with pytest.raises(UserError, match=said):
            Conversion(tmp_path / "from", options).run(tmp_path / "to")
    tiny.write(tmp_path / "from", seed=1)
    with pytest.raises(UserError, match="source was"):
        Conversion(tmp_path / "from", Options("hf", None, 60_000)).run(tmp_path / "to")


def test_nothing_that_is_there_is_written_over(tmp_path: Path) -> None:
    tiny.write(tmp_path / "from")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty, and holds no interrupted conversion"):
        run(tmp_path / "from", other)
    run(tmp_path / "from", tmp_path / "to")
    with pytest.raises(UserError, match="is not empty"):
        run(tmp_path / "from", tmp_path / "to")
    with pytest.raises(UserError, match=r"TO .*is the folder of FROM"):
        run(tmp_path / "from", tmp_path / "from")
    with pytest.raises(UserError, match=r"TO .*lies in the folder of FROM"):
        run(tmp_path / "from", tmp_path / "from" / "inner")
    assert contents(other) == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a"], "1 folders where two are needed"),
        (["{from}", "to"], "--format is missing"),
        (["{from}", "to", "--format", "gguf"], "'gguf' is not known .allowed: hf, paddle"),
        (["nowhere", "to", "--format", "hf"], "'nowhere' was not found"),
        (["{from}", "to", "--format", "hf", "--max_shard_size", "5 cows"], "is no size"),
        (["{from}", "to", "--format", "hf", "--max_shard_size", "0"], "is no size"),
    ],
)
def test_wrong_command_lines_are_refused(tmp_path: Path, argv: list[str], said: str) -> None:
    tiny.write(tmp_path / "from")
    with pytest.raises(UserError, match=said):
        convert.run([word.replace("{from}", str(tmp_path / "from")) for word in argv], Signals())


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5GiB", 3 * 2**29), ("200 kb", 200_000), ("7", 7), ("3B", 3)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size
