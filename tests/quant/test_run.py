"""run_quantization.py on tiny checkpoints: what it writes, what it refuses, how it resumes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams
from predict.device.library import Library
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.formats import PARAMS
from predict.loading.paddle_checkpoint import is_turned
from predict.loading.sources import CheckpointSource
from predict.nn.plans import plan_weights
from predict.system.outputs import locked
from quant.config import QuantConfig, parse_command_line
from quant.data import read_sequences, text_windows
from quant.evaluate import Model
from quant.run_quantization import main
from quant.state import RunState
from tests.support import tiny
from tests.support.golden import GOLDEN
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.quantization import (
    CHANGES,
    GROUPS,
    NUM_BATCHES,
    error_between,
    quantize,
    words_of,
    write_model,
)
from tests.support.tiny import TOKENIZER


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    words = np.random.default_rng(3).choice(["one", "two", "three", "and", "so", "on.", "\n"], 900)
    path.write_text(" ".join(words))
    return path


def logits(model: Path, **changes: Any) -> np.ndarray:
    config = EngineConfig(
        **{"max_length": 64, "src_length": 64, "inference_model": False, **changes},
        model_name_or_path=str(model),
    )
    found: np.ndarray = Model(config).logits(np.arange(3, 43, dtype=np.int32))
    return found


def error_against(model: Path, quantized: Path, **changes: Any) -> float:
    return error_between(logits(model), logits(quantized, **changes))


def test_windows_are_measured_where_their_length_says() -> None:
    """The first Qwen, whose rotary table goes by the length of the prompt."""
    folder = GOLDEN / "qwen_long"
    prompt = json.loads((folder / "golden.json").read_text())["prompts"][-1]
    wanted = np.load(folder / "golden.npz")["tail_logits"][:-1]
    config = EngineConfig(
        model_name_or_path=str(folder), dtype="float32", max_length=160, src_length=160
    )
    found = Model(config).logits(np.array(prompt, np.int32))
    np.testing.assert_allclose(found[-len(wanted) :], wanted, atol=1e-4 * np.abs(wanted).max())


def test_a_text_of_a_model_that_sees_ahead_has_no_perplexity() -> None:
    with pytest.raises(UserError, match="no perplexity; evaluate another model"):
        Model(EngineConfig(model_name_or_path=str(GOLDEN / "chatglm_6b"), max_length=64))


# Flags, and the largest relative logit error: 8 bits lose next to nothing, 4 bits of random
# weights a good deal.
CASES = {
    "int8": (("--quant_type", "weight_only_int8"), 5e-4),
    "int8 groups": (("--quant_type", "wint8", *GROUPS), 5e-4),
    "int8 gptq": (("--quant_type", "wint8", "--do_gptq"), 5e-4),
    "int4 groups": (("--quant_type", "wint4", *GROUPS), 0.04),
    "int4 gptq": (("--quant_type", "wint4", *GROUPS, "--do_gptq"), 0.04),
    "int4 gptq, groups follow the order": (
        ("--quant_type", "wint4", *GROUPS, "--do_gptq", "--gptq_static_groups", "false"),
        0.04,
    ),
    "int4 awq, clip, zero points": (
        (
            *("--quant_type", "wint4", *GROUPS, "--weight_symmetric", "false"),
            *("--do_awq", "--auto_clip"),
        ),
        0.04,
    ),
    "w4a8 awq then gptq": (("--quant_type", "w4a8", *GROUPS, "--do_awq", "--do_gptq"), 0.04),
    "a8w8 dynamic": (("--quant_type", "a8w8"), 2e-3),
    "a8w8 static, smooth": (
        ("--quant_type", "a8w8", "--do_ptq", "--smooth", "--smooth_all_linears"),
        0.05,
    ),
    "a8w8 static, piecewise": (
        (
            *("--quant_type", "a8w8", "--do_ptq", "--smooth", "--smooth_all_linears"),
            *("--smooth_piecewise_search", "--act_quant_method", "mse"),
        ),
        0.05,
    ),
    "a8w8 static, shift and smooth": (
        (
            *("--quant_type", "a8w8", "--do_ptq", "--shift", "--shift_all_linears"),
            *("--smooth", "--smooth_all_linears", "--act_quant_method", "abs_max"),
        ),
        0.05,
    ),
    "fp8 dynamic": (("--quant_type", "a8w8_fp8"), 0.012),
    "fp8 static, whole matrices": (
        (
            *("--quant_type", "a8w8_fp8", "--do_ptq", "--act_quant_method", "abs_max"),
            *("--weight_quant_method", "abs_max"),
        ),
        0.05,
    ),
    "fp8 blocks": (("--quant_type", "a8w8_fp8", "--weight_quant_method", "blockwise"), 0.012),
    "skipped linears": (
        ("--quant_type", "a8w8", "--do_ptq", "--skip_list_names", "down_proj,layers.1.self"),
        0.05,
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_written_runs_and_is_near_the_unquantized_model(
    case: str, model: Path, text: Path, tmp_path: Path
) -> None:
    flags, largest = CASES[case]
    quantized = quantize(model, text, tmp_path / "out", *flags)
    error = error_against(model, quantized)
    assert 0 < error < largest
    assert not (quantized / "calibration").exists()
    assert (quantized / "tokenizer.json").exists()


def test_biases_that_calibration_adds_are_added_by_compiled_operators(
    model: Path, text: Path, tmp_path: Path, compiled: Library
) -> None:
    flags = CASES["a8w8 static, shift and smooth"][0]
    quantized = quantize(model, text, tmp_path / "out", *flags)
    error = error_between(logits(quantized), logits(quantized, inference_model=True))
    assert error < 1e-3
    settings = EngineConfig(model_name_or_path=str(quantized), max_length=64)
    export_model(settings, tmp_path / "static")
    static = settings.changed(model_name_or_path=str(tmp_path / "static"), mode="static")
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    dynamic, exported = (LLM(each).generate([3, 4, 5], params) for each in (settings, static))
    assert dynamic[0].token_ids == exported[0].token_ids


def test_rounding_without_calibration_equals_the_online_scheme(model: Path, tmp_path: Path) -> None:
    for name, more in (("weight_only_int4", GROUPS), ("weight_only_int8", ()), ("a8w8", ())):
        quantized = quantize(model, None, tmp_path / name, "--quant_type", name, *more)
        online = logits(model, quant_type=name, weightonly_group_size=32 if more else -1)
        assert np.array_equal(logits(quantized), online)


def test_skipped_linears_keep_their_weights(model: Path, text: Path, tmp_path: Path) -> None:
    quantized = quantize(
        model, text, tmp_path / "out", "--quant_type", "wint4", "--skip_list_names", "q_proj"
    )
    before, after = Checkpoint(model), Checkpoint(quantized)
    # The parts of one product are quantized together, or not at all.
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        assert np.array_equal(before.read(name), after.read(name))
    ignored = json.loads((quantized / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.2.self_attn.k_proj" in ignored
    assert "model.layers.0.self_attn.o_proj.weight_packed" in after.tensors


@pytest.mark.parametrize("kind", ["qkv", "out", "gate_up", "down"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_scaling_an_input_keeps_the_layers_function(
    kind: str, kv_heads: int, tmp_path: Path
) -> None:
    import paddle
    from predict.loading.model import read_spec
    from predict.models import weight_names
    from predict.nn.rope import rope_table
    from predict.ops import plain as reference
    from quant.layer import LayerWeights, run_layer

    directory = write_model(tmp_path / "model", {"num_key_value_heads": kv_heads})
    spec, reader = read_spec(directory)
    plan = plan_weights(spec, weight_names(reader))
    source = CheckpointSource(Checkpoint(directory))
    layer = LayerWeights.read(1, plan, source)
    hidden = np.random.default_rng(0).normal(0, 1, (30, spec.hidden_size)).astype(np.float32)
    ropes = [paddle.to_tensor(rope_table(spec.ropes[0], spec.head_dim, 64, spec.max_position))]
    before = run_layer(reference, layer.records(None), hidden, (12, 18), ropes)
    columns = layer.linears[kind].weight.shape[1]
    scale = np.random.default_rng(1).uniform(0.3, 3.0, (columns,)).astype(np.float32)
    sharing = layer.sharing(kind)
    if sharing is not None:
        scale = scale[sharing]
    layer.scale_input(kind, scale)
    after = run_layer(reference, layer.records(None), hidden, (12, 18), ropes)
    assert np.allclose(after.output, before.output, atol=2e-4)
    assert np.allclose(after.inputs[kind], before.inputs[kind] / scale, rtol=1e-4, atol=1e-4)


def test_captured_keys_are_what_the_cache_holds(model: Path, text: Path, tmp_path: Path) -> None:
    quantized = quantize(
        *(model, text, tmp_path / "out", "--quant_type", "a8w8c8", "--do_ptq"),
        *("--cachekv_quant_method", "abs_max_headwise"),
    )
    scales = json.loads((quantized / "cachekv_scales.json").read_text())
    assert len(scales) == 2 * CHANGES["num_hidden_layers"]
    name = "llama.layers.0.self_attn.cachek_matmul.activation_quanter"
    heads = scales[name]
    assert len(heads) == tiny.CONFIG["num_attention_heads"]
    assert heads[0] == heads[1] != heads[2] == heads[3]  # two query heads read one key head

    # The engine's own cache, over the same sequences.
    engine = Model(EngineConfig(model_name_or_path=str(model), max_length=64, src_length=64))
    assert engine.llm.tokenizer is not None
    windows = read_sequences(text, engine.llm.tokenizer, 48, NUM_BATCHES * 2)
    largest = np.zeros(2)
    for window in windows:
        engine.logits(window)
        cache = engine.caches[0][0].numpy()
        by_token = cache.transpose(1, 0, 2, 3).reshape(2, -1, cache.shape[-1])[:, : len(window)]
        largest = np.maximum(largest, np.abs(by_token).max(axis=(1, 2)))
    assert heads[0] == pytest.approx(largest[0], rel=1e-4)
    assert heads[2] == pytest.approx(largest[1], rel=1e-4)


KILLED = """
import os, signal, sys
from quant import run_quantization, state
finish = state.RunState.finish_layer
def finish_and_die(self, layer):
    finish(self, layer)
    if layer == 1:
        os.kill(os.getpid(), signal.SIGKILL)
