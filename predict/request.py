"""Sampling parameters, and what a finished request returns.

Plain Python: the command line, the scheduler and the tests use this file without a framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, NamedTuple

from predict.errors import UserError
from predict.guide import Guide
from predict.system import bounds

FinishReason = Literal["stop", "length", "abort", "error"]
EarlyStopping = Literal[False, True, "never"]

MAX_SAMPLES = 1024  # of one prompt
MAX_BEAMS = 1024
MAX_LOGPROBS = 20  # of one token, besides its own

Word = str | Sequence[int]  # a text, or the token ids of one

_LENGTH = f"an integer of at least 1 and at most {bounds.MAX_INT32}, or None"
_COUNT = f"an integer >= 0 and at most {bounds.MAX_INT32}"
_MASS = f"a number above 0 and up to 1, from {bounds.MIN_MASS:g} on; 1 turns it off"
_AMOUNT = f"a finite number from -{bounds.MAX_AMOUNT:g} to {bounds.MAX_AMOUNT:g}; 0 turns it off"
# Fields that are whole numbers: the least, the largest, what is allowed in words.
_INTEGERS: dict[str, tuple[int, int, str]] = {
    "max_new_tokens": (1, bounds.MAX_INT32, _LENGTH),
    "max_length": (1, bounds.MAX_INT32, _LENGTH),
    "min_length": (0, bounds.MAX_INT32, _COUNT),
    "top_k": (0, bounds.MAX_INT32, f"{_COUNT}; 0 turns it off, 1 is greedy"),
    "no_repeat_ngram_size": (0, bounds.MAX_INT32, f"{_COUNT}; 0 turns it off"),
    "seed": (0, bounds.MAX_INT64, "an integer from 0 to 2**63 - 1, or None"),
    "n": (1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}"),
    "best_of": (1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}, or None"),
    "logprobs": (0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None"),
    "num_beams": (1, MAX_BEAMS, f"an integer of at least 1 and at most {MAX_BEAMS}"),
}
_OPTIONAL = ("max_new_tokens", "max_length", "seed", "best_of", "logprobs", "prompt_logprobs")
# Likewise those that are numbers; temperature may be 0 besides.
_REALS: dict[str, tuple[float, float, str]] = {
    "temperature": (
        bounds.MIN_TEMPERATURE,
        bounds.MAX_TEMPERATURE,
        f"0, which is greedy, or a finite number from {bounds.MIN_TEMPERATURE:g} to "
        f"{bounds.MAX_TEMPERATURE:g}",
    ),
    "top_p": (bounds.MIN_MASS, 1.0, _MASS),
    "typical_p": (bounds.MIN_MASS, 1.0, _MASS),
    "min_p": (0.0, bounds.BELOW_ONE, "a number from 0 to below 1, in float32; 0 turns it off"),
    "repetition_penalty": (
        bounds.MIN_REPETITION,
        bounds.MAX_REPETITION,
        f"a number above 0, from {bounds.MIN_REPETITION:g} to {bounds.MAX_REPETITION:g}; 1 turns "
        "it off",
    ),
    "presence_penalty": (-bounds.MAX_AMOUNT, bounds.MAX_AMOUNT, _AMOUNT),
    "frequency_penalty": (-bounds.MAX_AMOUNT, bounds.MAX_AMOUNT, _AMOUNT),
    "length_penalty": (
        -bounds.MAX_LENGTH_PENALTY,
        bounds.MAX_LENGTH_PENALTY,
        f"a finite number from -{bounds.MAX_LENGTH_PENALTY:g} to {bounds.MAX_LENGTH_PENALTY:g}; "
        "above 0 favours long answers",
    ),
}


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
    # Name of a loaded one, or of a prefix; None: the model, behind a prefix without a name.
    adapter: str | None = None
    # What the answer's text must be: JSON of a schema, a regular expression, ... (predict.Guide).
    guide: Guide | None = None
    # Beam search as HF transformers 5 has it (predict.engine.beams); processors before see
    # log-probabilities then, not logits.
    num_beams: int = 1  # above 1: the likeliest sequences are searched for with so many beams
    length_penalty: float = 1.0  # a score is a sum of log-probabilities / length ** this
    # True: ends with the num_beams-th hypothesis. False: when the best beam, were it to end now,
    # would score no better than the worst of these. "never": when it could not at any length.
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        checked: dict[str, object] = {}
        for name, (low, high, allowed) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                checked[name] = bounds.integer(name, value, low, allowed, high)
        for name, (least, most, allowed) in _REALS.items():
            value = getattr(self, name)
            if name == "temperature" and bounds.is_zero(value):
                checked[name] = 0.0
            else:
                checked[name] = bounds.real(name, value, least, most, allowed)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise bounds.refusal(name, getattr(self, name), "True, False")
        early = self.early_stopping
        if not (isinstance(early, bool) or (isinstance(early, str) and early == "never")):
            raise bounds.refusal("early_stopping", early, "False, True, 'never'")
        if not (self.adapter is None or isinstance(self.adapter, str)):
            raise bounds.refusal("adapter", self.adapter, "a name, or None")
        checked["guide"] = None if self.guide is None else Guide.of(self.guide)
        checked["logit_bias"] = bounds.logit_bias(self.logit_bias)
        checked["bad_words"] = bounds.bad_words(self.bad_words)
        checked["stop"] = bounds.stop_strings(self.stop)
        checked["stop_token_ids"] = bounds.token_ids(
            "stop_token_ids",
            self.stop_token_ids,
            bounds.MAX_STOP_TOKENS,
            f"a sequence of token ids >= 0 and at most {bounds.MAX_INT32}",
        )

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

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def num_samples(self) -> int:
        """Requests in the engine; a beam search is one."""
        if self.num_beams > 1:
            return 1
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to measure beside each new one; None: logprobs are not needed."""
        if self.logprobs is None and self.num_samples > self.n:
            return 0
        return self.logprobs

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0) or bool(
            self.min_length or self.no_repeat_ngram_size or self.logit_bias or self.bad_words
        )


# A prompt of a data file may set these keys for itself.
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
    "guide": (None,),
}


def check_beams(params: SamplingParams) -> None:
    """Raises UserError for a beam search with parameters that it does not support."""
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
        return self.token_times[0] if self.token_times else None

    @property
    def time_to_first_token(self) -> float | None:
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
