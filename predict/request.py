"""Sampling parameters, the mutable state of one request, and what a finished request returns.

Plain Python: the command line, the scheduler and the tests use this file without a framework.
"""

from __future__ import annotations

import copy
import enum
import math
import numbers
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from predict.errors import UserError

if TYPE_CHECKING:
    from predict.engine.answer_text import AnswerText
    from predict.engine.beams import BeamGroup
    from predict.engine.logprobs import LogprobRecord

FinishReason = Literal["stop", "length", "abort", "error"]
EarlyStopping = Literal[False, True, "never"]

# Seeds reach the sampling op as int64, token ids the network as int32.
_MAX_SEED = 2**63 - 1
_MAX_TOKEN_ID = 2**31 - 1
MAX_SAMPLES = 1024  # of one prompt
MAX_LOGPROBS = 20  # of one token, besides its own
_MAX_BIAS = 1e30  # a float32 that stays finite when a logit is added

Word = str | Sequence[int]  # a text, or the token ids of one


def _integer(name: str, value: Any, low: int, allowed: str) -> int:
    """`value` as an int of at least `low`; UserError says what was got and what is allowed."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or int(value) < low:
        raise UserError(f"{name} {value!r} is not supported (allowed: {allowed})")
    return int(value)


def _real(name: str, value: Any, allowed: str) -> float:
    """`value` as a finite float; UserError says what was got and what is allowed."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not math.isfinite(float(value)):
        raise UserError(f"{name} {value!r} is not supported (allowed: {allowed})")
    return float(value)


def _logit_bias(value: Any) -> dict[int, float]:
    """Token id -> amount. JSON has texts for keys: "15" is 15. Raises UserError."""
    allowed = f"a mapping from token ids >= 0 to numbers from -{_MAX_BIAS:g} to {_MAX_BIAS:g}"
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias {value!r} is not supported (allowed: {allowed})")
    biases: dict[int, float] = {}
    for key, amount in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        token = _integer("logit_bias of token", token, 0, allowed)
        biases[token] = _real(f"logit_bias of token {token}:", amount, allowed)
        if abs(biases[token]) > _MAX_BIAS:
            raise UserError(
                f"logit_bias of token {token}: {amount!r} is not supported (allowed: {allowed}); "
                "a token that must never come goes into bad_words"
            )
    return biases


