"""Drafters that read hidden states: what their files hold, held against the model, and weights.

EAGLE's heads and Medusa's lie in a folder of their own, layers for multi-token prediction in the
model's checkpoint or in one beside it. What is in the file decides, where published layouts differ.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.loading.arrays import listed
from predict.loading.build import DecoderBuilder, expected_tensors
from predict.loading.checkpoint import Checkpoint
from predict.loading.draft_config import draft_settings
from predict.loading.layouts import Layout, layout_of
from predict.loading.memory import loading_bytes, weight_bytes
from predict.loading.model import target_of
from predict.loading.platform import Platform
from predict.loading.safetensors_reader import read_header
from predict.loading.sources import CheckpointSource
from predict.loading.torch_file import read_torch
from predict.models import weight_names
from predict.models.ernie4_5 import spec as ernie4_5
from predict.nn.blocks import Norm
from predict.nn.decoder import Decoder, Head
from predict.nn.drafters import ChainDrafter, ChainForm, MedusaHeads
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.plans import (
    BlockPlan,
    LinearPlan,
    NormPlan,
    SlotPlan,
    TablePlan,
    WeightPlan,
    plan_weights,
)
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames

if TYPE_CHECKING:
    from paddle import Tensor

STATES = ("eagle", "mtp", "medusa")  # the methods that read hidden states
MAX_TAPS = 8
# Other drafters' names, in config.json or for speculators_model_type.
OTHERS = {
    "dflash": "DFlash drafts a block of tokens at once",
    "dspark": "DSpark drafts a block of tokens at once",
    "peagle": "P-EAGLE drafts several tokens in one pass",
    "mtp": "speculators' copy of a layer for multi-token prediction",
    "mlp_speculator": "an MLP speculator",
}
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
MEDUSA_UNREAD = (
    *("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "num_heads"),
    *("num_hidden_layers", "medusa_fc_bias", "truncated_vocab_size", "version", "hidden_size"),
    *("vocab_size", "max_paths", "topk", "max_seq_len"),
)
HEAD_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


@dataclass(frozen=True)
class Found:
    """What a drafter's files say. Names are those of `checkpoint`, which may be renamed ones."""

    checkpoint: Checkpoint
    reader: ConfigReader
    spec: DecoderSpec  # of its layers
    names: WeightNames
    slots: Mapping[str, SlotPlan]  # what it has besides its layers
    form: ChainForm | None = None  # None: Medusa's heads
    layers_change: Callable[[BlockPlan], BlockPlan] = lambda plan: plan
    target_ids: npt.NDArray[np.int64] | None = None  # of the head's rows
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrafterWeights:
    """A drafter whose names, shapes and schemes were checked; it is not read yet."""

    found: Found
    plan: WeightPlan
    layout: Layout
    config: EngineConfig
    platform: Platform

    @property
    def spec(self) -> DecoderSpec | None:
        """The network of its layers; None where it keeps nothing in a cache."""
        return None if self.found.form is None else self.found.spec

    @property
    def num_bytes(self) -> int:
        """Bytes of its own weights in memory."""
        return weight_bytes(self.plan, self.layout.scheme, self.config.model.dtype)

    @property
    def loading_bytes(self) -> int:
        """Bytes that `read` takes beside the weights, roughly."""
        return loading_bytes(self.plan, self.layout.scheme, self.layout.stored_bytes)

    def read(self, target: Decoder) -> ChainDrafter | MedusaHeads:
        """Its weights, those that it shares with the model the model's own."""
        config, found = self.config, self.found
        source = CheckpointSource(found.checkpoint)
        builder = DecoderBuilder(
            *(self.plan, source, self.layout, config.model.dtype, self.platform.compiled),
            config.max_length,
        )
        *layers, (own,) = self.plan.layers
        slots: dict[str, Any] = {name: builder.slot(plan) for name, plan in own.slots.items()}
        columns = _columns(found.target_ids, target.head.linear.out_features)
        if found.form is None:
            return _medusa_heads(slots, target, columns)
        norm = slots.get("norm")
        head_spec = target.head.spec if "head" not in slots else HeadSpec()
        if found.form.feeds_normed and norm is None:  # ERNIE's
            norm = target.head.norm
        norm_spec = None if norm is None else found.form.norm
        head = Head(
            replace(head_spec, norm=norm_spec, width=None),
            norm,
            slots.get("head", target.head.linear),
        )
        embedding = target.embedding
        if "embedding" in slots:
            embedding = replace(embedding, table=slots["embedding"])
        tap_norms = (slots[name] for name in sorted(slots) if name.startswith("tap_norm"))
        return ChainDrafter(
            form=found.form,
            embedding=embedding,
            tied=target.head.linear,
            layers=tuple(tuple(map(builder.block, layer)) for layer in layers),
            head=head,
            ropes=builder.ropes(),
            product=slots.get("product"),
            tap_norms=tuple(tap_norms),
            taps_norm=slots.get("taps_norm"),
            token_norm=slots.get("token_norm"),
            state_norm=slots.get("state_norm"),
            columns=columns,
        )


