"""Adapters on bases whose linears are others: fused, in turns, split over ranks, put together.

What they must give is written here by PaddleNLP's own formula in the layout of its files: weight
[in, out] plus lora_A @ lora_B times the scaling. The file that this makes is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.adapters import Adapter, Base, fitted, read_adapter
from predict.loading.checkpoint import Checkpoint
from predict.merge_lora_params import main as merge
from predict.models import family_of, weight_names, with_family
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import plan_weights
from predict.request import SamplingParams
from tests.support import tiny
from tests.support.adapter_folders import (
    ALPHA,
    RANK,
    Array,
    peft_tensors,
    write_paddlenlp,
    write_peft,
)
from tests.support.golden import GOLDEN, config
from tests.support.paddle_families import older, tensors_of, write_config
from tests.support.paddle_parts import ACTIONS, action_of, in_paddles_layout, whole
from tests.support.schemes import logits_of
from tests.support.stored_formats import Tensors, as_paddle, paddle_file

SCALING = ALPHA / RANK
PICKLE = "lora_model_state.pdparams"
Factors = dict[str, tuple[Array, Array]]  # A [in, r] and B [r, out] by the linear's name
LINEARS = (
    "(q|k|v|o|gate|up|down|qkv|gate_up_fused|out|c|q_b|kv_b)_proj|c_attn|linear[12]|w[123]|query"
    "|key|value|query_key_value|dense|dense_h_to_4h|dense_4h_to_h"
)
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 20, 30]


def factors_of(tensors: Tensors, chosen: str = LINEARS) -> Factors:
    """Random factors of the layers' linears whose names end so; tensors: PaddleNLP's."""
    generator = np.random.default_rng(0)
    made: Factors = {}
    for name, values in tensors.items():
        if re.fullmatch(rf".*(layers|h)\.\d+\..*\.({chosen})\.weight", name):
            a = generator.standard_normal((values.shape[0], RANK), np.float32)
            b = generator.standard_normal((RANK, values.shape[1]), np.float32)
            made[name.removesuffix(".weight")] = 0.5 * a / np.sqrt(np.float32(len(a))), 0.5 * b
    assert made
    return made


def named(factors: Factors) -> dict[str, Any]:
    """The factors as an adapter's file has them."""
    return {
        f"{name}.lora_{'AB'[index]}": np.ascontiguousarray(values)
        for name, pair in factors.items()
        for index, values in enumerate(pair)
    }


def with_products(tensors: Tensors, factors: Factors) -> Tensors:
    """PaddleNLP's tensors with the adapter merged as it merges them."""
    made = dict(tensors)
    for name, (a, b) in factors.items():
        made[f"{name}.weight"] = made[f"{name}.weight"] + SCALING * (a @ b)
    return made


def floats_of(case: str) -> Tensors:
    """A golden checkpoint as PaddleNLP has it, in float32."""
    return {name: to_float32(values) for name, (_, values) in tensors_of(case).items()}


class Model:
    """Writes a model of PaddleNLP's, and reads of it what adapters must do."""

    def __init__(self, tensors: Tensors, write: Callable[[Path], None]):
        """write: config.json and all but the weights, into a folder."""
        self.tensors, self._write = tensors, write

    def write(self, folder: Path, factors: Factors | None = None) -> Path:
        """The model's folder, with an adapter merged by hand."""
        folder.mkdir()
        self._write(folder)
        tensors = with_products(self.tensors, factors or {})
        (folder / "model_state.pdparams").write_bytes(paddle_file(tensors))
        return folder


def golden_model(case: str, change: Callable[[Tensors], Tensors] = dict) -> Model:
    return Model(change(floats_of(case)), lambda folder: write_config(folder, case))


def tiny_model(fused: bool) -> Model:
    def write(folder: Path) -> None:
        tiny.write(folder)
        (folder / "model.safetensors").unlink()

    return Model(as_paddle(tiny.tensors(tiny.CONFIG), fused), write)


