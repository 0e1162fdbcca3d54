"""EAGLE heads: 1 and 2, whose layer reads one state; 3 and 3.1, whose attention reads both."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.loading.arrays import Part, StoredArray
from predict.loading.checkpoint import Checkpoint
from predict.loading.drafters._found import (
    Found,
    check_sizes,
    linear,
    mapped,
    refuse_others,
    renamed,
)
from predict.nn.blocks import Norm
from predict.nn.drafters import ChainForm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.plans import (
    BlockPlan,
    LinearPlan,
    NormPlan,
    SlotPlan,
    TablePlan,
)
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

MAX_TAPS = 8
EAGLE_UNREAD = (
    *("speculators_config", "speculators_version", "has_no_defaults_at_init", "qkv_bias", "bias"),
    *(
        "block_size",
        "embed_requires_grad",
        "ttt_length",
        "loss_type",
        "is_eagle",
        "aux_hidden_size",
    ),
)


def eagle(path: Path, target: DecoderSpec, embedding: Callable[[], StoredArray]) -> Found:
    """An EAGLE head: 1 and 2 where its layer reads one state, 3 and 3.1 where it reads both.

    embedding: finds the model's, whose rows a tied head has for its logits.
    """
    reader = ConfigReader.from_dir(path)
    refuse_others(reader)
    checkpoint = renamed(Checkpoint(path), _eagle_name)
    there = checkpoint.tensors
    at = "layers.0.self_attn."
    inner = reader
    if block := _block(reader, "transformer_layer_config"):
        inner = reader.part(block, "transformer_layer_config")
    inner = inner.with_defaults(vocab_size=target.vocab_size, num_hidden_layers=1)
    inner.values["model_type"] = "llama"
    if inner.get_int("num_hidden_layers") != 1:
        raise inner.wrong("num_hidden_layers", "1: a head of one layer")
    norm = Norm(epsilon=inner.get_float("rms_norm_eps", 1e-6))
    has_norm = "layers.0.input_layernorm.weight" in there
    spec = llama_like(
        inner,
        attention={
            "norm": None,
            "qkv_bias": f"{at}q_proj.bias" in there,
            "out_bias": f"{at}o_proj.bias" in there,
            "qk_norm": norm if f"{at}q_norm.weight" in there else None,
        },
        norm=norm,
    )
    hidden = spec.hidden_size
    query = there.get(f"{at}q_proj.weight")
    reads_both = "layers.0.hidden_norm.weight" in there or (
        query is not None and query.shape[-1] == 2 * hidden  # where that norm was lost
    )
    # EAGLE-3's product alone makes states of another size.
    theirs = reader.optional_int("target_hidden_size")
    for part in (reader, inner):
        check_sizes(part, target, theirs if theirs and reads_both else hidden)
    if not reads_both:
        if has_norm:
            spec = spec.with_blocks(AttentionBlock, lambda _, b: replace(b, norm=norm))
        slots: dict[str, SlotPlan] = {"product": linear("fc", hidden, 2 * hidden, there)}
        slots |= _own_embedding(checkpoint, target.vocab_size, hidden)
        reader.check_unread(EAGLE_UNREAD)
        form = ChainForm(("norm",), norm=norm)
        ignored = ("rotary_emb.inv_freq",)
        return Found(checkpoint, inner, spec, WeightNames(layer="layers.0."), slots, form,
                     ignored=ignored)  # fmt: skip
    return _eagle3(checkpoint, reader, inner, spec, target, embedding)


def _eagle3(
    checkpoint: Checkpoint,
    reader: ConfigReader,
    inner: ConfigReader,
    spec: DecoderSpec,
    target: DecoderSpec,
    embedding: Callable[[], StoredArray],
) -> Found:
    there, hidden, norm = checkpoint.tensors, spec.hidden_size, spec.head.norm
    assert norm is not None
    taps, width = _taps(reader, target), target.hidden_size
    slots: dict[str, SlotPlan] = {
        "token_norm": NormPlan(norm, "layers.0.input_layernorm.weight", None, hidden),
        "state_norm": NormPlan(norm, "layers.0.hidden_norm.weight", None, hidden),
        "norm": NormPlan(norm, "norm.weight", None, hidden),
        **_own_embedding(checkpoint, target.vocab_size, hidden),
    }
    if "embedding" not in slots and hidden != width:
        raise UserError(
            f"{checkpoint.directory}: embed_tokens.weight is missing, and the model's rows have "
            f"{width} values, not {hidden}; complete the download"
        )
    if taps != ("norm",):
        slots["product"] = linear("fc", hidden, len(taps) * width, there)
    elif hidden != width:
        raise reader.wrong("use_aux_hidden_state", "true, for a head of another hidden_size")
    if reader.get_bool("fc_norm", False) or "fc_norm.0.weight" in there:
        slots |= {
            f"tap_norm_{index}": NormPlan(norm, f"fc_norm.{index}.weight", None, width)
            for index in range(len(taps))
        }
    if reader.get_bool("norm_before_fc", False) or "input_norm.weight" in there:
        if "tap_norm_0" in slots:
            raise reader.wrong("norm_before_fc", "false, beside fc_norm")
        slots["taps_norm"] = NormPlan(norm, "input_norm.weight", None, len(taps) * width)
    rows = reader.optional_int("draft_vocab_size") or target.vocab_size
    ids = mapped(checkpoint, "d2t", rows, target.vocab_size, is_offset=True)
    if ids is None and rows != target.vocab_size:
        raise UserError(
            f"{checkpoint.directory}: d2t is missing, which says what tokens the {rows} of "
            "draft_vocab_size are; complete the download"
        )
    if ids is not None and inner.get_bool("tie_word_embeddings", False):
        own = "embed_tokens.weight"
        if "lm_head.weight" not in there:  # of the embedding, the rows of its tokens
            there["lm_head.weight"] = Part(there[own] if own in there else embedding(), ids)
    if "lm_head.weight" in there or rows != target.vocab_size:
        slots["head"] = linear("lm_head", rows, hidden, there)
    elif hidden != width:
        raise UserError(f"{checkpoint.directory}: lm_head.weight is missing; complete the download")
    form = ChainForm(
        taps,
        reads_both=True,
        feeds_normed=reader.get_bool("norm_output", False),
        adds_normed=reader.get_bool("norm_before_residual", False),
        norm=norm,
    )
    reader.check_unread(EAGLE_UNREAD)

    def both(plan: BlockPlan) -> BlockPlan:
        """With twice the inputs of queries, keys and values."""
        slots = dict(plan.slots)
        if isinstance(qkv := slots.get("qkv"), LinearPlan):
            slots["qkv"] = replace(qkv, in_features=2 * hidden)
        return replace(plan, slots=slots)

    ignored = ("rotary_emb.inv_freq", "t2d", "d2t")
    names = WeightNames(layer="layers.0.")
    return Found(checkpoint, inner, spec, names, slots, form, both, ids, ignored)


def _block(reader: ConfigReader, key: str) -> dict[str, Any]:
    """The object of that key, empty where there is none."""
    block = reader.values.get(key)
    if block is not None and not isinstance(block, dict):
        raise reader.wrong(key, "an object")
    return block or {}


def _own_embedding(
    checkpoint: Checkpoint, vocab_size: int, hidden_size: int
) -> dict[str, SlotPlan]:
    name, shape = "embed_tokens.weight", (vocab_size, hidden_size)
    return {"embedding": TablePlan(name, shape, shape, False)} if name in checkpoint.tensors else {}


def _taps(reader: ConfigReader, target: DecoderSpec) -> tuple[str, ...]:
    """The states that an EAGLE-3 head reads; ("norm",): the final one, without a product.

    hidden_states[i] of transformers is the output of layer i - 1. Ids at the top level are those
    i. In eagle_config there are two conventions: a first id of 1 names outputs of layers.
    """
    key, num_layers = "eagle_aux_hidden_state_layer_ids", target.num_layers
    part, given, shift = reader, reader.values.get(key), 0
    if block := _block(reader, "eagle_config"):
        part = reader.part(block, "eagle_config")
        if part.get_bool("use_aux_hidden_state", True) is False:
            return ("norm",)
        own = part.values.get(key)
        if own is not None and given is None:
            given, shift = own, int(isinstance(own, list) and own[:1] == [1])
    else:
        part = reader
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_TAPS
    if not (is_list and all(type(i) is int and 1 <= i + shift <= num_layers for i in given)):
        raise UserError(
            f"{reader.path}: {key} is {given} (allowed: up to {MAX_TAPS} of {1 - shift} to "
            f"{num_layers - shift}, for the model's {num_layers} layers); this head is for another "
            "model, or its config.json must name the layers"
        )
    count = reader.optional_int("num_aux_hidden_states")
    if count is not None and count != len(given):
        raise reader.wrong("num_aux_hidden_states", f"{len(given)}, as many as {key} names")
    return tuple(f"layers.{i + shift - 1}" for i in given)


def _eagle_name(name: str) -> str:
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    for index, place in enumerate(("low", "mid", "high")):
        name = name.replace(f"aux_norm_{place}.", f"fc_norm.{index}.")
    return name
