"""LoRA adapters merged while the weights are read: PEFT's goldens, formulas, hostile folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.errors import UserError
from predict.loading.adapters import read_adapter
from tests.support import adapter_folders, tiny
from tests.support.adapter_folders import (
    ADAPTERS,
    ALPHA,
    DOWN,
    RANK,
    Array,
    Q,
    factors,
    floats,
    golden,
    merged_model,
    paddlenlp_tensors,
    peft_tensors,
    with_products,
    write_paddlenlp,
    write_peft,
)
from tests.support.golden import GOLDEN, config, greedy
from tests.support.schemes import SETTINGS, logits_of, on_this_cpu

MAX_LENGTH = 144  # GPT-2's goldens have no positions beyond
PICKLE = "lora_model_state.pdparams"
SCALING = ALPHA / RANK


@pytest.mark.parametrize("case", adapter_folders.CASES)
def test_merged_adapter_gives_the_text_of_peft(case: str, operators: dict[str, Any]) -> None:
    wanted = golden(case)
    llm = LLM(
        config(wanted["base"], lora_path=str(ADAPTERS / case), max_length=MAX_LENGTH, **operators)
    )
    assert greedy(llm, wanted["prompts"], len(wanted["greedy"][0])) == wanted["greedy"]


@pytest.mark.parametrize("case", ["gpt2", "tied_head"])
def test_exported_model_has_the_adapter(
    case: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    wanted = golden(case)
    settings = config(
        wanted["base"], lora_path=str(ADAPTERS / case), max_length=MAX_LENGTH, **operators
    )
    export_model(settings, tmp_path / "static")
    static = settings.changed(
        model_name_or_path=str(tmp_path / "static"), mode="static", lora_path=None
    )
    assert greedy(LLM(static), wanted["prompts"], len(wanted["greedy"][0])) == wanted["greedy"]


def check_same(model: Path, adapter: Path, changed: Mapping[str, Array], work: Path) -> None:
    """Asserts that the adapter makes of the model what these tensors make of it."""
    wanted = logits_of(merged_model(work / "merged", model, changed))
    got = logits_of(model, lora_path=str(adapter))
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)
    assert np.abs(wanted - logits_of(model)).max() > 1e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("name", [PICKLE, "peft_model.safetensors"])
def test_paddlenlp_folder_adds_a_b_times_scaling(
    tiny_model: Path, name: str, tmp_path: Path
) -> None:
    folder = write_paddlenlp(tmp_path / "lora", {name: paddlenlp_tensors(factors())})
    check_same(tiny_model, folder, with_products(factors(), SCALING), tmp_path)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rslora": True}, ALPHA / math.sqrt(RANK)),
        ({"lora_plus_scale": 16.0}, SCALING),
        ({"pissa": True}, 1.0),
        ({"rslora": True, "pissa": True}, 1.0),
        ({"use_quick_lora": True}, SCALING),
    ],
)
def test_paddlenlp_variants_have_their_own_scaling(
    tiny_model: Path, changes: dict[str, Any], scaling: float, tmp_path: Path
) -> None:
    tensors = paddlenlp_tensors(factors())
    folder = write_paddlenlp(tmp_path / "lora", {PICKLE: tensors}, changes)
    check_same(tiny_model, folder, with_products(factors(), scaling), tmp_path)


def test_paddlenlp_mixer_stands_between_the_factors(tiny_model: Path, tmp_path: Path) -> None:
    tensors, changed = paddlenlp_tensors(factors()), tiny.tensors(tiny.CONFIG)
    for name, theirs in (
        (Q, Q.replace("model.", "llama.")),
        (DOWN, DOWN.replace("model", "llama")),
    ):
        mixer = np.random.default_rng(3).standard_normal((RANK, RANK), np.float32)
        tensors[f"{theirs}.lora_AB"] = mixer
        a, b = tensors[f"{theirs}.lora_A"], tensors[f"{theirs}.lora_B"]
        changed[f"{name}.weight"] = changed[f"{name}.weight"] + SCALING * (a @ mixer @ b).T
    folder = write_paddlenlp(tmp_path / "lora", {PICKLE: tensors}, {"lora_use_mixer": True})
    check_same(tiny_model, folder, changed, tmp_path)


def test_paddlenlp_lora_ga_takes_away_what_training_began_with(
    tiny_model: Path, tmp_path: Path
) -> None:
    begun, ended = factors(), {n: (2 * a, b + 1) for n, (a, b) in factors().items()}
    both = {
        name: (
            np.concatenate([ended[name][0], begun[name][0]]),
            np.concatenate([ended[name][1], -begun[name][1]], axis=1),
        )
        for name in begun
    }
    folder = write_paddlenlp(tmp_path / "lora", {PICKLE: paddlenlp_tensors(both)}, {"loraga": True})
    check_same(tiny_model, folder, with_products(both, SCALING), tmp_path)


def parts(tensors: Mapping[str, Any], cut: Mapping[str, int], rank: int, of: int) -> dict[str, Any]:
    """What a tensor-parallel rank has: parts of some tensors, all of the others."""
    return {
        name: np.ascontiguousarray(np.split(values, of, axis=cut[name])[rank])
        if name in cut
        else values
        for name, values in tensors.items()
    }


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallel_parts_are_one_adapter(
    tiny_model: Path, degree: int, tmp_path: Path
) -> None:
    """Columns of q_proj's B, rows of down_proj's A; an odd vocabulary is in each part whole."""
    tensors = paddlenlp_tensors(factors())
    table = tiny.tensors(tiny.CONFIG, seed=5)
    changed = with_products(factors(), SCALING)
    changed["model.norm.weight"] = table["model.norm.weight"]
    changed["lm_head.weight"] = table["lm_head.weight"]
    tensors["llama.norm.weight"] = table["model.norm.weight"]
    tensors["lm_head.weight"] = np.ascontiguousarray(table["lm_head.weight"].T)
    q, down = Q.replace("model", "llama"), DOWN.replace("model", "llama")
    cut = {f"{q}.lora_B": 1, f"{down}.lora_A": 0}
    files = {
        f"lora_model_state.tp{rank:02d}.pdparams": parts(tensors, cut, rank, degree)
        for rank in range(degree)
    }
    changes = {"tensor_parallel_degree": degree}
    folder = write_paddlenlp(tmp_path / "lora", files, changes)
    check_same(tiny_model, folder, changed, tmp_path)


def test_pipeline_stages_are_one_adapter(tiny_model: Path, tmp_path: Path) -> None:
    tensors = paddlenlp_tensors(factors())
    stages = [{n: v for n, v in tensors.items() if f"layers.{layer}." in n} for layer in (0, 1)]
    files = {f"lora_model_state.pp{i:02d}.pdparams": stage for i, stage in enumerate(stages)}
    folder = write_paddlenlp(tmp_path / "lora", files)
    check_same(tiny_model, folder, with_products(factors(), SCALING), tmp_path)


def test_paddlenlp_trainable_modules_replace_tensors(tiny_model: Path, tmp_path: Path) -> None:
    other = tiny.tensors(tiny.CONFIG, seed=7)
    gate = "layers.1.mlp.gate_proj.weight"
    tensors = {
        "llama.embed_tokens.weight": other["model.embed_tokens.weight"],
        f"llama.{gate}": np.ascontiguousarray(other[f"model.{gate}"].T),
        **paddlenlp_tensors(factors()),
    }
    changes = {"trainable_modules": [".*embed_tokens.*"]}
    folder = write_paddlenlp(tmp_path / "lora", {PICKLE: tensors}, changes)
    changed = with_products(factors(), SCALING)
    for name in ("model.embed_tokens.weight", f"model.{gate}"):
        changed[name] = other[name]
    check_same(tiny_model, folder, changed, tmp_path)


def test_experts_linears_take_adapters(tmp_path: Path) -> None:
    base = GOLDEN / "mixtral_8x7b"
    weights = floats(base)
    name = next(n for n in weights if "experts.1.w2" in n).removesuffix(".weight")
    generator = np.random.default_rng(0)
    out, columns = weights[f"{name}.weight"].shape
    a = generator.standard_normal((RANK, columns), np.float32)
    b = generator.standard_normal((out, RANK), np.float32)
    folder = write_peft(tmp_path / "lora", peft_tensors({name: (a, b)}))
    merged = merged_model(
        tmp_path / "merged", base, {f"{name}.weight": weights[f"{name}.weight"] + SCALING * (b @ a)}
    )
    wanted = logits_of(merged)
    np.testing.assert_allclose(logits_of(base, lora_path=str(folder)), wanted, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in SETTINGS if on_this_cpu(name)])
def test_products_are_added_before_rounding(tiny_model: Path, name: str, tmp_path: Path) -> None:
    """Codes of the sum, whatever quantizes it; the model's own dtype has 8 bits here."""
    changes = {**SETTINGS[name], "inference_model": True}
    folder = write_peft(tmp_path / "lora", peft_tensors(factors()))
    merged = merged_model(tmp_path / "merged", tiny_model, with_products(factors(), SCALING))
    got = logits_of(tiny_model, lora_path=str(folder), **changes)
    np.testing.assert_array_equal(got, logits_of(merged, **changes))


