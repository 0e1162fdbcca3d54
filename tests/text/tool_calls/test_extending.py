"""The worked example of docs/tool-calls.md is a format like those that are there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from predict.text import tool_calls
from predict.text.deltas import AnswerParts, Call
from predict.text.tool_calls import GuideContext, detected, format_of, known_formats
from tests.support.tool_guides import takes
from tests.text.tool_calls.published import USE, read_format

EXAMPLES = Path(__file__).parents[2] / "docs_examples" / "tool_calls"
TEXT = 'So. <call=get_weather>{"city": "Köln"}</call> <call=now>{}</call>'


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tool_calls, "__path__", [*tool_calls.__path__, str(EXAMPLES)])
    yield
    sys.modules.pop("predict.text.tool_calls.acme", None)
    vars(tool_calls).pop("acme", None)


@pytest.mark.usefixtures("acme")
def test_a_format_is_one_file() -> None:
    assert "acme" in known_formats()
    assert detected("{{ '<call=' }}{{ x }}{{ '</call>' }}") is format_of("acme")
    answer = AnswerParts(
        "So.", None, [Call("", "get_weather", '{"city": "Köln"}'), Call("", "now", "{}")]
    )
    for at in range(len(TEXT)):
        assert read_format("acme", [TEXT[:at], TEXT[at:]]) == answer
    assert read_format("acme", ["a <call=b c"]).content == "a <call=b c"
    guide = format_of("acme").guide(USE, GuideContext(lambda _: None))
    assert takes(guide, TEXT)
    assert not takes(guide, TEXT.replace("city", "town"))
