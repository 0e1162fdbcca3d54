"""Types of blocks: every one is read, and codes that are kept stand for the same values."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from predict import LLM
from predict.config.schemes import scheme_info
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts._target import Target
from predict.loading.layouts.gguf import KINDS as KEPT
from predict.loading.layouts.gguf import as_quantized, holds
from predict.schemes import scheme_of
from tests.support import tiny
from tests.support.gguf_blocks import KINDS, Types, random_blocks, values_of
from tests.support.gguf_models import convert, finish, writer_of
from tests.support.stored_layouts import values_of as values_of_codes
from tests.support.tiny import CONFIG

ROWS, COLUMNS = 37, 512
NAME = "blk.0.ffn_down.weight"
OURS = "model.layers.0.mlp.down_proj.weight"


def write(path: Path, kind: str, blocks: np.ndarray) -> Path:
    writer = writer_of(path, CONFIG)
    writer.add_tensor("token_embd.weight", np.zeros((199, 64), np.float32))
    writer.add_tensor(NAME, blocks, raw_dtype=Types[kind])
    finish(writer)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_read_as_the_package_reads_it(kind: str, tmp_path: Path) -> None:
    blocks = random_blocks(kind, ROWS, COLUMNS)
    checkpoint = Checkpoint(write(tmp_path / "x.gguf", kind, blocks))
    assert checkpoint.tensors[OURS].shape == (ROWS, COLUMNS)
    wanted = values_of(blocks, kind)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(to_float32(checkpoint.read(OURS)), wanted)


@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "I32"])
def test_plain_types_are_read_as_they_are(kind: str, tmp_path: Path) -> None:
    dtype = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I32": np.int32}[kind]
    values = np.arange(64).reshape(4, 16).astype(dtype)
    checkpoint = Checkpoint(write(tmp_path / "x.gguf", kind, values))
    assert checkpoint.tensors[OURS].dtype == kind
    np.testing.assert_array_equal(checkpoint.read(OURS), values)


@pytest.mark.parametrize("kind", KEPT)
def test_kept_codes_stand_for_the_same_values(kind: str) -> None:
    row = KEPT[kind]
    _, size = gguf.GGML_QUANT_SIZES[Types[kind]]
    blocks = random_blocks(kind, ROWS, COLUMNS)
    made = as_quantized(row.unpack(blocks.reshape(-1, size)), row, groups=COLUMNS // row.group_size)
    wanted = values_of(blocks, kind)
    is_4_bits = scheme_info(row.scheme).bits == 4
    assert made.codes.min() >= (0 if is_4_bits else -128)
    assert made.codes.max() <= (15 if is_4_bits else 127)
    if row.has_minimum:  # float32's own rounding, of the minimum as a multiple of the scale
        np.testing.assert_allclose(
            values_of_codes(made), wanted, rtol=0, atol=4e-7 * np.abs(wanted).max()
        )
    else:
        scheme = scheme_of(row.scheme)
        got = scheme.plain(scheme.tensors(made, "float32", None)).numpy()
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", [kind for kind, row in KEPT.items() if row.has_minimum])
def test_a_group_of_one_value_keeps_it(kind: str) -> None:
    row = KEPT[kind]
    _, size = gguf.GGML_QUANT_SIZES[Types[kind]]
    blocks = random_blocks(kind, 2, 512)
    flat = blocks.reshape(-1, size)
    flat[0, :2] = 0  # the scale; the minimum stays
    made = as_quantized(row.unpack(flat), row, groups=512 // row.group_size)
    wanted = values_of(blocks, kind)
    assert np.isfinite(made.zero).all()
    np.testing.assert_allclose(values_of_codes(made), wanted, rtol=0, atol=1e-6)
    assert np.abs(wanted[0, :32]).min() > 0


ON_GPU = Target("gpu", compiled=True, dtype="float16", capability=(9, 0))


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        (Target("cpu", compiled=True, dtype="bfloat16"), set(KEPT)),
        (Target("gpu", compiled=False, dtype="bfloat16"), set(KEPT)),
        # Scales are of the model's dtype there, zeros whole numbers, and 8 bits have wider groups.
        (ON_GPU, {"Q4_0", "TQ2_0", "MXFP4"}),
        (Target("gpu", compiled=True, dtype="bfloat16", capability=(9, 0)), {"MXFP4"}),
        (Target("gpu", compiled=True, dtype="float16", capability=(8, 0)), {"TQ2_0"}),
    ],
    ids=["cpu", "plain operators", "hopper", "hopper in bfloat16", "ampere"],
)
def test_codes_are_kept_where_operators_hold_them_exactly(target: Target, kept: set[str]) -> None:
    assert {kind for kind, row in KEPT.items() if holds(target, [row], 512)} == kept


def test_parts_of_mxfp4_and_of_another_type_become_floats() -> None:
    target = Target("cpu", compiled=True, dtype="bfloat16")
    assert holds(target, [KEPT["MXFP4"], KEPT["MXFP4"]], 512)
    assert holds(target, [KEPT["Q4_0"], KEPT["Q8_0"]], 512)
    assert not holds(target, [KEPT["MXFP4"], KEPT["Q8_0"]], 512)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = convert(tiny.write(tmp_path / "m"), tmp_path / "x.gguf", Types.Q8_0)
    checkpoint = Checkpoint(path)
    ((_, offset),) = checkpoint.tensors["model.layers.1.self_attn.o_proj.weight"].places
    data = bytearray(path.read_bytes())
    data[offset : offset + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(data)
    with pytest.raises(UserError, match="o_proj has scales that are not finite"):
        LLM(str(path), dtype="float32", max_length=64, inference_model=True)