def _bad_words(value: Any) -> tuple[Word, ...]:
    """Words as texts or tuples of token ids. Raises UserError."""
    allowed = "a sequence of words, each a text or a sequence of token ids >= 0, none empty"
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UserError(f"bad_words {value!r} is not supported (allowed: {allowed})")
    words: list[Word] = []
    for word in value:
        if isinstance(word, str) and word.strip():
            words.append(word)
        elif isinstance(word, (str, bytes)) or not isinstance(word, Iterable):
            raise UserError(f"bad_words has {word!r} (allowed: {allowed})")
        else:
            token_ids = tuple(_integer("a token id of bad_words,", i, 0, allowed) for i in word)
            if not token_ids:
                raise UserError(f"bad_words has {word!r} (allowed: {allowed})")
            words.append(token_ids)
    return tuple(words)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end. Checked on construction.

    Raises UserError for a value out of range. `max_new_tokens` and `max_length` may both be set:
    the tighter one ends the request; with neither, the engine's own `max_length` does.
    """

    max_new_tokens: int | None = None  # generated tokens, at most
    max_length: int | None = None  # prompt + generated tokens, at most
    min_length: int = 0  # generated tokens before an eos or stop token may end the request
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off, 1 is greedy
    top_p: float = 1.0
    min_p: float = 0.0  # tokens less likely than this times the likeliest are left out
    typical_p: float = 1.0  # mass of the tokens whose surprise is nearest to the expected one
    repetition_penalty: float = 1.0  # of tokens in prompt or output: logits divided by it
    presence_penalty: float = 0.0  # of tokens in the output: taken off their logits
    frequency_penalty: float = 0.0  # likewise, for each time
    no_repeat_ngram_size: int = 0  # tokens; no n-gram of prompt and output comes twice; 0 is off
    # Token id -> what is added to its logit, before everything else.
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[Word] = ()  # never completed; as text: with and without a space in front
    seed: int | None = None  # None: drawn from the engine's seed and the request's index
    ignore_eos: bool = False  # eos tokens do not end the request; stop_token_ids still do
    stop_token_ids: tuple[int, ...] = ()
    stop: str | tuple[str, ...] = ()  # the text ends before the first of these
    include_stop_str_in_output: bool = False  # the text ends behind it instead
    n: int = 1  # answers: the best beams, or samples; sample i has seed + i, if there is a seed
    best_of: int | None = None  # samples of which the n likeliest are returned; None: n
    logprobs: int | None = None  # of each token, and of so many likeliest ones; None: none
    prompt_logprobs: int | None = None  # likewise, of the prompt's tokens but the first
    # Beam search as HF transformers 5 has it (predict.engine.beams); processors before see
    # log-probabilities then, not logits.
    num_beams: int = 1  # above 1: the likeliest sequences are searched for with so many beams
    length_penalty: float = 1.0  # a score is a sum of log-probabilities / length ** this
    # True: ends with the num_beams-th hypothesis. False: when the best beam, were it to end now,
    # would score no better than the worst of these. "never": when it could not at any length.
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        checked: dict[str, object] = {}
        for name in ("max_new_tokens", "max_length"):
            value = getattr(self, name)
            if value is not None:
                checked[name] = _integer(name, value, 1, "an integer of at least 1, or None")
        checked["min_length"] = _integer("min_length", self.min_length, 0, "an integer >= 0")
        checked["top_k"] = _integer(
            "top_k", self.top_k, 0, "an integer >= 0; 0 turns it off, 1 is greedy"
        )
        checked["no_repeat_ngram_size"] = _integer(
            "no_repeat_ngram_size", self.no_repeat_ngram_size, 0, "an integer >= 0; 0 turns it off"
        )
        checked["logit_bias"] = _logit_bias(self.logit_bias)
        checked["bad_words"] = _bad_words(self.bad_words)
        if self.seed is not None:
            allowed = "an integer from 0 to 2**63 - 1, or None"
            checked["seed"] = _integer("seed", self.seed, 0, allowed)
            if self.seed > _MAX_SEED:
                raise UserError(f"seed {self.seed!r} is not supported (allowed: {allowed})")

        allowed = "a finite number >= 0; 0 is greedy"
        temperature = checked["temperature"] = _real("temperature", self.temperature, allowed)
        if temperature < 0:
            raise UserError(f"temperature {temperature} is not supported (allowed: {allowed})")
        allowed = "a number above 0 and up to 1; 1 turns it off"
        for name in ("top_p", "typical_p"):
            mass = checked[name] = _real(name, getattr(self, name), allowed)
            if not 0 < mass <= 1:
                raise UserError(f"{name} {mass} is not supported (allowed: {allowed})")
        allowed = "a finite number above 0; 1 turns it off"
        penalty = _real("repetition_penalty", self.repetition_penalty, allowed)
        if penalty <= 0:
            raise UserError(f"repetition_penalty {penalty} is not supported (allowed: {allowed})")
        checked["repetition_penalty"] = penalty

        allowed = "a number from 0 to below 1; 0 turns it off"
        min_p = checked["min_p"] = _real("min_p", self.min_p, allowed)
        if not 0 <= min_p < 1:
            raise UserError(f"min_p {min_p} is not supported (allowed: {allowed})")
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = _real(name, getattr(self, name), "a finite number; 0 turns it off")

        if not isinstance(self.ignore_eos, bool):
            raise UserError(
                f"ignore_eos {self.ignore_eos!r} is not supported (allowed: True, False)"
            )
        allowed = "a sequence of token ids >= 0"
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(
            self.stop_token_ids, Iterable
        ):
            raise UserError(
                f"stop_token_ids {self.stop_token_ids!r} is not supported (allowed: {allowed})"
            )
        checked["stop_token_ids"] = tuple(
            _integer("stop_token_ids", token_id, 0, allowed) for token_id in self.stop_token_ids
        )
        checked |= self._checked_answers()
        checked |= self._checked_beams()

        # Normalised to plain Python numbers: NumPy scalars from a data file would slow every
        # comparison of the scheduler and do not serialise to JSON.
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name in ("max_new_tokens", "max_length"):
            limit = getattr(self, name)
            if limit is not None and self.min_length > limit:
                raise UserError(
                    f"min_length {self.min_length} is more than {name} {limit}; "
                    f"lower min_length or raise {name}"
                )

        if self.num_beams > 1:
            check_beams(self)
        elif self.n > self.num_samples:
            raise UserError(
                f"best_of {self.best_of} is less than n {self.n}: the n best are returned; raise "
                "best_of or lower n"
            )
        if self.num_samples > 1 and self.greedy:
            name = "n" if self.n > 1 else "best_of"
            raise UserError(
                f"{name} {self.num_samples} with greedy decoding gives the same answer each time; "
                "sample (temperature above 0 and top_k not 1), or leave it out"
            )

    def _checked_answers(self) -> dict[str, object]:
        """The fields about what comes back, normalised."""
        stop = self.stop_strings
        allowed = "a text or a sequence of texts, none of them empty"
        if isinstance(stop, bytes) or not isinstance(stop, Iterable):
            raise UserError(f"stop {self.stop!r} is not supported (allowed: {allowed})")
        stop = tuple(dict.fromkeys(stop))
        for text in stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"stop {text!r} is not supported (allowed: {allowed})")
        if not isinstance(self.include_stop_str_in_output, bool):
            raise UserError(
                f"include_stop_str_in_output {self.include_stop_str_in_output!r} is not supported "
                "(allowed: True, False)"
            )
        checked: dict[str, object] = {"stop": stop}
        for name, low, most, none in (
            ("n", 1, MAX_SAMPLES, ""),
            ("best_of", 1, MAX_SAMPLES, ", or None"),
            ("logprobs", 0, MAX_LOGPROBS, ", or None"),
            ("prompt_logprobs", 0, MAX_LOGPROBS, ", or None"),
        ):
            value, allowed = getattr(self, name), f"an integer from {low} to {most}{none}"
            if value is None and none:
                continue
            checked[name] = number = _integer(name, value, low, allowed)
            if number > most:
                raise UserError(f"{name} {number} is not supported (allowed: {allowed})")
        return checked

    def _checked_beams(self) -> dict[str, object]:
        """The fields of beam search, normalised."""
        checked: dict[str, object] = {}
        checked["num_beams"] = _integer("num_beams", self.num_beams, 1, "an integer of at least 1")
        checked["length_penalty"] = _real(
            "length_penalty", self.length_penalty, "a finite number; above 0 favours long answers"
        )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise UserError(
                f"early_stopping {self.early_stopping!r} is not supported (allowed: False, True, "
                "'never')"
            )
        return checked

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, a lone text as one of one."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def num_samples(self) -> int:
        """Requests that it takes; beams belong to one."""
        if self.num_beams > 1:
            return 1
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to measure beside each new one; None where nobody wants logprobs."""
        if self.logprobs is None and self.num_samples > self.n:
            return 0
        return self.logprobs

    @cached_property
    def adjusts_logits(self) -> bool:
        """True when logits are changed before a token is chosen (see predict.engine.logits)."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0) or bool(
            self.min_length or self.no_repeat_ngram_size or self.logit_bias or self.bad_words
        )


# A prompt of a data file may have these keys: what holds for it alone.
SAMPLING_KEYS = tuple(field.name for field in fields(SamplingParams))


# Fields that a beam search has no use for, and the values that change nothing.
_BEAM_NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (1.0, 0.0),
    "top_k": (0, 1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "seed": (None,),
    "best_of": (None,),
    "logprobs": (None,),
    "stop": ((),),
}


def check_beams(params: SamplingParams) -> None:
    """Raises UserError where `params` ask for beams and for something that beams do not do."""
    if params.n > params.num_beams:
        raise UserError(
            f"n {params.n} is more than num_beams {params.num_beams}: the n best of these are "
            "returned (allowed: 1 to num_beams); lower n (--num_return_sequences) or raise "
            "num_beams"
        )
    for name, neutral in _BEAM_NEUTRAL.items():
        value = getattr(params, name)
        if value not in neutral:
            allowed = ", ".join(map(repr, neutral))
            raise UserError(
                f"{name} {value!r} is not supported with num_beams {params.num_beams} (allowed: "
                f"{allowed}): a beam search draws no tokens, returns scores, and knows its text at "
                f"the end; leave {name} out, or num_beams"
            )


class RequestStatus(enum.Enum):
    """Where a request is: in the waiting queue (WAITING, PREEMPTED), in the batch, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.perf_counter`; None where it never got there."""

    arrival_time: float
    first_scheduled_time: float | None
    token_times: tuple[float, ...]  # one per generated token
    finish_time: float | None
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_preemptions: int = 0

    @property
    def first_token_time(self) -> float | None:
        """When the first generated token was known."""
        return self.token_times[0] if self.token_times else None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None below two tokens."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def inter_token_latencies(self) -> tuple[float, ...]:
        """Seconds between consecutive tokens: one less than there are tokens."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return tuple(after - before for before, after in pairs)


class Request:
    """The mutable state of one sequence. The scheduler is its only writer once it was added.

    `token_ids` is prompt then output and only ever grows; a preemption keeps it whole. Its last
    `num_placeholders` entries are negative: tokens that a running step is about to yield. The keys
    and values of its first `num_computed_tokens` tokens lie in the cache blocks `block_ids`, in
    order. Raises UserError for an empty prompt or a token id outside 0..2**31 - 1.
    """

    __slots__ = (
        "answer",
        "arrival_index",
        "arrival_time",
        "beam_group",
        "block_digests",
        "block_ids",
        "cache_salt",
        "error",
        "finish_reason",
        "finish_time",
        "first_scheduled_time",
        "leader",
        "logprobs",
        "max_num_blocks",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_published_blocks",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "status",
        "token_ids",
        "token_times",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float | None = None,
        cache_salt: bytes = b"",
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids: list[int] = [int(token_id) for token_id in prompt_token_ids]
        if not self.prompt_token_ids:
            raise UserError(f"request {request_id}: the prompt has no tokens (at least 1 needed)")
        for token_id in (min(self.prompt_token_ids), max(self.prompt_token_ids)):
            if not 0 <= token_id <= _MAX_TOKEN_ID:
                raise UserError(
                    f"request {request_id}: token id {token_id} in the prompt (allowed: 0 to "
                    f"{_MAX_TOKEN_ID})"
                )
        self.token_ids: list[int] = list(self.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.sampling_params = sampling_params
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # what went wrong, where finish_reason is "error"
        # Its text as far as it is known, where that decides when the request ends.
        self.answer: AnswerText | None = None
        self.logprobs: LogprobRecord | None = None  # where they are wanted; the engine adds them
        # A request with the same prompt, whose blocks this one waits for.
        self.leader: Request | None = None
        # Requests share cached blocks only under the same salt: an adapter that changes keys and
        # values, or a tenant who must not probe another's prompts, sets its own.
        self.cache_salt = cache_salt
        self.arrival_index = -1  # order of Scheduler.add
        self.arrival_time = time.perf_counter() if arrival_time is None else arrival_time
        self.first_scheduled_time: float | None = None
        self.token_times: list[float] = []
        self.finish_time: float | None = None
        self.num_cached_tokens = 0  # of the prompt, at first admission
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.block_digests: list[bytes] = []  # one per full block of token_ids hashed so far
        self.num_published_blocks = 0  # leading blocks of block_ids that others may match
        self.max_num_tokens = 0  # prompt + output, set by Scheduler.add
        self.max_num_blocks = 0  # blocks for max_num_tokens, set by Scheduler.add
        # Whose beam this is, or whose search; set by Scheduler.add where there are beams.
        self.beam_group: BeamGroup | None = None

    def fork(self, request_id: int) -> Request:
        """A beam with the same tokens and blocks; the caller takes references of the blocks."""
        beam = copy.copy(self)
        beam.request_id = request_id
        beam.token_ids = list(self.token_ids)
        beam.block_ids = list(self.block_ids)
        beam.block_digests = list(self.block_digests)
        beam.logprobs = None
        return beam

    @property
    def owner(self) -> Request:
        """The request that was added: this one, or whose beam it is."""
        return self if self.beam_group is None else self.beam_group.request

    @property
    def num_slots(self) -> int:
        """Sequences of the batch that it takes: a search before its first fork, all its beams'."""
        return self.sampling_params.num_beams if self.owner is self else 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, placeholders included."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens without placeholders."""
        return len(self.token_ids) - self.num_placeholders

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, an ending eos and placeholders included."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens that are known (a new list), an ending eos included."""
        return self.token_ids[len(self.prompt_token_ids) : self.num_known_tokens]

    @property
    def first_token_time(self) -> float | None:
        """perf_counter seconds at which the first generated token was known."""
        return self.token_times[0] if self.token_times else None

    @property
    def metrics(self) -> RequestMetrics:
        """A snapshot of the times so far."""
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            token_times=tuple(self.token_times),
            finish_time=self.finish_time,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, "
            f"prompt={self.num_prompt_tokens}, output={self.num_output_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={len(self.block_ids)})"
        )


class Logprob(NamedTuple):
    """How likely the model found a token, before penalties, temperature and truncation."""

    logprob: float  # natural logarithm
    rank: int  # 1 for the likeliest


TokenLogprobs = dict[int, Logprob]  # by token id: the token itself first, then the likeliest ones


@dataclass(frozen=True)
class CompletionOutput:
    """One of the answers to a prompt."""

    index: int  # of the sample; with best_of or beams the place among the best
    text: str
    token_ids: tuple[int, ...]  # generated, an ending eos included
    finish_reason: FinishReason | None  # None while it is still running
    cumulative_logprob: float | None = None  # of all tokens, where logprobs were wanted
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token
    error: str | None = None
    score: float | None = None  # of a beam search: see SamplingParams.length_penalty


@dataclass(frozen=True)
class RequestOutput:
    """What a request returned; `token_ids`, `text` and `finish_reason` are the first answer's."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # generated, an ending eos included
    text: str
    finish_reason: FinishReason | None  # None while it is still running
    metrics: RequestMetrics
    outputs: tuple[CompletionOutput, ...] = ()  # all n answers
    # Of each token of the prompt; None for the first, which nothing stands before.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def __post_init__(self) -> None:
        if not self.outputs:
            only = CompletionOutput(0, self.text, self.token_ids, self.finish_reason)
            object.__setattr__(self, "outputs", (only,))
