"""Prefix tuning's files: keys and values of tokens that nobody writes, before every prompt.

As PaddleNLP saves them: pre_caches.npy, or prefix_config.json and prefix_model_state.pdparams, from
which PaddleNLP's PrefixModel makes the same array (after Li and Liang, 2021). A folder has one of
the two, or both. Keys are as the cache has them: nothing rotates them.

A training on several cards leaves prefix_model_state.tp00.pdparams and so on, a part of the encoder
in each. There, each rank cuts its heads' share out of what the whole encoder makes: one piece of
the features, which it reads as all layers of its heads. So the heads of rank r are those of the
r-th piece, and pre_caches.npy beside such files, which reads the features as one rank would, is
not what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from predict.device.place import check_holds
from predict.errors import UserError
from predict.loading.adapters.values import Floats, Values
from predict.loading.arrays import StoredArray, listed
from predict.loading.npy import read_npy
from predict.loading.parallel_parts import Split, check_degree, joined, patterns, ranks_of
from predict.loading.pdparams import read_params
from predict.nn.cuts import own_key_heads
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec
from predict.system.files import read_json_object
from predict.system.settings import refuse_unread, setting

PRE_CACHES = "pre_caches.npy"
CONFIG, STEM = "prefix_config.json", "prefix_model_state"
STATE = f"{STEM}.pdparams"
READ = "num_prefix_tokens prefix_projection tensor_parallel_degree"
# Sizes stand in the weights' shapes; the rest is of training.
UNREAD = """
    num_attention_heads multi_query_group_num num_hidden_layers hidden_size
    prefix_projection_hidden_size prefix_dropout dtype"""
# How tensors are split over ranks; what is not here each rank has whole.
SPLITS = {
    **dict.fromkeys(("0.weight", "1.bias", "3.weight"), Split(is_column=False)),
    "1.weight": Split(is_column=True),
}
WHAT = "[num_layers, 2, num_kv_heads, prefix_len, head_dim]"


@dataclass(frozen=True)
class StoredPrefix:
    """A prefix, read. values: [num_layers, 2, num_kv_heads, num_tokens, head_dim], keys first."""

    path: Path
    values: Floats

    @property
    def num_tokens(self) -> int:
        return int(self.values.shape[3])


def read_prefix(path: str | Path, spec: DecoderSpec, dtype: str, max_length: int) -> StoredPrefix:
    """The prefix of a .npy file or a folder, for a network that computes in `dtype`.

    Nothing but headers is read before shapes are known to fit. Raises UserError for anything that
    is no prefix of this network, or that leaves no room in `max_length` tokens.
    """
    path = Path(path)
    if spec.share is not None:
        stored = read_prefix(path, spec.share.whole, dtype, max_length)
        return StoredPrefix(stored.path, own_heads(stored.values, spec))
    num_layers, num_heads, head_dim = _kept(spec, path)
    source = _source(path)
    if source.suffix == ".npy":
        array = read_npy(source)
        shape = array.shape
        wanted = (num_layers, 2, num_heads, -1, head_dim)
        if len(shape) != 5 or any(w not in (s, -1) for s, w in zip(shape, wanted, strict=True)):
            raise UserError(
                f"{source} has shape {list(shape)}, and this model takes [{num_layers}, 2, "
                f"{num_heads}, prefix_len, {head_dim}], which is {WHAT}; the prefix was trained "
                "for another model"
            )
        _check_length(source, shape[3], max_length)
        values = Values("the array", (array,)).read()
    else:
        values = _from_state(source, (num_layers, num_heads, head_dim), max_length)
    check_holds(dtype, values, str(source), "prefix")
    return StoredPrefix(source, values)


def own_heads(values: Floats, spec: DecoderSpec) -> Floats:
    """What the rank of a spec has of a prefix's values."""
    layers = zip(values, own_key_heads(spec), strict=True)
    return np.stack(
        [np.concatenate([layer[:, slice(*ends)] for ends in heads], 1) for layer, heads in layers]
    )


def _kept(spec: DecoderSpec, path: Path) -> tuple[int, int, int]:
    """Layers, heads of keys and of values, and their size, alike in all layers."""
    kinds = {block.cache_rows for block in spec.attention}
    rows = next(iter(kinds))
    if len(kinds) != 1 or len(rows) != 2 or any(spec.states):
        raise UserError(
            f"{path}: a prefix is keys and values of one shape in all layers, and "
            f"{spec.model_type} keeps something else; leave --prefix_path out"
        )
    return len(spec.attention), rows[0].num_heads, rows[0].size


