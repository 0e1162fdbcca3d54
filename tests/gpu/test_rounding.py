"""Weights rounded on the GPU: the codes, scales and packed bytes of the host's rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from predict import EngineConfig
from predict.device import devices
from predict.device.place import tensor_at
from predict.loading.matrices import round_weight
from predict.loading.model import open_weights, read_spec
from predict.loading.platform import platform_of
from predict.loading.sources import CheckpointSource
from predict.loading.upload import DeviceCheckpointSource
from predict.nn.decoder import Decoder
from predict.ops import compiled, plain
from predict.schemes import known_schemes, scheme_of
from tests.support import rounding, tiny
from tests.support.golden import GOLDEN
from tests.support.gpu_engines import SETTINGS as ON_GPU
from tests.support.gpu_products import settings_here, skip_unless_here
from tests.support.schemes import SETTINGS, normal


def tensor_of(values: npt.NDArray[np.float32], dtype: str) -> Any:
    import paddle

    return paddle.to_tensor(values, place=paddle.CPUPlace()).astype(dtype)


def assert_alike(got: Any, wanted: Any, name: str) -> None:
    assert (got is None) == (wanted is None), name
    if got is not None:
        one, other = (rounding.bits(each.cpu().numpy()) for each in (got, wanted))
        np.testing.assert_array_equal(one, other, err_msg=name)


def check(
    gpu: devices.Device, values: npt.NDArray[np.float32], dtype: str, rule: str, group_size: int
) -> None:
    """Asserts that the GPU and the host make the same codes, scales and zeros."""
    weight = tensor_of(values, dtype)
    got = compiled.round_weight(weight._copy_to(gpu.place(), True), rule, group_size)
    wanted = plain.round_weight(weight, rule, group_size)
    for name, one, other in zip(("codes", "scale", "zero"), got, wanted, strict=True):
        assert_alike(one, other, name)


@pytest.mark.parametrize("dtype", rounding.DTYPES)
@pytest.mark.parametrize(("rule", "group_size"), rounding.RULES)
def test_codes_and_scales_are_the_hosts(
    gpu: devices.Device, rule: str, group_size: int, dtype: str
) -> None:
    has_ends = group_size == -1 or rule == "e4m3"  # groups of others divide a row
    for shape in (*rounding.SHAPES, *(rounding.ODD_SHAPES if has_ends else ())):
        check(gpu, rounding.matrix(shape), dtype, rule, group_size)
    check(gpu, rounding.hard_matrix(), dtype, rule, group_size)


@pytest.mark.parametrize("group_size", [-1, 128])
@pytest.mark.parametrize("rule", ["int8", "int4", "e4m3"])
def test_every_number_of_sixteen_bits_has_the_hosts_code(
    gpu: devices.Device, rule: str, group_size: int
) -> None:
    # Beside others of all sizes, and beside those of its own size.
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for order in (patterns, np.random.default_rng(0).permutation(patterns)):
        halves = order.view(np.float16).astype(np.float32).reshape(512, 128)
        check(gpu, halves, "float16", rule, group_size)
        wide = (order.astype(np.uint32) << 16).view(np.float32).reshape(512, 128)
        check(gpu, wide, "bfloat16", rule, group_size)


@pytest.mark.parametrize(
    ("rule", "group_size", "words"),
    [
        ("int3", -1, "rule 'int3' is not known .allowed: int8, int4, e4m3"),
        ("int4", 48, "group_size 48 does not divide 128 columns"),
        ("int4", 0, "group_size 0 is not supported .allowed: -1, 1, 2"),
    ],
)
def test_unknown_rules_and_groups_are_refused(
    gpu: devices.Device, rule: str, group_size: int, words: str
) -> None:
    import paddle

    with pytest.raises(ValueError, match=words):
        compiled.round_weight(paddle.zeros([4, 128]), rule, group_size)
    with pytest.raises(ValueError, match="weight is on the CPU; this operator is for GPUs"):
        compiled.round_weight(tensor_of(normal((4, 128)), "float32"), "int8", -1)


@pytest.mark.parametrize("dtype", rounding.DTYPES)
def test_matrices_are_turned_round_as_they_are(gpu: devices.Device, dtype: str) -> None:
    weight = tensor_of(normal((67, 130)), dtype)
    turned = compiled.transposed(weight._copy_to(gpu.place(), True))
    assert_alike(turned.astype("float32"), plain.transposed(weight).astype("float32"), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group_size", [-1, 64, 128])
@pytest.mark.parametrize("scheme", [name for name in known_schemes() if name != "dense"])
def test_packed_bytes_are_those_of_the_hosts_codes(
    gpu: devices.Device, scheme: str, group_size: int, dtype: str
) -> None:
    skip_unless_here(scheme)
    if scheme == "a8w8":
        group_size = -1
    if scheme == "weight_only_mxfp4":
        group_size = 32
    if scheme == "a8w8_fp8" and group_size == 64:
        pytest.skip("float8 has blocks of 128 alone")
    module, weight = scheme_of(scheme), tensor_of(rounding.matrix((272, 384)), dtype)
    placed = weight._copy_to(gpu.place(), True)
    sides = [
        module.tensors(
            module.quantize(each, group_size, round_weight), dtype, compiled, gpu.place()
        )
        for each in (placed, weight.numpy())
    ]
    for index, (one, other) in enumerate(zip(*sides, strict=True)):
        assert_alike(one, other, f"tensor {index}")


def made_by(
    source: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> Decoder:
    """The decoder of a checkpoint whose linears were rounded by the GPU, or by the host."""
    config = EngineConfig(model_name_or_path=str(source), **ON_GPU, **settings)
    spec, reader = read_spec(source)
    uploads: list[tuple[str, ...]] = []

    def counted(self: DeviceCheckpointSource, names: tuple[str, ...], shape: Any) -> Any:
        uploads.append(names)
        return stored_matrix(self, names, shape)

    stored_matrix = DeviceCheckpointSource.stored_matrix
    with monkeypatch.context() as patch:
        taken = CheckpointSource.stored_matrix if on_host else counted
        patch.setattr(DeviceCheckpointSource, "stored_matrix", taken)
        decoder = open_weights(config, spec, reader, platform_of("gpu", True)).read()
    assert on_host or len(uploads) == len(rounded_linears(decoder))
    return decoder


def rounded_linears(decoder: Decoder) -> list[Any]:
    found = [
        linear for layer in decoder.layers for block in layer for linear in block.linears().values()
    ]
    return [
        linear
        for linear in (*found, decoder.head.linear)
        if linear.scheme not in ("dense", "dense_folded")
    ]


def assert_same_weights(
    source: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got, wanted = (
        rounded_linears(made_by(source, settings, monkeypatch, on_host))
        for on_host in (False, True)
    )
    assert got
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.scheme == other.scheme
        for pair in zip(one.tensors, other.tensors, strict=True):
            assert_alike(*pair, f"linear {index}")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_checkpoints_are_rounded_by_the_gpu(
    gpu: devices.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stored: str
) -> None:
    settings, _ = settings_here(name)
    shape = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
    source = tiny.write(tmp_path, shape)
    as_stored(source / "model.safetensors", stored)
    assert_same_weights(source, {**settings, "dtype": "bfloat16"}, monkeypatch)


def as_stored(path: Path, dtype: str) -> None:
    """Writes a file of float32 tensors anew, in `dtype`."""
    from predict.loading.checkpoint import Checkpoint
    from predict.loading.safetensors_writer import write

    checkpoint = Checkpoint(path.parent)
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    tensors = {
        name: (names[dtype], tensor_of(checkpoint.read(name), dtype).numpy())
        for name in checkpoint.tensors
    }
    write(path, tensors)


@pytest.mark.parametrize("case", ["gpt2_small", "bloom_7b", "gpt_neox_pythia"])
def test_matrices_that_are_stored_otherwise_are_rounded_by_the_gpu(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    settings = {"quant_type": "weight_only_int8", "dtype": "float16", "max_length": 64}
    assert_same_weights(GOLDEN / case, settings, monkeypatch)


def test_random_weights_are_made_and_rounded_on_the_gpu(
    gpu: devices.Device, tmp_path: Path
) -> None:
    source = tiny.write(tmp_path)
    (source / "model.safetensors").unlink()
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "quant_type": "weight_only_int4",
    }
    config = EngineConfig(model_name_or_path=str(source), **ON_GPU, **settings)
    spec, reader = read_spec(source)
    weights = open_weights(config, spec, reader, platform_of("gpu", True))
    first = next(iter(weights.plan.linears()))
    made = weights.layout.read(first)
    assert made.codes.place == tensor_at(np.zeros(1, np.float32), gpu.place()).place
    assert len(np.unique(made.codes.numpy())) == 16
    weights.source.close()
