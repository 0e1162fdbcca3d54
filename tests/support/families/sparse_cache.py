"""Llama's shape, of whose layers some have no attention: they are an MLP alone, or experts."""

from __future__ import annotations

from dataclasses import replace

from predict.nn.blocks import Block, Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.kinds.experts import ExpertBlock, Router
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family. layer_types: "attention" (and an MLP), "mlp" or "experts"."""
    # Norms of single heads are an operator's of its own: no call has several of such layers.
    each = {"qk_norm": Norm(), "qk_norm_each": True}
    made = llama_like(config, each if config.get_bool("qk_norm_each", False) else {})
    attention, mlp = made.layers[0]
    experts = ExpertBlock(Router(4, 2, renormalize=True), 64, norm=mlp.norm)
    types: dict[str, tuple[Block, ...]] = {
        "attention": (attention, mlp),
        "mlp": (mlp,),
        "experts": (experts,),
    }
    return replace(
        made, layers=tuple(types[name] for name in config.get_texts("layer_types") or ())
    )