MODELS: dict[str, Callable[[], Model]] = {
    "fused": lambda: tiny_model(True),
    "chatglm2": lambda: golden_model("chatglm_2_6b"),
    "older chatglm2": lambda: golden_model("chatglm_2_6b", older),
    "baichuan": lambda: golden_model("baichuan_7b"),
}
# All linears at once, and some of those that are one matrix elsewhere.
CHOICES = {
    "fused": (LINEARS, "qkv_proj", "gate_up_fused_proj"),
    "chatglm2": (LINEARS, "dense_h_to_4h"),
    "older chatglm2": (LINEARS, "query|value", "key", "dense_h_to_4h"),
    "baichuan": (LINEARS, "q_proj|v_proj"),
}
EVERY = [(name, chosen) for name, all_chosen in CHOICES.items() for chosen in all_chosen]


def check_text(base: Path, adapter: Path, merged: Path, **settings: Any) -> None:
    """Asserts that the adapter, merged and beside the model, does what was merged by hand."""
    wanted = logits_of(merged)
    np.testing.assert_allclose(
        logits_of(base, lora_path=str(adapter)), wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0
    )
    assert np.abs(wanted - logits_of(base)).max() > 1e-2 * np.abs(wanted).max()
    (answer,) = LLM(config(merged, max_length=64)).generate([PROMPT], PARAMS)
    served = LLM(
        config(base, max_length=64, lora_modules=(f"a={adapter}",), max_lora_rank=64, **settings)
    )
    (ours,) = served.generate([PROMPT], replace(PARAMS, adapter="a"))
    assert ours.token_ids == answer.token_ids
    assert served.generate([PROMPT], PARAMS)[0].token_ids != answer.token_ids


@pytest.mark.parametrize(("name", "chosen"), EVERY)
def test_an_adapter_changes_the_model_that_it_was_trained_on(
    name: str, chosen: str, tmp_path: Path
) -> None:
    model = MODELS[name]()
    factors = factors_of(model.tensors, chosen)
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: named(factors)})
    check_text(model.write(tmp_path / "base"), adapter, model.write(tmp_path / "merged", factors))


@pytest.mark.parametrize("name", ["fused", "older chatglm2"])
def test_merged_files_have_the_same_text(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    factors = factors_of(model.tensors)
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: named(factors)})
    words = ["--model_name_or_path", str(model.write(tmp_path / "base"))]
    words += ["--lora_path", str(adapter), "--output_path", str(tmp_path / "out")]
    assert merge([*words, "--progress", "false"]) == 0
    wanted = logits_of(model.write(tmp_path / "merged", factors))
    np.testing.assert_allclose(logits_of(tmp_path / "out"), wanted, atol=1e-4, rtol=0)


# The same model as another library has it: Hugging Face's files.
CROSSED = {"fused": None, "chatglm2": "chatglm_2_6b", "older chatglm2": "chatglm_2_6b"}
CROSSED |= {"baichuan": "baichuan_7b"}


@pytest.mark.parametrize("name", CROSSED)
def test_paddlenlps_adapter_runs_on_hugging_faces_files(name: str, tmp_path: Path) -> None:
    model, case = MODELS[name](), CROSSED[name]
    factors = factors_of(model.tensors)
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: named(factors)})
    base = tiny.write(tmp_path / "base") if case is None else GOLDEN / case
    check_text(Path(base), adapter, model.write(tmp_path / "merged", factors), dtype="float32")


def test_pefts_adapter_of_baichuan_runs_on_paddlenlps_files(tmp_path: Path) -> None:
    """W_pack is queries, keys and values there."""
    model = MODELS["baichuan"]()
    base, generator = model.write(tmp_path / "base"), np.random.default_rng(1)
    pairs, merged = {}, dict(model.tensors)
    for layer in range(2):
        a = 0.1 * generator.standard_normal((RANK, 32), np.float32)
        b = generator.standard_normal((96, RANK), np.float32)
        pairs[f"model.layers.{layer}.self_attn.W_pack"] = a, b
        for part, kind in enumerate("qkv"):
            rows = SCALING * b[32 * part : 32 * (part + 1)]
            merged[f"llama.layers.{layer}.self_attn.{kind}_proj.weight"] = (
                merged[f"llama.layers.{layer}.self_attn.{kind}_proj.weight"] + (rows @ a).T
            )
    adapter = write_peft(tmp_path / "a", peft_tensors(pairs))
    by_hand = Model(merged, lambda folder: write_config(folder, "baichuan_7b"))
    check_text(base, adapter, by_hand.write(tmp_path / "merged"))


