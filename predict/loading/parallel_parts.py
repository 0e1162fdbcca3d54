"""PaddleNLP's checkpoints in parts, one file for each rank of a training on several cards.

`model_state.tp00.pdparams`: a part of each split tensor, and the others whole; `_pp00` and so on:
the tensors of a stage of the pipeline. Matrices are [in, out]. What splits how is PaddleNLP's: a
column-parallel linear by its outputs, a row-parallel one by its inputs, tables of tokens by rows.
Where a linear holds two or three matrices side by side, each rank has its part of each of them;
only queries, keys and values that lie head by head are split as one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from predict.errors import UserError
from predict.loading.arrays import StoredArray, joined_along, listed, same
from predict.loading.paddle_checkpoint import HEAD_TABLE, separate
from predict.loading.pdparams import read_params
from predict.nn.hf_config import ConfigReader

MODEL = "model_state"
CHATGLM_V2 = "chatglm_v2."
INSTEAD = "merge the parts with PaddleNLP's tools/merge_tp_and_pp_params.py"


class Split(NamedTuple):
    """How a tensor is split, along the columns or the rows of [in, out]; see joined_along."""

    is_column: bool
    widths: tuple[int, ...] = ()


# By the last name of a linear or table, the first pattern that fits its end: whether it is split
# by columns, and how many matrices of one size lie side by side in it.
RULES: tuple[tuple[str, bool, int], ...] = (
    (r"gate_up_fused_proj", True, 2),
    (r"c_attn", True, 3),
    (r"experts\.\d+\.w2", False, 1),  # Mixtral's; w2 of the first Qwen is its gate
    (r"(q|k|v|qkv|gate|up|q_b|kv_b)_proj|query_key_value", True, 1),
    (r"linear1|dense_h_to_4h|w1|w2|w3|lm_head|output_layer|project_in|project_out", True, 1),
    (r"(o|out|down|c)_proj|linear2|dense|dense_4h_to_h", False, 1),
    (r"embed_tokens|word_embeddings|wte", False, 1),
)
TABLES = re.compile(r"(?:.*\.)?(?:lm_head|output_layer|embed_tokens|word_embeddings|wte)")
OF_INPUTS = ("shift_bias", "smooth_weight")  # of post-training quantization
KEYS = re.compile(r".*\.[kv]_proj")


def patterns(stem: str = MODEL) -> tuple[str, str]:
    """Of the names of files in parts."""
    return f"{stem}.tp*.pdparams", f"{stem}.pp*.pdparams"


def merged_parts(directory: Path) -> dict[str, StoredArray]:
    """The tensors of a directory's parts, merged. Raises UserError where a part is missing."""
    ranks = ranks_of(directory)
    if len(ranks) == 1:
        return ranks[0]
    config = ConfigReader.from_dir(directory)
    check_degree(config, len(ranks))
    check_no_turns(directory, separate(ranks[0]))
    made: dict[str, StoredArray] = {}
    for name, first in ranks[0].items():
        split = split_of(name, first.shape, len(ranks), config)
        made[name] = joined(name, [rank[name] for rank in ranks], split)
    return made


def paths_of_ranks(path: Path) -> list[Path]:
    """act_scales_0.json, act_scales_1.json and so on, in the place of act_scales.json.

    Raises UserError where one is missing: of a row of them, of the ranks that there are parts of,
    or of those that config.json says.
    """
    name = re.compile(rf"{re.escape(path.stem)}_(0|[1-9]\d{{0,3}}){re.escape(path.suffix)}")
    files = path.parent.glob(f"{path.stem}_*{path.suffix}")
    numbers = {int(found[1]) for each in files if (found := name.fullmatch(each.name))}
    if not numbers:
        return []
    of_parts = path.parent.glob(f"{MODEL}.tp*.pdparams")
    count = len({re.split("[._]", each.name)[2] for each in of_parts}) or 1 + max(numbers)
    if numbers != {*range(count)}:
        other = sorted(numbers ^ {*range(count)})
        raise UserError(
            f"{path.parent} has {path.stem}_N{path.suffix} of {len(numbers)} ranks, and there are "
            f"{count}; rank {other[0]} is one without, or too many; complete the copy"
        )
    check_degree(ConfigReader.from_dir(path.parent), count)
    return [path.with_name(f"{path.stem}_{number}{path.suffix}") for number in range(count)]


def check_no_turns(directory: Path, older: Sequence[str]) -> None:
    """Raises UserError for parts of older tensors, see paddle_checkpoint.separate."""
    if older:
        raise UserError(
            f"{directory}: {listed(older)} are of a version of ChatGLM2 whose parts are not merged "
            f"here; {INSTEAD}"
        )


def ranks_of(directory: Path, stem: str = MODEL) -> list[dict[str, StoredArray]]:
    """The tensors of each rank's parts. Raises UserError where a part is missing.

    stem: of the files' names.
    """
    grid = _grid(directory, stem)
    num_stages = 1 + max(stage for _, stage in grid)
    ranks = [
        _stages_of([grid[rank, stage] for stage in range(num_stages)])
        for rank in range(1 + max(rank for rank, _ in grid))
    ]
    for rank, tensors in enumerate(ranks):
        other = sorted(tensors.keys() ^ ranks[0].keys())
        if other:
            raise UserError(
                f"{directory}: the parts of ranks 0 and {rank} do not hold the same tensors; only "
                f"one has {listed(other)}; the files are not of one checkpoint"
            )
    return ranks


