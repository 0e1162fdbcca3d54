"""ERNIE 3.5 SE's checkpoints, seen as if each linear had a matrix of its own.

A parallel layer has two matrices: queries, keys and values (head by head), gate and up in one; what
multiplies the MLP's inner values, then attention's, in the other. H hidden size, I inner size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from predict.errors import UserError
from predict.loading.arrays import Part, StoredArray
from predict.nn.hf_config import ConfigReader

IN_ONE = re.compile(r"(model\.layers\.\d+)\.self_attn_mlp\.(qkv_gate_up|o)_proj\.(weight|bias)")
LAST_MLP = ("mlp.", "post_attention_layernorm.")


def parts_of(tensors: Mapping[str, StoredArray], directory: Path) -> dict[str, StoredArray]:
    """The array of each name that the network asks for.

    tensors: [out, in], by names that begin with "model.". Raises UserError for shapes that are not
    those of the family.
    """
    config = ConfigReader.from_dir(directory)
    num_heads, num_layers = (
        config.get_int(key) for key in ("num_attention_heads", "num_hidden_layers")
    )
    hidden, inner = config.get_int("hidden_size"), config.get_int("intermediate_size")
    if hidden % num_heads:
        raise config.wrong("num_attention_heads", f"a divisor of the hidden_size {hidden}")
    in_one = {
        "qkv_gate_up.weight": (3 * hidden + 2 * inner, hidden),
        "qkv_gate_up.bias": (3 * hidden + 2 * inner,),
        "o.weight": (hidden, inner + hidden),
        "o.bias": (hidden,),
    }
    last, before = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers - 2}.blocks.2."
    has_last_mlp = f"{last}mlp.down_proj.weight" in tensors
    parts: dict[str, StoredArray] = {}
    for name, array in tensors.items():
        match = IN_ONE.fullmatch(name)
        if match is None:
            is_moved = has_last_mlp and name.startswith(tuple(last + each for each in LAST_MLP))
            parts[before + name.removeprefix(last) if is_moved else name] = array
            continue
        layer, product, kind = match.groups()
        if array.shape != in_one[f"{product}.{kind}"]:
            raise UserError(
                f"{directory}: {name} has the shape {list(array.shape)}, and config.json says "
                f"{list(in_one[f'{product}.{kind}'])}; the two do not belong to one model"
            )
        cut = _outputs(array, inner) if product == "o" else _inputs(array, hidden, inner, num_heads)
        parts.update({f"{layer}.{linear}.{kind}": part for linear, part in cut})
    for name in list(parts):  # the one norm of a parallel layer is both its blocks'
        layer, _, kind = name.partition(".input_layernorm.")
        if kind and f"{layer}.mlp.down_proj.weight" in parts:
            parts.setdefault(f"{layer}.post_attention_layernorm.{kind}", parts[name])
    return parts


def _inputs(
    array: StoredArray, hidden: int, inner: int, num_heads: int
) -> Iterator[tuple[str, Part]]:
    rows = np.arange(3 * hidden, dtype=np.int64).reshape(num_heads, 3, -1)
    for number, kind in enumerate("qkv"):
        yield f"self_attn.{kind}_proj", Part(array, rows[:, number].reshape(-1))
    yield "mlp.gate_proj", Part(array, slice(3 * hidden, 3 * hidden + inner))
    yield "mlp.up_proj", Part(array, slice(3 * hidden + inner, None))


def _outputs(array: StoredArray, inner: int) -> Iterator[tuple[str, StoredArray]]:
    if len(array.shape) == 1:  # one bias for both products: attention's
        yield "self_attn.o_proj", array
        return
    yield "self_attn.o_proj", Part(array, columns=slice(inner, None))
    yield "mlp.down_proj", Part(array, columns=slice(0, inner))
