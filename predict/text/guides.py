"""Guides compiled for a model's vocabulary, and the states of answers in them.

llguidance makes a grammar of a predict.guide.Guide, and says for any state of it which tokens may
come next. Imports no Paddle.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.guide import Guide
from predict.system.files import parse_json
from predict.text.backends.base import Pieces
from predict.text.lark import JSON_STYLE, LIMITS, MAX_MESSAGE, literal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from predict.text.tokenizer import Tokenizer

MAX_CACHED = 256  # compiled guides
MOST_THREADS = 8  # that compile
BEHIND = 10  # their nice value
NO_TEXT = ("NoExtension", "NoExtensionBias")  # llguidance's words for it
MAX_FORCED = 64  # runs of tokens
ALL_TOKENS = -1  # a word of a mask


class GuideState:
    """The position of one answer in its guide. Not thread-safe.

    error: why no token may follow any more; None while some may.
    """

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Advances by a token; whether nothing may follow it, so that the answer is complete.

        Raises UserError for a token that the guide forbids, and when a limit is met.
        """
        if not self.matcher.consume_token(token_id):
            raise UserError(self._said(f"token {token_id}"))
        return bool(self.matcher.is_stopped())

    def check(self, token_id: int, kind: str, bans: Sequence[str]) -> None:
        """Raises UserError for a token that the guide forbids: `bans` forbade all others.

        kind: of the guide. bans: fields of the request.
        """
        if self.error is None and not self.valid((token_id,)):
            raise UserError(contradiction(kind, bans))

    def valid(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The longest prefix of these tokens that the guide allows next."""
        if not token_ids or self.matcher.is_stopped():
            return ()
        return token_ids[: self.matcher.validate_tokens(list(token_ids))]

    def forced(self) -> list[int]:
        """The tokens that the guide forces next; most often none."""
        if self.matcher.is_stopped():
            return []
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens

    def has_failed(self) -> bool:
        """Whether a mask could not be computed; then `error` says why."""
        if self.error is None and self.matcher.is_error():
            self.error = self._said("the next token")
        return self.error is not None

    def _said(self, what: str) -> str:
        reason = self.matcher.get_error() or "it is not allowed here"
        return f"the guide failed at {what}: {_short(reason)}; make the guide simpler"


def contradiction(kind: str, bans: Sequence[str]) -> str:
    """Why nothing may follow where a guide and other fields of a request leave no token."""
    names = " and ".join((f"guide.{kind}", *bans))
    return f"{names} together forbid every token that may come next; loosen one of them"


class CompiledGuide:
    """A valid guide compiled for a vocabulary."""

    def __init__(self, make: Callable[[], LLMatcher]):
        """make: a matcher at the beginning."""
        self._make = make

    def start(self) -> GuideState:
        """A new state at the beginning, in 0.4 to 3 ms.

        Not a copy: copies of a matcher share a lexer behind a lock, which would serialize their
        masks. The first mask is computed here, as it may take 130 ms (of 900 alternatives).
        """
        matcher = self._make()
        matcher.compute_bitmask()
        return GuideState(matcher)


class MaskRows(NamedTuple):
    """A state, and the rows of masks that it fills: one before and one behind each draft token."""

    state: GuideState
    first: int
    drafts: Sequence[int]


class MaskFiller:
    """Computes the masks of a step, on threads of its own."""

    def __init__(self) -> None:
        import llguidance

        self._executor = llguidance.LLExecutor()

    def fill(self, rows: Sequence[MaskRows], masks: npt.NDArray[np.int32]) -> None:
        """Fills `masks` [R, W], where bit v % 32 of word v / 32 is 1 if token v may come.

        Other rows are not changed. A mask that cannot be computed allows no token, and its state
        has the error.
        """
        plain = [(each.state.matcher, each.first) for each in rows if not each.drafts]
        drafted = [
            (each.state.matcher, each.first, list(each.drafts)) for each in rows if each.drafts
        ]
        where = masks.ctypes.data, masks.strides[0], masks.shape[0]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for each in rows:
            if each.state.has_failed():
                masks[each.first : each.first + len(each.drafts) + 1] = 0


class Guides:
    """Compiles guides for one tokenizer, on threads of its own, and keeps the last ones.

    Raises UserError where the tokenizer does not suit.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        """vocab_size: columns of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str, str], Future[CompiledGuide]] = OrderedDict()
        # A batch of answers begins when all their states are made.
        num_threads = min(max(len(os.sched_getaffinity(0)) // 2, 2), MOST_THREADS)
        self._threads = ThreadPoolExecutor(num_threads, "regatta-guides", _lower_priority)
        self._vocabulary: Future[_Vocabulary] | None = None

    def compiled(self, guide: Guide) -> Future[CompiledGuide]:
        """The future compiled guide; a wrong guide's UserError names its field. Returns at once."""
        key = guide.kind, guide.text, guide.around or ""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                if self._vocabulary is None:
                    self._vocabulary = self._threads.submit(self._read_vocabulary)
                found = self._known[key] = self._threads.submit(_compile, guide, self._vocabulary)
                if len(self._known) > MAX_CACHED:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return found

    def states(self, guide: Guide, count: int) -> Future[list[GuideState]]:
        """The future states of so many answers at the beginning; see `compiled`."""
        compiled = self.compiled(guide)
        # Threads take work in order, so the awaited compilation has begun.
        return self._threads.submit(lambda: [compiled.result().start() for _ in range(count)])

    def _read_vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)


