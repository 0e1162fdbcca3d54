"""Drafters that read hidden states: what their files hold, held against the model, and weights.

EAGLE's heads and Medusa's lie in a folder of their own, layers for multi-token prediction in the
model's checkpoint or in one beside it. What is in the file decides, where published layouts differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.config.speculation import STATES
from predict.errors import UserError
from predict.loading.arrays import FLOAT_DTYPES, StoredArray
from predict.loading.build import DecoderBuilder, expected_tensors
from predict.loading.checkpoint import Checkpoint
from predict.loading.draft_config import draft_settings
from predict.loading.drafters._found import Found, shared_checkpoint
from predict.loading.drafters.eagle import eagle
from predict.loading.drafters.medusa import medusa, medusa_heads
from predict.loading.drafters.mtp import check_family, mtp
from predict.loading.layouts import Layout, layout_of
from predict.loading.layouts.local import Local, order_of, units
from predict.loading.memory import loading_bytes, weight_bytes
from predict.loading.model import check_linears, target_of
from predict.loading.platform import Platform
from predict.loading.sources import CheckpointSource
from predict.models import weight_names
from predict.nn.cuts import linears_of_features, local_plan, local_spec
from predict.nn.decoder import Decoder, Head
from predict.nn.drafters import MEDUSA_TAPS, ChainDrafter, MedusaHeads
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import (
    BlockPlan,
    LinearPlan,
    WeightPlan,
    plan_weights,
)
from predict.nn.shares import Ranks
from predict.nn.spec import DecoderSpec, HeadSpec

if TYPE_CHECKING:
    from paddle import Tensor


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

    def check_given(self, taps: Sequence[str] | None, program: str) -> None:
        """Raises UserError where an exported program does not give the states that it reads."""
        wanted = self.taps
        if not {*wanted} <= {*(taps or ())}:
            raise UserError(
                f"the drafter reads the hidden states of {', '.join(wanted)}, and the program in "
                f"{program} gives {', '.join(taps) if taps else 'none'}; export it with this "
                "drafter and --return_full_hidden_states"
            )

    @property
    def taps(self) -> Sequence[str]:
        """The hidden states that it reads."""
        return MEDUSA_TAPS if self.found.form is None else self.found.form.taps

    @property
    def num_heads(self) -> int:
        """Medusa's heads."""
        return len({name[6:9] for name in self.found.slots if name.startswith("block_")})

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
            place=self.platform.place,
            gpu=self.platform.gpu,
        )
        *layers, (own,) = self.plan.layers
        slots: dict[str, Any] = {name: builder.slot(plan) for name, plan in own.slots.items()}
        share = target.head.share
        rows = target.head.linear.out_features if share is None else share.whole.vocab_size
        columns = _columns(found.target_ids, rows)
        if found.form is None:
            return medusa_heads(slots, target, columns)
        norm = slots.get("norm")
        head_spec = target.head.spec if "head" not in slots else HeadSpec()
        if found.form.feeds_normed and norm is None:  # ERNIE's
            norm = target.head.norm
        norm_spec = None if norm is None else found.form.norm
        head = Head(
            replace(head_spec, norm=norm_spec, width=None),
            norm,
            slots.get("head", target.head.linear),
            share=None if "head" in slots else share,
        )
        embedding = target.embedding
        if "embedding" in slots:
            embedding = replace(embedding, table=slots["embedding"], share=None)
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
    config: EngineConfig,
    target: DecoderSpec,
    reader: ConfigReader,
    platform: Platform,
    ranks: Ranks | None = None,
) -> DrafterWeights | None:
    """The drafter of hidden states that `config`, the model's, asks for; None where it is none.

    target, reader: the whole model's. ranks: of the rank that runs it. Raises UserError where the
    two do not fit together, before any weight is read.
    """
    method = config.speculation.speculate_method
    if method not in STATES:
        return None
    if platform.gpu is None and not platform.device.is_cpu:
        raise UserError(
            f"speculate_method {method} drafts on CPUs and NVIDIA GPUs alone, and --device is "
            f"{config.model.device}; use draft_model, lookahead or inference_with_reference there"
        )
    found = find_drafter(config, target, reader)
    opened = None if found is None else _opened(config, found, platform)
    return opened if opened is None or ranks is None else _part(opened, ranks)


