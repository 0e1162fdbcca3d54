"""Calibration of expert families: statistics of each expert's own rows, and what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import EngineConfig
from predict.config.quantization import QuantSettings
from predict.device.library import Library
from predict.errors import UserError
from predict.loading.build import check_gpu_expert
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts import layout_of
from predict.loading.model import read_spec
from predict.loading.safetensors_writer import write
from predict.loading.sources import CheckpointSource
from predict.models import weight_names
from predict.nn.plans import WeightPlan, plan_weights
from quant.config import QuantConfig, parse_command_line
from quant.evaluate import Model
from quant.experts import RoutedRows
from quant.layer import LayerWeights, Routed, run_layer
from quant.run_quantization import main, run
from tests.support.checkpoints import joined, stored
from tests.support.expert_models import FAMILIES, write_experts
from tests.support.quantization import GROUPS, error_between, words_of

LETTERS = list("abcdefghijklmnopqrstuvwxyz,.0123456789")
INT4 = ("--quant_type", "wint4", *GROUPS)


def letters(seed: int, count: int) -> str:
    """Words of random letters: a text that reaches all of a small vocabulary."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 8, count)
    return " ".join("".join(generator.choice(LETTERS, size)) for size in sizes)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(letters(3, 900))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints by family, each written once."""
    folder = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        path = folder / family
        return path if path.exists() else write_experts(path, family)

    return model


def quantize(model: Path, text: Path | None, output: Path, *more: str) -> Path:
    words = words_of(model, text, output, *more)
    for name, value in (("--src_length", "128"), ("--batch_size", "4")):
        words[words.index(name) + 1] = value
    run(QuantConfig.from_flags(parse_command_line(words)), progress=False)
    return output


def logits(model: Path, **changes: Any) -> np.ndarray:
    """Of a text of the calibration's kind."""
    settings = {"max_length": 300, "src_length": 256, "inference_model": False, **changes}
    engine = Model(EngineConfig(model_name_or_path=str(model), **settings))
    assert engine.llm.tokenizer is not None
    ids = engine.llm.tokenizer.encode(letters(4, 120))[:256]
    found: np.ndarray = engine.logits(np.array(ids, np.int32))
    return found


def error_against(model: Path, quantized: Path, **changes: Any) -> float:
    return error_between(logits(model), logits(quantized, **changes))


def plan_of(folder: Path) -> WeightPlan:
    spec, reader = read_spec(folder)
    return plan_weights(spec, weight_names(reader).found_in(Checkpoint(folder).tensors))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_calibrated_experts_are_nearer_than_rounding_to_nearest(
    family: str, models: Any, text: Path, tmp_path: Path
) -> None:
    model = models(family)
    nearest = error_against(model, quantize(model, None, tmp_path / "nearest", *INT4))
    for method in ("--do_gptq", "--do_awq"):
        error = error_against(model, quantize(model, text, tmp_path / method, *INT4, method))
        assert 0 < error < nearest, method


@pytest.mark.parametrize("family", list(FAMILIES))
def test_scaling_an_input_keeps_the_layers_function(family: str, models: Any) -> None:
    """Also of the router: where rows go is a part of it."""
    import paddle
    from predict.nn.rope import rope_table
    from predict.ops import plain

    plan = plan_of(models(family))
    spec, source = plan.spec, CheckpointSource(Checkpoint(models(family)))
    ropes = [
        paddle.to_tensor(rope_table(rope, spec.head_dim, 64, spec.max_position))
        for rope in spec.ropes
    ]
    generator = np.random.default_rng(0)
    hidden = generator.normal(0, 1, (30, spec.hidden_size)).astype(np.float32)

    def read() -> LayerWeights:
        return LayerWeights.read(1, plan, source)

    before = run_layer(plain, read().records(None), hidden, (12, 18), ropes)
    assert before.routed is not None
    for key in read().storable():
        layer = read()
        if not layer.scales_input(key) or key.endswith((".1", ".2")):
            continue
        columns = layer.linears[key].weight.shape[1]
        scale = generator.uniform(0.3, 3.0, (columns,)).astype(np.float32)
        sharing = layer.sharing(key)
        layer.scale_input(key, scale if sharing is None else scale[sharing])
        after = run_layer(plain, layer.records(None), hidden, (12, 18), ropes)
        assert after.routed is not None
        np.testing.assert_array_equal(after.routed.ids, before.routed.ids, key)
        np.testing.assert_allclose(after.output, before.output, atol=2e-4, err_msg=key)
        if key in before.inputs and sharing is None:
            wanted = before.inputs[key] / scale
            np.testing.assert_allclose(after.inputs[key], wanted, rtol=1e-3, atol=1e-4)


