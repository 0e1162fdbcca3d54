"""What the sampling operator draws, counted: distributions, masked tokens, seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.device.library import Library
from predict.engine.drafts import accepted_tokens
from tests.support.cpu_kernels import Ints, sample
from tests.support.distributions import (
    LOGITS,
    NUM_DRAWS,
    SETTINGS,
    Floats,
    assert_follows,
    distribution,
)
from tests.support.golden import config, golden


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_distribution(compiled: Library, setting: str) -> None:
    rows = np.tile(LOGITS.astype(np.float32), (NUM_DRAWS, 1))
    tokens = sample(compiled, rows, seeds=77, offsets=np.arange(NUM_DRAWS), **SETTINGS[setting])
    assert_follows(tokens, distribution(LOGITS, **SETTINGS[setting]))  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["plain", "top_p", "all"])
def test_pairs_of_tokens_follow_the_distribution_with_drafts(
    compiled: Library, setting: str
) -> None:
    """Two tokens in a row, the second one's distribution by the first; half the drafts are likely.

    A wrong draft's position is drawn again in the next step, with the same random number.
    """
    rng = np.random.default_rng(4)
    first, second = rng.standard_normal(8) * 1.5, rng.standard_normal((8, 8)) * 1.5
    likely = np.argsort(-first)[:2]
    drafts = np.where(rng.random(NUM_DRAWS) < 0.5, likely[0], rng.integers(0, 8, NUM_DRAWS))

    def drawn(logits: Floats, offset: int) -> Ints:
        return sample(
            compiled,
            np.broadcast_to(logits, (NUM_DRAWS, 8)).astype(np.float32),
            seeds=np.arange(NUM_DRAWS),
            offsets=offset,
            **SETTINGS[setting],
        )

    ahead = drawn(first, 0), drawn(second[drafts], 1)
    again = drawn(second[ahead[0]], 1)
    pairs = []
    for draft, one, two, later in zip(drafts, *ahead, again, strict=True):
        tokens = accepted_tokens([draft], [one, two])
        pairs.append(8 * tokens[0] + (tokens[1] if len(tokens) == 2 else later))
    settings: Any = SETTINGS[setting]
    joint = distribution(first, **settings)[:, None] * np.stack(
        [distribution(row, **settings) for row in second]
    )
    assert_follows(np.array(pairs), joint.reshape(-1))


def test_masked_tokens_are_never_drawn_in_five_million(compiled: Library) -> None:
    """Masked by -inf, or too unlikely for float32 to have a weight."""
    rng = np.random.default_rng(5)
    num_rows, size = 100_000, 33
    possible = rng.random(size) < 0.3
    row = np.where(possible, rng.standard_normal(size), -np.inf).astype(np.float32)
    row[np.flatnonzero(~possible)[::3]] = -1000
    rows = np.tile(row, (num_rows, 1))
    kinds = list(SETTINGS.values())
    columns = {
        name: np.array([kinds[i % len(kinds)].get(name, off) for i in range(num_rows)])
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("typical_p", 1.0))
    }
    for seed in range(50):
        tokens = sample(compiled, rows, seeds=seed, offsets=np.arange(num_rows), **columns)
        assert possible[tokens].all()


def test_seeds_reproduce_alone_in_a_batch_and_in_a_static_program(tmp_path: Path) -> None:
    prompts = golden("llama_gqa")["prompts"]
    prompts = [prompts[index % len(prompts)] for index in range(32)]
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9, "temperature": 0.8},
        {"typical_p": 0.7},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {
            "top_k": 20,
            "no_repeat_ngram_size": 2,
            "logit_bias": {5: 2.0},
            "bad_words": [[7], [8, 9]],
        },
    ]
    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, seed=100 + index, **kinds[index % 5])
        for index in range(32)
    ]

    def texts(llm: LLM, chosen: slice) -> list[tuple[int, ...]]:
        return [out.token_ids for out in llm.generate(prompts[chosen], params[chosen])]

    batch = LLM(config("llama_gqa", batch_size=32, attention="append", inference_model=True))
    together = texts(batch, slice(0, 32))
    alone = LLM(config("llama_gqa", batch_size=1, inference_model=True))
    for index in (0, 6, 12, 23, 29):  # one of each kind
        assert texts(alone, slice(index, index + 1)) == together[index : index + 1]
    export_model(batch.config, tmp_path)
    static = batch.config.changed(model_name_or_path=str(tmp_path), mode="static")
    assert texts(LLM(static), slice(0, 32)) == together