def find_drafter(config: EngineConfig, target: DecoderSpec, reader: ConfigReader) -> Found | None:
    """What the files of the drafter of hidden states say; None where `config` asks for none.

    Raises UserError where it is not for this model.
    """
    method = config.speculation.speculate_method
    if method not in STATES:
        return None
    if target.prefix is not None or target.embedding.num_positions:
        raise UserError(
            f"speculate_method {method} takes rotary positions, and model_type "
            f"{target.model_type} places tokens in another way; use another method"
        )
    path = config.speculation.draft_model_name_or_path
    if method == "mtp":
        check_family(target)
        directory = Path(path or config.model.model_name_or_path)
        if directory.is_file():
            raise UserError(
                f"speculate_method mtp reads its layer from a folder, and {directory} is a file; "
                "give the folder by --draft_model_name_or_path, or use another method"
            )
        is_program = config.model.mode == "static"
        if is_program and directory == Path(config.model.model_name_or_path):
            return mtp(shared_checkpoint(config), target, reader)
        return mtp(Checkpoint(directory), target, reader)
    assert path is not None
    kind = eagle if method == "eagle" else medusa
    has_head = method == "medusa" and not target.tie_word_embeddings
    return kind(Path(path), target, partial(_matrix, config, reader, has_head))


def _matrix(config: EngineConfig, reader: ConfigReader, is_head: bool) -> StoredArray:
    """The model's embedding as it is stored; is_head: its matrix for logits."""
    is_program = config.model.mode == "static"
    directory = Path(config.model.model_name_or_path)
    there = (shared_checkpoint(config) if is_program else Checkpoint(directory)).tensors
    names = weight_names(reader).found_in(there)
    name = f"{names.head}.weight" if is_head else names.embedding
    found = there.get(name)
    if found is None or found.dtype not in FLOAT_DTYPES:
        stored = "is not there" if found is None else f"is {found.dtype}"
        raise UserError(
            f"the drafter has no matrix for logits, and {name} of the model, whose rows it would "
            f"have, {stored} or in codes; use a model in floats, or a drafter with a matrix"
        )
    return found


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
    runs_on = target_of(config, platform)
    layout = layout_of(
        *(found.reader, checkpoint, source, settings.quantization.settings, plan), runs_on
    )
    try:
        check_linears(plan, layout, runs_on)
    except UserError as error:
        said = str(error).replace("--quant_type", "--draft_model_quant_type")
        raise UserError(f"the drafter in {checkpoint.directory}: {said}") from None
    expected = {n: s for n, s in expected_tensors(plan, layout).items() if n != plan.embedding}
    checkpoint.check(expected, (*found.ignored, *layout.ignored))
    return DrafterWeights(found, plan, layout, settings, platform)


def _part(whole: DrafterWeights, ranks: Ranks) -> DrafterWeights:
    """What a rank has of the layers; all of them where ranks cannot share them out.

    What is beside them is whole on each rank.
    """
    found, plan = whole.found, whole.plan
    unit = units(whole.layout, linears_of_features(plan))
    *layers, own = plan.layers
    if found.form is None:
        return whole
    for whole_experts in sorted({ranks.whole_experts, False}, reverse=True):
        with contextlib.suppress(UserError):
            spec = local_spec(
                *(found.spec, ranks.rank, ranks.size), unit=unit, whole_experts=whole_experts
            )
            order = cache(partial(order_of, whole.layout))
            made = local_plan(replace(plan, layers=tuple(layers)), spec, order)
            plan = replace(plan, layers=(*made.layers, own))
            layout: Layout = Local(whole.layout)
            found = replace(found, spec=spec)
            return replace(whole, found=found, plan=plan, layout=layout)
    return whole


def _columns(ids: npt.NDArray[np.int64] | None, vocab_size: int) -> Tensor | None:
    """By token, the column of the drafter's logits that is its; one behind all where none is."""
    import paddle

    if ids is None:
        return None
    columns = np.full(vocab_size, len(ids), np.int64)
    columns[ids] = np.arange(len(ids))
    return paddle.to_tensor(columns, place=paddle.CPUPlace())
