"""Matrices that hold several linears' rows: which rows are whose.

In PaddleNLP's files `qkv_proj` has, for each key head, its queries, its key and its value, and
`gate_up_fused_proj` gate, then up. Baichuan's `W_pack` is queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.loading.arrays import Shape, listed
from predict.nn.hf_config import ConfigReader

Rows: TypeAlias = "dict[str, npt.NDArray[np.int64]]"  # by the linear's name
ReadConfig: TypeAlias = Callable[[], ConfigReader]
Cut: TypeAlias = "Callable[[int, str, ReadConfig], Rows]"


def rows_of(module: str, shape: Shape, config: ReadConfig, table: Mapping[str, Cut]) -> Rows:
    """The rows of each linear in a module, by their names; empty where it is a linear itself.

    shape: [rows, ...] of the module's matrix, or of something else that has its rows. config: of
    the model. table: PADDLENLP or BAICHUAN. Raises UserError for numbers of rows that no such model
    has.
    """
    parent = module.rpartition(".")[0]
    cut = next((cut for end, cut in table.items() if module.endswith(f".{end}")), None)
    if cut is None or not shape or 0 in shape:  # an empty one may claim any number of rows
        return {}
    parts = cut(shape[0], module, config)
    return {f"{parent}.{part}": rows.reshape(-1) for part, rows in parts.items()}


def _by_heads(num_rows: int, module: str, config: ReadConfig) -> Rows:
    found = config()
    num_heads = found.get_int("num_attention_heads")
    num_kv_heads = found.get_int("num_key_value_heads", num_heads)
    if num_kv_heads < 1 or num_heads % num_kv_heads or num_rows % (num_heads + 2 * num_kv_heads):
        raise UserError(
            f"{found.path.parent}: {module} has {num_rows} outputs, which are not those of "
            f"{num_heads} query heads and {num_kv_heads} key/value heads; the file and config.json "
            "do not belong to one model"
        )
    rows = np.arange(num_rows).reshape(num_kv_heads, num_heads // num_kv_heads + 2, -1)
    return {"q_proj": rows[:, :-2], "k_proj": rows[:, -2:-1], "v_proj": rows[:, -1:]}


def _alike(*names: str) -> Cut:
    """Linears with as many rows each, one below the other."""

    def cut(num_rows: int, module: str, config: ReadConfig) -> Rows:
        if num_rows % len(names):
            raise UserError(
                f"{config().path.parent}: {module} has {num_rows} outputs, and {listed(names)} "
                "have as many each; copy the files again"
            )
        return dict(zip(names, np.arange(num_rows).reshape(len(names), -1), strict=True))

    return cut


# By the ends of modules' names.
PADDLENLP: Mapping[str, Cut] = {
    "self_attn.qkv_proj": _by_heads,
    "gate_up_fused_proj": _alike("gate_proj", "up_proj"),
}
BAICHUAN: Mapping[str, Cut] = {"self_attn.W_pack": _alike("q_proj", "k_proj", "v_proj")}
