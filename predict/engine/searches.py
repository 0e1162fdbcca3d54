"""Beam searches in a batch: their beams' blocks, and the beams that go on after a step.

A beam search (predict.engine.beams) is one request until its prompt is computed. Then its beams, in
its place, are requests that decode as all others do; the group decides after each step which of
them go on and fork. Forked beams share all blocks; before a beam writes into a block that others
hold it gets a copy. The beams are preempted together, and the search then starts again from its
prompt, which gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from predict.engine.request_state import BeamGroup, Request
from predict.engine.resources import CacheBlocks
from predict.engine.states import StateSlots


class Searches:
    """The beams of all searches of a scheduler."""

    def __init__(self, blocks: CacheBlocks, states: StateSlots) -> None:
        self._blocks, self._states = blocks, states
        self._num_beams = 0  # made since: beams have ids below 0

    def max_num_blocks(self, request: Request, of_one_beam: int) -> int:
        """The most blocks of a request whose single beam has at most `of_one_beam`."""
        # The blocks that the prompt fills are shared to the end, all others may part.
        num_tokens = request.prefix.num_tokens + request.num_prompt_tokens
        num_parting = of_one_beam - num_tokens // self._blocks.config.block_size
        return of_one_beam + (request.sampling_params.num_beams - 1) * num_parting

    def grow(self, group: BeamGroup, make_room: Callable[[], bool]) -> bool:
        """Gives each beam its own last block; full blocks stay shared.

        A beam at the end of its blocks gets a new one. Of beams that share a partly filled block,
        all but the last get a copy of it. make_room is called while blocks are short; where it says
        False, so does this, and nothing was taken.
        """
        manager, block_size = self._blocks.manager, self._blocks.config.block_size
        num_before = group.request.prefix.num_tokens
        last = [(num_before + beam.num_computed_tokens) // block_size for beam in group.beams]
        held = [
            b.block_ids[i] for b, i in zip(group.beams, last, strict=True) if i < len(b.block_ids)
        ]
        num_new, spare = len(group.beams) - len(set(held)), group.spare_block_ids
        while len(spare) + manager.num_free_blocks < num_new:
            if not make_room():
                return False
        fresh = [spare.pop() for _ in range(min(num_new, len(spare)))]
        fresh += manager.allocate(num_new - len(fresh))
        for beam, index in zip(group.beams, last, strict=True):
            if index == len(beam.block_ids):
                beam.block_ids.append(fresh.pop())
            elif manager.ref_count(beam.block_ids[index]) > 1:
                self._blocks.copies.append((beam.block_ids[index], fresh[-1]))
                manager.free([beam.block_ids[index]])
                beam.block_ids[index] = fresh.pop()
        return True

    def fork(
        self, group: BeamGroup, going_on: Sequence[tuple[int, int]], running: list[Request]
    ) -> None:
        """Replaces a group's beams, in `running` too, by those going on: (its index, new token)."""
        before, beams, blocks = group.beams, list[Request](), self._blocks
        for index, _ in going_on:
            beam = before[index]
            if beam is group.request or beam in beams:
                self._num_beams += 1
                beam = beam.fork(-self._num_beams)
                beam.max_num_blocks = blocks.needed(beam, beam.max_num_tokens)
                blocks.manager.acquire(beam.block_ids)
                self._states.share(beam)
            beams.append(beam)
        for beam, (_, token_id) in zip(beams, going_on, strict=True):
            beam.token_ids.append(token_id)
        first = running.index(before[0])
        running[first : first + len(before)] = beams
        group.beams = beams
        for beam in before:
            if beam not in beams:
                blocks.drop(beam)
                self._states.drop(beam)
        if blocks.config.reserve_full:
            # The group keeps as many blocks as the dropped beams alone had.
            spare, own = group.spare_block_ids, {b for beam in beams for b in beam.block_ids}
            missing = group.request.max_num_blocks - len(own) - len(spare)
            spare += blocks.manager.allocate(missing)
