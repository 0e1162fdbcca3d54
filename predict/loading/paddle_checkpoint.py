"""PaddleNLP's own checkpoints, seen as if Hugging Face had written them, and the other way round.

Names begin with the family ("llama.layers.0...") in place of "model.", matrices are [in, out], and
linears with shift and smooth keep theirs below ".layer". Queries, keys and values may be of one
matrix, head by head (`qkv_proj`: the queries of a key head, its key, its value, then the next
one's), gate and up of another (`gate_up_fused_proj`). OPT has other names of its layers, too;
Baichuan is a Llama there. A head that is the table of tokens is [vocab, hidden] like the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.loading.arrays import (
    FLOAT_DTYPES,
    LastRead,
    Part,
    Shape,
    Shared,
    StoredArray,
    Turned,
    joined_along,
    listed,
)
from predict.loading.baichuan import as_llama
from predict.loading.ernie import parts_of
from predict.loading.fused import PADDLENLP, rows_of
from predict.nn.hf_config import ConfigReader

# The family that stands ahead of the table of tokens. Hugging Face's first OPT has "decoder" there,
# and its encoders have their own name.
FAMILY = re.compile(
    r"(?!model\.|decoder\.|bert\.|roberta\.)([a-z0-9_]+\.)(embed_tokens|embeddings\.word_embeddings)\.weight"
)
CHATGLM = "chatglm.transformer."
# Families whose names begin with "transformer." in Hugging Face's files: by PaddleNLP's name of the
# table of tokens, what its names begin with.
OTHERS = {
    "bloom.word_embeddings.weight": "bloom.",
    "qwen.wte.weight": "qwen.",
    "chatglm.transformer.word_embeddings.weight": CHATGLM,
    "chatglm_v2.embedding.word_embeddings.weight": "chatglm_v2.",
    "embedding.word_embeddings.weight": "",  # ChatGLM2's, saved without its head
}
OTHERS_BASE = "transformer."
ERNIE, OPT = "ernie.", "opt."
OWN_FUSED = ("gpt.", "phi3.")  # whose names here are of matrices in one, too
NOT_TRANSPOSED = (
    *("embed_tokens.weight", "embed_positions.weight", "_embeddings.weight", "wte.weight"),
)
# OPT's modules as PaddleNLP calls them, and as Hugging Face does: those of a layer, and others.
OPT_MODULE = re.compile(r"(decoder\.layers\.\d+\.)(\w+)(\.\w+)")
OPT_LAYER = {
    "norm1": "self_attn_layer_norm",
    "norm2": "final_layer_norm",
    "linear1": "fc1",
    "linear2": "fc2",
}
OPT_OTHERS = {
    "embeddings.word_embeddings": "decoder.embed_tokens",
    "embeddings.position_embeddings": "decoder.embed_positions",
    "embeddings.project_in": "decoder.project_in",
}
HEAD, HEAD_TABLE = "lm_head.weight", "lm_head.decoder_weight"
TABLE_HEADS = (OPT, "bloom.", CHATGLM)  # whose head is a table of tokens, called HEAD_TABLE
# Of PaddleNLP's first checkpoints of ChatGLM2.
SEPARATE = re.compile(r"(.*\.self_attention\.)(query|key|value)\.(weight|bias)")
TAKING_TURNS = ".mlp.dense_h_to_4h"


def prefixes_of(names: Iterable[str]) -> tuple[str, str]:
    """What names begin with in PaddleNLP's files, and in Hugging Face's in its place.

    Empty where the names are not PaddleNLP's.
    """
    for name in names:
        if name in OTHERS:
            return OTHERS[name], OTHERS_BASE
        if match := FAMILY.fullmatch(name):
            return match[1], "model."
    return "", ""


def is_turned(name: str) -> bool:
    """Whether PaddleNLP stores a tensor as [in, out]; `name` is Hugging Face's."""
    return name.endswith(".weight") and not name.endswith(NOT_TRANSPOSED)


def _turned(name: str, array: StoredArray) -> StoredArray:
    return Turned(array) if is_turned(name) and len(array.shape) == 2 else array


