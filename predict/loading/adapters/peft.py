"""Adapters as Hugging Face's PEFT saves them.

adapter_config.json stands beside adapter_model.safetensors, or adapter_model.bin. Names begin with
"base_model.model."; lora_A is [r, in], lora_B [out, r], lora_embedding_A [r, num], lora_embedding_B
[width, r]. What is not of LoRA is a tensor of the model's, whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.loading.adapters.record import Adapter, AdapterConfig, LowRank
from predict.loading.adapters.values import Values
from predict.loading.arrays import MAX_SHOWN, StoredArray, listed
from predict.loading.safetensors_reader import read_header
from predict.loading.torch_file import read_torch
from predict.system.files import read_json_object
from predict.system.settings import pattern, refuse_unread, setting, texts

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READERS: dict[str, Callable[[Path], Mapping[str, StoredArray]]] = {
    WEIGHTS: read_header,
    "adapter_model.bin": read_torch,  # what PEFT wrote at first
}
BASE = "base_model.model."
# "default" is the name that an adapter has in memory; some tools save it.
FACTOR = re.compile(
    r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.default)?(?:\.(weight|bias))?"
)
KINDS = {
    ("A", "weight"): "a",
    ("B", "weight"): "b",
    ("embedding_A", None): "a",
    ("embedding_B", None): "b",
    ("B", "bias"): "bias",
    ("magnitude_vector", None): "magnitude",
    ("magnitude_vector", "weight"): "magnitude",
}
READ = """
    peft_type r lora_alpha use_rslora rank_pattern alpha_pattern modules_to_save use_dora lora_bias
    init_lora_weights base_model_name_or_path ensure_weight_tying"""
# Which linears were trained, and where biases were, the tensors say.
UNREAD = """
    task_type inference_mode target_modules exclude_modules layers_to_transform layers_pattern bias
    fan_in_fan_out lora_dropout revision auto_mapping peft_version megatron_config megatron_core
    loftq_config eva_config corda_config lora_ga_config runtime_config qalora_group_size
    base_model_class unsloth_version save_embedding_layers"""
# Of the base's weights, PEFT takes the beginning of these away before it adds the adapter.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Settings that make the adapter more than low-rank products of linears and tables.
OTHER_METHODS = {
    "target_parameters": "adapts parameters that are no linears",
    "layer_replication": "repeats layers",
    "trainable_token_indices": "has single rows of the embedding",
    "alora_invocation_tokens": "is switched on by tokens of the prompt",
    "use_qalora": "is of QALoRA",
    "use_bdlora": "has block-diagonal factors",
    "arrow_config": "routes between adapters",
    "kasa_config": "is of KaSA",
    "monteclora_config": "is of MonteCLoRA",
}
MAX_RANK, MAX_ALPHA = 1 << 16, 1e9


@dataclass
class FoundLinear:
    """Tensors of one linear, by LowRank's fields."""

    tensors: dict[str, Values] = field(default_factory=dict)
    is_table: bool = False


def read(directory: Path) -> Adapter:
    """The adapter of a folder. Raises UserError; no tensor is read but its shape."""
    path = directory / CONFIG
    raw = read_json_object(path)
    config = _config(raw, path)
    weights = next((directory / name for name in READERS if (directory / name).exists()), None)
    if weights is None:
        raise UserError(
            f"{directory / WEIGHTS} is missing, and {CONFIG} stands there; complete the copy"
        )
    linears: dict[str, FoundLinear] = {}
    replaced: dict[str, Values] = {}
    for name, array in READERS[weights.name](weights).items():
        _sort(name, array, linears, replaced)
    _check_saved(raw, replaced, path)
    _check_parts(raw, linears, path)
    ranks = Patterns(raw, path)
    return Adapter(
        directory,
        config,
        {name: _linear(name, found, config, ranks, weights) for name, found in linears.items()},
        replaced,
    )


def _config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    where, kind = str(path), raw.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"{where}: peft_type is {repr(kind)[:MAX_SHOWN]} (allowed: LORA, DoRA and rsLoRA "
            "included); merge the adapter with PEFT's merge_and_unload() and pass the merged model"
        )
    for key, what in OTHER_METHODS.items():
        if raw.get(key):
            raise UserError(
                f"{where}: {key} is set: the adapter {what}, which is not supported; merge it with "
                "PEFT's merge_and_unload() and pass the merged model"
            )
    do = (
        "merge the adapter with PEFT's merge_and_unload() and pass the merged model, train it again"
    )
    refuse_unread(raw, READ, UNREAD, where, do)
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise UserError(
            f"{where}: init_lora_weights is {start[:MAX_SHOWN]!r}: the adapter fits weights that "
            "PEFT makes from the base's at every start; save it as a plain one, with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return AdapterConfig(
        format="PEFT",
        r=rank_of(raw, "r", 8, where),
        alpha=number_of(raw, "lora_alpha", 8, where),
        use_rslora=setting(raw, "use_rslora", False, where, bool),
        base_model=setting(raw, "base_model_name_or_path", None, where, str),
        ties_embeddings=setting(raw, "ensure_weight_tying", False, where, bool),
    )


def rank_of(config: Mapping[str, Any], key: str, default: int | None, where: str) -> int:
    """A rank out of a config file. Raises UserError."""
    rank = setting(config, key, default, where, int)
    if rank is None or not 1 <= rank <= MAX_RANK:
        raise UserError(f"{where}: {key} is {rank}; a rank is a whole number, 1 to {MAX_RANK}")
    return int(rank)


