"""Rotary tables: cos and sin per position for every supported scaling method, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from predict.nn.spec import RopeSpec

Array = npt.NDArray[np.float64]


def _base_inv_freq(theta: float | Array, dim: int) -> Array:
    return 1.0 / np.power(theta, np.arange(0, dim, 2, dtype=np.float64) / dim)


def _default(rope: RopeSpec, dim: int, max_position: int) -> Array:
    return _base_inv_freq(rope.theta, dim)


def _linear(rope: RopeSpec, dim: int, max_position: int) -> Array:
    return _base_inv_freq(rope.theta, dim) / rope.factor


def _llama3(rope: RopeSpec, dim: int, max_position: int) -> Array:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between."""
    original = rope.original_max_position or max_position
    inv_freq = _base_inv_freq(rope.theta, dim)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = np.clip(smooth, 0.0, 1.0)
    return (1 - ramp) * inv_freq / rope.factor + ramp * inv_freq


def _yarn(rope: RopeSpec, dim: int, max_position: int) -> Array:
    """YaRN: interpolate slow dims, keep fast ones, a linear ramp between two rotation counts."""
    original = rope.original_max_position or max_position
    inv_freq = _base_inv_freq(rope.theta, dim)

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    interpolate = np.clip((np.arange(dim // 2) - low) / span, 0.0, 1.0)
    return inv_freq / rope.factor * interpolate + inv_freq * (1 - interpolate)


def _dynamic(rope: RopeSpec, dim: int, max_position: int) -> Array:
    """Dynamic NTK, by position: [max_position, dim/2] inverse frequencies.

    Past the original context the base grows with the length seen so far. Position p uses length
    p + 1, so that a token's rotation does not depend on how its prompt was cut into steps; token by
    token this is what HF transformers does, which however re-scales a long prompt as a whole.
    """
    original = rope.original_max_position or max_position
    length = np.maximum(np.arange(max_position, dtype=np.float64) + 1, original)
    theta = rope.theta * (rope.factor * length / original - (rope.factor - 1)) ** (dim / (dim - 2))
    return _base_inv_freq(theta[:, None], dim)


def step_of(rope: RopeSpec, prompt_len: int) -> int:
    """The index of a "dynamic_steps" rope's table for a prompt of `prompt_len` tokens.

    Table 0 serves up to the original context of n tokens, 1 up to 2 n, 2 up to 4 n, and so on.
    """
    original = rope.original_max_position or prompt_len
    return (max(-(-prompt_len // original), 1) - 1).bit_length()


def num_tables(rope: RopeSpec, num_positions: int) -> int:
    """Tables that lie behind each other in the one of `rope`, each of num_positions rows."""
    return 1 + step_of(rope, num_positions) if rope.method == "dynamic_steps" else 1


def _dynamic_steps(rope: RopeSpec, dim: int, max_position: int) -> Array:
    """Qwen's dynamic NTK: [tables * max_position, dim/2], see `step_of`.

    Table k has the base of alpha 2^(k+1) - 1. Qwen's own code takes the alpha of the prompt's
    length for all of its tokens, and keeps it for the answer.
    """
    steps = np.repeat(np.arange(num_tables(rope, max_position)), max_position)
    alpha = np.exp2(steps + 1, dtype=np.float64) - 1
    return _base_inv_freq((rope.theta * alpha ** (dim / (dim - 2)))[:, None], dim)


def _longrope(rope: RopeSpec, dim: int, max_position: int) -> Array:
    """LongRoPE: each frequency over a factor of its own, for contexts of max_position tokens.

    Factors for short contexts hold up to the original one, those for long contexts beyond it. One
    table serves all requests, so the longest one that is allowed decides.
    """
    factors = rope.long_factor if _is_long(rope, max_position) else rope.short_factor
    return _base_inv_freq(rope.theta, dim) / factors


def _is_long(rope: RopeSpec, max_position: int) -> bool:
    return max_position > (rope.original_max_position or max_position)


METHODS: dict[str, Callable[[RopeSpec, int, int], Array]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic_steps": _dynamic_steps,
    "longrope": _longrope,
}
BY_NUM_POSITIONS = ("dynamic", "dynamic_steps", "longrope")  # given the rows that are made


def attention_factor(rope: RopeSpec, max_position: int = 0) -> float:
    """Multiplier of cos and sin (an attention temperature); 1 without YaRN or LongRoPE.

    max_position: of contexts, in tokens, by which some of LongRoPE have one of two.
    """
    if rope.method not in ("yarn", "longrope"):
        return 1.0
    is_long = _is_long(rope, max_position)
    own = rope.long_attention_factor if is_long else rope.short_attention_factor
    if own is not None:
        return own
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.method == "longrope":
        original = rope.original_max_position
        if original is None or rope.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(original))

    if rope.mscale and rope.mscale_all_dim:
        given, all_dim = (yarn_mscale(rope.factor, m) for m in (rope.mscale, rope.mscale_all_dim))
        return given / all_dim
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, scale: float) -> float:
    """YaRN's attention temperature of a context `factor` times as long, of weight `scale`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_table(
    rope: RopeSpec, head_dim: int, num_positions: int, max_position: int
) -> npt.NDArray[np.float32]:
    """Returns [rows, R] float32: cos of R/2 angles, then their sines; R = rotary dims.

    num_positions: rows to make (tokens), of each of `num_tables`. max_position: the checkpoint's
    own context (tokens), the original context where the method's entry does not name one.
    Raises KeyError for an unknown method (refused earlier, when the config is read).
    """
    dim = rope.rotary_dim or head_dim
    given = max_position
    if rope.method in BY_NUM_POSITIONS:
        rope = replace(rope, original_max_position=rope.original_max_position or max_position)
        given = num_positions
    inv_freq = np.atleast_2d(METHODS[rope.method](rope, dim, given))
    # Angles are rounded to float32 before cos and sin, as the checkpoints were trained.
    places = np.tile(np.arange(num_positions), num_tables(rope, num_positions))[:, None]
    positions = places.astype(np.float32)
    angles = (positions * inv_freq.astype(np.float32)).astype(np.float64)
    factor: float | Array = attention_factor(rope, given)
    if rope.log_scale_from:
        lengths = places.astype(np.float64) + 1
        factor = factor * np.maximum(np.log(lengths) / math.log(rope.log_scale_from), 1.0)
    if rope.log_growth:
        original = rope.original_max_position or max_position
        factor = factor * (1 + rope.log_growth * np.log1p(places // original))
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * factor).astype(np.float32)