def open_drafter(
    config: EngineConfig, target: DecoderSpec, reader: ConfigReader, platform: Platform
) -> DrafterWeights | None:
    """The drafter of hidden states that `config`, the model's, asks for; None where it is none.

    target, reader: the model's. Raises UserError where the two do not fit together, before any
    weight is read.
    """
    method = config.speculation.speculate_method
    if method not in STATES:
        return None
    if platform.gpu is not None or not platform.device.is_cpu:
        raise UserError(
            f"speculate_method {method} drafts on the CPU alone for now, and --device is "
            f"{config.model.device}; use draft_model, lookahead or inference_with_reference there"
        )
    if config.model.mode == "static":
        raise UserError(
            f"speculate_method {method} needs the model's hidden states, which exported programs "
            "do not give yet; use --mode dynamic, or another method"
        )
    if target.prefix is not None or target.embedding.num_positions:
        raise UserError(
            f"speculate_method {method} takes rotary positions, and model_type "
            f"{target.model_type} places tokens in another way; use another method"
        )
    path = config.speculation.draft_model_name_or_path
    if method == "mtp":
        directory = path or config.model.model_name_or_path
        found = _mtp(Checkpoint(directory), target, reader)
    else:
        assert path is not None
        found = (_eagle if method == "eagle" else _medusa)(Path(path), target)
    return _opened(config, found, platform)


def _opened(config: EngineConfig, found: Found, platform: Platform) -> DrafterWeights:
    settings = draft_settings(config, str(found.checkpoint.directory))
    plan = plan_weights(found.spec, found.names)
    layers = () if found.form is None else plan.layers
    changed = tuple(tuple(map(found.layers_change, layer)) for layer in layers)
    own = BlockPlan(found.spec.layers[0][0], dict(found.slots))
    # Embedding and head are the model's, or among the slots.
    spec = replace(plan.spec, vocab_size=0, tie_word_embeddings=True)
    nothing = LinearPlan(("lm_head",), (0,), spec.hidden_size, False)
    plan = replace(
        *(plan,), spec=spec, layers=(*changed, (own,)), final_norm=None, embedding_norm=None,
        embedding_projection=None, head_projection=None, head=nothing,
    )  # fmt: skip
    checkpoint = found.checkpoint
    source = CheckpointSource(checkpoint)
    layout = layout_of(
        *(found.reader, checkpoint, source, settings.quantization.settings, plan),
        target_of(config, platform),
    )
    expected = {n: s for n, s in expected_tensors(plan, layout).items() if n != plan.embedding}
    checkpoint.check(expected, (*found.ignored, *layout.ignored))
    return DrafterWeights(found, plan, layout, settings, platform)


