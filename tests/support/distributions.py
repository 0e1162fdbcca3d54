"""What the sampling operator has to draw, and whether draws follow it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.support.cpu_kernels import Ints

Floats = npt.NDArray[np.float64]

NUM_DRAWS = 100_000
LOGITS = np.random.default_rng(3).standard_normal(64) * 1.2
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.08},
    "typical_p": {"typical_p": 0.5},
    "typical_p, top_k of all": {"typical_p": 0.5, "top_k": 100},
    "typical_p, min_p of all": {"typical_p": 0.8, "min_p": 1e-6},
    "all": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8},
}


def distribution(
    logits: Floats,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Floats:
    """Probabilities of the tokens, one definition after the other, for logits without ties."""
    p = np.exp((logits - logits.max()) / temperature)
    if top_k:
        p[p < np.sort(p)[-min(top_k, len(p))]] = 0
    if top_p < 1:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p * p.sum()]] = 0
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    if typical_p < 1:
        kept = np.flatnonzero(p)
        surprise = -np.log(p[kept])
        order = kept[np.argsort(np.abs(surprise - np.sum(p[kept] * surprise)))]
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= typical_p]] = 0
    result: Floats = p / p.sum()
    return result


def assert_follows(tokens: Ints, probabilities: Floats) -> None:
    """Pearson's chi-square; a right sampler fails with a probability of one in a million."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    common = expected >= 5
    rest = expected[~common].sum()
    got, want = counts[common], expected[common]
    if rest > 0:
        got, want = np.append(got, counts[~common].sum()), np.append(want, rest)
    degrees = len(want) - 1
    statistic = float(np.sum((got - want) ** 2 / want))
    # Wilson and Hilferty 1931: the cube root is nearly normal.
    spread = 2 / (9 * degrees)
    assert ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4.75
