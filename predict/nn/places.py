"""Positions of a request's tokens, for networks whose positions are not 0, 1, 2, ...

Positions are rows of the rotary tables. They, and the optional fields of predict.nn.inputs, follow
from a request's prompt alone; generated tokens do not change them. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from predict.nn.inputs import Field, StepInputs, fields_with
from predict.nn.rope import num_tables, step_of
from predict.nn.spec import DecoderSpec, PrefixSpec, RopeSpec


class Prefix(NamedTuple):
    """The first tokens of a request, which all of its tokens see."""

    num_tokens: int
    mask_row: int  # of the rotary table, of all tokens behind the prefix


class Places(NamedTuple):
    """Positions of the tokens of one request."""

    first_row: int = 0  # row of the rotary tables of token 0
    prefix: Prefix | None = None
    num_before: int = 0  # tokens of a tuned prefix, without positions, visible to all tokens
    second: int | None = None  # place of the first token of a pair's second text

    @property
    def runs_whole(self) -> bool:
        """Whether the prompt must run in one span, and shares no cache blocks."""
        return self.prefix is not None


class Placing(Protocol):
    """How a network assigns positions to tokens."""

    def of(self, prompt_token_ids: Sequence[int], num_before: int = 0) -> Places:
        """The places of a request. num_before: tokens of a tuned prefix in the cache before it."""

    def placed(self, inputs: StepInputs, places: Sequence[Places]) -> StepInputs:
        """NumPy inputs of a step with the fields that depend on its requests' places."""


@dataclass(frozen=True)
class PrefixPlacing:
    """Positions of PrefixSpec."""

    spec: PrefixSpec

    def of(self, prompt_token_ids: Sequence[int], num_before: int = 0) -> Places:
        first: dict[int, int] = {}  # place of a token's first occurrence
        for place, token in enumerate(prompt_token_ids):
            first.setdefault(token, place)
        num_tokens = first.get(self.spec.end_id, len(prompt_token_ids))
        masks = (first[token] for token in self.spec.mask_ids if token in first)
        mask_row = next(masks, max(num_tokens - 1, 0))
        return Places(prefix=Prefix(num_tokens, mask_row), num_before=num_before)

    def placed(self, inputs: StepInputs, places: Sequence[Places]) -> StepInputs:
        prefixes = [each.prefix or Prefix(0, 0) for each in places]
        lens = np.array([prefix.num_tokens for prefix in prefixes], np.int32)
        ends = _by_token(lens, inputs)
        mask_rows = _by_token([prefix.mask_row for prefix in prefixes], inputs)
        positions = inputs.positions
        return inputs._replace(
            positions=np.where(positions < ends, positions, mask_rows),
            block_positions=np.maximum(positions - ends + 1, 0),
            prefix_lens=lens + np.array([each.num_before for each in places], np.int32),
        )


@dataclass(frozen=True)
class WholePlacing:
    """Positions where every token sees its whole text: all of it is a prefix.

    Tokens of a pair's second text have rows of the table of positions behind those of the first's.
    """

    num_rows: int  # of a first text; 0 where both have the same

    def of(self, prompt_token_ids: Sequence[int], num_before: int = 0) -> Places:
        return Places(prefix=Prefix(len(prompt_token_ids), 0), num_before=num_before)

    def placed(self, inputs: StepInputs, places: Sequence[Places]) -> StepInputs:
        positions, lens = inputs.positions, np.diff(inputs.cu_seqlens_q).astype(np.int32)
        if self.num_rows:
            seconds = [lens.max() if p.second is None else p.second for p in places]
            positions = positions + self.num_rows * (positions >= _by_token(seconds, inputs))
        return inputs._replace(positions=positions.astype(np.int32), prefix_lens=lens)


@dataclass(frozen=True)
class StepPlacing:
    """Positions in the part of the rotary table that the prompt's length selects; see step_of."""

    rope: RopeSpec
    num_positions: int  # rows of one part

    def of(self, prompt_token_ids: Sequence[int], num_before: int = 0) -> Places:
        return Places(self.num_positions * step_of(self.rope, len(prompt_token_ids)))

    def placed(self, inputs: StepInputs, places: Sequence[Places]) -> StepInputs:
        first_rows = _by_token([each.first_row for each in places], inputs)
        return inputs._replace(positions=inputs.positions + first_rows)


def _by_token(of_requests: npt.ArrayLike, inputs: StepInputs) -> npt.NDArray[np.int32]:
    """Values of requests, repeated for each token: [T]."""
    return np.repeat(np.asarray(of_requests, np.int32), np.diff(inputs.cu_seqlens_q))


def placing_of(spec: DecoderSpec, num_positions: int) -> Placing | None:
    """A network's Placing; None where positions are 0, 1, 2, ...

    num_positions: tokens of the longest request.
    """
    if spec.prefix is not None:
        return PrefixPlacing(spec.prefix)
    if spec.sees_both_ways:
        is_pair = spec.embedding.num_types > 1
        return WholePlacing(spec.num_learned_positions or 0 if is_pair else 0)
    for rope in spec.ropes:
        if num_tables(rope, num_positions) > 1:
            return StepPlacing(rope, num_positions)
    return None


def fields_of(spec: DecoderSpec, adapters: bool = False) -> tuple[Field, ...]:
    """The rows of predict.nn.inputs.FIELDS that a network reads. adapters: whether it has some."""
    optional: tuple[str, ...] = ("prefix_lens",) if spec.sees_both_ways else ()
    if spec.prefix is not None:
        optional = ("block_positions", "prefix_lens")
    if spec.vision is not None:
        optional += ("image_rows", *(("image_places",) if spec.vision.axes else ()))
        optional += ("prefix_lens",) if spec.vision.sees_itself else ()
    if any(spec.states):
        optional += ("state_src", "state_dst")
    return fields_with(optional + (("adapter_ids", "adapter_pages") if adapters else ()))