def test_bfloat16_weights_are_not_rounded_between_sum_and_codes(tmp_path: Path) -> None:
    base = GOLDEN / "llama_mha"
    weights = floats(base)
    name = "model.layers.0.mlp.up_proj"
    out, columns = weights[f"{name}.weight"].shape
    generator = np.random.default_rng(1)
    a = 0.01 * generator.standard_normal((RANK, columns), np.float32)
    b = 0.01 * generator.standard_normal((out, RANK), np.float32)
    folder = write_peft(tmp_path / "lora", peft_tensors({name: (a, b)}))
    summed = {f"{name}.weight": weights[f"{name}.weight"] + (b * np.float32(SCALING)) @ a}
    merged = merged_model(tmp_path / "merged", base, summed)
    changes = {"quant_type": "weight_only_int8", "inference_model": True}
    got = logits_of(base, lora_path=str(folder), **changes)
    np.testing.assert_array_equal(got, logits_of(merged, **changes))


# ---- what is refused, and how


def load(adapter: Path, model: Path, **settings: Any) -> LLM:
    return LLM(EngineConfig(model_name_or_path=str(model), lora_path=str(adapter), **settings))


def _without(tensors: dict[str, Any], ending: str) -> dict[str, Any]:
    return {name: values for name, values in tensors.items() if not name.endswith(ending)}