def test_a_mixer_of_each_stays_with_its_own(tmp_path: Path) -> None:
    model = MODELS["older chatglm2"]()
    factors = factors_of(model.tensors, "query|key|value")
    tensors, mixed, generator = named(factors), {}, np.random.default_rng(2)
    for name, (a, b) in factors.items():
        tensors[f"{name}.lora_AB"] = generator.standard_normal((RANK, RANK), np.float32)
        mixed[name] = a @ tensors[f"{name}.lora_AB"], b
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: tensors}, {"lora_use_mixer": True})
    check_text(model.write(tmp_path / "base"), adapter, model.write(tmp_path / "merged", mixed))


def on(base: Path, folder: Path) -> Adapter:
    reader = with_family(ConfigReader.from_dir(base), None)
    checkpoint = Checkpoint(base)
    names = weight_names(reader).found_in(checkpoint.tensors)
    plan = plan_weights(family_of(reader).spec(reader), names)
    made = Base.of(plan, names, checkpoint.shapes, reader, checkpoint.takes_turns)
    return fitted(read_adapter(folder), made)


def in_parts(factors: Factors, cut: Callable[[str], Any], num_ranks: int) -> Mapping[str, Any]:
    """Files of ranks: linears split by outputs have parts of B, those by inputs parts of A."""
    files: dict[str, dict[str, Any]] = {}
    for rank in range(num_ranks):
        parts: Factors = {}
        for name, (a, b) in factors.items():
            action = cut(f"{name}.weight")
            if action is whole:
                parts[name] = a, b
                continue
            probe = action(a @ b, rank, num_ranks).shape
            is_column = probe[0] == len(a)
            parts[name] = (
                (a, action(b, rank, num_ranks)) if is_column else (action(a, rank, num_ranks), b)
            )
        files[f"lora_model_state.tp{rank:02d}.pdparams"] = named(parts)
    return files


