"""From checkpoint names to the decoder's layers: what is expected, how it is read or made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from predict.nn.spec import DecoderSpec

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class WeightNames:
    """Names in a family's checkpoints. Linears by prefix (".weight" and ".bias" follow).

    Where a linear has several prefixes, they are stacked along the output features.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: tuple[str, ...] = ("self_attn.o_proj",)
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class LinearPlan:
    """One linear of the network: its parts in the checkpoint and its sizes."""

    prefixes: tuple[str, ...]
    part_sizes: tuple[int, ...]  # output features of each part
    in_features: int
    has_bias: bool

    @property
    def out_features(self) -> int:
        """Output features of all parts."""
        return sum(self.part_sizes)


@dataclass(frozen=True)
class LayerPlan:
    """Names and linears of one layer."""

    attention_norm: str
    qkv: LinearPlan
    q_norm: str | None
    k_norm: str | None
    out: LinearPlan
    mlp_norm: str
    gate_up: LinearPlan
    down: LinearPlan


@dataclass(frozen=True)
class WeightPlan:
    """Every tensor that a network needs, by checkpoint name."""

    spec: DecoderSpec
    embedding: str
    final_norm: str
    head: LinearPlan  # with tied embeddings its weight is the embedding's
    layers: tuple[LayerPlan, ...]
    ignored: tuple[str, ...]

    def linears(self) -> Iterator[LinearPlan]:
        """The layers' linears, the head apart."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Names and lengths of the norm weights."""
        yield self.final_norm, self.spec.hidden_size
        for layer in self.layers:
            yield layer.attention_norm, self.spec.hidden_size
            yield layer.mlp_norm, self.spec.hidden_size
            for name in (layer.q_norm, layer.k_norm):
                if name:
                    yield name, self.spec.head_dim


def plan_weights(spec: DecoderSpec, names: WeightNames) -> WeightPlan:
    """Resolves a family's names for every layer of a spec."""
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def linear(
        prefix: str, parts: tuple[str, ...], sizes: tuple[int, ...], in_features: int, bias: bool
    ) -> LinearPlan:
        return LinearPlan(tuple(prefix + part for part in parts), sizes, in_features, bias)

    def layer(index: int) -> LayerPlan:
        at = names.layer.format(layer=index)
        qkv_sizes = (query, key_value, key_value) if len(names.qkv) == 3 else (spec.qkv_size,)
        gate_up_sizes = (inner, inner) if len(names.gate_up) == 2 else (2 * inner,)
        return LayerPlan(
            attention_norm=at + names.attention_norm,
            qkv=linear(at, names.qkv, qkv_sizes, hidden, spec.qkv_bias),
            q_norm=at + names.q_norm if spec.qk_norm else None,
            k_norm=at + names.k_norm if spec.qk_norm else None,
            out=linear(at, names.out, (hidden,), query, spec.out_bias),
            mlp_norm=at + names.mlp_norm,
            gate_up=linear(at, names.gate_up, gate_up_sizes, hidden, spec.mlp_bias),
            down=linear(at, names.down, (hidden,), inner, spec.mlp_bias),
        )

    head = names.embedding.removesuffix(".weight") if spec.tie_word_embeddings else names.head
    return WeightPlan(
        spec=spec,
        embedding=names.embedding,
        final_norm=names.final_norm,
        head=LinearPlan((head,), (spec.vocab_size,), hidden, False),
        layers=tuple(layer(i) for i in range(spec.num_layers)),
        # A tied checkpoint may still carry its head; it is the embedding.
        ignored=names.ignored + ((names.head,) if spec.tie_word_embeddings else ()),
    )
