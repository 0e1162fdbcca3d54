"""Qwen 2.5 VL: Qwen 2.5 with a tower of windows, and positions in time, rows and columns."""

from __future__ import annotations

from dataclasses import replace

from predict.errors import UserError
from predict.images.areas import AreaPixels
from predict.models import qwen2
from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, llama_like, per_head
from predict.nn.spec import DecoderSpec
from predict.nn.vision import CHANNELS, Merger, VisionSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(beside_text=("visual.",))
TOWER = WeightNames(
    layer="blocks.{layer}.",
    attention_norm="norm1.weight",
    qkv=("attn.qkv",),
    out=("attn.proj",),
    mlp_norm="norm2.weight",
)
SECTIONS = (16, 24, 24)  # of the angles, by axis, where a file says none
UNREAD = ("tokens_per_second", "spatial_patch_size")  # of films; patch_size


def spec(config: ConfigReader) -> DecoderSpec:
    text, sections = text_of(config)
    made = llama_like(
        text, {"qkv_bias": True}, windows=qwen2.windows(text), theta=1e6, model_type="qwen2_5_vl"
    )
    return replace(made, vision=vision(config, made, sections))


def text_of(config: ConfigReader) -> tuple[ConfigReader, tuple[int, ...]]:
    """The text model's config, its positions those of text alone; and their sections."""
    text = config
    if isinstance(config.values.get("text_config"), dict):
        text = config.text_config()
    text = text.with_defaults(rms_norm_eps=1e-5)
    sections: tuple[int, ...] = SECTIONS
    for key in ("rope_scaling", "rope_parameters"):
        block = text.values.get(key)
        if not isinstance(block, dict):
            continue
        plain = {name: value for name, value in block.items() if name != "mrope_section"}
        kinds = {name: "default" for name in ("type", "rope_type") if plain.get(name) == "mrope"}
        text = text.with_values(**{key: {**plain, **kinds}})
        if "mrope_section" in block:
            sections = sections_of(config, block["mrope_section"])
    return text, sections


def sections_of(config: ConfigReader, value: object) -> tuple[int, ...]:
    """Numbers of angles of time, rows and columns."""
    if not (isinstance(value, list) and len(value) == 3) or any(type(n) is not int for n in value):
        raise UserError(f"{config.path}: mrope_section is {value!r:.60} (allowed: three numbers)")
    return tuple(value)


def vision(config: ConfigReader, text: DecoderSpec, sections: tuple[int, ...]) -> VisionSpec:
    """The tower, and its pictures in prompts."""
    if 2 * sum(sections) != text.head_dim or min(sections) < 0:
        raise UserError(
            f"{config.path}: mrope_section is {list(sections)} (allowed: numbers whose sum is half "
            f"of the {text.head_dim} values of a head)"
        )
    values = config.values.get("vision_config")
    if not isinstance(values, dict):
        raise config.wrong("vision_config", "an object: the tower's config")
    own = config.part(values, "vision_config")
    if own.values.get("model_type") not in (None, "qwen2_5_vl", "qwen2_5_vl_vision"):
        raise own.wrong("model_type", "qwen2_5_vl_vision")
    for key in ("in_channels", "in_chans"):
        own.must_be(key, CHANNELS)
    own.must_be("out_hidden_size", text.hidden_size, 3584)
    size, heads = own.get_int("hidden_size", 3584), own.get_int("num_heads", 16)
    depth, patch = own.get_int("depth", 32), own.get_int("patch_size", 14)
    merge = own.get_int("spatial_merge_size", 2)
    norm = Norm()
    layer = blocks_of(
        (heads, heads, per_head(own.with_values(num_attention_heads=heads), size, heads)),
        own.get_int("intermediate_size", 3420),
        Activation(own.activation()),
        bias=True,
        attention={"positions": Positions(), "prefix_mask": True},
        norm=norm,
    )
    rope = own.part(dict(own.values.get("rope_parameters") or {}), "vision_config")
    rope.must_be("rope_type", "axial")
    whole = own.get_ints("fullatt_block_indexes", depth) or (7, 15, 23, 31)
    return VisionSpec(
        model_type="qwen2_5_vl",
        hidden_size=size,
        layers=(layer,) * depth,
        out_size=text.hidden_size,
        merger=Merger(norm, inner=size * merge**2),
        names=TOWER,
        pixels=AreaPixels(patch, merge, own.get_int("temporal_patch_size", 2)),
        placeholder=config.get_int("image_token_id", 151655),
        around=(
            config.get_int("vision_start_token_id", 151652),
            config.get_int("vision_end_token_id", 151653),
        ),
        axes=tuple(axis for axis, count in enumerate(sections) for _ in range(count)),
        theta=rope.get_float("rope_theta", 10000.0),
        window=max(own.get_int("window_size", 112) // merge // patch, 1),
        whole_layers=frozenset(whole),
    )