@pytest.mark.parametrize("family", ACTIONS)
def test_parts_of_ranks_are_one_adapter(family: str, tmp_path: Path) -> None:
    """Each rank's are those of the base's rows that it has, in fused linears part by part."""
    factors = factors_of(in_paddles_layout(family))
    base = GOLDEN / family
    if family == "opt_350m":
        base = tmp_path / "base"
        base.mkdir()
        values = json.loads((GOLDEN / family / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(values | {"num_attention_heads": 4}))
        for path in (GOLDEN / family).glob("*.safetensors"):
            (base / path.name).write_bytes(path.read_bytes())
    files = in_parts(factors, lambda name: action_of(family, name), 2)
    parts = on(base, write_paddlenlp(tmp_path / "p", files, {"tensor_parallel_degree": 2}))
    one = on(base, write_paddlenlp(tmp_path / "a", {PICKLE: named(factors)}))
    assert parts.linears.keys() == one.linears.keys()
    for name, linear in one.linears.items():
        for ours, wanted in zip(parts.linears[name].factors(), linear.factors(), strict=True):
            np.testing.assert_array_equal(ours, wanted, err_msg=name)


def test_parts_of_gate_and_up_in_one_are_joined_part_by_part(tmp_path: Path) -> None:
    model = MODELS["fused"]()
    factors = factors_of(model.tensors, "gate_up_fused_proj")

    def cut(values: Array, rank: int, num_ranks: int) -> Array:
        gate, up = np.split(values, 2, axis=-1)
        return np.concatenate([np.split(each, num_ranks, -1)[rank] for each in (gate, up)], -1)

    adapter = write_paddlenlp(tmp_path / "a", in_parts(factors, lambda _: cut, 2))
    check_text(model.write(tmp_path / "base"), adapter, model.write(tmp_path / "m", factors))


def test_a_rank_that_the_config_tells_of_is_missed(tmp_path: Path) -> None:
    factors = factors_of(as_paddle(tiny.tensors(tiny.CONFIG)), "q_proj")
    files = {"lora_model_state.tp00.pdparams": named(factors)}
    folder = write_paddlenlp(tmp_path / "a", files, {"tensor_parallel_degree": 2})
    with pytest.raises(UserError, match="tensor_parallel_degree is 2, and there are parts of 1"):
        read_adapter(folder)


def test_parts_of_the_older_chatglm2_are_refused(tmp_path: Path) -> None:
    model = MODELS["older chatglm2"]()
    base = model.write(tmp_path / "base")
    for chosen in ("query", "dense_h_to_4h"):
        factors = factors_of(model.tensors, chosen)
        files = in_parts(factors, lambda _: whole, 2)
        with pytest.raises(UserError, match="are not merged here"):
            on(base, write_paddlenlp(tmp_path / chosen, files))


def test_hugging_faces_files_do_not_tell_which_chatglm2_an_adapter_is_of(tmp_path: Path) -> None:
    for name in ("chatglm2", "older chatglm2"):
        factors = factors_of(MODELS[name]().tensors, "dense_h_to_4h")
        adapter = write_paddlenlp(tmp_path / name, {PICKLE: named(factors)})
        with pytest.raises(UserError, match="may be of either version of ChatGLM2"):
            on(GOLDEN / "chatglm_2_6b", adapter)


def test_which_chatglm2_an_adapter_is_of_must_be_known(tmp_path: Path) -> None:
    """A program has no checkpoint beside it whose rows would tell."""
    model = MODELS["chatglm2"]()
    settings = config(model.write(tmp_path / "base"), max_length=64)
    export_model(settings, tmp_path / "static", enable_lora=True)
    static = config(tmp_path / "static", max_length=64, mode="static", max_lora_rank=64)
    for chosen in ("dense_h_to_4h", LINEARS):
        factors = factors_of(model.tensors, chosen)
        adapter = write_paddlenlp(tmp_path / chosen[:5], {PICKLE: named(factors)})
        served = static.changed(lora_modules=(f"a={adapter}",))
        if chosen is not LINEARS:
            with pytest.raises(UserError, match="may be of either version of ChatGLM2"):
                LLM(served)
            continue
        (ours,) = LLM(served).generate([PROMPT], replace(PARAMS, adapter="a"))
        merged = LLM(config(model.write(tmp_path / "merged", factors), max_length=64))
        assert ours.token_ids == merged.generate([PROMPT], PARAMS)[0].token_ids


def twice(also: str) -> Callable[[Tensors], Factors]:
    """Queries, keys and values in one, and one of them again."""
    plain = as_paddle(tiny.tensors(tiny.CONFIG))
    return lambda tensors: factors_of(tensors, "qkv_proj") | factors_of(plain, also)


def narrow(tensors: Tensors) -> Factors:
    found = factors_of(tensors, "qkv_proj")
    return {name: (a, b[:, :-1].copy()) for name, (a, b) in found.items()}


def long_keys(tensors: Tensors) -> Factors:
    found = factors_of(tensors, "key")
    return {name: (a, np.concatenate([b, b], axis=1)) for name, (a, b) in found.items()}


def wide_keys(tensors: Tensors) -> Factors:
    found = factors_of(tensors, "query|key|value")
    return {
        name: (np.concatenate([a, a]) if name.endswith("key") else a, b)
        for name, (a, b) in found.items()
    }


@pytest.mark.parametrize(
    ("name", "made", "said"),
    [
        ("fused", twice("q_proj"), "two tensors of the adapter change .*q_proj"),
        ("fused", twice("v_proj"), "two tensors of the adapter change .*v_proj"),
        ("fused", narrow, "255 outputs, which are not those of 4 query heads"),
        ("older chatglm2", long_keys, r"\[32, 4\], and 16 rows of .*query_key_value.* its own"),
        ("older chatglm2", wide_keys, r"key.lora_A has the shape \[4, 64\].* 32 columns"),
    ],
)
def test_products_that_do_not_fit_into_one_are_refused(
    name: str, made: Callable[[Tensors], Factors], said: str, tmp_path: Path
) -> None:
    model = MODELS[name]()
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: named(made(model.tensors))})
    with pytest.raises(UserError, match=said):
        on(model.write(tmp_path / "base"), adapter)


