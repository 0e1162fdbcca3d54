"""The text of an answer with the special tokens in it that a parser looks for.

The engine's text leaves special tokens out. For models that mark calls and thoughts with them, the
front makes the text from the token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from predict.engine.samples import StreamOutput
from predict.request import CompletionOutput, SamplingParams
from predict.text.answer_text import AnswerText
from predict.text.detokenizer import Detokenizer
from predict.text.tokenizer import Tokenizer


class KeptText:
    """Makes the texts of one prompt's answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        kept: Mapping[int, str],
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        """detokenizer: one that writes special tokens out. kept: those that stay."""
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._kept = kept
        self._prompt = prompt_token_ids
        self._params = params
        self._answers: dict[int, AnswerText] = {}

    def of_piece(self, piece: StreamOutput) -> str:
        """The text that a piece adds to its answer."""
        answer = self._answers.get(piece.index)
        if answer is None:
            answer = self._answers[piece.index] = self._begun()
        self._append(answer, piece.token_ids)
        if piece.finish_reason is not None:
            answer.finish()
        return answer.take()

    def of_answer(self, output: CompletionOutput) -> str:
        """The text of a whole answer."""
        answer = self._begun()
        self._append(answer, output.token_ids)
        answer.finish()
        return answer.text

    def _begun(self) -> AnswerText:
        return AnswerText(
            self._detokenizer.stream(self._prompt),
            self._params.stop_strings,
            self._params.include_stop_str_in_output,
        )

    def _append(self, answer: AnswerText, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id in self._kept or self._tokenizer.decode([token_id]):
                answer.append(token_id)
            elif not self._tokenizer.decode([token_id], False):
                answer.append(token_id)  # part of a character, or a token without text