def as_hugging_face(stored: Mapping[str, StoredArray], directory: Path) -> dict[str, StoredArray]:
    """PaddleNLP's tensors under Hugging Face's names, matrices [out, in], one for each linear.

    Raises UserError where a name stands for two tensors, or a shape is not that of config.json.
    """
    prefix, ours = prefixes_of(stored)
    tables = (a.shape for name, a in stored.items() if name in OTHERS or FAMILY.fullmatch(name))
    table: Shape = next(tables, ())  # of tokens; empty where none is known by its name
    seen: dict[str, StoredArray] = {}
    names: dict[str, str] = {}  # in the files
    for name, array in stored.items():
        known = hugging_face_name(name, prefix, ours)
        if known in names:
            raise UserError(
                f"{directory}: {listed([name, names[known]])} are two names of one tensor"
            )
        names[known] = name
        seen[known] = array if _is_table(name, array, table) else _turned(known, array)
    if prefix == ERNIE:  # the names of ERNIE 4.5 begin as those of 3.5 do
        model_type = ConfigReader.from_dir(directory).values.get("model_type")
        if not str(model_type).startswith("ernie4_5"):
            return parts_of(seen, directory)
    if prefix == CHATGLM and HEAD not in seen:
        # PaddleNLP leaves out what is the table of tokens, Hugging Face's files have both.
        seen[HEAD] = seen["transformer.word_embeddings.weight"]
    if ours == OTHERS_BASE:
        return _with_joined_linears(seen, directory)
    return seen if prefix in OWN_FUSED else _split(seen, directory)


def _is_table(name: str, array: StoredArray, table: tuple[int, ...]) -> bool:
    """Whether a head is stored as the table of tokens that it is: in a tied model it may be."""
    if name == HEAD_TABLE:
        return True
    return name == HEAD and array.shape == table and table != table[::-1]


def hugging_face_name(name: str, prefix: str, ours: str) -> str:
    """A name of PaddleNLP's that begins with `prefix`, as Hugging Face has it: with `ours`."""
    if name == HEAD_TABLE:
        return HEAD
    known = name.replace("_proj.layer.", "_proj.")
    if not name.startswith(prefix):
        return known
    known = known.removeprefix(prefix)
    return ours + (_opt_name(known, to_paddle=False) if prefix == OPT else known)


def _opt_name(name: str, to_paddle: bool) -> str:
    """A tensor of OPT's by what the other library calls its module. name: without the prefix."""
    match = OPT_MODULE.fullmatch(name)
    names = OPT_LAYER if match else OPT_OTHERS
    if to_paddle:
        names = {theirs: ours for ours, theirs in names.items()}
    before, module, kind = match.groups() if match else ("", *name.rpartition(".")[::2])
    return f"{before}{names.get(module, module)}{kind if match else f'.{kind}'}"


def _with_joined_linears(
    seen: Mapping[str, StoredArray], directory: Path
) -> dict[str, StoredArray]:
    """ChatGLM2's tensors as Hugging Face has them, and PaddleNLP's later checkpoints.

    In the first ones, queries, keys and values have a matrix each, and the rows of gate and up take
    turns.
    """
    if not separate(seen):
        return dict(seen)
    made: dict[str, StoredArray] = {}
    for name, array in seen.items():
        match = SEPARATE.fullmatch(name)
        if match is None:
            module = name.rpartition(".")[0]
            rows = rows_in_turns(array.shape) if module.endswith(TAKING_TURNS) else None
            made[name] = array if rows is None else Part(array, rows)
        elif match[2] == "query":
            parts = [f"{match[1]}{each}.{match[3]}" for each in ("query", "key", "value")]
            try:
                joined = joined_along(0, [seen[part] for part in parts])
            except (KeyError, ValueError) as error:
                raise UserError(
                    f"{directory}: {listed(parts)} do not make up one matrix: {error}"
                ) from None
            made[f"{match[1]}query_key_value.{match[3]}"] = joined
    return made


