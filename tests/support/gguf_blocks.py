"""Blocks of every type that the gguf package reads, of moderate values."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from predict.gguf.reader import PLAIN, types

Types: Any = gguf.GGMLQuantizationType
KINDS = ("BF16", *(name for name, *_ in types().values() if name not in PLAIN))
# Bytes of a block where float16 scales lie; types without one have scales of other kinds.
SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
SCALES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}
# NVFP4's scales are bytes, four at the start of a block: the codes of 0.03 to 0.12. Of random ones
# a block in two hundred would do.
NVFP4_SCALES = range(0x10, 0x21)
WIDTH = 0.1  # about the standard deviation of values


def values_of(blocks: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """What rows of blocks stand for, by the package."""
    with np.errstate(all="ignore"):
        made: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks, Types[kind])
    return made


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """[rows, bytes] of random codes; scales are such that values are about WIDTH wide."""
    generator = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[Types[kind]]
    if kind == "BF16":
        values = generator.standard_normal((rows, columns), np.float32) * np.float32(WIDTH)
        return gguf.quants.quantize(values, Types.BF16)
    blocks = generator.integers(0, 256, (rows * columns // block, size), np.uint8)
    if kind == "NVFP4":
        blocks[:, :4] = generator.choice(NVFP4_SCALES, (len(blocks), 4))
    for at in SCALES.get(kind, ()):
        blocks[:, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    if kind in SCALES:
        wide = WIDTH / values_of(blocks, kind).std()
        factors = generator.uniform(0.5, 1.5, len(blocks)).astype(np.float16)
        for number, at in enumerate(SCALES[kind]):
            scale = (factors * np.float16(wide / (1 + number))).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    else:
        _roll_again(blocks, kind, generator)
    return blocks.reshape(rows, -1)


def _roll_again(blocks: npt.NDArray[np.uint8], kind: str, generator: np.random.Generator) -> None:
    """Draws blocks until none has large values or what is no number."""
    while True:
        largest = np.abs(values_of(blocks, kind)).max(axis=1)
        bad = ~(largest < 8 * WIDTH)
        if not bad.any():
            return
        blocks[bad] = generator.integers(0, 256, (int(bad.sum()), blocks.shape[1]), np.uint8)