def _source(path: Path) -> Path:
    """The file with the prefix: the path itself, or what the folder has; of parts the first."""
    if not path.is_dir():
        if path.suffix != ".npy":
            raise UserError(
                f"prefix_path {path} is neither a folder nor a .npy file; name the folder that "
                f"PaddleNLP saved, or the {PRE_CACHES} in it"
            )
        return path
    parts = sorted(each for pattern in patterns(STEM) for each in path.glob(pattern))
    if parts and (path / STATE).exists():
        raise UserError(
            f"{path} has {STATE} and {listed(each.name for each in parts)}, which are of two "
            "savings; keep one of them"
        )
    for found in (*parts, path / PRE_CACHES, path / STATE):
        if found.exists():
            return found
    raise UserError(f"{path} has neither {PRE_CACHES} nor {STATE}: it holds no prefix")


def _check_length(source: Path, num_tokens: int, max_length: int) -> None:
    if num_tokens < 1:
        raise UserError(f"{source} is a prefix of {num_tokens} tokens (allowed: 1 and more)")
    if num_tokens > max_length - 2:
        raise UserError(
            f"{source} is a prefix of {num_tokens} tokens, and max_length is {max_length} tokens "
            f"of prefix, prompt and output together (allowed: prefixes of up to {max_length - 2}); "
            "raise --max_length"
        )


def _from_state(path: Path, kept: tuple[int, int, int], max_length: int) -> Floats:
    """What PaddleNLP's encoder makes of its weights: [layers, 2, heads, tokens, head_dim].

    An embedding of the tokens' numbers holds it all; or one of a token's keys does, and two
    products with a tanh between them make the rest of it. path: of the weights, or of the first of
    the parts that ranks have saved.
    """
    num_layers, num_heads, head_dim = kept
    config_path = path.parent / CONFIG
    config = read_json_object(config_path)
    where = str(config_path)
    refuse_unread(config, READ, UNREAD, where, do="train the prefix again")
    num_tokens = setting(config, "num_prefix_tokens", None, where, int)
    projects = setting(config, "prefix_projection", False, where, bool)
    if num_tokens is None:
        raise UserError(f"{where} has no num_prefix_tokens; save the prefix again")
    _check_length(path, num_tokens, max_length)
    if path.name == STATE:
        stored: Mapping[str, StoredArray] = read_params(path)
        num_ranks = 1
    else:
        ranks = ranks_of(path.parent, STEM)
        num_ranks = len(ranks)
        check_degree(ConfigReader(config, config_path), num_ranks)
        stored = {n: joined(n, [rank[n] for rank in ranks], SPLITS.get(n)) for n in ranks[0]}
    if num_heads % num_ranks:
        raise UserError(
            f"{path.parent} has the parts of {num_ranks} ranks, and this model has {num_heads} "
            "heads of keys, which they cannot share out; the prefix was trained for another model"
        )
    rows = _encoded(path, stored, num_tokens, num_heads * head_dim, num_layers, projects)
    pieces = rows.reshape(num_tokens, num_ranks, 2, num_layers, num_heads // num_ranks, head_dim)
    by_head = pieces.transpose(3, 2, 1, 4, 0, 5)  # [layers, 2, ranks, heads, tokens, head_dim]
    return np.ascontiguousarray(by_head).reshape(num_layers, 2, num_heads, num_tokens, head_dim)


def _encoded(
    path: Path,
    stored: Mapping[str, StoredArray],
    num_tokens: int,
    width: int,
    num_layers: int,
    projects: bool,
) -> Floats:
    """[num_tokens, 2 * num_layers * width] what the encoder makes of its weights."""
    total = 2 * num_layers * width
    if not projects:
        return _checked(path, stored, "0.weight", (num_tokens, total)).read()
    inner = _inner_size(path, stored)
    shapes = {
        "0.weight": (num_tokens, width),
        "1.weight": (width, inner),
        "1.bias": (inner,),
        "3.weight": (inner, total),
        "3.bias": (total,),
    }
    # All shapes before any value.
    weights = [_checked(path, stored, name, shape) for name, shape in shapes.items()]
    embedding, first, first_bias, second, second_bias = (each.read() for each in weights)
    rows: Floats = np.tanh(embedding @ first + first_bias) @ second + second_bias
    if not np.isfinite(rows).all():
        raise UserError(f"{path} makes values that are not finite; train the prefix again")
    return rows


def _inner_size(path: Path, stored: Mapping[str, StoredArray]) -> int:
    bias = stored.get("1.bias")
    if bias is None or len(bias.shape) != 1:
        raise UserError(
            f"{path} lacks 1.bias, and {CONFIG} says prefix_projection; the two do not belong "
            "together"
        )
    return bias.shape[0]


def _checked(
    path: Path, stored: Mapping[str, StoredArray], name: str, shape: tuple[int, ...]
) -> Values:
    found = stored.get(name)
    if found is None or tuple(found.shape) != shape:
        got = "is not there" if found is None else f"has shape {list(found.shape)}"
        raise UserError(
            f"{path}: {name} {got}, and this model and {CONFIG} make it {list(shape)}; the prefix "
            "was trained for another model"
        )
    return Values(name, (found,))
