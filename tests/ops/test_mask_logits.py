"""Masks on rows of logits: the compiled operator and its plain twin."""

from __future__ import annotations

import numpy as np
import pytest

from predict.device import library
from predict.ops import compiled as ops
from predict.ops import plain


@pytest.mark.parametrize("backend", [ops, plain], ids=["compiled", "plain"])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "num_words"), [(1, 1, 1), (3, 32, 1), (2, 199, 7), (5, 5121, 170)]
)
def test_tokens_without_a_bit_are_banned(
    compiled: library.Library, backend: object, num_rows: int, vocab_size: int, num_words: int
) -> None:
    import paddle

    generator = np.random.default_rng(vocab_size)
    logits = generator.standard_normal((num_rows, vocab_size), dtype=np.float32)
    bits = generator.integers(0, 2, (num_rows + 2, 32 * num_words), dtype=np.uint8)
    bits[0] = 1
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    tensor = paddle.to_tensor(logits)
    masked = backend.mask_logits(tensor, paddle.to_tensor(masks))  # type: ignore[attr-defined]
    expected = np.where(bits[:num_rows, :vocab_size], logits, -np.inf)
    np.testing.assert_array_equal(masked.numpy(), expected)
    np.testing.assert_array_equal(tensor.numpy(), expected)


def test_masks_that_are_too_small_are_refused(compiled: library.Library) -> None:
    import paddle

    logits = paddle.zeros([2, 65])
    for shape in ([1, 3], [2, 2]):
        with pytest.raises(ValueError, match="32 tokens per word"):
            ops.mask_logits(logits, paddle.zeros(shape, "int32"))