def number_of(config: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """A number out of a config file. Raises UserError."""
    return checked_number(setting(config, key, default, where, int, float), f"{where}: {key}")


def checked_number(value: Any, what: str) -> float:
    """The number that scales a product. Raises UserError for others; what: names it."""
    if type(value) not in (int, float) or not abs(value) <= MAX_ALPHA:
        raise UserError(
            f"{what} is {repr(value)[:MAX_SHOWN]}; it must be a number, {MAX_ALPHA:g} at most"
        )
    return float(value)


def _sort(
    name: str, array: StoredArray, linears: dict[str, FoundLinear], replaced: dict[str, Values]
) -> None:
    """Puts one tensor of the file where it belongs. Raises UserError for what is of no LoRA."""
    values = Values(name, (array,))
    plain = name.removeprefix(BASE).replace(".modules_to_save.default.", ".")
    match = FACTOR.fullmatch(plain)
    if match is None:
        if "lora_" in plain or not plain.endswith((".weight", ".bias")):
            raise UserError(
                f"{values.where} is no tensor of a LoRA adapter (known: lora_A, lora_B, "
                "lora_embedding_A, lora_embedding_B, lora_magnitude_vector, and tensors of the "
                "model's, .weight or .bias)"
            )
        replaced[plain.replace(".base_layer.", ".")] = values
        return
    module, factor, ending = match.groups()
    kind = KINDS.get((factor, ending))
    if kind is None:
        raise UserError(f"{values.where} is not known: lora_{factor} with {ending or 'no ending'}")
    found = linears.setdefault(module, FoundLinear())
    if kind in found.tensors:
        raise UserError(
            f"{values.where} and {found.tensors[kind].name[:MAX_SHOWN]} are two tensors of one "
            "linear; save the adapter again"
        )
    found.tensors[kind] = values
    found.is_table = found.is_table or factor.startswith("embedding")


class Patterns:
    """rank_pattern and alpha_pattern: settings of linears whose names end as a pattern says."""

    def __init__(self, raw: Mapping[str, Any], path: Path):
        self.where = str(path)
        self.ranks = self._compiled(raw, "rank_pattern")
        self.alphas = self._compiled(raw, "alpha_pattern")

    def _compiled(self, raw: Mapping[str, Any], key: str) -> list[tuple[re.Pattern[str], float]]:
        given = setting(raw, key, {}, self.where, dict)
        made = []
        for text, value in given.items():
            what = f"{self.where}: {key} of {text[:MAX_SHOWN]!r}"
            number = checked_number(value, what)
            if key == "rank_pattern" and not 1 <= number <= MAX_RANK:
                raise UserError(f"{what} is {value}; a rank is a whole number, 1 to {MAX_RANK}")
            pattern(text, f"{self.where}: {key}")
            made.append((re.compile(rf"(?:.*\.)?(?:{text})"), number))
        return made


def _first(patterns: list[tuple[re.Pattern[str], float]], name: str, default: float) -> float:
    return next((value for each, value in patterns if each.fullmatch(name)), default)


def _linear(
    name: str, found: FoundLinear, config: AdapterConfig, patterns: Patterns, path: Path
) -> LowRank:
    tensors = found.tensors
    missing = [f"lora_{kind.upper()}" for kind in ("a", "b") if kind not in tensors]
    if missing:
        raise UserError(
            f"{path}: {name[:MAX_SHOWN]} has no {' and no '.join(missing)}; save the adapter again"
        )
    rank = _first(patterns.ranks, name, config.r)
    if tensors["a"].shape[:1] != (rank,):
        raise UserError(
            f"{tensors['a'].where} has the shape {list(tensors['a'].shape)}, and {CONFIG} says "
            f"that the rank of {name[:MAX_SHOWN]} is {rank}; the two do not belong together"
        )
    alpha = _first(patterns.alphas, name, config.alpha)
    scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    return LowRank(
        name,
        tensors["a"],
        tensors["b"],
        scaling,
        magnitude=tensors.get("magnitude"),
        bias=tensors.get("bias"),
        is_table=found.is_table,
    )


def _check_saved(raw: Mapping[str, Any], replaced: Mapping[str, Values], path: Path) -> None:
    """Raises UserError where a module that the config says is saved whole is not in the file."""
    modules = [name.rpartition(".")[0] for name in replaced]
    lacking = [
        name
        for name in texts(raw, "modules_to_save", str(path))
        if not any(module == name or module.endswith(f".{name}") for module in modules)
    ]
    if lacking:
        raise UserError(
            f"{path}: modules_to_save names {listed(lacking)}, and the adapter has no tensor of "
            "it; save the adapter again"
        )


def _check_parts(raw: Mapping[str, Any], linears: Mapping[str, FoundLinear], path: Path) -> None:
    """Raises UserError where the config and the tensors differ in what linears have beside A and B.

    PEFT takes no notice of tensors that the config has no word of.
    """
    for key, kind, what in (("use_dora", "magnitude", "magnitudes"), ("lora_bias", "bias", "bias")):
        is_said = setting(raw, key, False, str(path), bool)
        is_there = any(kind in each.tensors for each in linears.values())
        if linears and is_said != is_there:
            raise UserError(
                f"{path}: {key} is {str(is_said).lower()}, and the adapter has "
                f"{what if is_there else f'no {what}'}; the two do not belong together: save the "
                "adapter again"
            )
