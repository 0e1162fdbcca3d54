"""Logprobs as OpenAI's objects show them, with the texts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predict.request import Logprob, TokenLogprobs
from predict.text.token_texts import TokenTexts

LEAST = -9999.0  # in place of minus infinity, which JSON has not


def _value(found: Logprob) -> float:
    return max(found.logprob, LEAST)


class LogprobTexts:
    """Makes the objects; without a tokenizer the texts are empty."""

    def __init__(self, texts: TokenTexts | None, num_top: int) -> None:
        """num_top: likeliest tokens beside each one that are shown."""
        self._texts = texts
        self._num_top = num_top

    def chat(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Entries of a chat answer's logprobs.content."""
        made: list[dict[str, Any]] = []
        for each in tokens:
            token_id = next(iter(each))
            top = [self._entry(i, each[i]) for i in self._top(each)]
            made.append({**self._entry(token_id, each[token_id]), "top_logprobs": top})
        return made

    def completion(self, tokens: Sequence[TokenLogprobs | None], offset: int) -> dict[str, Any]:
        """The logprobs of a completion. offset: of the first token in the text, in characters."""
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for each in tokens:
            offsets.append(offset)
            if each is None:  # the first of a prompt
                texts.append("")
                values.append(None)
                tops.append(None)
                continue
            token_id = next(iter(each))
            texts.append(self._text(token_id))
            values.append(_value(each[token_id]))
            shown = [token_id, *self._top(each)]
            tops.append({self._text(i): _value(each[i]) for i in shown})
            offset += len(texts[-1])
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self._num_top else None,
            "text_offset": offsets,
        }

    def by_id(self, tokens: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """A prompt's logprobs as vLLM shows them: by token id, the token itself first."""
        return [
            None
            if each is None
            else {
                str(i): {
                    "logprob": _value(found),
                    "rank": found.rank,
                    "decoded_token": self._text(i),
                }
                for i, found in each.items()
            }
            for each in tokens
        ]

    def _top(self, each: TokenLogprobs) -> list[int]:
        ranked = sorted(each, key=lambda i: each[i].rank)
        return [i for i in ranked if each[i].rank <= self._num_top]

    def _text(self, token_id: int) -> str:
        return "" if self._texts is None else self._texts[token_id].text

    def _entry(self, token_id: int, found: Logprob) -> dict[str, Any]:
        texts = self._texts
        token = None if texts is None else texts[token_id]
        return {
            "token": "" if token is None else token.text,
            "logprob": _value(found),
            "bytes": None if token is None else token.bytes,
        }
