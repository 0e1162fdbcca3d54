"""ERNIE 3.5 SE's checkpoints, seen as if each linear had a matrix of its own.

A parallel layer has two matrices: queries, keys and values (head by head), gate and up in one; what
multiplies the MLP's inner values, then attention's, in the other. H hidden size, I inner size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.nn.hf_config import ConfigReader

IN_ONE = re.compile(r"(model\.layers\.\d+)\.self_attn_mlp\.(qkv_gate_up|o)_proj\.(weight|bias)")
LAST_MLP = ("mlp.", "post_attention_layernorm.")
Indices: TypeAlias = "npt.NDArray[np.int64] | slice"


class Part(NamedTuple):
    """Rows and columns of a tensor [out, in], or elements of one [out]."""

    tensor: str
    rows: Indices = slice(None)
    columns: slice = slice(None)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's, of a tensor of this shape."""
        empty = np.broadcast_to(np.empty((), np.uint8), whole)
        return self.of(empty).shape

    def of(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The part of the tensor's values."""
        part = values[self.rows]
        return part if values.ndim == 1 else np.ascontiguousarray(part[:, self.columns])


def parts_of(shapes: Mapping[str, tuple[int, ...]], directory: Path) -> dict[str, Part]:
    """What to read for each name that the network asks for.

    shapes: [out, in], by names that begin with "model.". Raises UserError for shapes that are not
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
    has_last_mlp = f"{last}mlp.down_proj.weight" in shapes
    parts: dict[str, Part] = {}
    for name, shape in shapes.items():
        match = IN_ONE.fullmatch(name)
        if match is None:
            is_moved = has_last_mlp and name.startswith(tuple(last + each for each in LAST_MLP))
            parts[before + name.removeprefix(last) if is_moved else name] = Part(name)
            continue
        layer, product, kind = match.groups()
        if shape != in_one[f"{product}.{kind}"]:
            raise UserError(
                f"{directory}: {name} has the shape {list(shape)}, and config.json says "
                f"{list(in_one[f'{product}.{kind}'])}; the two do not belong to one model"
            )
        cut = _inputs(name, hidden, inner, num_heads) if product != "o" else _outputs(name, inner)
        parts.update({f"{layer}.{linear}.{kind}": part for linear, part in cut})
    for name in list(parts):  # the one norm of a parallel layer is both its blocks'
        layer, _, kind = name.partition(".input_layernorm.")
        if kind and f"{layer}.mlp.down_proj.weight" in parts:
            parts.setdefault(f"{layer}.post_attention_layernorm.{kind}", parts[name])
    return parts


def _inputs(name: str, hidden: int, inner: int, num_heads: int) -> Iterator[tuple[str, Part]]:
    rows = np.arange(3 * hidden, dtype=np.int64).reshape(num_heads, 3, -1)
    for number, kind in enumerate("qkv"):
        yield f"self_attn.{kind}_proj", Part(name, rows[:, number].reshape(-1))
    yield "mlp.gate_proj", Part(name, slice(3 * hidden, 3 * hidden + inner))
    yield "mlp.up_proj", Part(name, slice(3 * hidden + inner, None))


def _outputs(name: str, inner: int) -> Iterator[tuple[str, Part]]:
    yield "self_attn.o_proj", Part(name, columns=slice(inner, None))
    if name.endswith(".weight"):  # one bias for both products: attention's
        yield "mlp.down_proj", Part(name, columns=slice(0, inner))
