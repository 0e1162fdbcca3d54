"""Where a request's tokens stand, for networks to which that is more than 0, 1, 2, ...

Positions are rows of the rotary tables. Which ones a network takes, and what its optional fields of
predict.nn.inputs are, follows from a request's prompt, once; tokens that are generated never change
it. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from predict.nn.inputs import Field, ForwardInputs, fields_with
from predict.nn.rope import num_tables, step_of
from predict.nn.spec import DecoderSpec, PrefixSpec, RopeSpec


class Prefix(NamedTuple):
    """The first tokens of a request, which all of its tokens see."""

    num_tokens: int
    mask_row: int  # of the rotary table, of all tokens behind the prefix


class Places(NamedTuple):
    """Where the tokens of one request stand."""

    first_row: int = 0  # of the rotary tables: that of place 0
    prefix: Prefix | None = None
    num_before: int = 0  # tokens of a tuned prefix, which stand nowhere, and which all tokens see

    @property
    def runs_whole(self) -> bool:
        """Whether the prompt runs in one span, and its keys and values suit no other request."""
        return self.prefix is not None


class Placing(Protocol):
    """How a network places the tokens of requests."""

    def of(self, prompt_token_ids: Sequence[int], num_before: int = 0) -> Places:
        """The places of a prompt and of what is generated behind it.

        num_before: tokens of a tuned prefix, which the cache has before them.
        """
        ...

    def placed(self, inputs: ForwardInputs, places: Sequence[Places]) -> ForwardInputs:
        """NumPy inputs of a step with the fields that depend on the places of its requests."""
        ...


@dataclass(frozen=True)
class PrefixPlacing:
    """Prompts that begin with a prefix; see PrefixSpec."""

    spec: PrefixSpec

    def of(self, prompt_token_ids: Sequence[int], num_before: int = 0) -> Places:
        first: dict[int, int] = {}  # place of a token's first occurrence
        for place, token in enumerate(prompt_token_ids):
            first.setdefault(token, place)
        num_tokens = first.get(self.spec.end_id, len(prompt_token_ids))
        masks = (first[token] for token in self.spec.mask_ids if token in first)
        mask_row = next(masks, max(num_tokens - 1, 0))
        return Places(prefix=Prefix(num_tokens, mask_row), num_before=num_before)

    def placed(self, inputs: ForwardInputs, places: Sequence[Places]) -> ForwardInputs:
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
class StepPlacing:
    """Prompts whose length chooses one of a rotary table's parts; see predict.nn.rope.step_of."""

    rope: RopeSpec
    num_positions: int  # rows of one part

    def of(self, prompt_token_ids: Sequence[int], num_before: int = 0) -> Places:
        return Places(self.num_positions * step_of(self.rope, len(prompt_token_ids)))

    def placed(self, inputs: ForwardInputs, places: Sequence[Places]) -> ForwardInputs:
        first_rows = _by_token([each.first_row for each in places], inputs)
        return inputs._replace(positions=inputs.positions + first_rows)


def _by_token(of_requests: npt.ArrayLike, inputs: ForwardInputs) -> npt.NDArray[np.int32]:
    """[T] what each token's request has."""
    return np.repeat(np.asarray(of_requests, np.int32), np.diff(inputs.cu_seqlens_q))


def placing_of(spec: DecoderSpec, num_positions: int) -> Placing | None:
    """How a network places tokens; None where positions are 0, 1, 2, ...

    num_positions: tokens of the longest request.
    """
    if spec.prefix is not None:
        return PrefixPlacing(spec.prefix)
    for rope in spec.ropes:
        if num_tables(rope, num_positions) > 1:
            return StepPlacing(rope, num_positions)
    return None


def fields_of(spec: DecoderSpec, adapters: bool = False) -> tuple[Field, ...]:
    """The rows of predict.nn.inputs.FIELDS that a network reads. adapters: whether it has some."""
    optional = () if spec.prefix is None else ("block_positions", "prefix_lens")
    return fields_with(optional + (("adapter_ids", "adapter_pages") if adapters else ()))