def _columns(ids: npt.NDArray[np.int64] | None, vocab_size: int) -> Tensor | None:
    """By token, the column of the drafter's logits that is its; one behind all where none is."""
    import paddle

    if ids is None:
        return None
    columns = np.full(vocab_size, len(ids), np.int64)
    columns[ids] = np.arange(len(ids))
    return paddle.to_tensor(columns, place=paddle.CPUPlace())


def _renamed(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> Checkpoint:
    """The checkpoint with other names; None leaves a tensor out.

    Raises UserError where two tensors get one name.
    """
    made, of = copy.copy(checkpoint), dict[str, str]()
    made.tensors = {}
    for name, array in checkpoint.tensors.items():
        known = rename(name)
        if known is None:
            continue
        if known in of:
            raise UserError(
                f"{checkpoint.directory}: {listed([of[known], name])} are two names of one tensor; "
                "take one of them out"
            )
        of[known] = name
        made.tensors[known] = array
    return made


def _check_sizes(reader: ConfigReader, target: DecoderSpec, hidden_size: int) -> None:
    vocab_size = reader.values.get("vocab_size", target.vocab_size)
    for name, own, theirs in (
        ("hidden_size", hidden_size, target.hidden_size),
        ("vocab_size", vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise UserError(
                f"{reader.path}: this head is for a model of {name} {own}, and the model has "
                f"{theirs}; --draft_model_name_or_path takes a head that was trained for this model"
            )


def _linear(name: str, out: int, into: int, tensors: Iterable[str]) -> LinearPlan:
    return LinearPlan((name,), (out,), into, f"{name}.bias" in tensors)


# EAGLE


def _eagle_name(name: str) -> str:
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    for index, place in enumerate(("low", "mid", "high")):
        name = name.replace(f"aux_norm_{place}.", f"fc_norm.{index}.")
    return name


def _eagle(path: Path, target: DecoderSpec) -> Found:
    """An EAGLE head: 1 and 2 where its layer reads one state, 3 and 3.1 where it reads both."""
    reader = ConfigReader.from_dir(path)
    _refuse_others(reader)
    checkpoint = _renamed(Checkpoint(path), _eagle_name)
    there = checkpoint.tensors
    at = "layers.0.self_attn."
    inner = reader
    if isinstance(block := reader.values.get("transformer_layer_config"), dict):
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
    reads_both = query is not None and query.shape[-1] == 2 * hidden
    _check_sizes(reader, target, reader.values.get("target_hidden_size") or hidden)
    if not reads_both:
        if has_norm:
            spec = spec.with_blocks(AttentionBlock, lambda _, b: replace(b, norm=norm))
        slots: dict[str, SlotPlan] = {"product": _linear("fc", hidden, 2 * hidden, there)}
        slots |= _own_embedding(checkpoint, target.vocab_size, hidden)
        reader.check_unread(EAGLE_UNREAD)
        form = ChainForm(("norm",), norm=norm)
        ignored = ("rotary_emb.inv_freq",)
        return Found(checkpoint, inner, spec, WeightNames(layer="layers.0."), slots, form,
                     ignored=ignored)  # fmt: skip
    return _eagle3(checkpoint, reader, inner, spec, target)


def _eagle3(
    checkpoint: Checkpoint,
    reader: ConfigReader,
    inner: ConfigReader,
    spec: DecoderSpec,
    target: DecoderSpec,
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
        slots["product"] = _linear("fc", hidden, len(taps) * width, there)
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
    if "lm_head.weight" in there or rows != target.vocab_size:
        slots["head"] = _linear("lm_head", rows, hidden, there)
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

    ids = _mapped(checkpoint, "d2t", rows, target.vocab_size, is_offset=True)
    if ids is None and rows != target.vocab_size:
        raise UserError(
            f"{checkpoint.directory}: d2t is missing, which says what tokens the {rows} of "
            "draft_vocab_size are; complete the download"
        )
    ignored = ("rotary_emb.inv_freq", "t2d", "d2t")
    names = WeightNames(layer="layers.0.")
    return Found(checkpoint, inner, spec, names, slots, form, both, ids, ignored)


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
    if isinstance(block := reader.values.get("eagle_config"), dict):
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


def _refuse_others(reader: ConfigReader) -> None:
    """Raises UserError for another kind of drafter, by its name."""
    kind = str(reader.values.get("speculators_model_type") or "eagle3").lower()
    said = [str(name) for name in reader.values.get("architectures") or []]
    words = [kind, *(name.lower() for name in said)]
    if reader.values.get("dflash_config") is not None:
        words.append("dflash")
    if reader.values.get("parallel_drafting"):
        words.append("peagle")
    for name, what in OTHERS.items():
        if any(word.replace("-", "").replace("_", "").startswith(name.replace("_", ""))
               for word in words):  # fmt: skip
            raise UserError(
                f"{reader.path}: {what}, which is not supported yet (--speculate_method eagle "
                "takes heads of EAGLE-1, 2, 3 and 3.1)"
            )


def _mapped(
    checkpoint: Checkpoint, name: str, count: int, vocab_size: int, is_offset: bool
) -> npt.NDArray[np.int64] | None:
    """The model's token of each of a drafter's; None where the file has no table of them."""
    if name not in checkpoint.tensors:
        return None
    values = checkpoint.read(name).astype(np.int64).reshape(-1)
    if len(values) != count:
        raise UserError(
            f"{checkpoint.directory}: {name} has {len(values)} entries, and the drafter has "
            f"{count} tokens; the two do not belong together"
        )
    ids = values + np.arange(count) if is_offset else values
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < count:
        raise UserError(
            f"{checkpoint.directory}: {name} names tokens from {ids.min()} to {ids.max()}, "
            f"{len(np.unique(ids))} different ones for {count} (allowed: a token of its own for "
            f"each, 0 to {vocab_size - 1}); this head is for another model"
        )
    return ids


# Layers for multi-token prediction


def _mtp(checkpoint: Checkpoint, target: DecoderSpec, reader: ConfigReader) -> Found:
    """The layer that a model was trained with to draft; of the families that have one."""
    count = reader.values.get("num_nextn_predict_layers") or reader.values.get("num_mtp_layers")
    kinds = {
        "deepseek_v3": _behind_last,
        "glm4_moe": _behind_last,
        "ernie4_5_moe": _ernie,
    }
    if target.model_type not in kinds:
        raise UserError(
            f"speculate_method mtp takes model_type {', '.join(kinds)}, and this model is "
            f"{target.model_type}; use another method"
        )
    if count is not None and count != 1:
        raise UserError(
            f"{reader.path}: num_nextn_predict_layers is {count} (allowed: 1, the one layer that "
            "makes all drafts)"
        )
    return kinds[target.model_type](checkpoint, target, reader)


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
    return _renamed(
        checkpoint,
        lambda name: (
            name
            if name.startswith(tuple(parts)) and not any(part in name for part in ignored)
            else None
        ),
    )


def _behind_last(checkpoint: Checkpoint, target: DecoderSpec, reader: ConfigReader) -> Found:
    """DeepSeek's and GLM's: a whole layer, behind the last one.

    Its copies of the model's embedding and head stay unread.
    """
    names, hidden = weight_names(reader).found_in(checkpoint.tensors), target.hidden_size
    prefix, norm = names.layer.format(layer=target.num_layers), target.head.norm
    assert norm is not None
    copies = (f"{prefix}embed_tokens.", f"{prefix}shared_head.head.")
    there = _of_mtp(checkpoint, (prefix,), f"{prefix}eh_proj.weight", copies)
    slots: dict[str, SlotPlan] = {
        "product": _linear(f"{prefix}eh_proj", hidden, 2 * hidden, there.tensors),
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
        "product": _linear(f"{base}mtp_linear_proj.0", hidden, 2 * hidden, there.tensors),
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


# Medusa


def _medusa_name(name: str) -> str | None:
    if match := VLLM_BLOCK.fullmatch(name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := VLLM_HEAD.fullmatch(name):
        return f"{match[1]}.head.weight"
    if match := HEAD_NAME.fullmatch(name):
        return f"{match[1]}.{match[2] if match[3] else 'head'}.{match[3] or ''}{match[4]}"
    return name


def _medusa(path: Path, target: DecoderSpec) -> Found:
    """Medusa's heads. Published configs may name another number of heads: tensors are counted."""
    reader = ConfigReader.from_dir(path)
    _refuse_others(reader)
    torch_file, safe_file = path / "medusa_lm_head.pt", path / "medusa_lm_head.safetensors"
    if safe_file.exists() or torch_file.exists():
        read = read_header(safe_file) if safe_file.exists() else read_torch(torch_file)
        checkpoint = _renamed(Checkpoint.of(path, read), _medusa_name)
    else:
        whole = Checkpoint(path)
        own = any(name.startswith("medusa_head.") for name in whole.tensors)
        checkpoint = _renamed(
            whole,
            lambda name: None if own and "medusa_head." not in name else _medusa_name(name),
        )
    there, hidden = checkpoint.tensors, target.hidden_size
    numbers = [match for name in there if (match := re.match(r"(\d+)\.(\d+)\.linear\.", name))]
    num_heads = 1 + max((int(match[1]) for match in numbers), default=-1)
    num_layers = 1 + max((int(match[2]) for match in numbers), default=-1)
    if not numbers:
        raise UserError(
            f"{path} has no Medusa heads (names like 0.0.linear.weight, or "
            "blocks.0.layers.0.weight); it has "
            f"{listed(list(there)[:3])}"
        )
    first = there.get("0.0.linear.weight")
    if first is not None:
        _check_sizes(reader, target, first.shape[0])
    ids = _mapped_tokens(checkpoint, target.vocab_size)
    rows = target.vocab_size if ids is None else len(ids)
    slots: dict[str, SlotPlan] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            slots[f"block_{head:03d}_{layer:03d}"] = _linear(name, hidden, hidden, there)
        if f"{head}.head.weight" in there:
            slots[f"head_{head:03d}"] = _linear(f"{head}.head", rows, hidden, there)
    owned = sum(name.startswith("head_") for name in slots)
    shared = reader.get_bool("original_lm_head", False)
    if owned not in (0, num_heads) and not (shared and owned == 1 and "head_000" in slots):
        raise UserError(
            f"{path} has {num_heads} Medusa heads and {owned} matrices for logits (allowed: one "
            "for each, or none where they share the model's); complete the download"
        )
    reader.check_unread(MEDUSA_UNREAD)
    names = WeightNames()
    return Found(
        *(checkpoint, reader, target, names, slots), target_ids=ids, ignored=("token_map",)
    )


def _mapped_tokens(checkpoint: Checkpoint, vocab_size: int) -> npt.NDArray[np.int64] | None:
    found = checkpoint.tensors.get("token_map")
    count = 0 if found is None else int(np.prod(found.shape))
    return _mapped(checkpoint, "token_map", count, vocab_size, is_offset=False)


def _medusa_heads(slots: Mapping[str, Any], target: Decoder, columns: Tensor | None) -> MedusaHeads:
    blocks: dict[str, list[Any]] = {}
    for name in sorted(slots):
        if name.startswith("block_"):
            blocks.setdefault(name[6:9], []).append(slots[name])
    spec = replace(target.head.spec, norm=None, width=None)
    shared = slots.get("head_000") if "head_001" not in slots else None
    heads = []
    for head in blocks:
        own = slots.get(f"head_{head}", shared)
        linear = target.head.linear if own is None else own
        heads.append(Head(spec if own is None else HeadSpec(norm=None), None, linear))
    return MedusaHeads(tuple(map(tuple, blocks.values())), tuple(heads), columns)
