"""OpenAI's objects of pieces and answers, without HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from predict.engine.samples import StreamOutput
from predict.request import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from predict.server.answers import (
    ChatEvents,
    CompletionEvents,
    Echo,
    Identity,
    as_events,
    completion,
    gathered,
)
from predict.server.logprobs import LEAST, LogprobTexts
from predict.server.runs import Usage
from predict.text.token_texts import TokenTexts
from predict.text.tokenizer import Tokenizer
from tests.support.texts import TOKENIZERS
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
    assert "completion_tokens_details" not in last["usage"]
    drafted = Usage(3, 4, num_draft_tokens=5, num_accepted_draft_tokens=2)
    details = values(ChatEvents(IDENTITY, True).finish(drafted))[-1]["usage"]
    assert details["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 3,
    }
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    assert ChatEvents(IDENTITY, False).finish(Usage()) == b"data: [DONE]\n\n"


def test_a_logprob_of_minus_infinity_is_a_number(tokenizer: Tokenizer) -> None:
    texts = LogprobTexts(TokenTexts(tokenizer), 1)
    (entry,) = texts.chat([{5: Logprob(float("-inf"), 9), 6: Logprob(-0.1, 1)}])
    assert entry["logprob"] == LEAST
    assert [each["logprob"] for each in entry["top_logprobs"]] == [-0.1]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_of_an_echoed_completion_join_to_its_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    made, prompt_text, text = LogprobTexts(TokenTexts(tokenizer), 2), "a né 🙂", " b🙂 a"
    prompt = tokenizer.encode(prompt_text, True)
    ids = tokenizer.encode(prompt_text + text, True)[len(prompt) :]
    measured = [{i: Logprob(-0.5, 1), 3: Logprob(-1.0, 2), 4: Logprob(-2.0, 3)} for i in ids]
    echo = Echo(prompt_text, TokenTexts(tokenizer).of_prompt(prompt, prompt_text))
    whole = completion(
        IDENTITY,
        [
            RequestOutput(
                *(0, tuple(prompt), tuple(ids), text, "stop", RequestMetrics(0.0, None, (), None)),
                outputs=(CompletionOutput(0, text, tuple(ids), "stop", logprobs=tuple(measured)),),
                prompt_logprobs=(None, *({i: Logprob(-0.5, 1)} for i in prompt[1:])),
            )
        ],
        *(Usage(), made, [echo]),
    )
    found = whole["choices"][0]["logprobs"]
    assert whole["choices"][0]["text"] == "".join(found["tokens"]) == prompt_text + text
    assert len(found["tokens"]) == len(prompt) + len(ids)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert (prompt_text + text).startswith(token, offset)
    assert found["token_logprobs"] == [None] + [-0.5] * (len(found["tokens"]) - 1)
    # The same of a stream, whose first piece has the prompt.
    stream = CompletionEvents(IDENTITY, 1, False, made, [prompt_text], [prompt])
    offsets, tokens = [], []
    for number, (token_id, each) in enumerate(zip(ids, measured, strict=True), 1):
        reason: Any = "stop" if number == len(ids) else None
        part = StreamOutput("", (token_id,), reason, logprobs=(each,))
        (event,) = values(stream.encode(0, [part]))
        offsets += event["choices"][0]["logprobs"]["text_offset"]
        tokens += event["choices"][0]["logprobs"]["tokens"]
    assert "".join(tokens) == text
    assert offsets == found["text_offset"][len(prompt) :]
    (*events, end) = values(as_events(whole, True))
    assert [event["choices"] for event in events] == [whole["choices"]]
    assert (end["choices"], end["usage"]) == ([], whole["usage"])


def test_likeliest_parts_of_characters_are_told_apart() -> None:
    tokenizer = TOKENIZERS["byte_level"]()
    first, *others = tokenizer.encode("🙂", False)
    tops = {i: Logprob(-1.0 - n, n + 1) for n, i in enumerate([first, *others])}
    made = LogprobTexts(TokenTexts(tokenizer), 9)
    found = made.completion([tops], made.position([]), False)
    assert found["tokens"] == [""]
    shown = [*found["top_logprobs"][0]]
    assert shown[0] == r"bytes:\xf0\x9f"
    assert len(set(shown)) == len(tops)


def test_each_event_counts_where_it_is_asked_for() -> None:
    usage = Usage(3, 0)
    for encoder in (
        ChatEvents(IDENTITY, True, usage_so_far=usage),
        CompletionEvents(IDENTITY, 1, True, usage_so_far=usage),
    ):
        for count in (1, 5):
            usage.num_output_tokens = count
            for event in values(encoder.encode(0, [piece("a")])):
                assert event["usage"]["completion_tokens"] == count


def test_texts_and_bytes_of_tokens_make_the_whole(tokenizer: Tokenizer) -> None:
    text = "hello wörld 🙂 <|user|>"
    texts = TokenTexts(tokenizer)
    found = [texts[i] for i in tokenizer.encode(text, False)]
    assert bytes(b for each in found for b in each.bytes or ()).decode() == text
    assert texts[10**6].text == ""
