"""Qwen 3 VL: Qwen 3 with a tower whose layers add to the text's first ones (DeepStack)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from predict.models import qwen2_5_vl, qwen3
from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader
from predict.nn.hf_vision import axes_of, merger_of, qwen_like, square_root, text_of, vision_config
from predict.nn.spec import DecoderSpec
from predict.nn.vision import Learned, Tap, VisionSpec

WEIGHTS = qwen2_5_vl.WEIGHTS
TOWER = replace(qwen2_5_vl.TOWER, gate_up=("mlp.linear_fc1",), down=("mlp.linear_fc2",))
PARTS = ("norm.weight", "linear_fc1", "linear_fc2")  # of a merger
SECTIONS = (24, 20, 20)


def spec(
    config: ConfigReader, text_spec: Callable[[ConfigReader], DecoderSpec] = qwen3.spec
) -> DecoderSpec:
    """text_spec: of the text model, from its config."""
    own, sections = text_of(config, SECTIONS, interleaved=True)
    text = text_spec(own.with_defaults(rope_theta=5e5))
    text = replace(text, model_type=config.get_str("model_type"))
    return replace(text, vision=_vision(config, text, axes_of(config, text, sections, True)))


def _vision(config: ConfigReader, text: DecoderSpec, axes: tuple[int, ...]) -> VisionSpec:
    own = vision_config(config)
    own.must_be("out_hidden_size", text.hidden_size, 3584)
    own = own.with_defaults(depth=27)
    size, norm = own.get_int("hidden_size", 1152), Norm("layer", 1e-6, bias=True)
    cell = size * own.get_int("spatial_merge_size", 2) ** 2

    def names(base: str) -> tuple[str, str, str]:
        return base + PARTS[0], base + PARTS[1], base + PARTS[2]

    depth, key = own.get_int("depth"), "deepstack_visual_indexes"
    found = own.values.get(key)
    tapped = (8, 16, 24) if found is None else own.get_ints(key, text.num_layers - 1)
    if len({*tapped}) < len(tapped) or any(layer >= depth for layer in tapped):
        raise own.wrong(key, f"different numbers below {depth}, as depth says")
    taps = []
    for number, layer in enumerate(tapped):
        parts = names(f"deepstack_merger_list.{number}.")
        taps.append(Tap(layer, merger_of(parts, norm, cell, text.hidden_size, norms_cells=True)))
    return qwen_like(
        *(config, own, text, axes),
        size=size,
        inner=own.get_int("intermediate_size", 4304),
        norm=norm,
        activation=Activation(own.activation(default="gelu_pytorch_tanh"), gated=False),
        merger=names("merger."),
        patch=16,
        names=TOWER,
        patch_bias=True,
        learned=Learned(
            "pos_embed.weight", square_root(own, "num_position_embeddings", 2304), "corners"
        ),
        taps=tuple(sorted(taps, key=lambda tap: tap.layer)),
    )