def without_expert(model: Path, folder: Path, expert: int, layer: int) -> Path:
    """A copy of a model with a correction or bias, whose router never chooses an expert."""
    shutil.copytree(model, folder)
    checkpoint = Checkpoint(folder)
    tensors = {n: (info.dtype, checkpoint.read(n)) for n, info in checkpoint.tensors.items()}
    endings = ("e_score_correction_bias", "router.bias")
    for name, (_, values) in tensors.items():
        if f"layers.{layer}." in name and name.endswith(endings):
            values.reshape(-1)[expert] = -1e4
    write(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "flags",
    [
        (*INT4, "--do_gptq"),
        (*INT4, "--do_gptq", "--gptq_static_groups", "false"),
        (*INT4, "--do_awq", "--auto_clip"),
        ("--quant_type", "a8w8", "--do_ptq", "--static_experts", "--smooth"),
    ],
    ids=["gptq", "gptq, groups follow the order", "awq, clip", "static"],
)
def test_an_expert_that_calibration_never_reaches_is_named_and_rounded_without_it(
    family: str,
    flags: tuple[str, ...],
    models: Any,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = without_expert(models(family), tmp_path / "model", 3, 1)
    quantized = quantize(model, text, tmp_path / "out", *flags)
    said = [line for line in capsys.readouterr().err.splitlines() if "reached none" in line]
    (line,) = said
    assert line.startswith("warning: layer 1: calibration reached none of 1 of ")
    assert "rounded to nearest without it (model.layers.1.mlp.experts: 3)" in line
    assert error_against(model, quantized) < 1.0


def test_the_rows_of_an_unreached_expert_are_those_of_rounding_to_nearest(
    models: Any, text: Path, tmp_path: Path
) -> None:
    model = without_expert(models("glm4_moe"), tmp_path / "model", 3, 1)
    folders = [
        quantize(model, text, tmp_path / "gptq", *INT4, "--do_gptq"),
        quantize(model, None, tmp_path / "nearest", *INT4),
    ]
    gptq, nearest = map(Checkpoint, folders)
    for expert in range(12):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{expert}.{part}.weight_packed"
            same = np.mean(gptq.read(name) == nearest.read(name))
            # Two ways to the same scales: their last digits decide ties.
            assert same > 0.95 if expert == 3 else same < 0.5


def test_experts_with_too_few_rows_for_second_moments_are_named(
    models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a b c.")
    model = models("qwen3_moe")
    quantized = quantize(model, short, tmp_path / "out", *INT4, "--do_gptq")
    assert "calibration has too few rows for" in capsys.readouterr().err
    assert error_against(model, quantized) < 1.0
    # The range of one row is a range.
    quantize(model, short, tmp_path / "a8w8", "--quant_type", "a8w8", "--do_ptq", "--smooth")
    assert "too few rows" not in capsys.readouterr().err


def test_an_experts_rows_are_those_that_the_router_sends_there() -> None:
    inputs = np.arange(12, dtype=np.float32).reshape(4, 3)
    routed = RoutedRows(max_batches=2)
    routed.update(Routed(inputs, np.array([[0, 2], [1, 2], [2, 0], [0, 1]], np.int32)))
    routed.update(Routed(inputs + 100, np.array([[1, 2], [1, 2], [1, 2], [1, 0]], np.int32)))
    routed.update(Routed(inputs + 999, np.zeros((4, 2), np.int32)))  # one more than are taken
    assert [rows.tolist() for rows in routed.of(0)] == [
        inputs[[0, 2, 3]].tolist(),
        (inputs[[3]] + 100).tolist(),
    ]
    assert [len(rows) for rows in routed.of(2)] == [3, 3]
    assert list(routed.of(3)) == []
    routed.rescale(np.full(3, 2.0, np.float32))
    assert next(routed.of(0)).tolist() == (inputs[[0, 2, 3]] / 2).tolist()


# Flags, whether a GPU takes the experts, and the largest relative logit error.
CASES = {
    "a8w8, static but for experts": (("a8w8", "--do_ptq"), True, 0.5),
    "a8w8, smooth": (("a8w8", "--do_ptq", "--smooth", "--smooth_all_linears"), True, 0.1),
    "a8w8, static experts": (
        ("a8w8", "--do_ptq", "--static_experts", "--smooth", "--smooth_piecewise_search"),
        False,
        0.2,
    ),
    "fp8": (("a8w8_fp8", "--do_ptq"), True, 0.5),
    "fp8, static experts": (("a8w8_fp8", "--do_ptq", "--static_experts"), False, 0.5),
    "w4a8, awq then gptq": (("w4a8", *GROUPS, "--do_awq", "--do_gptq"), True, 0.5),
    "int4, zero points": (
        ("wint4", *GROUPS, "--weight_symmetric", "false", "--do_awq", "--auto_clip"),
        True,
        0.5,
    ),
    "int4, groups follow the order": (
        ("wint4", *GROUPS, "--do_gptq", "--gptq_static_groups", "false"),
        False,
        0.5,
    ),
    "int8": (("wint8", "--do_gptq"), True, 0.05),
    "skipped experts": (("wint4", "--do_gptq", "--skip_list_names", ".experts."), True, 0.3),
}


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("case", list(CASES))
def test_what_is_written_loads_on_the_devices_that_are_promised(
    case: str, family: str, models: Any, text: Path, tmp_path: Path
) -> None:
    flags, on_gpu, largest = CASES[case]
    model = models(family)
    quantized = quantize(model, text, tmp_path / "out", "--quant_type", *flags)
    assert 0 < error_against(model, quantized) < largest
    plan, reader = plan_of(quantized), read_spec(quantized)[1]
    checkpoint = Checkpoint(quantized)
    layout = layout_of(reader, checkpoint, CheckpointSource(checkpoint), QuantSettings(), plan)
    refused = []
    for linear in plan.linears():
        if linear.is_expert:
            try:
                check_gpu_expert(layout.read(linear), linear)
            except UserError as error:
                refused.append(str(error))
    assert bool(refused) is not on_gpu


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
def test_compiled_operators_calibrate_like_plain_paddle(
    family: str, models: Any, text: Path, tmp_path: Path, compiled: Library
) -> None:
    flags = (*INT4, "--do_gptq")
    plain = quantize(models(family), text, tmp_path / "plain", *flags)
    fused = quantize(models(family), text, tmp_path / "fused", *flags, "--inference_model=true")
    expected = logits(plain)
    assert np.mean((logits(fused) - expected) ** 2) < 1e-3 * np.var(expected)


def test_routers_and_matrices_of_heads_stay_in_the_models_dtype(
    models: Any, text: Path, tmp_path: Path
) -> None:
    flags = (*INT4, "--do_gptq", "--dtype", "bfloat16")
    for family, kept in (
        ("qwen2_moe", ("mlp.gate", "mlp.shared_expert_gate")),
        ("deepseek_v3", ("mlp.gate", "self_attn.kv_b_proj")),
    ):
        quantized = quantize(models(family), text, tmp_path / family, *flags)
        tensors = Checkpoint(quantized).tensors
        values = json.loads((quantized / "config.json").read_text())["quantization_config"]
        for name in kept:
            assert tensors[f"model.layers.1.{name}.weight"].dtype == "BF16"
            assert f"model.layers.1.{name}" in values["ignore"]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert tensors[name].dtype == "F32"


def test_experts_that_lie_in_turns_are_written_apart(
    models: Any, text: Path, tmp_path: Path
) -> None:
    """gpt-oss: an expert's gate and up are rows in turns of one matrix, which is transposed."""
    quantized = quantize(models("gpt_oss"), text, tmp_path / "out", *INT4, "--do_gptq")
    tensors = Checkpoint(quantized).tensors
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert f"model.layers.1.mlp.experts.6.{part}.weight_packed" in tensors
        assert f"model.layers.1.mlp.experts.6.{part}.bias" in tensors
    assert not any("gate_up_proj" in name for name in tensors)


def test_one_tensor_of_all_experts_is_calibrated_like_theirs(
    models: Any, text: Path, tmp_path: Path
) -> None:
    model = models("mixtral")
    together = Path(shutil.copytree(model, tmp_path / "joined"))
    write(together / "model.safetensors", joined(stored(model)))
    first = quantize(model, text, tmp_path / "first", *INT4, "--do_gptq")
    second = quantize(together, text, tmp_path / "second", *INT4, "--do_gptq")
    np.testing.assert_array_equal(logits(first), logits(second))


@pytest.mark.parametrize(
    ("family", "words", "said"),
    [
        (
            "mixtral",
            ("a8w8", "--do_ptq", "--shift"),
            "in mixtral it feeds experts and their router",
        ),
        ("deepseek_v2", ("a8w8c8", "--do_ptq"), "deepseek_v2 keeps latents, one for all heads"),
        (
            "gpt_oss",
            ("a8w8", "--do_ptq", "--smooth", "--smooth_all_linears"),
            "--smooth_all_linears: the experts of gpt_oss clamp what up makes",
        ),
        ("olmoe", ("wint4", "--do_gptq", "--skip_list_names", "experts.3."), "skip all experts"),
        ("olmoe", ("wint4", "--static_experts"), "--static_experts is about static activation"),
        ("olmoe", ("a8w8", "--static_experts"), "--static_experts is about static activation"),
    ],
)
def test_what_has_no_meaning_for_a_family_is_refused_by_name(
    family: str,
    words: tuple[str, ...],
    said: str,
    models: Any,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words_of(models(family), text, tmp_path / "out", "--quant_type", *words)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "calibration").exists()


def test_nan_in_an_expert_names_it(models: Any, text: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(models("olmoe"), tmp_path / "model"))
    tensors = stored(model)
    tensors["model.layers.1.mlp.experts.4.up_proj.weight"][1][5, 7] = np.nan
    write(model / "model.safetensors", tensors)
    for number, flags in enumerate((INT4[:2], ("--quant_type", "a8w8", "--do_ptq"))):
        more = ("--do_gptq",) if number == 0 else ("--static_experts",)
        with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.4\.down_proj.*NaN"):
            quantize(model, text, tmp_path / str(number), *flags, *more)
