"""Grammars for guides, in llguidance's variant of Lark, written rule by rule.

A mark that is one token of the vocabulary may be a special token, which no text of a grammar
matches, or an ordinary one, which is matched by its text alone. So a grammar takes either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from predict.text.reasoning import ReasoningFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON is written as Python's json.dumps does, the commonest form in training data. With any spaces
# a model may write them to the end of its tokens, and no token between values is forced. A schema
# may ask for another style under the key "x-guidance".
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
MAX_MESSAGE = 400  # characters of what llguidance says
# In llguidance's units: some 20 ms for the first lexer, 3 for the mask of one step, and 60 MB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 30_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 40_000,
    "max_grammar_size": 300_000,
    "verbose_errors": False,
}
TEXT = "TEXT"
_TERMINALS = "TEXT: /(.|\\n)*/\n"


@dataclass(frozen=True)
class GuideContext:
    """The properties of the model and the prompt that grammars depend on.

    token_id: the id of a text that is one token of the vocabulary, else None.
    """

    token_id: Callable[[str], int | None]
    thoughts: ReasoningFormat | None = None  # of the model
    is_thinking: bool | None = False  # see ReasoningFormat.is_opened_by


class Rules:
    """The rules of a grammar; methods return what stands for a rule in other rules.

    Equal rules are written once.
    """

    def __init__(self, context: GuideContext) -> None:
        self._context = context
        self._names: dict[str, str] = {}

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule with this body."""
        return self._names.setdefault(f"{options}: {body}", f"rule_{len(self._names)}")

    def mark(self, text: str) -> str:
        """A mark as a token, or as text."""
        token = self._token(text)
        return self.rule(f"{token} | {literal(text)}") if token else literal(text)

    def text_until(self, mark: str) -> str:
        """Any text, thoughts included, up to the mark, which is the last of it."""
        tokens = self._thought_tokens(besides=mark)
        end = self.plain_text_until(mark)
        return self.rule(f"({TEXT} ({tokens}))* {end}") if tokens else end

    def free_text(self) -> str:
        """Any text, thoughts included, to the end."""
        tokens = self._thought_tokens()
        return self.rule(f"{TEXT} (({tokens}) {TEXT})*") if tokens else TEXT

    def thought(self) -> str:
        """A thought ahead of the content; "" for a model without thoughts."""
        row = self._context.thoughts
        if row is None:
            return ""
        rest = f"{self.plain_text_until(row.end)} /\\s{{0,4}}/"
        return rest if self._context.is_thinking else f"({self.mark(row.begin)} {rest})?"

    def has_token(self, text: str) -> bool:
        """Whether a text is one token of the vocabulary."""
        return self._context.token_id(text) is not None

    def grammar(self, start: str) -> str:
        """The text of the grammar."""
        rules = [f"{name}{body}\n" for body, name in self._names.items()]
        return "".join([f"start: {start}\n", _TERMINALS, *rules])

    def plain_text_until(self, mark: str, without: Sequence[str] = ()) -> str:
        """Text without special tokens up to the mark, and with none of the texts in `without`."""
        text = TEXT
        if without:
            texts = "|".join(map(_pattern, without))
            text = f"({TEXT} & ~/(.|\\n)*({texts})(.|\\n)*/)"
        by_text = self.rule(f"{text} {literal(mark)}", "[lazy]")
        token = self._token(mark)
        return self.rule(f"{by_text} | {TEXT} {token}") if token else by_text

    def _thought_tokens(self, besides: str = "") -> str:
        row = self._context.thoughts
        marks = () if row is None else row.kept_tokens
        tokens = [self._token(mark) for mark in marks if mark != besides]
        return " | ".join(filter(None, tokens))

    def _token(self, text: str) -> str:
        token_id = self._context.token_id(text)
        return "" if token_id is None else f"<[{token_id}]>"


def _pattern(text: str) -> str:
    """A regular expression of a text alone."""
    return re.sub(r"([^\w\s<>=:])", r"\\\1", text).replace("\n", "\\n")


def literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)
