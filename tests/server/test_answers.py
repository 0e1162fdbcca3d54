"""OpenAI's objects of pieces and answers, without HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from predict.engine.samples import StreamOutput
from predict.request import Logprob
from predict.server.answers import ChatEvents, CompletionEvents, Identity, gathered
from predict.server.logprobs import LEAST, LogprobTexts
from predict.server.runs import Usage
from predict.text.token_texts import TokenTexts
from predict.text.tokenizer import Tokenizer
from tests.support.tiny import TOKENIZER

IDENTITY = Identity("id", "kind", "name")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TOKENIZER)


def values(events: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in events.decode().split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def piece(text: str, index: int = 0, reason: Any = None) -> StreamOutput:
    return StreamOutput(text, tuple(range(len(text))), reason, index)


def test_pieces_that_piled_up_become_one_for_each_answer() -> None:
    made = gathered([piece("a"), piece("b", 1), piece("c"), piece("d", 1, "stop")])
    assert [(each.index, each.text, each.finish_reason) for each in made] == [
        (0, "ac", None),
        (1, "bd", "stop"),
    ]
    assert [len(each.token_ids) for each in made] == [2, 2]


def test_a_text_that_is_not_there_yet_makes_no_event() -> None:
    for encoder in (ChatEvents(IDENTITY, False), CompletionEvents(IDENTITY, 1, False)):
        encoder.encode(0, [piece("a")])
        assert encoder.encode(0, [piece("")]) == b""


@pytest.mark.parametrize(
    "text", ['"', "\\", "\n", "\x00", "\u2028", "</script>", "🙂", "data: x\n\n"]
)
def test_any_text_is_whole_in_one_event(text: str) -> None:
    (event,) = values(CompletionEvents(IDENTITY, 1, False).encode(0, [piece(text)]))
    assert event["choices"][0]["text"] == text
    *_, event = values(ChatEvents(IDENTITY, True).encode(0, [piece(text)]))
    assert event["choices"][0]["delta"] == {"content": text}
    assert event["usage"] is None


def test_usage_follows_all_answers() -> None:
    last = values(ChatEvents(IDENTITY, True).finish(Usage(3, 4, 2)))[-1]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    assert ChatEvents(IDENTITY, False).finish(Usage()) == b"data: [DONE]\n\n"


def test_a_logprob_of_minus_infinity_is_a_number(tokenizer: Tokenizer) -> None:
    texts = LogprobTexts(TokenTexts(tokenizer), 1)
    (entry,) = texts.chat([{5: Logprob(float("-inf"), 9), 6: Logprob(-0.1, 1)}])
    assert entry["logprob"] == LEAST
    assert [each["logprob"] for each in entry["top_logprobs"]] == [-0.1]


def test_texts_and_bytes_of_tokens_make_the_whole(tokenizer: Tokenizer) -> None:
    text = "hello wörld 🙂 <|user|>"
    texts = TokenTexts(tokenizer)
    found = [texts[i] for i in tokenizer.encode(text, False)]
    assert bytes(b for each in found for b in each.bytes or ()).decode() == text
    assert texts[10**6].text == ""
