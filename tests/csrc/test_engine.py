"""csrc/engine against its twins in predict/engine: both are given the same, and make the same."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from predict.engine.choices import request_seed
from predict.engine.logits_processors import Adjustment
from predict.engine.logprobs import measure
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.request import SamplingParams
from predict.text.answer_text import AnswerText
from tests.support import engine_programs
from tests.support.scheduler_traffic import EOS, random_params, random_prompt

NUM_TRACES = 60
Answers = Callable[[Sequence[str]], list[str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("engine")
    names = "engine_parts", "engine_test"
    return engine_programs.compiled(names, ("address", "undefined"), folder)


@pytest.fixture
def answers(programs: list[Path]) -> Answers:
    """What engine_parts.cc prints for lines."""
    return lambda lines: engine_programs.run(programs[0], lines=lines)


def joined(*words: object) -> str:
    return " ".join(str(int(word) if isinstance(word, bool) else word) for word in words)


def hexed(text: str) -> str:
    return text.encode().hex() or "-"


def test_digests_are_hashlibs(answers: Answers) -> None:
    data = [random.Random(size).randbytes(size) for size in (1, 32, 96, 127, 128, 129, 256, 1000)]
    wanted = [hashlib.blake2b(each, digest_size=32).hexdigest() for each in (b"", *data)]
    assert answers([f"blake2b {each.hex() or '-'}" for each in (b"", *data)]) == wanted


class Trace:
    """Arrivals, cancels and steps of Python's scheduler, and what each of them gave."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.lines: list[str] = []
        self.wanted: list[str] = []
        self.requests: list[Request] = []
        self.limits = self._limits()
        self.scheduler = Scheduler(self.limits)
        for _ in range(self.dice.randrange(20, 70)):
            event = self.dice.random()
            if event < 0.4:
                self._add()
            elif event < 0.5 and self.requests:
                self._cancel(self.dice.choice(self.requests))
            else:
                self._step()
        while self.scheduler.has_unfinished():
            self._step()

    def _limits(self) -> SchedulerConfig:
        dice = self.dice
        block_size, max_length = dice.choice([1, 2, 4, 5]), dice.randint(8, 40)
        num_seqs, least = dice.randint(1, 6), -(-max_length // block_size)
        limits = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + dice.randrange(25),
            max_length=max_length,
            block_size=block_size,
            num_blocks=least - 1 + dice.randrange(least),
            reserve_full=dice.random() < 0.2,
            prefix_caching=dice.random() < 0.7,
            chunked_prefill=dice.random() < 0.7,
            separate_steps=dice.random() < 0.3,
        )
        names = "max_num_seqs max_num_batched_tokens max_length block_size num_blocks reserve_full"
        names += " prefix_caching chunked_prefill separate_steps"
        self.lines.append(joined("scheduler", *(getattr(limits, n) for n in names.split())))
        return limits

    def _add(self) -> None:
        params = random_params(self.dice)
        prompt = random_prompt(self.dice, min(self.limits.max_length - 1, 20))
        if self.dice.random() < 0.05:
            prompt = [1] * self.limits.max_length
        new = params.max_new_tokens or 0
        if params.max_length is not None:  # which C++ has not
            new = max(min(new or 99, params.max_length - len(prompt)), 1)
        params = SamplingParams(
            max_new_tokens=new or None,
            min_length=params.min_length,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
        )
        request = Request(len(self.requests), prompt, params)
        head = ("add", len(self.requests), new, params.min_length, params.ignore_eos)
        self.lines.append(joined(*head, "|", *params.stop_token_ids, "|", *prompt))
        try:
            self.scheduler.add(request)
        except UserError as error:
            self.wanted.append(str(error).split(": ", 1)[1])
            return
        self.requests.append(request)
        self.wanted.append("added")

    def _cancel(self, request: Request) -> None:
        self.lines.append(f"cancel {request.request_id}")
        if self.scheduler.abort(request.request_id) is not None:
            self.wanted.append(self._state())

    def _step(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            self.lines.append("step")
            self.wanted.append(self._state())
            return
        said = ""
        for span in batch.spans:
            blocks = "".join(f"{block} " for block in span.block_ids)
            samples = "!" if span.samples else ""
            said += f"{span.request.request_id}:{span.start}+{span.num_tokens}{samples}[{blocks}] "
        said += "".join(f"preempted {each.request_id} " for each in batch.preempted)
        tokens = self.dice.choices(
            (0, 1, 2, 3, 4, 5, 6), (1, 9, 9, 1, 9, 9, 9), k=batch.num_samples
        )
        for ended in self.scheduler.update(batch, tokens, EOS):
            said += f"{ended.request_id} ends by {ended.finish_reason} "
        self.lines.append(joined("step", *tokens))
        self.wanted.append(said + self._state())

    def _state(self) -> str:
        scheduler = self.scheduler
        scheduler.check()
        return (
            f"ok {scheduler.num_running} running {scheduler.num_waiting} waiting "
            f"{scheduler.block_manager.num_free_blocks} free "
            f"{scheduler.stats.num_prefix_hit_tokens} hits "
            f"{scheduler.stats.num_preemptions} preemptions"
        )


def test_steps_are_those_of_pythons_scheduler(answers: Answers) -> None:
    traces = {seed: Trace(seed) for seed in random.sample(range(2**40), NUM_TRACES)}
    got = iter(answers([line for trace in traces.values() for line in trace.lines]))
    for seed, trace in traces.items():
        assert [*islice(got, len(trace.wanted))] == trace.wanted, f"Trace({seed})"
    stats = [trace.scheduler.stats for trace in traces.values()]
    assert sum(each.num_preemptions for each in stats) > NUM_TRACES / 4
    assert sum(each.num_prefix_hit_tokens for each in stats) > NUM_TRACES
    ended = [each.status for trace in traces.values() for each in trace.requests]
    assert set(ended) == {RequestStatus.FINISHED}


class GivenStream:
    """A TextStream whose pieces are given. See GivenStream of engine_parts.cc."""

    def __init__(self) -> None:
        self.text = self.piece = self.pending = ""

    def append(self, token_ids: Sequence[int]) -> str:
        self.text += self.piece
        return self.piece

    def finish(self) -> str:
        self.text += self.pending
        return self.pending


def test_texts_end_where_pythons_do(answers: Answers) -> None:
    dice, lines, wanted, num_ended = random.Random(5), list[str](), list[str](), 0

    def text(most: int) -> str:
        return "".join(dice.choices("aaéb\U0001f600", k=dice.randint(1, most)))

    for _ in range(300):
        stops = tuple(dict.fromkeys(text(4) for _ in range(dice.randrange(4))))
        hidden = dict[int, str]()  # as `hidden_in` finds them: whole in a stop string
        if stops and dice.random() < 0.4:
            hidden, stops = {9: "<é>"}, (stops[0] + "<é>" + dice.choice(["", "a"]), *stops[1:])
        include, held = dice.random() < 0.3, ""
        marks = (f"{token}={hexed(mark)}" for token, mark in hidden.items())
        lines.append(joined("stops", include, *marks, "|", *map(hexed, stops)))
        stream = GivenStream()
        answer = AnswerText(stream, stops, include, hidden)  # type: ignore[arg-type]
        length = dice.randint(1, 14)
        for index in range(length):
            token = 9 if dice.random() < 0.2 else 1
            held += text(3) if token == 1 and dice.random() < 0.9 else ""
            holds = dice.random() < 0.3
            stream.piece, stream.pending = ("", held) if holds else (held, "")
            held = held if holds else ""
            may_stop, is_last = index >= length // 4, index == length - 1
            given = hexed(stream.piece), hexed(stream.pending)
            lines.append(joined("token", token, may_stop, is_last, *given))
            completes = answer.append(token, may_stop, is_last)
            wanted.append(joined(completes, hexed(answer.take())))
            if completes:
                num_ended += 1
                break
    assert answers(lines) == wanted
    assert num_ended > 100


def test_logits_are_changed_to_the_bit_as_python_changes_them(answers: Answers) -> None:
    dice, lines, wanted = random.Random(6), list[str](), list[str]()
    for _ in range(200):
        vocab = dice.choice([5, 40, 300])

        def ids(most: int, vocab: int = vocab) -> list[int]:
            return [dice.randrange(vocab) for _ in range(dice.randrange(1, most))]

        biases = {token: dice.uniform(-3, 3) for token in ids(4)} if dice.random() < 0.4 else {}
        words = [ids(4) for _ in range(3)] if dice.random() < 0.4 else []
        stops = tuple(ids(3)) if dice.random() < 0.5 else ()
        params = SamplingParams(
            min_length=dice.choice([0, 0, 3]),
            ignore_eos=dice.random() < 0.5,
            no_repeat_ngram_size=dice.choice([0, 0, 1, 2, 3]),
            repetition_penalty=dice.choice([1.0, 1.3, 0.7]),
            presence_penalty=dice.choice([0.0, 0.1, -0.7]),
            frequency_penalty=dice.choice([0.0, 0.3, -0.1]),
            logit_bias=biases,
            bad_words=words,
            stop_token_ids=stops,
        )
        prompt = ids(20)
        tokens = prompt + (ids(20) if dice.random() < 0.8 else [])
        rows = np.arange(vocab)
        logits = ((rows // 2 + 1) * np.where(rows % 2, -0.25, 0.25)).astype(np.float32)
        adjustment = Adjustment.of(params, EOS)
        if len(tokens) - len(prompt) < adjustment.ends_at:
            adjustment.apply(logits, tokens, len(prompt))
        switches = params.min_length, params.ignore_eos, len(prompt), params.no_repeat_ngram_size
        amounts = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        pairs = [value for pair in biases.items() for value in pair]
        listed = [",".join(map(str, word)) for word in words]
        lines.append(
            joined(
                *("adjust", vocab, *switches, "|", *amounts, "|", *pairs, "|", *listed, "|"),
                *(*stops, "|", *tokens),
            )
        )
        wanted.append(" ".join(float(logit).hex() for logit in logits))
    got = [" ".join(float.fromhex(word).hex() for word in line.split()) for line in answers(lines)]
    assert got == wanted


def test_logprobs_are_pythons(answers: Answers) -> None:
    dice, lines = np.random.default_rng(7), list[str]()
    wanted: list[tuple[float, ...]] = []
    for vocab, num_top in ((1, 0), (3, 5), (50, 4), (400, 20)):
        logits = np.round(dice.normal(0, 3, vocab), 1).astype(np.float32)  # with ties
        token = int(dice.integers(vocab))
        entries = measure(logits[None], [token], num_top).entry(0, token, num_top)
        lines.append(joined("measure", token, num_top, "|", *logits))
        own = (token, *entries.pop(token))
        wanted.append(tuple(value for i, each in entries.items() for value in (i, *each)))
        wanted[-1] = (*own, *wanted[-1])
    for line, numbers in zip(answers(lines), wanted, strict=True):
        got = list(map(float, line.split()))
        first = got[:3]
        others = [i for i in range(3, len(got), 3) if got[i] != first[0]]
        numbers_of_others = [value for i in others for value in got[i : i + 3]]
        assert [*first, *numbers_of_others] == pytest.approx(numbers, abs=2e-6)


def test_seeds_are_pythons(answers: Answers) -> None:
    lines, wanted = [], []
    for engine_seed in (0, 3, 2**63 - 1):
        for seed in (None, 0, 5, -1, -(2**63), 2**63 - 1):
            request = Request(12, [1], SamplingParams(seed=seed))
            lines.append(joined("seed", engine_seed, 12, "-" if seed is None else seed))
            wanted.append(str(request_seed(engine_seed, request)))
    assert answers(lines) == wanted


def test_answers_are_those_of_requests_that_run_alone(programs: list[Path]) -> None:
    """Among others, with cancels, preemptions and prefixes, over a network that is a hash."""
    seed = random.randrange(2**40)
    said = engine_programs.run(programs[1], str(seed), "30")
    assert said[1:] == ["random requests: ok", "doors: ok"]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_many_threads_submit_and_cancel(
    sanitizer: str, programs: list[Path], tmp_path: Path
) -> None:
    program = programs[1]
    if sanitizer == "thread":
        (program,) = engine_programs.compiled(["engine_test"], [sanitizer], tmp_path)
    assert engine_programs.run(program, "threads")[-1] == "threads: ok"