state.RunState.finish_layer = finish_and_die
sys.exit(run_quantization.main(sys.argv[1:]))
"""


def test_a_killed_run_goes_on_after_its_last_finished_layer(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--quant_type", "wint4", *GROUPS, "--do_gptq")
    whole = quantize(model, text, tmp_path / "whole", *flags)
    output = tmp_path / "out"
    words = words_of(model, text, output, *flags)
    command = [sys.executable, "-c", KILLED, *words]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert not (output / "config.json").exists()
    state = json.loads((output / "calibration" / "state.json").read_text())
    assert state["num_done"] == 2
    with pytest.raises(UserError, match=r"other inputs: gptq_percdamp was 0.1 and is 0.2"):
        quantize(model, text, output, *flags, "--gptq_percdamp", "0.2")
    assert main(words) == 0
    assert "going on after layer 2 of 3" in capsys.readouterr().err
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert main(words) == 2
    assert "holds a finished checkpoint" in capsys.readouterr().err
    assert main([*words, "--overwrite_output_dir"]) == 0


def test_a_signal_while_a_checkpoint_is_replaced_leaves_the_old_one_and_goes_on(
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = quantize(model, None, tmp_path / "out", "--quant_type", "wint8")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    flags = ("--quant_type", "wint4", *GROUPS, "--do_gptq")
    whole = quantize(model, text, tmp_path / "whole", *flags)
    words = words_of(model, text, output, *flags)
    finish = RunState.finish_layer

    def signalled(state: RunState, layer: int) -> None:
        finish(state, layer)
        if layer == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunState, "finish_layer", signalled)
    assert main([*words, "--overwrite_output_dir"]) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert "2 of 3 layers are kept in" in said
    assert "the same command without --overwrite_output_dir goes on after them" in said
    assert {name: (output / name).read_bytes() for name in before} == before
    assert main(words) == 0
    for path in whole.iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_another_checkpoint_or_text_is_no_continuation(
    model: Path, text: Path, tmp_path: Path
) -> None:
    from predict.loading.checkpoint import checkpoint_digest

    changed = write_model(tmp_path / "changed", {"rms_norm_eps": 1e-6})
    assert checkpoint_digest(changed) != checkpoint_digest(model)
    inputs = {"model": checkpoint_digest(model), "data": "x"}
    out = tmp_path / "out"
    RunState.open(out, inputs, 3, overwrite=False).save()
    RunState.open(out, inputs, 3, overwrite=False)
    for key in inputs:
        with pytest.raises(UserError, match=f"other inputs: {key} was"):
            RunState.open(out, {**inputs, key: "y"}, 3, overwrite=False)
    RunState.open(out, {**inputs, "data": "y"}, 3, overwrite=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "begin anew"),
        ("[]", "begin anew"),
        ('{"format": 2, "inputs": {}, "num_done": 0}', "not a state that this version wrote"),
        ('{"format": 1, "inputs": [], "num_done": 0}', "not a state that this version wrote"),
        ('{"format": 1, "inputs": {}, "num_done": 4}', "not a state that this version wrote"),
        ('{"format": 1, "inputs": {}, "num_done": -1}', "not a state that this version wrote"),
        ('{"format": 1, "inputs": {}, "num_done": true}', "not a state that this version wrote"),
        ('{"format": 1, "inputs": {}, "num_done": 1}', "layer 0 .* is damaged"),
        ("[" * 9999, "begin anew"),
        ("\x00" * 99, "begin anew"),
    ],
)
def test_a_damaged_state_is_refused_and_named(tmp_path: Path, content: str, said: str) -> None:
    RunState.open(tmp_path, {}, 3, overwrite=False)
    (tmp_path / "calibration" / "state.json").write_text(content)
    with pytest.raises(UserError, match=said):
        RunState.open(tmp_path, {}, 3, overwrite=False)


def test_files_of_others_stay_where_a_state_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "calibration"
    folder.mkdir()
    (folder / "my text.txt").write_text("mine")
    state = RunState.open(tmp_path, {}, 3, overwrite=True)
    state.save()
    (folder / "layer-00000.json").write_text("{}")
    state.remove()
    assert [path.name for path in folder.iterdir()] == ["my text.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["calibration"]


def test_a_state_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("calibration", ".calibration.removed"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="is no folder"):
            RunState.open(tmp_path, {}, 3, overwrite=True)
        (tmp_path / name).unlink()


def test_a_new_checkpoint_leaves_nothing_of_an_older_one(
    model: Path, text: Path, tmp_path: Path
) -> None:
    output = quantize(
        *(model, text, tmp_path / "out", "--quant_type", "a8w8c8", "--do_ptq", "--shift")
    )
    (output / "model.safetensors.index.json").write_text("{}")
    (output / "model-00002-of-00002.safetensors").write_text("")
    (output / "mine.txt").write_text("mine")
    whole = quantize(model, None, tmp_path / "whole", "--quant_type", "wint8")
    quantize(model, None, output, "--quant_type", "wint8", "--overwrite_output_dir")
    (output / "mine.txt").unlink()
    names = [sorted(path.name for path in folder.iterdir()) for folder in (output, whole)]
    assert names[0] == names[1]


def test_an_output_is_not_shared_and_not_among_its_inputs(
    model: Path, text: Path, tmp_path: Path
) -> None:
    flags = ("--quant_type", "wint8")
    with (
        locked("output_path", tmp_path / "out"),
        pytest.raises(UserError, match=f"being written by process {os.getpid()}"),
    ):
        quantize(model, None, tmp_path / "out", *flags)
    with pytest.raises(UserError, match="lies in the folder of --model_name_or_path"):
        quantize(model, None, model / "out", *flags)
    with pytest.raises(UserError, match="holds the --data_file"):
        quantize(model, text, text.parent, *flags, "--do_gptq")
    assert not (tmp_path / "out").exists()


def test_nan_in_calibration_names_the_linear(text: Path, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = np.nan
    save_file(tensors, directory / "model.safetensors")
    for flags in (("a8w8", "--do_ptq"), ("wint4", "--do_gptq"), ("a8w8", "--smooth")):
        with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj.*batch 1.*NaN"):
            quantize(directory, text, tmp_path / flags[0] / flags[1], "--quant_type", *flags)


def test_shards_are_joined_by_an_index(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quant import writer

    flags = ("--quant_type", "wint8")
    whole = quantize(model, text, tmp_path / "whole", *flags)
    monkeypatch.setattr(writer, "MAX_SHARD_BYTES", 100_000)
    sharded = quantize(model, text, tmp_path / "sharded", *flags)
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 1
    first, second = Checkpoint(whole), Checkpoint(sharded)
    assert first.tensors.keys() == second.tensors.keys()
    assert all(np.array_equal(first.read(name), second.read(name)) for name in first.tensors)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quant_type", "a8w9"], "a8w9"),
        (["--quant_type", "a8w8", "--do_gptq"], "--do_gptq rounds weight-only types"),
        (["--quant_type", "wint4", "--do_gptq", "--do_ptq"], "exclude each other"),
        (["--quant_type", "a8w8", "--do_awq"], "--do_awq"),
        (["--quant_type", "a8w8", "--shift"], "add --do_ptq"),
        (["--quant_type", "wint4", "--smooth"], "--shift and --smooth"),
        (["--quant_type", "wint4", "--group_size", "7"], "weightonly_group_size 7"),
        (["--quant_type", "wint4", "--group_size", "128"], "group size 128 does not divide"),
        (["--quant_type", "a8w8", "--weight_quant_method", "groupwise"], "weight-only types"),
        (["--quant_type", "a8w8", "--weight_quant_method", "abs_max"], "is for a8w8_fp8"),
        (["--quant_type", "a8w8", "--do_qat"], "--do_qat is not available"),
        (["--quant_type", "a8w8", "--fp8_type", "e5m2,e4m3"], "--fp8_type"),
        (
            ["--quant_type", "a8w8", "--ptq_step", "0"],
            "--ptq_step: 0 is not supported (allowed: a whole number from 1",
        ),
        (["--quant_type", "a8w8", "--act_quant_method", "min"], "allowed: avg"),
        (["--quant_type", "wint8", "--skip_list_names", "proj"], "leaves no linear"),
        (["--quanttype", "a8w8"], "did you mean --quant_type?"),
        (
            ["--quant_type", "a8w8", "--device", "xpu"],
            "--device xpu does not calibrate (allowed: cpu, gpu, gpu:N)",
        ),
        (["--quant_type", "a8w8", "--device", "gpu"], "--inference_model=false runs on the CPU"),
    ],
)
def test_wrong_flags_are_one_paragraph_before_any_work(
    words: list[str],
    said: str,
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    assert main(words_of(model, text, output, *words)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not output.exists()


def test_wrong_files_are_refused(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--quant_type", "wint4", "--do_gptq")
    quantized = quantize(model, None, tmp_path / "int8", "--quant_type", "wint8")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    (tmp_path / "no dataset").mkdir()
    for given_model, data, said in (
        (quantized, text, "is quantized already"),
        (model, None, "--do_gptq needs calibration data; give --data_file"),
        (model, tmp_path / "none.txt", "does not exist"),
        (model, empty, "is blank"),
        (model, tmp_path / "no dataset", "quant.json"),
        (TOKENIZER, text, "config.json does not exist"),
    ):
        assert main(words_of(given_model, data, tmp_path / "out", *flags)) == 2
        assert said in capsys.readouterr().err
    assert main(words_of(model, text, model, *flags)) == 2
    assert "is the folder of --model_name_or_path" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["internlm2_7b", "gpt2_small", "stablelm_3b", "baichuan_13b"])
def test_layers_that_calibration_does_not_know_are_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Matrices in another order, blocks of another form, ALiBi."""
    words = words_of(GOLDEN / case, None, tmp_path / "out", "--quant_type", "wint8")
    assert main(words) == 2
    assert "cannot be calibrated" in capsys.readouterr().err


