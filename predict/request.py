"""Sampling parameters, and what a finished request returns.

Plain Python: the command line, the scheduler and the tests use this file without a framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from predict.answer_form import AnswerForm
from predict.errors import UserError
from predict.guide import Guide
from predict.system import bounds
from predict.system.options import Checked, option
from predict.system.ranges import MAX_INT32, MAX_INT64, Range, refusal

FinishReason = Literal["stop", "length", "abort", "error"]
EarlyStopping = Literal[False, True, "never"]

MAX_SAMPLES = 1024  # of one prompt
MAX_BEAMS = 1024
MAX_LOGPROBS = 20  # of one token, besides its own

Word = str | Sequence[int]  # a text, or the token ids of one

_LENGTH = Range(1, MAX_INT32, words=f"an integer of at least 1 and at most {MAX_INT32}")
_COUNT = f"an integer >= 0 and at most {MAX_INT32}"
_SIZE = Range(0, MAX_INT32, words=f"{_COUNT}; 0 turns it off")
_SAMPLES = Range(1, MAX_SAMPLES, words=f"an integer from 1 to {MAX_SAMPLES}")
_LOGPROBS = Range(0, MAX_LOGPROBS, words=f"an integer from 0 to {MAX_LOGPROBS}")


def _real(low: float, high: float, words: str, or_zero: bool = False) -> Range:
    return Range(low, high, whole=False, words=words, or_zero=or_zero)


_TEMPERATURE = _real(
    bounds.MIN_TEMPERATURE,
    bounds.MAX_TEMPERATURE,
    f"0, which is greedy, or a finite number from {bounds.MIN_TEMPERATURE:g} to "
    f"{bounds.MAX_TEMPERATURE:g}",
    or_zero=True,
)
_MASS = _real(
    bounds.MIN_MASS,
    1.0,
    f"a number above 0 and up to 1, from {bounds.MIN_MASS:g} on; 1 turns it off",
)
_TOP_P = _real(
    bounds.MIN_MASS,
    1.0,
    f"0, which is greedy, or a number from {bounds.MIN_MASS:g} to 1; 1 turns it off",
    or_zero=True,
)
_REPETITION = _real(
    bounds.MIN_REPETITION,
    bounds.MAX_REPETITION,
    f"a number above 0, from {bounds.MIN_REPETITION:g} to {bounds.MAX_REPETITION:g}; 1 turns it "
    "off",
)
_AMOUNT = _real(
    -bounds.MAX_AMOUNT,
    bounds.MAX_AMOUNT,
    f"a finite number from -{bounds.MAX_AMOUNT:g} to {bounds.MAX_AMOUNT:g}; 0 turns it off",
)
_PENALTY = _real(
    -bounds.MAX_LENGTH_PENALTY,
    bounds.MAX_LENGTH_PENALTY,
    f"a finite number from -{bounds.MAX_LENGTH_PENALTY:g} to {bounds.MAX_LENGTH_PENALTY:g}; above "
    "0 favours long answers",
)


def _guide(value: Any) -> Guide:
    from predict.guide import Guide

    return Guide.of(value)


def _early_stopping(value: Any) -> EarlyStopping:
    if isinstance(value, bool) or (isinstance(value, str) and value == "never"):
        return value  # type: ignore[return-value]
    raise refusal("early_stopping", value, "False, True, 'never'")


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Checked):
    """How the tokens of one request are chosen and when they end. Checked on construction.

    Raises UserError for a value out of range. `max_new_tokens` and `max_length` may both be set:
    the tighter one ends the request; with neither, the engine's own `max_length` does. Numbers
    become Python's own: NumPy's would slow the scheduler, and are not written to JSON.
    """

    # fmt: off
    BANS: ClassVar[tuple[str, ...]] = (
        "logit_bias", "bad_words", "min_length", "no_repeat_ngram_size")

    max_new_tokens: int | None = option(None,
        "Longest output in tokens, in place of --max_length; with both, whichever is reached "
        "first.",
        group="Lengths and batch", allowed=_LENGTH)
    max_length: int | None = option(None,
        "Longest sequence in tokens, prompt and output together.", allowed=_LENGTH, is_flag=False)
    min_length: int = option(0,
        "Output tokens before an end-of-text or stop token may end it.",
        allowed=Range(0, MAX_INT32, words=_COUNT))
    num_beams: int = option(1,
        "Beams of a beam search as Hugging Face transformers has it, of each of the --batch_size "
        "prompts. Processors before it see log-probabilities then, not logits.",
        group="Sampling", flag_default=4,
        allowed=Range(1, MAX_BEAMS, words=f"an integer of at least 1 and at most {MAX_BEAMS}"))
    length_penalty: float = option(1.0,
        "beam_search divides a sum of log-probabilities by length to this power: above 0 favours "
        "long answers.",
        allowed=_PENALTY)
    early_stopping: EarlyStopping = option(False,
        "When beam_search ends, with num_beams answers finished: true, at once; false, when no "
        "beam would score better if it ended now; never, when none could at any length.",
        allowed=_early_stopping,
        kind="str", flag_default="false", choices=("false", "true", "never"))
    top_k: int = option(0,
        "Sample among this many most likely tokens; 1 is greedy, 0 takes all.",
        allowed=Range(-1, MAX_INT32, words=f"{_COUNT}; 0 turns it off, as -1 does, 1 is greedy"),
        flag_default=1)
    top_p: float = option(1.0,
        "Sample among the most likely tokens that together reach this probability; 1 takes all, "
        "0 is greedy.",
        allowed=_TOP_P)
    min_p: float = option(0.0,
        "Leave out tokens less likely than this times the likeliest; 0 takes all.",
        allowed=_real(0.0, bounds.BELOW_ONE,
                      "a number from 0 to below 1, in float32; 0 turns it off"))
    typical_p: float = option(1.0,
        "Sample among the tokens whose surprise is nearest to the expected one that together "
        "reach this probability; 1 takes all.",
        allowed=_MASS)
    temperature: float = option(1.0,
        "Divides the logits before sampling; 0 is greedy.", allowed=_TEMPERATURE)
    repetition_penalty: float = option(1.0,
        "Above 1 makes tokens that were already seen less likely.", allowed=_REPETITION)
    presence_penalty: float = option(0.0,
        "Taken off the logits of tokens that the output has.", allowed=_AMOUNT)
    frequency_penalty: float = option(0.0,
        "Taken off the logit of a token for each time that the output has it.", allowed=_AMOUNT)
    no_repeat_ngram_size: int = option(0,
        "No n-gram of this size comes twice in prompt and output; 0 turns it off.", allowed=_SIZE)
    logit_bias: Mapping[int, float] = option(dict,
        'Added to logits, before everything else: {"TOKEN_ID": AMOUNT, ...}.',
        allowed=bounds.logit_bias, kind="json", flag_default=None)
    bad_words: Sequence[Word] = option((),
        'Never completed: ["a word", [TOKEN_ID, ...], ...]; a word with and without a space in '
        "front.",
        allowed=bounds.bad_words, kind="json")
    seed: int | None = option(None,
        "Same seed, same output; when not given, drawn from the engine's seed and the request's "
        "index.",
        allowed=Range(-MAX_INT64 - 1, MAX_INT64, words="an integer from -2**63 to 2**63 - 1"),
        is_flag=False)
    ignore_eos: bool = option(False,
        "End-of-text tokens do not end the output; stop_token_ids still do.", is_flag=False)
    stop: str | Sequence[str] = option((),
        'Ends the output before this text, or before any of ["...", ...].',
        group="Answers", allowed=bounds.stop_strings, kind="texts", null_words=())
    include_stop_str_in_output: bool = option(False,
        "Ends the output behind the text of --stop.")
    stop_token_ids: Sequence[int] = option((),
        "Tokens that end the output, besides end-of-text tokens.",
        allowed=bounds.stop_token_ids, kind="ints")
    n: int = option(1,
        'Answers to each prompt, samples or the best of --num_beams beams: above 1 the result has '
        '"outputs" too. Sample i has seed + i, if there is a seed.',
        allowed=_SAMPLES, name="num_return_sequences", aliases=("n",))
    best_of: int | None = option(None,
        "Samples, of which the --num_return_sequences likeliest are returned.", allowed=_SAMPLES)
    logprobs: int | None = option(None,
        "Adds to each result the logprobs of its tokens and of so many likeliest ones, 0 to 20.",
        allowed=_LOGPROBS)
    prompt_logprobs: int | None = option(None,
        "Likewise, of the prompt's tokens but the first.", allowed=_LOGPROBS)
    priority: int = option(0,
        "Requests of smaller numbers run first, and may take the place of running ones of larger "
        "ones; of one number, those that came first. See --priority_aging.",
        allowed=Range(-MAX_INT32, MAX_INT32,
                      words=f"an integer from -{MAX_INT32} to {MAX_INT32}; 0 is usual"),
        is_flag=False)
    adapter: str | None = option(None,
        "Name of a loaded adapter, or of a prefix; without, the model, behind a prefix without a "
        "name.",
        is_flag=False)
    guide: Guide | None = option(None,
        "What the answer's text must be: JSON of a schema, a regular expression, ... "
        "(predict.Guide).",
        allowed=_guide, is_flag=False)
    answer_form: AnswerForm | None = option(None,
        "How the answer is read: then stop counts in its content alone, not in thoughts, calls and "
        "marks (predict.AnswerForm).",
        allowed=AnswerForm.of, is_flag=False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "top_k", max(self.top_k, 0))
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

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

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
    def bans(self) -> tuple[str, ...]:
        """The given fields that may forbid tokens."""
        return tuple(name for name in self.BANS if getattr(self, name))

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0) or bool(self.bans)


def check_samples(params: SamplingParams) -> None:
    """Raises UserError for several samples that would all be the same answer."""
    if params.num_samples > 1 and params.greedy:
        name = "n" if params.n > 1 else "best_of"
        raise UserError(
            f"{name} {params.num_samples} with greedy decoding gives the same answer each time; "
            "sample (temperature above 0 and top_k not 1), or leave it out"
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
    num_draft_tokens: int = 0  # that were verified
    num_accepted_draft_tokens: int = 0

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
