"""Names of tensors in a family's checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

JOINED_GATE_UP = "mlp.experts.{expert}.gate_up_proj"
SEPARATE_GATE = ".mlp.experts.0.gate_proj."
DELTA_PARTS = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")  # in place of one matrix


@dataclass(frozen=True)
class WeightNames:
    """Names in a family's checkpoints. Linears by prefix (".weight" and ".bias" follow).

    Where a linear has several prefixes, they are stacked along the output features.
    qkv_rows: the order of rows where queries, keys and values have one prefix: "stacked" is all
    queries, all keys, all values; "grouped" is the queries of a key head, its key, its value, then
    the next key head. transposed: matrices are stored [in, out]. qk_norm: prefixes for queries and
    keys where each head has its own factor; with {head} each head has its own tensor.
    expert_gate_up, expert_down: {expert} is the expert's number, also where one tensor holds all
    experts (predict.loading.checkpoint.one_by_one). expert_rows: the order of rows where gate and
    up have one prefix: "stacked" is the gate, then up; "interleaved" alternates them.
    experts_transposed: experts' matrices are stored [in, out]; where experts_by_shape, the shapes
    of a checkpoint say whether they are. q_whole replaces q_a, q_a_norm and q_b in latent attention
    without q_lora_rank.
    A layer's third and later blocks have names that begin with "blocks.2." within the layer.
    """

    embedding: str = "model.embed_tokens.weight"
    embedding_norm: str = ""
    embedding_projection: str = ""
    positions: str = ""
    types: str = ""
    final_norm: str = "model.norm.weight"
    head_projection: str = ""
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_rows: Literal["stacked", "grouped"] = "stacked"
    out: tuple[str, ...] = ("self_attn.o_proj",)
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    qk_norm: tuple[str, ...] = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    q_a: tuple[str, ...] = ("self_attn.q_a_proj",)
    q_whole: tuple[str, ...] = ("self_attn.q_proj",)
    kv_a: tuple[str, ...] = ("self_attn.kv_a_proj_with_mqa",)
    q_a_norm: str = "self_attn.q_a_layernorm.weight"
    q_b: tuple[str, ...] = ("self_attn.q_b_proj",)
    kv_a_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_b: tuple[str, ...] = ("self_attn.kv_b_proj",)
    sinks: str = "self_attn.sinks"
    attention_post_norm: str = "post_self_attn_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    mlp_post_norm: str = "post_mlp_layernorm.weight"
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.bias"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_is_row: bool = False  # [1, experts]
    expert_gate_up: tuple[str, ...] = (
        "mlp.experts.{expert}.gate_proj",
        "mlp.experts.{expert}.up_proj",
    )
    expert_down: tuple[str, ...] = ("mlp.experts.{expert}.down_proj",)
    expert_rows: Literal["stacked", "interleaved"] = "stacked"
    experts_transposed: bool = False
    experts_by_shape: bool = False
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: tuple[str, ...] = ("mlp.shared_experts.down_proj",)
    shared_gate: str = "mlp.shared_expert_gate.weight"
    delta_qkvz: tuple[str, ...] = ("linear_attn.in_proj_qkvz",)
    delta_ba: tuple[str, ...] = ("linear_attn.in_proj_ba",)
    delta_conv: str = "linear_attn.conv1d.weight"
    delta_conv_bias: str = "linear_attn.conv1d.bias"
    delta_decay: str = "linear_attn.A_log"
    delta_step_bias: str = "linear_attn.dt_bias"
    delta_skip: str = "linear_attn.D"
    delta_out_norm: str = "linear_attn.norm.weight"
    delta_out: tuple[str, ...] = ("linear_attn.out_proj",)
    conv_bcx: tuple[str, ...] = ("conv.in_proj",)
    conv_taps: str = "conv.conv.weight"
    conv_taps_bias: str = "conv.conv.bias"
    conv_out: tuple[str, ...] = ("conv.out_proj",)
    transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    base: str = "model."  # what names begin with, unless a checkpoint leaves it out
    # Substrings of names of tensors that are not read: of a multimodal model's other parts, and of
    # layers behind the last one that draft tokens.
    beside_text: tuple[str, ...] = ()
    drafting: tuple[str, ...] = ()

    def without_layers(self, first: int, count: int) -> WeightNames:
        """The names that leave `count` layers from `first` on unread: they draft tokens."""
        layers = tuple(self.layer.format(layer=first + index) for index in range(count))
        return replace(self, drafting=self.drafting + layers)

    @property
    def unread(self) -> tuple[str, ...]:
        """Substrings of the names of tensors that are not read."""
        return self.ignored + self.beside_text + self.drafting

    def found_in(self, tensors: Collection[str]) -> WeightNames:
        """The variant of these names that matches a checkpoint's tensors, a mapping to those.

        What drafts may have its experts in another form.
        """
        joined = f".{JOINED_GATE_UP}.weight".format(expert=0)
        names = self
        own = [name for name in tensors if not any(part in name for part in self.drafting)]
        if any(name.endswith(joined) for name in own):
            names = self._with_joined_experts()
            if self.experts_by_shape and isinstance(tensors, Mapping):
                names = replace(names, experts_transposed=_are_transposed(tensors, joined))
        elif any(SEPARATE_GATE in name for name in own):
            names = self._with_joined_experts().with_separate_experts()
        if any(f"{DELTA_PARTS[0]}." in name for name in tensors):
            names = replace(names, delta_qkvz=DELTA_PARTS)
        return names._with_found_base(tensors)

    def with_separate_experts(self) -> WeightNames:
        """The names with an expert's gate and up as two matrices [out, in].

        Quantized checkpoints store them apart, since interleaved rows would reorder the codes.
        """
        if self.expert_gate_up != (JOINED_GATE_UP,):
            return self
        return replace(
            self,
            expert_gate_up=WeightNames().expert_gate_up,
            expert_rows="stacked",
            experts_transposed=False,
        )

    def _with_joined_experts(self) -> WeightNames:
        """The names that transformers 5 writes: an expert's gate and up are one matrix."""
        if self.expert_gate_up == (JOINED_GATE_UP,):
            return self
        default = WeightNames()
        return replace(
            self,
            router=default.router,
            expert_gate_up=(JOINED_GATE_UP,),
            expert_down=default.expert_down,
        )

    def _with_found_base(self, tensors: Collection[str]) -> WeightNames:
        candidates = [self, *(self._with_base(self.base, base) for base in ("", "model."))]
        if self.beside_text:
            candidates = [
                self._with_base("model.", "model.language_model."),
                replace(
                    self._with_base("model.", "language_model.model."),
                    head=f"language_model.{self.head}",
                ),
                self,
            ]
        return next((names for names in candidates if names.embedding in tensors), candidates[0])

    def _with_base(self, base: str, other: str) -> WeightNames:
        """The names with `other` in place of `base` at the beginning."""
        changed: dict[str, Any] = {
            field.name: other + value.removeprefix(base)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), str) and value.startswith(base)
        }
        return replace(self, **changed)


def _are_transposed(tensors: Mapping[str, Any], ending: str) -> bool:
    """Whether experts' matrices are [in, out], by the first one's. ending: of its gate and up."""
    name = next(name for name in tensors if name.endswith(ending))
    down = tensors.get(name.replace("gate_up_proj", "down_proj"))
    if down is None:  # which is an error of its own
        return False
    (rows, columns), (inner, hidden) = tensors[name].shape, down.shape
    return bool(columns == 2 * inner and rows == hidden)
