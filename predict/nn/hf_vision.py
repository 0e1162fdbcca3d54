"""What config.json says of towers, and of text models whose positions have three dimensions."""

from __future__ import annotations

from typing import Any

from predict.errors import UserError
from predict.images.areas import AreaPixels
from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, per_head
from predict.nn.spec import DecoderSpec
from predict.nn.vision import CHANNELS, Merger, VisionSpec

SECTIONS = (16, 24, 24)  # of the angles, by axis, where a file says none


def text_of(config: ConfigReader) -> tuple[ConfigReader, tuple[int, ...]]:
    """The text model's config, its positions those of text alone; and their sections.

    Its fields lie in text_config, or flat.
    """
    is_nested = isinstance(config.values.get("text_config"), dict)
    text = config.text_config() if is_nested else config
    sections: tuple[int, ...] = SECTIONS
    for key in ("rope_scaling", "rope_parameters"):
        block = text.values.get(key)
        if not isinstance(block, dict):
            continue
        plain = {name: value for name, value in block.items() if name != "mrope_section"}
        kinds = {name: "default" for name in ("type", "rope_type") if plain.get(name) == "mrope"}
        text = text.with_values(**{key: {**plain, **kinds}})
        if "mrope_section" in block:
            sections = _sections_of(config, block["mrope_section"])
    return text, sections


def _sections_of(config: ConfigReader, value: object) -> tuple[int, ...]:
    """Numbers of angles of time, rows and columns."""
    if not (isinstance(value, list) and len(value) == 3) or any(type(n) is not int for n in value):
        raise UserError(f"{config.path}: mrope_section is {value!r:.60} (allowed: three numbers)")
    return tuple(value)


def axes_of(config: ConfigReader, text: DecoderSpec, sections: tuple[int, ...]) -> tuple[int, ...]:
    """The axis of each angle of the text's rotary table, one section behind the other."""
    if 2 * sum(sections) != text.head_dim or min(sections) < 0:
        raise UserError(
            f"{config.path}: mrope_section is {list(sections)} (allowed: numbers whose sum is half "
            f"of the {text.head_dim} values of a head)"
        )
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def vision_config(config: ConfigReader) -> ConfigReader:
    """The reader of the tower's config. Raises UserError where it is another family's."""
    values = config.values.get("vision_config")
    if not isinstance(values, dict):
        raise config.wrong("vision_config", "an object: the tower's config")
    own = config.part(values, "vision_config")
    name = config.get_str("model_type")
    if own.values.get("model_type") not in (None, name, f"{name}_vision"):
        raise own.wrong("model_type", f"{name}, {name}_vision")
    for key in ("in_channels", "in_chans"):
        own.must_be(key, CHANNELS)
    return own


def qwen_like(
    config: ConfigReader,
    own: ConfigReader,
    text: DecoderSpec,
    sections: tuple[int, ...],
    size: int,
    inner: int,
    norm: Norm,
    activation: Activation,
    **changes: Any,
) -> VisionSpec:
    """The VisionSpec of Qwen's towers. own: of vision_config. changes: of its fields.

    size, inner: features of a patch, and between an MLP's products.
    """
    heads, merge = own.get_int("num_heads", 16), own.get_int("spatial_merge_size", 2)
    layer = blocks_of(
        (heads, heads, per_head(own.with_values(num_attention_heads=heads), size, heads)),
        inner,
        activation,
        bias=True,
        attention={"positions": Positions(), "prefix_mask": True},
        norm=norm,
    )
    said = own.values.get("rope_parameters") or {}
    if not isinstance(said, dict):
        raise own.wrong("rope_parameters", "an object")
    rope = own.part(said, "vision_config")
    rope.must_be("rope_type", "axial")
    frames = own.get_int("temporal_patch_size", 2)
    values: dict[str, Any] = {
        "model_type": text.model_type,
        "hidden_size": size,
        "layers": (layer,) * own.get_int("depth", 32),
        "out_size": text.hidden_size,
        "merger": Merger(norm, inner=size * merge**2),
        "pixels": AreaPixels(own.get_int("patch_size", 14), merge, frames),
        "placeholder": config.get_int("image_token_id", 151655),
        "axes": axes_of(config, text, sections),
        "theta": rope.get_float("rope_theta", 10000.0),
    }
    return VisionSpec(**{**values, **changes})
