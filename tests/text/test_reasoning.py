"""Thoughts, told from the answer however the text is cut, and calls behind them."""

from __future__ import annotations

import pytest

from predict.errors import UserError
from predict.text.deltas import AnswerParts, Call, ContentDelta, ReasoningDelta
from predict.text.reasoning import FORMATS, detected, reasoning_of
from predict.text.tool_calls import ToolUse, answer_parser, format_of
from tests.text.tool_calls.published import HARMONY, USE, read

THINK = reasoning_of("think")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW = [Call("", "now", "{}")]
# name, whether the prompt has opened the thought, text, what it is
CASES = [
    ("think", False, "<think>\nHm — ü.\n\n</think>\n\nYes.", AnswerParts("Yes.", "Hm — ü.")),
    ("think", True, "\nHm.\n</think>\n\nYes.\n", AnswerParts("Yes.\n", "Hm.")),
    ("think", True, "<think>Hm.</think>Yes.", AnswerParts("Yes.", "Hm.")),
    ("think", False, "<think>\n\n</think>\n\nYes.", AnswerParts("Yes.")),
    ("think", False, "  Yes, <think>no</think>.", AnswerParts("  Yes, <think>no</think>.")),
    ("think", False, "<thin", AnswerParts("<thin")),
    # The end alone, unless the prompt has closed the thought.
    ("think", False, " Hm </thin \n</think>\nYes.", AnswerParts("Yes.", "Hm </thin")),
    ("think", None, "Hm</think>\nYes.", AnswerParts("Hm</think>\nYes.")),
    ("think", None, "<think>Hm</think>\nYes.", AnswerParts("Yes.", "Hm")),
    ("think", False, f"Hm.\n</think>\n\n{CALL}", AnswerParts(None, "Hm.", NOW)),
    ("think", False, "</think>Yes </think>.", AnswerParts("Yes </think>.")),
    ("think", False, f"{CALL} a</think>b", AnswerParts("\n a</think>b", None, NOW)),
    ("think", False, "a <tool_call> b</think>c", AnswerParts("c", "a <tool_call> b")),
    ("ernie_x1", False, "Hm</think>\n<response>\nYes.\n</response>", AnswerParts("Yes.", "Hm")),
    ("think", True, "a </thin b", AnswerParts(None, "a </thin b")),
    ("think", True, "a </think", AnswerParts(None, "a </think")),
    ("think", False, "<think>Hm. ", AnswerParts(None, "Hm.")),
    ("think", False, f"<think>Hm.</think>\n{CALL}", AnswerParts(None, "Hm.", NOW)),
    ("think", True, f"{CALL}</think>So.\n{CALL}", AnswerParts("So.", CALL, NOW)),
    # A call in a thought that never ends, and what only looks like one.
    ("think", True, f"I call\n{CALL}", AnswerParts(None, "I call", NOW)),
    ("think", False, f"<think>I call\n{CALL} so", AnswerParts(None, "I call\n so", NOW)),
    ("think", True, "I call\n<tool_call>no", AnswerParts(None, "I call\n<tool_call>no")),
    ("think", True, f"a {CALL} b</think>So.", AnswerParts("So.", f"a {CALL} b")),
    ("ernie_x1", True, "\nHm.\n</think>\n\n<response>\nYes.\nSo.\n</response>\n",
     AnswerParts("Yes.\nSo.", "Hm.")),
    ("ernie_x1", True, "Hm.\n</think>\nYes </response>", AnswerParts("Yes </response>", "Hm.")),
    ("ernie_x1", False, "<response>\nYes.\n</response>\n", AnswerParts("Yes.")),
    ("ernie_x1", True, f"Hm.\n</think>\n\n<response>\nSo.\n</response>\n{CALL}",
     AnswerParts("So.", "Hm.", NOW)),
    ("ernie_x1", True, f"Hm.\n</think>\n\n\n{CALL}", AnswerParts(None, "Hm.", NOW)),
    ("hunyuan", False, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>",
     AnswerParts("Yes.", "Hm.")),
    ("mistral", False, "[THINK]Hm.[/THINK]Oui.", AnswerParts("Oui.", "Hm.")),
    ("seed_oss", False, "<seed:think>Hm.</seed:think>Yes.", AnswerParts("Yes.", "Hm.")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "is_thinking", "text", "answer"), CASES)
def test_a_thought_is_told_wherever_the_text_is_cut(
    name: str, is_thinking: bool | None, text: str, answer: AnswerParts
) -> None:
    def told(pieces: list[str]) -> AnswerParts:
        row = reasoning_of(name)
        parser = answer_parser(format_of("hermes"), row, USE, is_thinking=is_thinking)
        return read(parser, pieces)

    assert told([text]) == answer
    for at in range(1, len(text)):
        assert told([text[:at], text[at:]]) == answer, at
    assert told(list(text)) == answer


def test_thoughts_come_as_they_are_written() -> None:
    parser = answer_parser(None, THINK, ToolUse(), is_thinking=True)
    assert parser.feed("Hm, ") == [ReasoningDelta("Hm,")]
    assert parser.feed("so </th") == [ReasoningDelta(" so")]
    assert parser.feed("ink>\n") == []
    assert parser.feed("Yes ") == [ContentDelta("Yes ")]
    assert parser.finish() == []


def test_without_tools_calls_are_content() -> None:
    for use in (ToolUse(), ToolUse(tools=USE.tools, choice="none")):
        for row in (None, format_of("hermes")):
            assert read(answer_parser(row, None, use), list(CALL)) == AnswerParts(CALL)


def test_harmony_tells_thoughts_itself_with_tools_and_without() -> None:
    case = HARMONY[1]
    for thoughts in (None, THINK):
        parser = answer_parser(format_of("harmony"), thoughts, ToolUse())
        assert read(parser, list(case.text)) == case.answer


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("What is <think>?<|im_end|>\n", False),
    ],
)
def test_a_prompt_may_open_or_close_the_thought(prompt: str, opened: bool | None) -> None:
    assert THINK.is_opened_by(prompt) is opened


def test_a_row_is_found_by_the_template_or_by_name() -> None:
    assert detected("... {% if x %}<think>{% endif %} ... </think>") is THINK
    assert detected("{{ m.content.split('</think>')[-1] }}") is THINK
    assert detected("<think></think><response></response>") is FORMATS["ernie_x1"]
    assert detected("<minimax:tool_call></think><response></response>") is THINK
    assert detected("</think><answer></answer>") is FORMATS["hunyuan"]
    assert detected("[THINK]{{ x }}[/THINK]") is FORMATS["mistral"]
    assert detected("{{ messages }}") is None
    with pytest.raises(UserError, match="did you mean think"):
        reasoning_of("thinking")
