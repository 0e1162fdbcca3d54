"""How a row of logits becomes a token: the row, and the sampling operator's inputs for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from predict.engine.request_state import Request

NUM_SEEDS = 1 << 63


class Row(NamedTuple):
    """A row of logits: behind a request's tokens and the first of its drafts."""

    request: Request
    drafts: Sequence[int] = ()  # those before the row

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens before the row's, drafts included."""
        return self.request.num_output_tokens + len(self.drafts)


class Choice(NamedTuple):
    """How one row of logits becomes a token: names of CHOICES, in the order of `ops.sample`."""

    temperature: float  # 0: the largest logit
    top_k: int  # 0: all
    top_p: float
    seed: int
    offset: int
    min_p: float = 0.0
    typical_p: float = 1.0


GREEDY = Choice(0.0, 1, 1.0, 0, 0)


def request_seed(engine_seed: int, request: Request) -> int:
    """The request's own seed, or one made from the engine's seed and the request's number.

    0 to 2**63 - 1: a negative one is that number modulo 2**63.
    """
    if request.sampling_params.seed is not None:
        return request.sampling_params.seed % NUM_SEEDS
    return numbered_seed(engine_seed, request.request_id)


def numbered_seed(engine_seed: int, request_id: int) -> int:
    """The seed of a request that has none of its own; of the next one, the next number."""
    return (engine_seed * 0x9E3779B97F4A7C15 + request_id + 1) % NUM_SEEDS