def joined(name: str, parts: Sequence[StoredArray], split: Split | None) -> StoredArray:
    """The tensor of all ranks. Raises UserError where the parts do not fit together."""
    if split is None:
        return same(parts, name)
    axis = len(parts[0].shape) - 1 if split.is_column else 0
    try:
        return joined_along(axis, parts, split.widths)
    except ValueError as error:
        directory = parts[0].places[0][0].parent
        raise UserError(f"{directory}: {name} cannot be merged: {error}") from None


def _grid(directory: Path, stem: str) -> dict[tuple[int, int], Path]:
    """Files by rank and stage of the pipeline, all there."""
    name = re.compile(rf"{stem}\.(?:tp(\d{{2,4}}))?_?(?:pp(\d{{2,4}}))?\.pdparams")
    paths = sorted({path for pattern in patterns(stem) for path in directory.glob(pattern)})
    found = {path: name.fullmatch(path.name) for path in paths}
    strange = [path.name for path, match in found.items() if match is None]
    if strange:
        raise UserError(
            f"{directory}: {listed(strange)} cannot be merged here (read are "
            f"{stem}.tpNN.pdparams, {stem}.ppNN.pdparams and "
            f"{stem}.tpNN_ppNN.pdparams); {INSTEAD}"
        )
    kinds = {(match[1] is None, match[2] is None) for match in found.values() if match}
    grid = {(int(m[1] or 0), int(m[2] or 0)): path for path, m in found.items() if m}
    if len(kinds) > 1 or len(grid) < len(paths):
        names = listed(path.name for path in paths)
        raise UserError(f"{directory} holds parts of several checkpoints: {names}; keep one")
    (no_rank, no_stage), *_ = kinds
    last = [max(position[axis] for position in grid) for axis in (0, 1)]
    missing = []
    for rank in range(last[0] + 1):
        for stage in range(last[1] + 1):
            if (rank, stage) not in grid:
                numbers = (f"tp{rank:02d}" * (not no_rank), f"pp{stage:02d}" * (not no_stage))
                missing.append(f"{stem}.{'_'.join(filter(None, numbers))}.pdparams")
    if missing:
        raise UserError(f"{directory} lacks {listed(missing)}; complete the copy")
    return grid


def _stages_of(paths: Sequence[Path]) -> dict[str, StoredArray]:
    """The tensors of one rank; what several stages hold (a tied table) must be the same."""
    found: dict[str, list[StoredArray]] = {}
    for path in paths:
        for name, array in read_params(path).items():
            found.setdefault(name, []).append(array)
    return {
        name: arrays[0] if len(arrays) == 1 else same(arrays, name)
        for name, arrays in found.items()
    }


def check_degree(config: ConfigReader, num_ranks: int) -> None:
    """Raises UserError where a config says that there are other ranks."""
    degree = config.values.get("tensor_parallel_degree")
    if type(degree) is int and degree > 1 and degree != num_ranks:
        raise UserError(
            f"{config.path}: tensor_parallel_degree is {degree}, and there are parts of "
            f"{num_ranks} ranks; complete the copy"
        )


def split_of(
    name: str, shape: tuple[int, ...], num_ranks: int, config: ConfigReader
) -> Split | None:
    """How a tensor is split over the ranks; None where each of them has it whole.

    shape: of a part. Raises UserError for a split that is not known.
    """
    stem, _, kind = name.rpartition(".")
    stem = stem.removesuffix(".layer")  # of a linear with the tensors of its inputs
    if name == HEAD_TABLE and shape:
        return _of_table(shape[0], False, config)
    rules = (rule for rule in RULES if re.fullmatch(rf"(?:.*\.)?(?:{rule[0]})", stem))
    _, is_column, blocks = next(rules, ("", False, 0))
    if blocks and kind in OF_INPUTS:
        return None if is_column else Split(is_column=True)
    if not blocks or kind not in ("weight", "bias") or not shape:
        return None
    if not is_column and kind == "bias":
        return None  # it is added once, behind the sum over the ranks
    if KEYS.fullmatch(stem):
        heads = config.get_int("num_attention_heads", 1)
        if config.get_int("num_key_value_heads", heads) % num_ranks:
            return None
    if stem == "lm_head" and config.get_bool("tie_word_embeddings", False):
        is_column = False  # it is the table of tokens
    size = shape[-1 if is_column else 0]
    if TABLES.fullmatch(stem):
        return _of_table(size, is_column, config)
    if name.startswith(CHATGLM_V2):
        return _of_chatglm_v2(name, size, num_ranks, config)
    return Split(is_column, (size // blocks,) * blocks if blocks > 1 else ())


def _of_table(size: int, is_column: bool, config: ConfigReader) -> Split | None:
    """Of a table whose part has so many tokens: whole where the ranks do not divide them."""
    tokens = config.get_int("vocab_size", aliases=("padded_vocab_size",))
    return None if size == tokens else Split(is_column)


def _of_chatglm_v2(name: str, size: int, num_ranks: int, config: ConfigReader) -> Split:
    """A rank has its part of each of queries, keys, values, gate and up.

    Older versions had one linear for each of the first three, and split gate and up as one.
    """
    if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
        return Split(False)
    if "dense_h_to_4h" in name:
        return Split(True, (size // 2, size // 2))
    queries = config.get_int("hidden_size") // num_ranks
    keys = (size - queries) // 2
    return Split(True, (queries, keys, keys))
