"""Random traffic through a scheduler and its blocks, every promise checked at every step."""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from predict.adapters.pool import AdapterPool
from predict.adapters.prefixes import NO_PREFIX, ServedPrefix
from predict.engine.beams import Candidates, likeliest, num_candidates
from predict.engine.queue import waits_for_leader
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.request import SamplingParams

EOS = (0,)
VOCAB = 7
WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def config(**changes: Any) -> SchedulerConfig:
    """Small limits; changes: other ones, and more fields."""
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_length": 32,
        "block_size": 4,
        "num_blocks": 32,
    }
    return SchedulerConfig(**{**limits, **changes})


def random_config(draw: st.DrawFn, adapters: AdapterPool | None = None) -> SchedulerConfig:
    """Limits of any kind, small enough that something is always short."""
    max_num_seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    max_length = draw(st.integers(8, 40))
    least = -(-max_length // block_size)
    return config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 24)),
        max_length=max_length,
        block_size=block_size,
        num_blocks=least + draw(st.integers(0, 2 * least)),
        reserve_full=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        chunked_prefill=draw(st.booleans()),
        separate_steps=draw(st.booleans()),
        adapters=adapters,
    )


def request(request_id: int, prompt: Sequence[int], max_new_tokens: int = 4) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return Request(request_id, prompt, params)


@dataclass
class Cache:
    """What each slot holds: the hash of the token prefix that ends with the slot's token."""

    block_size: int
    slots: dict[int, int] = field(default_factory=dict)

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )


def first_hash(request: Request) -> int:
    """What all that a request computes depends on: its adapter, whose name is a number."""
    return 17 if request.adapter is None else 19 + int(request.adapter.name)


def prefix_hashes(token_ids: Sequence[int], last: int = 17) -> list[int]:
    """last: of the request, see first_hash."""
    hashes = []
    for token_id in token_ids:
        last = hash((last, token_id))
        hashes.append(last)
    return hashes


def contents(prefix: ServedPrefix) -> list[int]:
    """Tokens that nobody writes, which stand for a tuned prefix's keys and values."""
    return [VOCAB + sum(prefix.name.encode()) + i for i in range(prefix.num_tokens)]


def next_token(prefix_hash: int) -> int:
    return (prefix_hash >> 7) % VOCAB


def expected_output(request: Request, max_length: int) -> list[int]:
    """What the model answers when nothing else runs; written without the code under test.

    max_length does not count a tuned prefix.
    """
    prompt, params, first = request.prompt_token_ids, request.sampling_params, first_hash(request)
    tokens, output = [*contents(request.prefix), *prompt], list[int]()
    limit = min(max_length, params.max_length or max_length) - len(prompt)
    limit = min(limit, params.max_new_tokens or limit)
    while len(output) < limit:
        token_id = next_token(prefix_hashes(tokens, first)[-1])
        tokens.append(token_id)
        output.append(token_id)
        stops = (*(() if params.ignore_eos else EOS), *params.stop_token_ids)
        if token_id in stops and len(output) > params.min_length:
            break
    return output


