"""Logprobs as OpenAI's objects show them, with the texts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predict.request import Logprob, TokenLogprobs
from predict.text.detokenizer import TextStream
from predict.text.token_texts import TokenTexts

LEAST = -9999.0  # in place of minus infinity, which JSON has not


def _value(found: Logprob) -> float:
    return max(found.logprob, LEAST)


class TextPosition:
    """A place in the text of one completion, at the end of what was shown of it."""

    def __init__(self, stream: TextStream | None) -> None:
        """stream: of the answer; None: without a tokenizer texts are empty."""
        self._stream = stream
        self.offset = 0  # characters

    def next(self, token_id: int) -> str:
        """The text that the answer's next token adds."""
        return "" if self._stream is None else self._stream.append((token_id,))

    def rest(self) -> str:
        """The text that is known behind the last token alone."""
        return "" if self._stream is None else self._stream.finish()


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

    def position(self, prompt_token_ids: Sequence[int]) -> TextPosition:
        """The beginning of the answer to a prompt, which stands at the text's beginning."""
        return TextPosition(None if self._texts is None else self._texts.stream(prompt_token_ids))

    def completion(
        self,
        tokens: Sequence[TokenLogprobs],
        position: TextPosition,
        is_last: bool,
        prompt: Sequence[tuple[str, int, TokenLogprobs | None]] = (),
    ) -> dict[str, Any]:
        """The logprobs of a piece of a completion; `position` moves behind it.

        The texts of tokens are what each adds to the completion's text. prompt: of tokens before
        the answer, where it is echoed: text, id, and logprobs of all but the first.
        """
        found = [*prompt]
        for each in tokens:
            token_id = next(iter(each))
            found.append((position.next(token_id), token_id, each))
        if is_last and tokens:
            text, *rest = found[-1]
            found[-1] = (text + position.rest(), *rest)  # type: ignore[assignment]
        offsets: list[int] = []
        for text, _, _ in found:
            offsets.append(position.offset)
            position.offset += len(text)
        return {
            "tokens": [text for text, _, _ in found],
            "token_logprobs": [each and _value(each[token_id]) for _, token_id, each in found],
            "top_logprobs": [self._tops(*each) for each in found] if self._num_top else None,
            "text_offset": offsets,
        }

    def _tops(
        self, text: str, token_id: int, measured: TokenLogprobs | None
    ) -> dict[str, float] | None:
        """A token and the likeliest ones in its place, by text."""
        if measured is None:
            return None
        tops = {text or self._label(token_id): _value(measured[token_id])}
        for other in self._top(measured):
            if other != token_id:
                tops.setdefault(self._label(other), _value(measured[other]))
        return tops

    def _label(self, token_id: int) -> str:
        return "" if self._texts is None else self._texts.label(token_id)

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
