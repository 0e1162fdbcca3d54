"""Golden checkpoints in PaddleNLP's layout, their tensors split over ranks as it does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from predict.loading.checkpoint import Checkpoint
from predict.loading.paddle_checkpoint import as_paddle
from predict.nn.hf_config import ConfigReader
from tests.support.golden import GOLDEN
from tests.support.stored_formats import Tensors, paddle_file

Cut = Callable[[Any, int, int], Any]


def column(values: Any, rank: int, num_ranks: int) -> Any:
    return np.split(values, num_ranks, axis=-1)[rank]


def row(values: Any, rank: int, num_ranks: int) -> Any:
    return np.split(values, num_ranks, axis=0)[rank]


def whole(values: Any, rank: int, num_ranks: int) -> Any:
    return values


def of_each(*shares: int) -> Cut:
    """The part of each of the matrices that lie side by side, in these shares of the width."""

    def cut(values: Any, rank: int, num_ranks: int) -> Any:
        borders = np.cumsum(shares)[:-1] * values.shape[-1] // sum(shares)
        parts = np.split(values, borders, axis=-1)
        return np.concatenate([column(part, rank, num_ranks) for part in parts], axis=-1)

    return cut


# By family: PaddleNLP's action for the names that a pattern fits, of _get_tensor_parallel_mappings;
# other tensors are whole. All vocabularies here are odd, and PaddleNLP leaves such tables whole.
ACTIONS: dict[str, dict[str, Cut]] = {
    "llama_biases": {
        r"(q|gate|up)_proj\.(weight|bias)": column,  # one key head for two ranks: whole
        r"(o|down)_proj\.weight": row,
    },
    "qwen2_moe_sparse": {
        r"q_proj\.(weight|bias)|(gate|up)_proj\.weight": column,
        r"(o|down)_proj\.weight": row,
    },
    "mixtral_8x7b": {
        r"q_proj\.weight|experts\.\d\.w[13]\.weight": column,
        r"o_proj\.weight|experts\.\d\.w2\.weight": row,
    },
    "deepseek_v2": {r"(q_b|kv_b|q|gate|up)_proj\.weight": column, r"(o|down)_proj\.weight": row},
    "qwen_7b": {
        r"c_attn\.(weight|bias)": of_each(1, 1, 1),
        r"mlp\.w[12]\.weight": column,
        r"c_proj\.weight": row,
    },
    "bloom_7b": {
        r"(query_key_value|dense_h_to_4h)\.(weight|bias)": column,
        r"(self_attention\.dense|dense_4h_to_h)\.weight": row,
    },
    "chatglm_6b": {
        r"(query_key_value|dense_h_to_4h)\.(weight|bias)": column,
        r"(attention\.dense|dense_4h_to_h)\.weight": row,
    },
    "chatglm_2_6b": {  # 4 heads, 2 key/value heads
        r"query_key_value\.(weight|bias)": of_each(2, 1, 1),
        r"dense_h_to_4h\.weight": of_each(1, 1),
        r"(self_attention\.dense|dense_4h_to_h)\.weight": row,
    },
    "opt_350m": {
        r"(q|k|v)_proj\.(weight|bias)|linear1\.(weight|bias)": column,
        r"project_(in|out)\.weight": column,
        r"(out_proj|linear2)\.weight": row,
    },
    "gpt_paddlenlp_fused": {
        r"qkv_proj\.(weight|bias)|linear1\.(weight|bias)": column,
        r"(out_proj|linear2)\.weight": row,
    },
}


# Heads that two ranks can share; the tensors alone are compared.
CHANGES = {"opt_350m": {"num_attention_heads": 4}}


def in_paddles_layout(family: str) -> Tensors:
    """A golden model's tensors as PaddleNLP has them."""
    checkpoint = Checkpoint(GOLDEN / family)
    stored = checkpoint.stored
    if not checkpoint.is_paddle:
        stored = as_paddle(stored, ConfigReader.from_dir(GOLDEN / family))
    return {name: np.asarray(array.read(), order="C") for name, array in stored.items()}


def action_of(family: str, name: str) -> Cut:
    """What splits a tensor of PaddleNLP's."""
    actions = ACTIONS[family].items()
    fits = [cut for pattern, cut in actions if re.search(rf"[._]({pattern})$", name)]
    assert len(fits) < 2
    return (fits or [whole])[0]


def write_parts(folder: Path, family: str, num_ranks: int) -> Tensors:
    tensors = in_paddles_layout(family)
    folder.mkdir()
    values = json.loads((GOLDEN / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | CHANGES.get(family, {})))
    split = 0
    parts: list[Tensors] = [{} for _ in range(num_ranks)]
    for name, values in tensors.items():
        cut = action_of(family, name)
        split += cut is not whole
        for rank, part in enumerate(parts):
            part[name] = np.ascontiguousarray(cut(values, rank, num_ranks))
    assert split > 4
    for rank, part in enumerate(parts):
        (folder / f"model_state.tp{rank:02d}.pdparams").write_bytes(paddle_file(part))
    return tensors