def _renamed(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): values for name, values in tensors.items()}


def _changed(tensors: dict[str, Any], part: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    return {n: change(v) if part in n else v for n, v in tensors.items()}


def _holed(values: Any) -> Any:
    values = values.copy()
    values[0, 1] = np.nan
    return values


Q_A = "q_proj.lora_A"
HOSTILE_PEFT: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any], str]] = {
    "no B": (lambda t: _without(t, f"{Q}.lora_B.weight"), {}, f"{Q} has no lora_B"),
    "no A": (lambda t: _without(t, f"{Q}.lora_A.weight"), {}, f"{Q} has no lora_A"),
    "rank of the config": (dict, {"r": 5}, "says that the rank of .* is 5"),
    "ranks that differ": (
        lambda t: _changed(t, "q_proj.lora_B", lambda v: v[:, :3].copy()),
        {},
        "has rank 4, and B of .*q_proj has rank 3",
    ),
    "wrong columns": (
        lambda t: _changed(t, Q_A, lambda v: v[:, :-1].copy()),
        {},
        r"has the shape \[4, 63\], and .*q_proj of the model needs \[4, 64\]",
    ),
    "a vector": (lambda t: _changed(t, Q_A, lambda v: v[0].copy()), {}, "rank|matrix"),
    "empty": (lambda t: _changed(t, Q_A, lambda v: v[:, :0].copy()), {}, "is a matrix"),
    "unknown target": (lambda t: _renamed(t, "q_proj", "query"), {}, "which the model has not"),
    "no layer": (lambda t: _renamed(t, "layers.0", "layers.7"), {}, "which the model has not"),
    "other model": (
        lambda t: _renamed(t, "self_attn", "attention"),
        {"base_model_name_or_path": "some/model"},
        "trained on, 'some/model'",
    ),
    "NaN": (lambda t: _changed(t, Q_A, _holed), {}, "holds 1 values that are not finite"),
    "infinite sum": (
        lambda t: _changed(t, Q, lambda v: np.full_like(v, 1e30)),
        {},
        "with the adapter merged holds values that are not finite",
    ),
    "integers": (
        lambda t: _changed(t, Q_A, lambda v: v.astype(np.int32)),
        {},
        "has dtype I32; an adapter's tensors must be one of",
    ),
    "another method's tensor": (
        lambda t: {**t, f"base_model.model.{Q}.lora_C.weight": t[next(iter(t))]},
        {},
        "is no tensor of a LoRA adapter",
    ),
    "twice": (
        lambda t: {**t, f"{Q}.lora_A.default.weight": t[f"base_model.model.{Q}.lora_A.weight"]},
        {},
        "are two tensors of one linear",
    ),
    "saved module missing": (
        dict,
        {"modules_to_save": ["lm_head"]},
        "config.json: modules_to_save",
    ),
    "larger vocabulary": (
        lambda t: {**t, "base_model.model.lm_head.weight": np.zeros((201, 64), np.float32)},
        {},
        r"\[201, 64\], and lm_head.weight of the model needs \[199, 64\]",
    ),
    "table of a linear": (
        lambda t: {
            f"base_model.model.{Q}.lora_embedding_A": np.zeros((4, 64), np.float32),
            f"base_model.model.{Q}.lora_embedding_B": np.zeros((128, 4), np.float32),
        },
        {},
        "is of an embedding",
    ),
    "no rank": (dict, {"r": 0}, "r is 0; a rank is a whole number"),
    "a rank that is no number": (dict, {"r": "4"}, "r is '4'"),
    "alpha": (dict, {"lora_alpha": [1]}, r"lora_alpha is \[1\]"),
    "no rank of a linear": (
        lambda t: _changed(
            _changed(t, Q_A, lambda v: v[:0].copy()), "q_proj.lora_B", lambda v: v[:, :0].copy()
        ),
        {"rank_pattern": {"q_proj": 0}},
        "rank_pattern of 'q_proj' is 0; a rank is a whole number",
    ),
    "slow pattern": (
        dict,
        {"rank_pattern": {"(a+)+b": 2}},
        "adapter_config.json: .* may take too long",
    ),
    "DoRA without magnitudes": (dict, {"use_dora": True}, "adapter has no magnitudes"),
    "magnitudes without DoRA": (
        lambda t: {**t, f"base_model.model.{Q}.lora_magnitude_vector": np.ones(128, np.float32)},
        {},
        "use_dora is false, and the adapter has magnitudes",
    ),
    "biases that are not there": (dict, {"lora_bias": True}, "adapter has no bias"),
    "no pattern": (dict, {"alpha_pattern": {"q_(": 2}}, "is no regular expression"),
    "pattern of texts": (dict, {"rank_pattern": {"q_proj": "2"}}, "must be a number"),
    "another method": (dict, {"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    "VeRA": (dict, {"peft_type": "VERA"}, "peft_type is 'VERA'"),
    "PiSSA": (dict, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    "parameters": (dict, {"target_parameters": ["experts"]}, "target_parameters is set"),
    "tokens": (dict, {"trainable_token_indices": [1]}, "trainable_token_indices is set"),
}


@pytest.mark.parametrize("case", list(HOSTILE_PEFT))
def test_hostile_peft_folder_is_refused(case: str, tiny_model: Path, tmp_path: Path) -> None:
    change, config, message = HOSTILE_PEFT[case]
    folder = write_peft(tmp_path, change(peft_tensors(factors())), config)
    with pytest.raises(UserError, match=message):
        load(folder, tiny_model)


UNREAD = {"velora_config": {"rank": 1}, "lora_future_option": 0.5, "use_bdlora": {"nblocks": 2}}


@pytest.mark.parametrize("key", UNREAD)
def test_a_setting_of_adapters_that_nobody_knows_is_refused(
    key: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path / "peft", peft_tensors(factors()), {key: UNREAD[key]})
    with pytest.raises(UserError, match=rf"adapter_config.json: {key} is "):
        load(folder, tiny_model)
    files = {"lora_model_state.pdparams": paddlenlp_tensors(factors())}
    folder = write_paddlenlp(tmp_path / "paddlenlp", files, {key: UNREAD[key]})
    with pytest.raises(UserError, match=rf"lora_config.json: {key} is "):
        load(folder, tiny_model)


def test_settings_of_adapters_that_change_nothing_are_read_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    said = {
        "r": float(RANK),
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
        "fan_in_fan_out": True,
        "bias": "none",
        "lora_dropout": 0.1,
        "velora_config": None,
        "use_bdlora": False,
    }
    load(write_peft(tmp_path, peft_tensors(factors()), said), tiny_model)


HOSTILE_PADDLENLP: dict[
    str, tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any], str]
] = {
    "no B": (lambda t: _without(t, "q_proj.lora_B"), {}, "has no lora_B"),
    "no mixer": (dict, {"lora_use_mixer": True}, "has no lora_AB"),
    "a mixer too many": (
        lambda t: {**t, f"{Q.replace('model', 'llama')}.lora_AB": np.eye(4, dtype=np.float32)},
        {},
        "has a lora_AB, and lora_config.json has lora_use_mixer false",
    ),
    "rank of the config": (dict, {"r": 8}, "says that the rank is 8"),
    "LoRA-GA's rank": (dict, {"loraga": True}, "says that the rank is 8"),
    "a mixer of another rank": (
        lambda t: {
            **t,
            **{
                f"{name.replace('model', 'llama')}.lora_AB": np.ones((4, 5), np.float32)
                for name in (Q, DOWN)
            },
        },
        {"lora_use_mixer": True},
        r"lora_AB has the shape \[5, 4\], and the rank is 4",
    ),
    "scales of activations": (
        lambda t: {**t, f"{Q}.activation_quanter._scale": np.ones(1, np.float32)},
        {},
        "is no tensor of a LoRA adapter",
    ),
    "MoRA": (dict, {"use_mora": True}, "use_mora is set"),
    "quantized training": (dict, {"do_qat": True}, "do_qat is set"),
    "merged linears": (dict, {"enable_lora_list": [[True, False]]}, "enable_lora_list is set"),
    "a flag that is none": (dict, {"rslora": "yes"}, "rslora is 'yes'"),
}


@pytest.mark.parametrize("case", list(HOSTILE_PADDLENLP))
def test_hostile_paddlenlp_folder_is_refused(case: str, tiny_model: Path, tmp_path: Path) -> None:
    change, config, message = HOSTILE_PADDLENLP[case]
    folder = write_paddlenlp(tmp_path, {PICKLE: change(paddlenlp_tensors(factors()))}, config)
    with pytest.raises(UserError, match=message):
        load(folder, tiny_model)


def _tp(rank: int) -> str:
    return f"lora_model_state.tp{rank:02d}.pdparams"


def test_tensor_parallel_files_must_belong_together(tiny_model: Path, tmp_path: Path) -> None:
    tensors = paddlenlp_tensors(factors())
    q, down = Q.replace("model", "llama"), DOWN.replace("model", "llama")
    cut = {f"{q}.lora_B": 1, f"{down}.lora_A": 0}
    first, second = (parts(tensors, cut, rank, 2) for rank in range(2))
    other = {**second, f"{q}.lora_A": np.ones((64, 4), np.float32)}
    fewer = _without(tensors, "lora_B")
    for number, (files, message) in enumerate(
        [
            ({_tp(0): tensors, _tp(2): tensors}, "lacks .*tp01"),
            ({_tp(0): tensors, _tp(1): fewer}, "do not hold the same tensors"),
            ({_tp(0): first, _tp(1): other}, "hold different values of .*q_proj.lora_A"),
            ({_tp(0): tensors, PICKLE: tensors}, "keep the files of one kind"),
            (
                {
                    "lora_model_state.pp00.pdparams": tensors,
                    "lora_model_state.pp02.pdparams": tensors,
                },
                r"lacks lora_model_state\.pp01\.pdparams",
            ),
            ({"peft_model-00001-of-00002.safetensors": tensors}, "lacks peft_model-00002-of-00002"),
            ({}, r"found: none"),
        ]
    ):
        folder = write_paddlenlp(tmp_path / str(number), files)
        with pytest.raises(UserError, match=message):
            load(folder, tiny_model)


def test_folder_without_an_adapter_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--lora_path .*nowhere' was not found"):
        load(tmp_path / "nowhere", tiny_model)
    with pytest.raises(UserError, match="neither of adapter_config"):
        load(tiny_model, tiny_model)
    both = write_peft(tmp_path / "both", peft_tensors(factors()))
    write_paddlenlp(both, {PICKLE: paddlenlp_tensors(factors())})
    with pytest.raises(UserError, match="both of"):
        load(both, tiny_model)
    for name, message in (("vera_config.json", "VeRA"), ("prefix_config.json", "--prefix_path")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(UserError, match=message):
            load(folder, tiny_model)
    bare = write_peft(tmp_path / "bare", {})
    (bare / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is missing"):
        load(bare, tiny_model)
    with pytest.raises(UserError, match="hold no tensors"):
        load(write_peft(tmp_path / "empty", {}), tiny_model)


def test_adapter_of_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, peft_tensors(factors()))
    for case, method in (("gptq_sym", "gptq"), ("awq", "awq"), ("fp8_block", "fp8")):
        with pytest.raises(UserError, match=rf"quantized \({method}\).*merge it into the unquant"):
            load(folder, GOLDEN.parent / "golden_quantized" / case)


def test_adapter_needs_a_checkpoint_to_change(tiny_model: Path, tmp_path: Path) -> None:
    for settings, message in (
        ({"load_format": "dummy"}, "makes weights up"),
        ({"mode": "static"}, "export the model with --lora_path"),
    ):
        with pytest.raises(UserError, match=message):
            load(tmp_path, tiny_model, **settings)


def test_reading_an_adapter_reads_no_values(tmp_path: Path) -> None:
    """Only headers: the values behind them may all be NaN until somebody asks."""
    tensors = {name: np.full_like(v, np.nan) for name, v in peft_tensors(factors()).items()}
    adapter = read_adapter(write_peft(tmp_path, tensors))
    assert adapter.max_rank == RANK
    assert (adapter.linears[Q].b.shape, adapter.linears[Q].a.shape) == ((128, RANK), (RANK, 64))
    assert adapter.config.alpha == ALPHA
    with pytest.raises(UserError, match="not finite"):
        adapter.linears[Q].factors()
