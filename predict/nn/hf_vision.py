"""What config.json says of towers, and of text models whose positions have three dimensions."""

from __future__ import annotations

import math
from typing import Any

from predict.errors import UserError
from predict.images.areas import AreaPixels
from predict.images.pixels import Placeholder
from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, per_head
from predict.nn.spec import DecoderSpec
from predict.nn.vision import CHANNELS, GELU, Merger, Product, VisionSpec

MROPE = ("mrope_section", "mrope_interleaved")  # keys of how positions of axes turn
SECTIONS = (16, 24, 24)  # of the angles, by axis, where a file says none


def text_of(
    config: ConfigReader, sections: tuple[int, ...] = SECTIONS, interleaved: bool = False
) -> tuple[ConfigReader, tuple[int, ...]]:
    """The text model's config, its positions those of text alone; and their sections.

    Its fields lie in text_config, or flat. sections: where it says none. interleaved: whether the
    family's angles take turns, see axes_of.
    """
    is_nested = isinstance(config.values.get("text_config"), dict)
    text = config.text_config() if is_nested else config
    for key in ("rope_scaling", "rope_parameters"):
        block = text.values.get(key)
        if not isinstance(block, dict):
            continue
        if block.get("mrope_interleaved", interleaved) is not interleaved:
            turns = "true" if interleaved else "false"
            raise text.wrong(key, f"mrope_interleaved {turns} with this model_type")
        plain = {name: value for name, value in block.items() if name not in MROPE}
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


def axes_of(
    config: ConfigReader, text: DecoderSpec, sections: tuple[int, ...], interleaved: bool = False
) -> tuple[int, ...]:
    """The axis of each angle of the text's rotary table, one section behind the other.

    interleaved: time, row, column take turns as long as rows and columns have angles left.
    """
    if 2 * sum(sections) != text.head_dim or min(sections) < 0:
        raise UserError(
            f"{config.path}: mrope_section is {list(sections)} (allowed: numbers whose sum is half "
            f"of the {text.head_dim} values of a head)"
        )
    if interleaved:
        turns = (index % 3 * (index < 3 * sections[index % 3]) for index in range(sum(sections)))
        return tuple(turns)
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def vision_config(config: ConfigReader, *kinds: str) -> ConfigReader:
    """The reader of the tower's config. Raises UserError where it is another family's.

    kinds: its model_type's, where that is not the model's own.
    """
    values = config.values.get("vision_config")
    if not isinstance(values, dict):
        raise config.wrong("vision_config", "an object: the tower's config")
    own = config.part(values, "vision_config")
    name = config.get_str("model_type")
    kinds = kinds or (name, f"{name}_vision")
    if own.values.get("model_type") not in (None, *kinds):
        raise own.wrong("model_type", ", ".join(kinds))
    for key in ("in_channels", "in_chans", "num_channels"):
        own.must_be(key, CHANNELS)
    return own


def qwen_like(
    config: ConfigReader,
    own: ConfigReader,
    text: DecoderSpec,
    axes: tuple[int, ...],
    size: int,
    inner: int,
    norm: Norm,
    activation: Activation,
    merger: tuple[str, str, str] = ("merger.ln_q.weight", "merger.mlp.0", "merger.mlp.2"),
    patch: int = 14,
    **changes: Any,
) -> VisionSpec:
    """The VisionSpec of Qwen's towers. own: of vision_config. changes: of its fields.

    size, inner: features of a patch, and between an MLP's products. merger: names of its norm and
    products. patch: pixels on a side, where the file does not say.
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
    frames = own.get_int("temporal_patch_size", 2)
    values: dict[str, Any] = {
        "model_type": text.model_type,
        "hidden_size": size,
        "layers": (layer,) * own.get_int("depth", 32),
        "out_size": text.hidden_size,
        "merger": merger_of(merger, norm, size * merge**2, text.hidden_size),
        "pixels": AreaPixels(
            patch_size=own.get_int("patch_size", patch),
            merge_size=merge,
            temporal_patch_size=frames,
        ),
        "frames": frames,
        "placeholder": Placeholder(config.get_int("image_token_id", 151655)),
        "axes": axes,
        "theta": theta_of(own),
    }
    return VisionSpec(**{**values, **changes})


def theta_of(own: ConfigReader) -> float:
    """The base of a tower's rotary positions. own: the reader of its config."""
    said = own.values.get("rope_parameters") or {}
    if not isinstance(said, dict):
        raise own.wrong("rope_parameters", "an object")
    rope = own.part(said, "vision_config")
    rope.must_be("rope_type", "axial")
    return rope.get_float("rope_theta", own.get_float("rope_theta", 10000.0))


def merger_of(
    names: tuple[str, str, str], norm: Norm, inner: int, out_size: int, norms_cells: bool = False
) -> Merger:
    """A norm, a product, GELU, a product. names: of these three. inner: features between."""
    norm_name, up, down = names
    products = Product(up, inner, activation=GELU), Product(down, out_size)
    return Merger(norm, products, norm_name, norms_cells)


def square_root(config: ConfigReader, key: str, default: int) -> int:
    """The side of a square table of so many positions."""
    count = config.get_int(key, default)
    side = math.isqrt(count)
    if side * side != count:
        raise config.wrong(key, "a square: rows times columns")
    return side