class _Vocabulary:
    """The vocabulary as llguidance needs it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        import llguidance

        if not eos_token_ids:
            raise UserError(
                "a guide needs a model with an end-of-text token, and neither its tokenizer nor "
                "its config.json names one; add eos_token_id to config.json"
            )
        self._make: Callable[[Any], LLTokenizer] = partial(
            llguidance.LLTokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        try:
            self._tokens = self._make(tokenizer.for_guides(eos_token_ids[0]))
        except Exception as error:
            raise UserError(
                f"guides do not work with this model's tokenizer: {_short(str(error))}; leave the "
                "guide out"
            ) from None
        self.special = {
            text: token_id
            for text, token_id in tokenizer.vocabulary().items()
            if token_id < vocab_size and self._tokens.is_special_token(token_id)
        }
        self._encode, self._eos_token_id = tokenizer.encode_literal, eos_token_ids[0]

    def tokens_of(self, grammar: str) -> LLTokenizer:
        """The tokens of a grammar's texts.

        Where one has the text of a special token, it is cut as the ordinary text that it is.
        """
        is_there = any(text and text in grammar for text in self.special)
        return self._literal if is_there else self._tokens

    @cached_property
    def _literal(self) -> LLTokenizer:
        import llguidance

        ids = range(self._tokens.vocab_size)
        texts = [self._tokens.decode_bytes([i]) for i in ids]
        special = [i for i in ids if self._tokens.is_special_token(i)]
        pieces = Pieces(texts, special, self._eos_token_id, self._encode)
        return self._make(llguidance.TokenizerWrapper(pieces))


def _lower_priority() -> None:
    """Gives the engine's threads precedence over this one."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND)


def _compile(guide: Guide, vocabulary: Future[_Vocabulary]) -> CompiledGuide:
    import llguidance

    known = vocabulary.result()
    name = f"guide.{guide.kind}"
    try:
        grammar = grammar_of(guide, known.special)
    except ValueError as error:  # llguidance's of a schema
        raise UserError(f"{name}: {_short(str(error))}") from None
    limits = llguidance.LLParserLimits(**LIMITS)

    tokens = known.tokens_of(grammar)

    def make() -> LLMatcher:
        return llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)

    matcher = make()
    if not matcher.is_error() and matcher.is_stopped():
        raise UserError(f"{name} allows no text but the empty one; make it allow some")
    _take_forced(matcher)
    if matcher.is_error():
        raise UserError(f"{name} cannot be compiled: {_short(matcher.get_error())}")
    return CompiledGuide(make)


def _take_forced(matcher: LLMatcher) -> None:
    """Takes the forced tokens at the beginning, which finds guides that no finite text fits."""
    for _ in range(MAX_FORCED):
        if matcher.is_error() or matcher.is_stopped():
            return
        matcher.compute_bitmask()
        forced = matcher.compute_ff_tokens()
        if not forced:
            return
        matcher.consume_tokens(forced)


def _short(message: str) -> str:
    words = " ".join(message.replace("<non-verbose/>", "").split())
    if words in NO_TEXT:
        return "no text fits it"
    return words if len(words) <= MAX_MESSAGE else f"{words[:MAX_MESSAGE]}..."


