"""Adapters as PaddleNLP saves them: lora_config.json, and pickles or safetensors of tensors.

lora_model_state.pdparams holds all, or each tensor-parallel rank has its own
lora_model_state.tp00.pdparams; peft_model*.safetensors are those of unified checkpoints. Names are
PaddleNLP's ("llama.layers.0.self_attn.q_proj.lora_A"); lora_A is [in, r], lora_B [r, out], a mixer
lora_AB [r, r]. What is added is lora_A @ lora_AB @ lora_B * scaling. LoRA-GA's factors have twice
the rank: what training began with stands beside what it ended with, negated in lora_B.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.loading.adapters.peft import number_of, rank_of
from predict.loading.adapters.record import Adapter, AdapterConfig, LowRank
from predict.loading.adapters.values import Values
from predict.loading.arrays import MAX_SHOWN, StoredArray, listed
from predict.loading.formats import sharded
from predict.loading.paddle_checkpoint import hugging_face_name, is_turned
from predict.loading.parallel_parts import check_degree, patterns, ranks_of
from predict.loading.pdparams import read_params
from predict.loading.safetensors_reader import read_header
from predict.nn.hf_config import ConfigReader
from predict.system.files import read_json_object
from predict.system.settings import refuse_unread, setting

CONFIG, STEM, SAFETENSORS = "lora_config.json", "lora_model_state", "peft_model"
SHARDS = sharded(
    "unified checkpoint",
    (f"{SAFETENSORS}.safetensors", f"{SAFETENSORS}-*.safetensors"),
    f"{SAFETENSORS}.safetensors.index.json",
    read_header,
)
FACTOR = re.compile(r"(.+)\.lora_(A|B|AB)")
FIELDS = {"A": "a", "B": "b", "AB": "mixer"}
HEAD = "lm_head"
OTHER_METHODS = {
    "use_mora": "is of MoRA, whose factor is square",
    "do_qat": "was trained with quantized activations",
}
READ = """
    r lora_alpha rslora pissa loraga lora_use_mixer base_model_name_or_path
    tensor_parallel_degree"""
UNREAD = """
    target_modules trainable_modules trainable_bias lora_dropout merge_weights enable_lora_list
    dtype head_dim lora_plus_scale use_quick_lora mp_degree"""
MERGE = "merge it with PaddleNLP's merge_lora_params.py and pass the merged model"


def read(directory: Path) -> Adapter:
    """The adapter of a folder. Raises UserError; no tensor is read but its shape."""
    path = directory / CONFIG
    raw = read_json_object(path)
    config = _config(raw, path)
    scaling = _scaling(raw, config)
    linears: dict[str, dict[str, Values]] = {}
    replaced: dict[str, Values] = {}
    for name, parts in _tensors(directory, raw).items():
        match = FACTOR.fullmatch(name)
        if match is None:
            if not name.endswith((".weight", ".bias")):
                raise UserError(
                    f"{parts[0].places[0][0]}: {name[:MAX_SHOWN]} is no tensor of a LoRA adapter "
                    "(known: lora_A, lora_B, lora_AB, and tensors of the model's, .weight or "
                    f".bias); {MERGE}"
                )
            ours = model_name(name)
            replaced[ours] = Values(name, parts, turned=is_turned(ours))
            continue
        # The mixer, too, is multiplied from the other side where the matrices are [out, in].
        values = Values(name, parts, turned=True)
        linear = model_name(f"{match[1]}.weight").removesuffix(".weight")
        linears.setdefault(linear, {})[FIELDS[match[2]]] = values
    return Adapter(
        directory,
        config,
        {name: _linear(name, found, raw, config, scaling) for name, found in linears.items()},
        replaced,
    )


def model_name(name: str) -> str:
    """Hugging Face's name of the tensor that PaddleNLP calls `name`; "model." begins it."""
    family, _, rest = name.partition(".")
    return name if family == HEAD or not rest else hugging_face_name(name, f"{family}.", "model.")


def _config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    where = str(path)
    for key, what in OTHER_METHODS.items():
        if setting(raw, key, False, where, bool):
            raise UserError(
                f"{where}: {key} is set: the adapter {what}, which is not supported; {MERGE}"
            )
    refuse_unread(raw, READ, UNREAD, where, f"{MERGE}, train it again")
    enabled = setting(raw, "enable_lora_list", None, where, list)
    if enabled is not None and any(each is not None for each in enabled):
        raise UserError(
            f"{where}: enable_lora_list is set: parts of fused matrices have factors of their own, "
            f"as PaddleNLP 2.5 has them, which is not supported; {MERGE}"
        )
    return AdapterConfig(
        format="PaddleNLP",
        r=rank_of(raw, "r", 8, where),
        alpha=number_of(raw, "lora_alpha", 8, where),
        use_rslora=setting(raw, "rslora", False, where, bool),
        base_model=setting(raw, "base_model_name_or_path", None, where, str),
        ties_embeddings=True,
    )


def _scaling(raw: Mapping[str, Any], config: AdapterConfig) -> float:
    if setting(raw, "pissa", False, CONFIG, bool):
        return 1.0
    return config.alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _linear(
    name: str,
    found: Mapping[str, Values],
    raw: Mapping[str, Any],
    config: AdapterConfig,
    scaling: float,
) -> LowRank:
    uses_mixer = setting(raw, "lora_use_mixer", False, CONFIG, bool)
    wanted = ("a", "b", "mixer") if uses_mixer else ("a", "b")
    names = {ours: f"lora_{theirs}" for theirs, ours in FIELDS.items()}
    missing = [names[key] for key in wanted if key not in found]
    if missing or len(found) > len(wanted):
        what = f"no {' and no '.join(missing)}" if missing else f"a {names['mixer']}"
        raise UserError(
            f"{next(iter(found.values())).where}: its linear has {what}, and {CONFIG} has "
            f"lora_use_mixer {str(uses_mixer).lower()}; the two do not belong together: save the "
            "adapter again"
        )
    rank = config.r * (2 if setting(raw, "loraga", False, CONFIG, bool) else 1)
    if found["a"].shape[:1] != (rank,):
        raise UserError(
            f"{found['a'].where} has the shape {list(found['a'].shape[::-1])}, and {CONFIG} says "
            f"that the rank is {rank}; the two do not belong together"
        )
    return LowRank(name, found["a"], found["b"], scaling, found.get("mixer"))


def _tensors(directory: Path, raw: Mapping[str, Any]) -> dict[str, tuple[StoredArray, ...]]:
    """The folder's tensors, those of tensor-parallel ranks side by side."""
    one = directory / f"{STEM}.pdparams"
    ranks = sorted({path for pattern in patterns(STEM) for path in directory.glob(pattern)})
    kinds = [SHARDS.is_in(directory), one.exists(), bool(ranks)]
    if sum(kinds) != 1:
        stored = sorted(path for pattern in SHARDS.files for path in directory.glob(pattern))
        found = listed([path.name for path in (*stored, one, *ranks) if path.exists()]) or "none"
        raise UserError(
            f"{directory} needs {STEM}.pdparams, or one such file of each tensor-parallel rank, or "
            f"{SAFETENSORS}.safetensors (found: {found}); keep the files of one kind"
        )
    if ranks:
        parts = ranks_of(directory, STEM)
        check_degree(ConfigReader(raw, directory / CONFIG), len(parts))
        return {name: tuple(rank[name] for rank in parts) for name in parts[0]}
    tensors = read_params(one) if one.exists() else SHARDS.open(directory)
    return {name: (array,) for name, array in tensors.items()}
