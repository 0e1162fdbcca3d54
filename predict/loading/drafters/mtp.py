"""Layers for multi-token prediction, of the families that were trained with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from predict.errors import UserError
from predict.loading.arrays import Turned
from predict.loading.checkpoint import Checkpoint
from predict.loading.drafters._found import Found, linear, renamed
from predict.models import weight_names
from predict.models.ernie4_5 import spec as ernie4_5
from predict.nn.drafters import ChainForm
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import (
    NormPlan,
    SlotPlan,
)
from predict.nn.spec import DecoderSpec

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
PADDLENLP = ("deepseek_v3_mtp.", "model.")  # what names begin with, as stored and as read


def mtp(checkpoint: Checkpoint, target: DecoderSpec, reader: ConfigReader) -> Found:
    """The layer that a model was trained with to draft; of the families that have one."""
    values = _of_text(reader)
    name = next((each for each in COUNTS if values.get(each)), COUNTS[0])
    if (count := values.get(name)) is not None and count != 1:
        raise UserError(
            f"{reader.path}: {name} is {count} (allowed: 1, the one layer that makes all drafts)"
        )
    return KINDS[target.model_type](checkpoint, target, reader)


def _of_text(reader: ConfigReader) -> Mapping[str, Any]:
    """What the file says of its text model."""
    found = reader.values.get("text_config")
    return found if isinstance(found, dict) else reader.values


def check_family(target: DecoderSpec) -> None:
    """Raises UserError for a family that has no such layer."""
    if target.model_type not in KINDS:
        raise UserError(
            f"speculate_method mtp takes model_type {', '.join(KINDS)}, and this model is "
            f"{target.model_type}; use another method"
        )


def _as_deepseeks(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """PaddleNLP's folder (deepseek_v3_mtp) by DeepSeek's names, matrices [out, in]; others as is.

    Where the folder has an embedding, the checkpoint has turned its matrices already.
    """
    own = next((part for part in PADDLENLP if f"{part}eh_proj.weight" in checkpoint.tensors), None)
    if own is None:
        return checkpoint

    def rename(name: str) -> str | None:
        rest = name.removeprefix(own)
        if not name.startswith(own) or rest in ("embed_tokens.weight", "eh_proj.bias"):
            return None
        rest = rest.removeprefix("layers.0.")
        return f"{prefix}{'shared_head.' if rest == 'norm.weight' else ''}{rest}"

    made = renamed(checkpoint, rename)
    if not checkpoint.is_paddle:
        made.tensors = {
            name: Turned(array) if len(array.shape) == 2 else array
            for name, array in made.tensors.items()
        }
    return made


def _behind_last(checkpoint: Checkpoint, target: DecoderSpec, reader: ConfigReader) -> Found:
    """DeepSeek's and GLM's: a whole layer, behind the last one.

    Its copies of the model's embedding and head stay unread.
    """
    names, hidden = weight_names(reader).found_in(checkpoint.tensors), target.hidden_size
    prefix, norm = names.layer.format(layer=target.num_layers), target.head.norm
    assert norm is not None
    checkpoint = _as_deepseeks(checkpoint, prefix)
    copies = (f"{prefix}embed_tokens.", f"{prefix}shared_head.head.")
    there = _of_mtp(checkpoint, (prefix,), f"{prefix}eh_proj.weight", copies)
    slots: dict[str, SlotPlan] = {
        "product": linear(f"{prefix}eh_proj", hidden, 2 * hidden, there.tensors),
        "token_norm": NormPlan(norm, f"{prefix}enorm.weight", None, hidden),
        "state_norm": NormPlan(norm, f"{prefix}hnorm.weight", None, hidden),
        "norm": NormPlan(norm, f"{prefix}shared_head.norm.weight", None, hidden),
    }
    spec = replace(target, layers=target.layers[-1:])
    form = ChainForm(("norm",), feeds_normed=True, norm=norm)
    return Found(
        *(there, reader, spec, replace(names, layer=prefix, drafting=()), slots, form),
        ignored=names.ignored,
    )


def _ernie(checkpoint: Checkpoint, target: DecoderSpec, reader: ConfigReader) -> Found:
    """ERNIE 4.5's: a dense layer, or one of experts; the model's own norm is behind it."""
    names, hidden = weight_names(reader).found_in(checkpoint.tensors), target.hidden_size
    base, norm = names.layer.removesuffix("layers.{layer}."), target.head.norm
    assert norm is not None
    there = _of_mtp(checkpoint, (f"{base}mtp_",), f"{base}mtp_linear_proj.0.weight")
    slots: dict[str, SlotPlan] = {
        "product": linear(f"{base}mtp_linear_proj.0", hidden, 2 * hidden, there.tensors),
        "token_norm": NormPlan(norm, f"{base}mtp_emb_norm.0.weight", None, hidden),
        "state_norm": NormPlan(norm, f"{base}mtp_hidden_norm.0.weight", None, hidden),
    }
    prefix = f"{base}mtp_block.0."
    is_dense = f"{prefix}mlp.gate_proj.weight" in there.tensors
    layers = (ernie4_5(reader).layers if is_dense else target.layers)[-1:]
    form = ChainForm(("norm",), feeds_normed=True, norm=norm)
    return Found(
        *(there, reader, replace(target, layers=layers), replace(names, layer=prefix, ignored=())),
        *(slots, form),
    )


def _beside(checkpoint: Checkpoint, target: DecoderSpec, reader: ConfigReader) -> Found:
    """Qwen3-Next's and Qwen3.5's: a layer as the model's last one with attention."""
    if _of_text(reader).get("mtp_use_dedicated_embeddings"):
        raise UserError(
            f"{reader.path}: mtp_use_dedicated_embeddings is true (allowed: false, the layer has "
            "the model's table of tokens); use another --speculate_method"
        )
    hidden, norm = target.hidden_size, target.head.norm
    assert norm is not None
    there = _of_mtp(checkpoint, ("mtp.",), "mtp.fc.weight")
    names = replace(weight_names(reader), drafting=()).found_in(there.tensors)
    slots: dict[str, SlotPlan] = {
        "product": linear("mtp.fc", hidden, 2 * hidden, there.tensors),
        "token_norm": NormPlan(norm, "mtp.pre_fc_norm_embedding.weight", None, hidden),
        "state_norm": NormPlan(norm, "mtp.pre_fc_norm_hidden.weight", None, hidden),
        "norm": NormPlan(norm, "mtp.norm.weight", None, hidden),
    }
    caching = [layer for layer in target.layers if layer[0].cache_rows]
    form = ChainForm(("norm",), feeds_normed=True, norm=norm)
    return Found(
        *(there, reader, replace(target, layers=(caching[-1],))),
        *(replace(names, layer="mtp.layers.0."), slots, form),
    )


KINDS = {
    "deepseek_v3": _behind_last,
    "glm4_moe": _behind_last,
    "ernie4_5_moe": _ernie,
    "qwen3_next": _beside,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _beside),
}


def _of_mtp(
    checkpoint: Checkpoint, parts: Sequence[str], sign: str, left_out: Sequence[str] = ()
) -> Checkpoint:
    """The tensors whose names begin with one of `parts`. sign: one that must be there."""
    if sign not in checkpoint.tensors:
        raise UserError(
            f"{checkpoint.directory} has no layer that drafts: {sign} is missing; give the folder "
            "that has it by --draft_model_name_or_path, or use another --speculate_method"
        )
    ignored = tuple(left_out)
    return renamed(
        checkpoint,
        lambda name: (
            name
            if name.startswith(tuple(parts)) and not any(part in name for part in ignored)
            else None
        ),
    )