def separate(names: Iterable[str]) -> list[str]:
    """The tensors that only PaddleNLP's first checkpoints of ChatGLM2 have.

    Their queries, keys and values have a matrix each, and rows of gate and up take turns.
    """
    return [name for name in names if SEPARATE.fullmatch(name)]


def rows_in_turns(shape: Shape) -> npt.NDArray[np.int64] | None:
    """All the even rows, then all the odd ones; None for a shape without, refused elsewhere."""
    if not shape or 0 in shape or shape[0] % 2:  # an empty one may claim any number of rows
        return None
    return np.arange(shape[0]).reshape(-1, 2).T.reshape(-1)


def _split(seen: Mapping[str, StoredArray], directory: Path) -> dict[str, StoredArray]:
    """The tensors, those of several linears replaced by the linears' own."""
    split: dict[str, StoredArray] = {}
    last = LastRead()
    for name, array in seen.items():
        module, _, kind = name.rpartition(".")
        made: dict[str, StoredArray] = {name: array}
        if kind in ("weight", "bias"):
            cuts = rows_of(module, array.shape, lambda: ConfigReader.from_dir(directory), PADDLENLP)
            whole = Shared(array, last, len(cuts))
            made = {f"{each}.{kind}": Part(whole, rows) for each, rows in cuts.items()} or made
        twice = sorted(made.keys() & split.keys())
        if twice:
            raise UserError(f"{directory}: {listed(twice)} stands alone and in {name}; keep one")
        split.update(made)
    return split


def as_paddle(
    tensors: Mapping[str, StoredArray], config: ConfigReader
) -> Mapping[str, StoredArray]:
    """Hugging Face's tensors under PaddleNLP's names, matrices [in, out].

    Raises UserError for a family whose names PaddleNLP's do not follow, and for tensors that are
    no floats, which PaddleNLP has other names of.
    """
    model_type = config.get_str("model_type")
    tensors = _with_base(tensors, model_type)
    if model_type == "baichuan":
        model_type, tensors = "llama", as_llama(tensors, config)
    others = [
        (prefix, OTHERS_BASE)
        for table, prefix in OTHERS.items()
        if table.startswith(model_type) and OTHERS_BASE + table.removeprefix(prefix) in tensors
    ]
    prefix, ours = others[0] if others else (f"{model_type}.", "model.")
    made: dict[str, StoredArray] = {}
    for name, array in tensors.items():
        if name == HEAD and prefix in TABLE_HEADS:
            made[HEAD_TABLE] = array
        else:
            made[_paddle_name(name, prefix, ours)] = _turned(name, array)
    back = [hugging_face_name(name, prefix, ours) for name in made]
    if prefixes_of(made) != (prefix, ours) or back != list(tensors) or prefix == ERNIE:
        raise UserError(
            f"{config.path.parent}: tensors of model_type {model_type} have no names in "
            "PaddleNLP's layout that are known here; use --format hf"
        )
    codes = [name for name, array in tensors.items() if array.dtype not in FLOAT_DTYPES]
    if codes:
        raise UserError(
            f"{config.path.parent}: {listed(codes)} are codes of a quantized checkpoint, which has "
            "no form in PaddleNLP's layout; convert the unquantized checkpoint, or use --format hf"
        )
    return made


def _with_base(tensors: Mapping[str, StoredArray], model_type: str) -> Mapping[str, StoredArray]:
    """The tensors, with the base in front of names that lack it.

    The first files of BLOOM and OPT leave it out, which all libraries allow.
    """
    for first, table, base in (
        ("bloom", "word_embeddings.weight", OTHERS_BASE),
        ("opt", "decoder.embed_tokens.weight", "model."),
    ):
        if model_type == first and table in tensors:
            return {
                name if name.startswith("lm_head.") else base + name: array
                for name, array in tensors.items()
            }
    return tensors


def _paddle_name(name: str, prefix: str, ours: str) -> str:
    if not name.startswith(ours):
        return name
    known = name.removeprefix(ours)
    return prefix + (_opt_name(known, to_paddle=True) if prefix == OPT else known)