def test_mixers_that_only_together_have_the_rank_are_refused(tmp_path: Path) -> None:
    model = MODELS["older chatglm2"]()
    factors = factors_of(model.tensors, "query|key")
    tensors = named(factors)
    for name in factors:
        columns = RANK + (1 if name.endswith("query") else -1)
        tensors[f"{name}.lora_AB"] = np.ones((columns, 2 * RANK - columns), np.float32)
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: tensors}, {"lora_use_mixer": True})
    with pytest.raises(UserError, match=r"lora_AB has the shape .* and the rank is 4"):
        on(model.write(tmp_path / "base"), adapter)


def test_an_empty_matrix_that_claims_rows_takes_no_memory(tmp_path: Path) -> None:
    empty = np.empty((0, 2**38), np.float32)
    for model, name in (
        ("fused", "llama.layers.0.self_attn.qkv_proj.weight"),
        ("older chatglm2", "chatglm_v2.encoder.layers.0.mlp.dense_h_to_4h.weight"),
    ):
        folder = write_paddlenlp(tmp_path / model, {"peft_model.safetensors": {name: empty}})
        base = MODELS[model]().write(tmp_path / f"{model} base")
        with pytest.raises(UserError, match=r"has not|has the shape"):
            on(base, folder)


def test_pefts_qkv_proj_has_no_heads_to_cut_by(tmp_path: Path) -> None:
    """Phi-3's is queries, then keys, then values, where PaddleNLP's lie head by head."""
    a, b = np.ones((RANK, 64), np.float32), np.ones((256, RANK), np.float32)
    pairs = {"model.layers.0.self_attn.qkv_proj": (a, b)}
    with pytest.raises(UserError, match=r"qkv_proj.weight, which the model has not"):
        on(Path(tiny.write(tmp_path / "base")), write_peft(tmp_path / "a", peft_tensors(pairs)))


@pytest.mark.parametrize("chosen", ["qkv_gate_up_proj", "down_proj"])
def test_linears_of_ernie_that_lie_elsewhere_are_refused(chosen: str, tmp_path: Path) -> None:
    base = GOLDEN / "ernie_3_5_se"
    tensors = {name: array.read() for name, array in Checkpoint(base).stored.items()}
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: named(factors_of(tensors, chosen))})
    with pytest.raises(UserError, match=rf"{chosen}.weight, which the model has not"):
        on(base, adapter)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("older chatglm2", "chatglm_v2.encoder.layers.1.mlp.dense_h_to_4h.weight"),
        ("fused", "llama.layers.1.self_attn.qkv_proj.weight"),
    ],
)
def test_a_matrix_of_several_linears_may_be_replaced_whole(
    kind: str, name: str, tmp_path: Path
) -> None:
    """trainable_modules: the tensor of the file, in place of the model's; rows may take turns."""
    model = MODELS[kind]()
    other = 0.1 * np.random.default_rng(3).standard_normal(model.tensors[name].shape, np.float32)
    factors = factors_of(model.tensors, "gate_up_fused_proj|dense")
    adapter = write_paddlenlp(tmp_path / "a", {PICKLE: {**named(factors), name: other}})
    by_hand = Model({**model.tensors, name: other}, model._write)
    wanted = logits_of(by_hand.write(tmp_path / "merged", factors))
    found = logits_of(model.write(tmp_path / "base"), lora_path=str(adapter))
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)
