"""The random prefixes of prefixes.json; NumPy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def random_prefix(
    shape: tuple[int, int, int], num_tokens: int, seed: int
) -> npt.NDArray[np.float32]:
    """Keys and values [layers, 2, heads, num_tokens, head_dim], as pre_caches.npy has them.

    shape: layers, heads, head_dim. Values that bfloat16 has, so that every dtype has them.
    """
    num_layers, num_heads, head_dim = shape
    rng = np.random.default_rng([seed, num_tokens])
    values = rng.normal(size=(num_layers, 2, num_heads, num_tokens, head_dim)).astype(np.float32)
    return np.round(values * 64) / np.float32(64)
