"""Messages between the two processes: whole again however a socket cut them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predict import Guide, SamplingParams
from predict.config.adapters import Change
from predict.engine.samples import StreamOutput
from predict.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from predict.server.wire import (
    Abort,
    Add,
    AskChange,
    Changed,
    Ended,
    FromEngine,
    FromFront,
    Messages,
    SentPicture,
    StepNews,
    Stop,
    frame,
)

SEEN = [  # a picture, and one of tiles
    SentPicture(1, b"d" * 32, (2, 2, 3), bytes(12)),
    SentPicture(9, b"e" * 32, (3, 2, 2, 3), bytes(36)),
]
ADDED = [
    Add(1, [3, 4], SamplingParams(), True, 0.5, SEEN),
    *(
        Add(1, [3, 4], params, True, 0.5)
        for params in (
            SamplingParams(),
            SamplingParams(stop=("a", "b"), logit_bias={5: -1.5}, bad_words=("x", (1, 2)), n=2),
            SamplingParams(num_beams=2, early_stopping="never"),
            SamplingParams(adapter="sql"),
            SamplingParams(num_beams=2, early_stopping=True),
            SamplingParams(guide=Guide(json_schema={"type": "object"})),
            SamplingParams(guide=Guide(choice=("yes", "no"))),
        )
    ),
]
LOGPROBS = ({3: Logprob(-0.5, 1), 9: Logprob(float("-inf"), 2)},)
OUTPUT = RequestOutput(
    request_id=7,
    prompt_token_ids=(1, 2),
    token_ids=(3,),
    text="é",
    finish_reason="stop",
    metrics=RequestMetrics(0.1, None, (0.5,), 0.75),
    outputs=(CompletionOutput(0, "é", (3,), "stop", -0.5, LOGPROBS, score=0.25),),
    prompt_logprobs=(None, *LOGPROBS),
)
SAID = StepNews([(1, [StreamOutput("a", (5,), None), StreamOutput("", (), "stop", 1)])], [])


@given(st.lists(st.integers(0, 300), max_size=8))
def test_messages_are_whole_however_they_are_cut(cuts: list[int]) -> None:
    sent: list[FromFront] = [
        *ADDED,
        AskChange(3, Change("adapter", "é", "/a")),
        AskChange(4, Change("prefix", "é")),
        Abort(9),
        Stop(),
    ]
    data = b"".join(map(frame, sent))
    messages: Messages[FromFront] = Messages(FromFront)
    got: list[FromFront] = []
    for cut in cuts:
        got += messages.take(data[:cut])
        data = data[cut:]
    got += messages.take(data)
    assert got == sent


def test_an_answers_end_has_everything() -> None:
    messages: Messages[FromEngine] = Messages(FromEngine)
    said: list[Any] = [
        SAID,
        Changed(3),
        Changed(4, "why"),
        StepNews([], [Ended(1, None, OUTPUT), Ended(2, None, refused="why")]),
    ]
    assert messages.take(b"".join(frame(each) for each in said)) == said


def test_what_is_no_message_is_refused() -> None:
    messages: Messages[FromEngine] = Messages(FromEngine)
    with pytest.raises(msgspec.DecodeError):
        messages.take(frame(Abort(1)))  # of the other side