def test_a_recipe_file_gives_flags_that_the_command_line_changes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    values = {
        "model_name_or_path": str(TOKENIZER),
        "dataset_name_or_path": "data",
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "quant_type": "A8W8",
        "do_ptq": True,
        "ptq_step": 16,
        "smooth": True,
        "smooth_all_linears": True,
        "smooth_piecewise_search": True,
        "smooth_k_piece": 3,
        "smooth_search_piece": True,
        "bf16": True,
        "fp16_opt_level": "O2",
        "unified_checkpoint": True,
        "skip_list_names": ["lm_head", "down_proj"],
    }
    recipe.write_text(json.dumps(values))
    config = QuantConfig.from_flags(parse_command_line([str(recipe), "--ptq_step", "8"]))
    assert (config.scheme, config.ptq_step, config.batch_size) == ("a8w8", 8, 4)
    assert all((config.smooth, config.smooth_all_linears, config.smooth_piecewise_search))
    assert config.skip_list_names == ("lm_head", "down_proj")
    assert config.output_path == Path("out")
    assert any("--bf16" in note for note in config.notes)


def test_lines_are_cut_and_texts_are_spread(tmp_path: Path) -> None:
    from predict.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(TOKENIZER, "none")
    lines = tmp_path / "quant.json"
    lines.write_text('{"src": "hello ", "tgt": "world"}\n{"src": "hello", "tgt": ""}\n')
    first, second = read_sequences(tmp_path, tokenizer, 100)
    assert tokenizer.decode(first.tolist()) == "hello world"
    assert len(read_sequences(lines, tokenizer, 2)[0]) == 2
    assert len(read_sequences(lines, tokenizer, 2, 1)) == 1
    assert tokenizer.decode(second.tolist()) == "hello"

    text = tmp_path / "text.txt"
    text.write_text("hello world you " * 50)
    windows = text_windows(text.read_text(), tokenizer, 10)
    joined = [token for window in windows for token in window if token != tokenizer.bos_token_id]
    assert joined == tokenizer.encode(text.read_text(), add_special_tokens=False)
    assert max(map(len, windows)) == 10
    spread = read_sequences(text, tokenizer, 10, 3)
    assert len(spread) == 3
    assert np.array_equal(spread[0], windows[0])
    assert np.array_equal(spread[-1], windows[-1])