def token_log_probs(prefix_hash: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a beam search sees of the model."""
    return np.array([-((prefix_hash >> 7 * i) % 61) / 8 for i in range(VOCAB)], np.float32)


def expected_search(request: Request, max_length: int) -> list[tuple[list[int], float]]:
    """(tokens, score) of the answers of a beam search, in the words of transformers' own.

    That keeps num_beams rows from the start, all but one at -1e9, and as many places for finished
    sequences.
    """
    prompt, params, first = request.prompt_token_ids, request.sampling_params, first_hash(request)
    limit = min(max_length, params.max_length or max_length) - len(prompt)
    limit = min(limit, params.max_new_tokens or limit)
    num_beams = params.num_beams
    stops = {*(() if params.ignore_eos else EOS), *params.stop_token_ids}
    keep = max(2, 1 + len(stops)) * num_beams
    running: list[list[int]] = [[] for _ in range(num_beams)]
    scores = np.full(num_beams, -1e9, np.float32)
    scores[0] = 0
    done = [(-1e9, False, list[int]())] * num_beams
    for length in range(1, limit + 1):
        texts = [[*contents(request.prefix), *prompt, *row] for row in running]
        table = np.stack([token_log_probs(prefix_hashes(text, first)[-1]) for text in texts])
        totals = (table + scores[:, None]).ravel()
        order = np.argsort(-totals, kind="stable")[:keep]
        rows = [[*running[i // VOCAB], int(i % VOCAB)] for i in order]
        ends = [
            length == limit or (row[-1] in stops and length > params.min_length) for row in rows
        ]
        going_on = [i for i, end in enumerate(ends) if not end][:num_beams]
        for place, (i, row, end) in enumerate(zip(order, rows, ends, strict=True)):
            if end and place < num_beams:
                score = totals[i] / np.float32(length**params.length_penalty)
                done.append((float(score), True, row))
        done = sorted(done, key=lambda entry: -entry[0])[:num_beams]
        if not going_on:
            break
        assert len(going_on) == num_beams
        running, scores = [rows[i] for i in going_on], totals[order[going_on]]
        if all(finished for _, finished, _ in done):
            best_length = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                best_length = limit
            best = scores[0] / np.float32(best_length**params.length_penalty)
            if params.early_stopping is True or best <= done[-1][0]:
                break
    return [(row, score) for score, _, row in done[: params.n]]


def execute(
    batch: ScheduledBatch,
    cache: Cache,
    scheduler: Scheduler,
    last: Sequence[int | list[int] | Candidates] = (),
) -> list[int | list[int] | Candidates]:
    """Runs a batch as a device would: every span reads, then all write, then tokens come out.

    last: what the batch before yielded, which placeholders refer to.
    """
    sampled: list[int | list[int] | Candidates] = []
    sources, targets = {a for a, _ in batch.block_copies}, [b for _, b in batch.block_copies]
    assert len(set(targets)) == len(targets)
    assert not sources & set(targets)
    for source, target in batch.block_copies:
        for offset in range(cache.block_size):
            found = cache.slots.get(source * cache.block_size + offset)
            if found is not None:
                cache.slots[target * cache.block_size + offset] = found
    writes: dict[int, int] = {}
    for span in batch.spans:
        drafts = list(span.draft_token_ids)
        tokens = [*span.request.token_ids, *drafts]
        end = span.start + span.num_tokens
        assert span.token_ids == tokens[span.start : end]
        for position, token in enumerate(tokens):
            if token < 0:
                entry = last[-1 - token]
                assert not isinstance(entry, Candidates)
                tokens[position] = entry if isinstance(entry, int) else entry[0]
        assert span.samples == (end == len(tokens))
        before = contents(span.request.prefix)
        hashes = prefix_hashes([*before, *tokens[:end]], first_hash(span.request))
        first = len(before) + span.start
        for position in range(first):
            assert cache.slots[cache.slot(span.block_ids, position)] == hashes[position]
        for position in range(first, len(hashes)):
            slot = cache.slot(span.block_ids, position)
            assert slot not in writes, "two writers"
            assert scheduler.block_manager.ref_count(slot // cache.block_size) == 1
            writes[slot] = hashes[position]
        del hashes[: len(before)]
        if span.samples and span.request.beam_group is not None:
            count = num_candidates(span.request.sampling_params, EOS)
            sampled.append(likeliest(token_log_probs(hashes[-1]), count))
        elif span.samples:
            known = end - len(drafts)
            accepted: list[int] = []
            for draft, prefix in zip([*drafts, None], hashes[known - 1 :], strict=True):
                accepted.append(next_token(prefix))
                if draft != accepted[-1]:
                    break
            sampled.append(accepted if drafts or end % 2 else accepted[0])
    cache.slots.update(writes)
    return sampled


class Simulation:
    """Runs requests to their end and checks what must hold after every call."""

    def __init__(self, limits: SchedulerConfig, rng: random.Random) -> None:
        self.limits = limits
        self.rng = rng
        self.scheduler = Scheduler(limits)
        self.cache = Cache(limits.block_size)
        self.requests: dict[int, Request] = {}
        self.unfinished: dict[int, Request] = {}
        self.ended: list[int] = []
        self.ahead: deque[tuple[ScheduledBatch, list[int | list[int] | Candidates]]] = deque()
        self.last: list[int | list[int] | Candidates] = []
        self.num_copies = 0
        self.waited: set[str] = set()  # what did not run in the last step

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        request_id = len(self.requests)
        added = self._request(request_id, prompt, params)
        try:
            self.scheduler.add(added)
        except UserError:  # nothing but a search whose beams together fill more than the cache
            assert params.num_beams > 1
            return
        self.requests[request_id] = self.unfinished[request_id] = added

    def _request(self, request_id: int, prompt: list[int], params: SamplingParams) -> Request:
        return Request(request_id, prompt, params, prefix=self.prefix())

    def prefix(self) -> ServedPrefix:
        """Of the next request."""
        return NO_PREFIX

    @property
    def pinned(self) -> set[int]:
        """Blocks that no request owns, and that are used."""
        return set()

    def abort(self, request_id: int) -> None:
        aborted = self.scheduler.abort(request_id)
        assert (aborted is not None) == (request_id in self.unfinished)
        if aborted is not None:
            self._end(aborted)
        self.check()

    def step(self, drafts: bool, abort: int | None = None) -> None:
        known = {i: list(r.token_ids) for i, r in self.unfinished.items()}
        running = {i for i, r in self.unfinished.items() if r.status is RequestStatus.RUNNING}
        batch = self._schedule(self._drafts() if drafts else None)
        if not self.unfinished:
            assert batch is None
            return
        assert batch is not None
        self._check_batch(batch, running)
        assert all(r.token_ids == known[i] for i, r in self.unfinished.items())
        sampled = self._execute(batch)
        if abort is not None:
            self.abort(abort)
        for finished in self.scheduler.update(batch, sampled, EOS):
            self._end(finished)
        for i, tokens in known.items():
            assert self.requests[i].token_ids[: len(tokens)] == tokens
        self.check()

    def step_ahead(self, abort: int | None = None) -> None:
        """Runs steps until two are out, then takes the older one's result."""
        while len(self.ahead) < 2:
            if self.ahead and self.ahead[-1][0].decides:
                break
            running = {i for i, r in self.unfinished.items() if r.status is RequestStatus.RUNNING}
            batch = self._schedule()
            if batch is None:
                break
            self._check_batch(batch, running)
            self.last = self._execute(batch)
            if not batch.decides:
                self.scheduler.advance(batch)
            self.ahead.append((batch, self.last))
            self.check()
        if abort is not None:
            self.abort(abort)
        if self.ahead:
            batch, sampled = self.ahead.popleft()
            tokens = [entry[0] if isinstance(entry, list) else entry for entry in sampled]
            for finished in self.scheduler.update(batch, tokens, EOS):
                self._end(finished)
        else:
            assert not self.unfinished
        self.check()

    def check(self) -> None:
        manager = self.scheduler.block_manager
        owned = {b for r in self.unfinished.values() for b in blocks_of(r)}
        assert manager.num_used_blocks == len(owned | self.pinned)
        assert manager.num_free_blocks + manager.num_used_blocks == self.limits.num_blocks
        assert self.scheduler.has_unfinished() == bool(self.unfinished)
        order = sorted(self.unfinished.values(), key=lambda r: r.arrival_index)
        waiting = [r.status in WAITING for r in order]
        assert waiting == sorted(waiting), "a newer request runs while an older one waits"
        slots = sum(r.num_slots for r in order if r.status not in WAITING)
        assert slots == self.scheduler.num_running <= self.limits.max_num_seqs

    def finish(self) -> None:
        # The oldest request computes at least a token per step and is never preempted.
        bound = sum(r.max_num_tokens for r in self.unfinished.values())
        bound *= 1 + self.limits.separate_steps
        for _ in range(bound + len(self.ahead)):
            if self.ahead:
                self.step_ahead()
            else:
                self.step(drafts=False)
        assert not self.unfinished
        assert not self.ahead
        assert self.scheduler.block_manager.num_used_blocks == len(self.pinned)
        assert sorted(self.ended) == sorted(self.requests)
        for each in self.requests.values():
            max_length = self.limits.max_length - each.prefix.num_tokens
            if each.beam_group is not None:
                if each.finish_reason in ("abort", "error"):
                    assert each.output_token_ids == []
                    continue
                answers = expected_search(each, max_length)
                found = each.beam_group.returned
                assert [(answer.token_ids, answer.score) for answer in found] == answers
                assert each.output_token_ids == answers[0][0]
                continue
            output = expected_output(each, max_length)
            assert len(each.token_times) == each.num_output_tokens
            if each.finish_reason in ("abort", "error"):
                assert each.output_token_ids == output[: each.num_output_tokens]
            else:
                assert each.output_token_ids == output

    def _schedule(self, drafts: Mapping[int, list[int]] | None = None) -> ScheduledBatch | None:
        return self.scheduler.schedule(drafts)

    def _end(self, ended: Request) -> None:
        assert ended.status is RequestStatus.FINISHED
        assert ended.finish_reason is not None
        assert blocks_of(ended) == []
        del self.unfinished[ended.request_id]
        self.ended.append(ended.request_id)

    def _execute(self, batch: ScheduledBatch) -> list[int | list[int] | Candidates]:
        self.num_copies += len(batch.block_copies)
        return execute(batch, self.cache, self.scheduler, self.last)

    def _drafts(self) -> Mapping[int, list[int]]:
        """For some requests a few right guesses, then perhaps wrong ones."""
        drafts = {}
        for each in self.unfinished.values():
            if each.beam_group is not None:
                continue
            tokens = [*contents(each.prefix), *each.token_ids]
            for _ in range(self.rng.randrange(4)):
                tokens.append(next_token(prefix_hashes(tokens, first_hash(each))[-1]))
            guesses = tokens[each.prefix.num_tokens + each.num_tokens :]
            drafts[each.request_id] = guesses + [1] * self.rng.choice([0, 1, 2, 20])
        return drafts

    def _check_batch(self, batch: ScheduledBatch, running: set[int]) -> None:
        limits = self.limits
        span_ids = [span.request.request_id for span in batch.spans]
        assert len(set(span_ids)) == len(span_ids) <= limits.max_num_seqs
        ids = [span.request.owner.request_id for span in batch.spans]
        for owner in {span.request.owner for span in batch.spans}:
            if owner.beam_group is not None:  # all its beams, or none
                assert ids.count(owner.request_id) == len(owner.beam_group.beams)
        assert batch.num_tokens == sum(span.num_tokens for span in batch.spans)
        assert all(span.num_tokens >= 1 for span in batch.spans)
        prefills = [span for span in batch.spans if span.num_tokens > 1 + len(span.draft_token_ids)]
        if limits.chunked_prefill or len(prefills) != 1:
            assert batch.num_tokens <= limits.max_num_batched_tokens
        going = [i for i, r in self.unfinished.items() if not awaits_its_last_token(r)]
        # Where prompts and decodes take turns, each waits for the other's step, and for one only.
        self._check_turn(bool(going) and min(going) not in ids, "the oldest does not proceed")
        victims = [victim.request_id for victim in batch.preempted]
        assert victims == sorted(victims, reverse=True)
        survivors = running - set(victims)
        assert not victims or not survivors or min(victims) > max(survivors)
        assert not victims or set(ids) <= survivors
        decoding_ids = [i for i in survivors if is_decoding(self.requests[i])]
        self._check_turn(not set(decoding_ids) <= set(ids), "a decode waits")
        if limits.separate_steps:
            assert len({i in decoding_ids for i in ids}) == 1, "prompts beside decodes"
        if not victims and not (limits.separate_steps and decoding_ids):
            self._check_head(batch)

    def _check_head(self, batch: ScheduledBatch) -> None:
        """Nobody waits for whom there is room, even if nothing is shared."""
        limits = self.limits
        order = sorted(self.unfinished.values(), key=lambda r: r.arrival_index)
        head = next((each for each in order if each.status in WAITING), None)
        if head is None or self._awaits_more(head):
            return
        if head.num_tokens > limits.max_num_batched_tokens - batch.num_tokens:
            return
        if head.num_slots > limits.max_num_seqs - self.scheduler.num_running:
            return
        num_blocks = -(-(head.prefix.num_reserved + head.num_tokens) // limits.block_size)
        num_blocks = head.max_num_blocks if limits.reserve_full else num_blocks
        others = [r for r in order if r.status is RequestStatus.RUNNING]
        grows = [r for r in others if len(r.block_ids) < r.max_num_blocks or r.beam_group]
        grows += [head] * (num_blocks < head.max_num_blocks)
        num_spare = sum(r.num_slots for r in grows) if others and not limits.reserve_full else 0
        num_own = num_blocks - len(head.prefix.block_ids)
        assert num_own + num_spare > self.scheduler.block_manager.num_free_blocks, f"{head!r} waits"

    def _awaits_more(self, head: Request) -> bool:
        """Whether it waits for something else than tokens, sequences and blocks."""
        of_prompt = self.limits.prefix_caching and waits_for_leader(head, self.limits.block_size)
        return of_prompt or head.logprobs is not None

    def _check_turn(self, waits: bool, what: str) -> None:
        assert not waits or (self.limits.separate_steps and what not in self.waited), what
        (self.waited.add if waits else self.waited.discard)(what)


def blocks_of(request: Request) -> list[int]:
    """All blocks that a request holds, beams and reserve included."""
    group = request.beam_group
    if group is None:
        return request.block_ids
    beams = [block_id for beam in group.beams for block_id in beam.block_ids]
    return [*request.block_ids, *beams, *group.spare_block_ids]


def is_decoding(request: Request) -> bool:
    group = request.beam_group
    first = request if group is None else group.beams[0]
    return first.num_tokens - first.num_computed_tokens == 1 and not awaits_its_last_token(first)


def awaits_its_last_token(request: Request) -> bool:
    return bool(request.num_placeholders) and request.num_tokens >= request.max_num_tokens


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """One of a few long texts cut somewhere, so that prefixes are shared, with a tail perhaps."""
    text = random.Random(rng.randrange(3)).choices(range(1, VOCAB), k=longest)
    prompt = text[: rng.randint(1, longest)]
    return (prompt + rng.choices(range(VOCAB), k=rng.randrange(3)))[:longest]


def random_params(rng: random.Random, most_beams: int = 1) -> SamplingParams:
    num_beams = rng.choice([1, 1, 1, 2, 3]) if most_beams > 1 else 1
    num_beams = min(num_beams, most_beams)
    return SamplingParams(
        num_beams=num_beams,
        n=rng.randint(1, num_beams),
        length_penalty=rng.choice([1.0, 0.6, 2.0, -0.5]),
        early_stopping=rng.choice([False, True, "never"]),
        max_new_tokens=rng.choice([None, None, 1, 5, 20]),
        max_length=rng.choice([None, None, 40]),
        min_length=rng.choice([0, 0, 1]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), (), (3,)]),
    )


def run_random(
    limits: SchedulerConfig,
    seed: int,
    num_events: int,
    drafts: bool,
    ahead: bool = False,
    most_beams: int = 3,
    kind: type[Simulation] = Simulation,
) -> Simulation:
    """A simulation after `num_events` arrivals, aborts and steps, and the end of all requests."""
    rng = random.Random(seed)
    simulation = kind(limits, rng)
    longest = min(limits.max_length - 1, 20)
    for _ in range(num_events):
        event = rng.random()
        if event < 0.4:
            params = random_params(rng, min(limits.max_num_seqs, most_beams))
            simulation.add(random_prompt(rng, longest), params)
        elif event < 0.5 and simulation.requests:
            simulation.abort(rng.randrange(len(simulation.requests)))
        else:
            abort = None
            if simulation.requests and rng.random() < 0.1:
                abort = rng.randrange(len(simulation.requests))
            if ahead:
                simulation.step_ahead(abort)
            else:
                simulation.step(drafts and rng.random() < 0.5, abort)
    simulation.finish()
    return simulation
