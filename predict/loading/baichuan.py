"""Baichuan's checkpoints as PaddleNLP has them: a Llama's, and the way back where that has ALiBi.

Baichuan has queries, keys and values in one matrix, one behind the other. The heads of Baichuan 2
have rows of any length, which its own code brings to 1; PaddleNLP's Llama does not, so that they
have length 1 in the file. H hidden size, V tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.arrays import LastRead, Part, Shared, StoredArray, View, joined_along
from predict.loading.fused import BAICHUAN, rows_of
from predict.loading.safetensors_writer import as_stored
from predict.nn.hf_config import ConfigReader
from predict.text.chat_formats import is_baichuan_2

QUERIES = re.compile(r"(.*\.self_attn)\.q_proj\.weight")
HEAD = "lm_head.weight"
# What the 13B models' config.json has in place of max_position_embeddings.
LENGTH = "model_max_length"


@dataclass(frozen=True, eq=False)
class UnitRows(View):
    """A matrix [V, H], each row divided by its length."""

    def read(self) -> npt.NDArray[Any]:
        values = to_float32(self.array.read())
        lengths = np.sqrt(np.square(values).sum(1, keepdims=True))
        return as_stored(values / np.maximum(lengths, 1e-12), self.dtype)


def as_llama(tensors: Mapping[str, StoredArray], config: ConfigReader) -> dict[str, StoredArray]:
    """Baichuan's tensors [out, in], one for each linear. Raises UserError for other shapes."""
    normalizes = is_baichuan_2(config.values)
    made: dict[str, StoredArray] = {}
    last = LastRead()
    for name, array in tensors.items():
        module, _, kind = name.rpartition(".")
        cuts = rows_of(module, array.shape, lambda: config, BAICHUAN) if kind == "weight" else {}
        if not cuts:
            made[name] = UnitRows(array) if normalizes and name == HEAD else array
            continue
        packed = Shared(array, last, len(cuts))
        made |= {f"{linear}.weight": Part(packed, rows) for linear, rows in cuts.items()}
    return made


def as_baichuan(tensors: Mapping[str, StoredArray], config: ConfigReader) -> dict[str, StoredArray]:
    """A Llama's tensors [out, in], queries, keys and values of a layer in one matrix.

    Raises UserError where keys are not as many as queries: no family of theirs has that and ALiBi.
    """
    made: dict[str, StoredArray] = {}
    for name, array in tensors.items():
        if match := QUERIES.fullmatch(name):
            parts = [tensors.get(f"{match[1]}.{kind}_proj.weight") for kind in "qkv"]
            there = tuple(part for part in parts if part is not None)
            if len(there) < 3 or len({(part.dtype, part.shape) for part in there}) > 1:
                raise UserError(
                    f"{config.path}: alibi is true, and {name} has no keys and values of its own "
                    "shape: Hugging Face's Baichuan has as many of them; use --format paddle"
                )
            made[f"{match[1]}.W_pack.weight"] = joined_along(0, there)
        elif not name.endswith((".k_proj.weight", ".v_proj.weight")):
            made[name] = array
    return made


def llama_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Baichuan's config.json as PaddleNLP has it."""
    made = {**values, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    made.pop("z_loss_weight", None)
    if values.get("max_position_embeddings") is None:
        made |= {"alibi": True, "max_position_embeddings": values.get(LENGTH, 4096)}
    return made


def baichuan_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of PaddleNLP's Llama with ALiBi as its publisher has it."""
    made = {**values, "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    length = made.pop("max_position_embeddings", 4096)
    for key in ("alibi", "seq_length"):  # PaddleNLP's seq_length is that of training
        made.pop(key, None)
    return {**made, LENGTH: length}