@pytest.mark.parametrize("script", ["run_quantization.py", "evaluate.py"])
def test_help_answers_without_paddle(script: str, tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("raise SystemExit('paddle was imported')")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    done = run_python(ROOT / "quant" / script, "--help", env=environment)
    assert done.returncode == 0, done.stderr
    assert "--quant_type" in done.stdout


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "needs 48 bytes, and 47 follow"),
        (lambda data: data + b"x", "needs 48 bytes, and 49 follow"),
        (lambda data: data.replace(b"<f4", b"|O4"), "dtype .|O4., Python's objects"),
        (lambda data: data.replace(b"(3, 4)", b"(4, 3)"), "and this run wrote float32"),
        (lambda data: b"PK\x03\x04" + data[4:], "does not begin as one of version"),
        (lambda data: pickle.dumps([1]), "does not begin as one of version"),
        (lambda data: b"", "does not begin as one of version"),
    ],
)
def test_inputs_of_a_layer_are_only_read_as_this_program_wrote_them(
    tmp_path: Path, damage: Callable[[bytes], bytes], said: str
) -> None:
    state = RunState.open(tmp_path, {}, 3, overwrite=False)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    state.new_hidden(0, (3, 4))[:] = values
    np.testing.assert_array_equal(state.read_hidden(0, (3, 4)), values)
    path = state.hidden_path(0)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=said):
        state.read_hidden(0, (3, 4))


def test_a_checkpoint_as_paddle_saves_it_is_quantized_like_any_other(
    model: Path, text: Path, tmp_path: Path
) -> None:
    import paddle

    saved = Path(shutil.copytree(model, tmp_path / "saved"))
    held = Checkpoint(model)
    values = {
        name: held.read(name).T if is_turned(name) else held.read(name) for name in held.tensors
    }
    paddle.save({k: paddle.to_tensor(v) for k, v in values.items()}, str(saved / PARAMS))
    (saved / "model.safetensors").unlink()
    words = ("--quant_type", "weight_only_int8")
    first = quantize(model, text, tmp_path / "first", *words)
    second = quantize(saved, text, tmp_path / "second", *words)
    name = "model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()
    assert not (second / PARAMS).exists()
