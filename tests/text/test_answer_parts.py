"""Answers read from their tokens: marks that are special tokens, and stops in the content alone."""

from __future__ import annotations

from typing import Any

import pytest

from predict import AnswerForm, UserError
from predict.request import SamplingParams
from predict.text.answer_parts import AnswerParts, Forms
from predict.text.deltas import AnswerParts as Parts
from predict.text.deltas import Call, joined
from predict.text.detokenizer import Detokenizer
from predict.text.params import with_token_ids
from predict.text.tokenizer import Tokenizer
from tests.support.paths import DEMO
from tests.support.tiny import TOKENIZER

CALL = '<tool_call>{"name": "now", "arguments": {"a": "x END y"}}</tool_call>'
HERMES = AnswerForm(calls="hermes", thoughts="think", tools=("now",))
HARMONY = AnswerForm(calls="harmony")
PLAIN = AnswerForm(thoughts="think")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DEMO)


def reader(tokenizer: Tokenizer, form: AnswerForm, *stops: Any) -> AnswerParts:
    return AnswerParts(tokenizer, Detokenizer(tokenizer), [5], Forms.of(form), *stops)


def read(
    tokenizer: Tokenizer, form: AnswerForm, text: str, *stops: Any
) -> tuple[Parts, int | None]:
    """The parts of an answer, and the number of its tokens up to its stop string."""
    ids = tokenizer.encode(text, False)
    decider, reads, streams = (reader(tokenizer, form, *stops) for _ in range(3))
    least = stops[2] if len(stops) > 2 else 0
    numbers = range(1, len(ids) + 1)
    ended = (n for n in numbers if decider.append(ids[n - 1], n > least, n == len(ids)))
    end = next(ended, None)
    decider.finish()
    ids = ids[:end]
    whole = reads.read("", ids, True)
    pieces = [
        delta for n in range(len(ids)) for delta in streams.read("", [ids[n]], n + 1 == len(ids))
    ]
    found, streamed = (joined(deltas) for deltas in (whole, pieces))
    for call in (*found.calls, *streamed.calls):
        call.id = ""
    assert streamed == found
    assert decider.text == (found.content or "")
    return found, end


NOW = [Call("", "now", '{"a": "x END y"}')]
# form, text, what is read of it with the stop string END, and the number of the one that ends it.
ENDS = [
    (PLAIN, "<think>a END b</think>c END d", Parts("c ", "a END b"), 2),
    (PLAIN, "<think>a END b</think>c", Parts("c", "a END b"), 0),
    (PLAIN, "so</think>a END b", Parts("a ", "so"), 1),
    (HERMES, f"a{CALL}b END c", Parts("ab ", None, NOW), 2),
    (HERMES, f"<think>END</think>a\n{CALL}", Parts("a", "END", NOW), 0),
    (HERMES, f"a END{CALL}", Parts("a ", None), 1),
    (HERMES, f"a EN{CALL}D", Parts("a END", None, NOW), 0),
    (HERMES, "a <tool_call>END b", Parts("a <tool_call>"), 1),
    (
        HARMONY,
        "<|channel|>analysis<|message|>END<|end|><|start|>assistant<|channel|>final END<|message|>"
        "a END b",
        Parts("a ", "END"),
        3,
    ),
]


@pytest.mark.parametrize(("form", "text", "parts", "number"), ENDS)
def test_a_stop_string_counts_in_the_content_alone(
    tokenizer: Tokenizer, form: AnswerForm, text: str, parts: Parts, number: int
) -> None:
    found, end = read(tokenizer, form, text, ("END", "unseen"))
    assert found == parts
    assert bool(end) == bool(number)
    if number:
        said = tokenizer.decode(tokenizer.encode(text, False)[:end])
        assert said.count("END") == number


def test_below_min_length_no_stop_string_counts_and_none_cuts(tokenizer: Tokenizer) -> None:
    text = "<think>a</think>b END c END d"
    size = len(tokenizer.encode("<think>a</think>b END", False))
    found, _ = read(tokenizer, PLAIN, text, ("END",), False, size)
    assert found.content == "b END c "
    found, end = read(tokenizer, PLAIN, text, ("END",), False, 99)
    assert (found.content, end) == ("b END c END d", None)
    found, _ = read(tokenizer, PLAIN, text, ("END",), True)
    assert found.content == "b END"


def test_marks_that_are_special_tokens_are_parsed() -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    mark, other = "<|user|>", "<|end|>"
    row = Forms.of(PLAIN).thoughts
    assert row is not None
    forms = Forms(None, type(row)("marked", "", mark, other))
    parts = AnswerParts(tokenizer, Detokenizer(tokenizer), [5], forms, ("🙂",))
    ids = tokenizer.encode(f"{mark}né🙂{other}b🙂c", False)
    found = joined(parts.read("", ids, True))
    assert (found.reasoning, found.content) == ("né🙂", "b")


def test_a_mark_as_a_stop_string_ends_no_answer() -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    user = tokenizer.token_to_id("<|user|>")
    params = SamplingParams(stop=("<|user|>",))
    assert with_token_ids(params, tokenizer, 342).stop_token_ids == (user,)
    params = SamplingParams(stop=("<|end|>",), answer_form=HARMONY)
    assert with_token_ids(params, tokenizer, 342).stop_token_ids == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"call": "hermes"}, "did you mean calls"),
        ({"calls": 3}, r"answer_form\.calls 3"),
        ({"tools": "f"}, r"answer_form\.tools"),
        ({"is_thinking": 1}, r"answer_form\.is_thinking"),
        (3, "answer_form 3"),
    ],
)
def test_an_answer_form_that_is_none_is_refused(value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        SamplingParams(answer_form=value)
    with pytest.raises(UserError, match="did you mean hermes"):
        Forms.of(AnswerForm(calls="hermess"))