def grammar_of(guide: Guide, special: dict[str, int]) -> str:
    """The grammar that llguidance compiles. special: ids of tokens without bytes of their own."""
    grammar = _content_grammar(guide, special)
    if guide.around is None:
        return grammar
    # One of JSON holds a list of grammars, which refer to one another by @name.
    content = {"lark_grammar": grammar}
    if grammar.startswith("{"):
        (content,) = json.loads(grammar)["grammars"]
    named = [{"name": "answer", "lark_grammar": guide.around}, {**content, "name": "content"}]
    return json.dumps({"grammars": named})


def _content_grammar(guide: Guide, special: dict[str, int]) -> str:
    from llguidance import LLMatcher

    if guide.kind in ("json_object", "json_schema"):
        schema = '{"type":"object"}' if guide.kind == "json_object" else guide.text
        if not schema.startswith("{"):
            schema = json.dumps(_as_object(schema == "true"))
        return str(LLMatcher.grammar_from_json_schema(schema, JSON_STYLE))
    if guide.kind == "regex":
        return str(LLMatcher.grammar_from_regex(guide.text))
    grammar = guide.text
    if guide.choice is not None:
        grammar = f"start: {' | '.join(map(literal, guide.choice))}\n"
    elif guide.kind == "structural_tag":
        grammar = structural_grammar(parse_json(grammar, "guide.structural_tag"), special)
    return str(LLMatcher.grammar_from_lark(grammar))


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A schema, true and false too, as an object."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    return schema


def structural_grammar(tag: dict[str, Any], special: dict[str, int]) -> str:
    """The Lark grammar of a structural tag, as predict.guide checks it.

    Any text may come up to a trigger, behind which one of its structures must come. special: ids of
    tokens that no text matches; triggers, beginnings and ends may have them.
    """
    rules: list[str] = []
    tags: list[str] = []
    for number, trigger in enumerate(tag["triggers"]):
        bodies = [
            _body(structure, trigger, special)
            for structure in tag["structures"]
            if _trigger_of(structure, tag["triggers"]) == trigger
        ]
        if not bodies:
            continue
        first, *rest = pieces(trigger, special)
        if first in special:
            head = f"TEXT <[{special[first]}]>"
        else:
            rules.append(f"until_{number}[lazy]: TEXT {literal(first)}")
            head = f"until_{number}"
        tail = " ".join(_symbols(rest, special))
        rules.append(f"tag_{number}: {head} {tail} ({' | '.join(bodies)})")
        tags.append(f"tag_{number}")
    one = f"({' | '.join(tags)})"
    if tag["stop_after_first"]:
        start = one if tag["at_least_one"] else f"{one} | TEXT"
    else:
        start = f"{one}{'+' if tag['at_least_one'] else '*'} TEXT"
    return "\n".join([f"start: {start}", *rules, r"TEXT: /(.|\n)*/", ""])


def _trigger_of(structure: dict[str, Any], triggers: Sequence[str]) -> str:
    """The longest trigger that a structure begins with."""
    return max((each for each in triggers if structure["begin"].startswith(each)), key=len)


def _body(structure: dict[str, Any], trigger: str, special: dict[str, int]) -> str:
    """The rule of a structure behind its trigger."""
    schema = {"x-guidance": JSON_STYLE, **_as_object(structure["schema"])}
    parts = [
        *_symbols(pieces(structure["begin"][len(trigger) :], special), special),
        f"%json {json.dumps(schema, ensure_ascii=False)}",
        *_symbols(pieces(structure.get("end", ""), special), special),
    ]
    return " ".join(parts)


def pieces(text: str, special: dict[str, int]) -> list[str]:
    """A text cut into special tokens, the longest first, and what stands between them."""
    return list(_pieces(text, sorted((s for s in special if s and s in text), key=len)))


def _pieces(text: str, tokens: Sequence[str]) -> Iterator[str]:
    if not text:
        return
    for token in reversed(tokens):
        before, found, behind = text.partition(token)
        if found:
            yield from _pieces(before, tokens)
            yield token
            yield from _pieces(behind, tokens)
            return
    yield text


def _symbols(parts: Sequence[str], special: dict[str, int]) -> Iterator[str]:
    for part in parts:
        yield f"<[{special[part]}]>" if part in special else literal(part)
