"""gpt-oss' harmony: every message has a channel, for thoughts, for content, or for a call.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{...}<|call|>, and <|channel|>final<|message|>...<|return|> for content.
A call ends the answer: its last token is one that ends a text.
"""

from __future__ import annotations

import re

from predict.text.lark import Rules, literal
from predict.text.markup import Emit, Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import NO_ARGUMENTS
from predict.text.tool_calls._records import Tool, ToolUse

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
BEGINS, ENDS = (START, CHANNEL, MESSAGE), (END, CALL, RETURN)
NAMESPACE = "functions."
RECIPIENT = "to="
_RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    names = [tool.name for tool in use.allowed]
    reader.record()
    yield from reader.spaces()
    mark = yield from reader.literal(RECIPIENT)  # the prompt has begun the header
    if mark is None:
        output.content(reader.rejected())
        mark = yield from reader.until((*BEGINS, *ENDS), output.content)
    while mark:
        if mark in ENDS:
            mark = yield from reader.until((*BEGINS, *ENDS), output.content)
            continue
        header = [mark]
        is_message = mark == MESSAGE or (yield from reader.until((MESSAGE,), header.append))
        if not is_message:
            return
        mark = yield from _message("".join(header), reader, output, names)


def _message(header: str, reader: Reader, output: Output, names: list[str]) -> Steps[str | None]:
    """Reads a message behind its header; the mark that ends it, None at the end of the text."""
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    to = recipient[1] if recipient else ""
    if to.startswith(NAMESPACE) or to in names:
        output.begin_call(to.removeprefix(NAMESPACE))
        sizes: list[int] = []

        def arguments(text: str) -> None:
            sizes.append(len(text))
            output.arguments(text)

        mark = yield from reader.until((*BEGINS, *ENDS), arguments)
        if not sizes:
            output.arguments(NO_ARGUMENTS)
        return mark
    is_thought = channel is not None and channel[1] == "analysis"
    emit: Emit = output.reasoning if is_thought else output.content
    output.separate()
    return (yield from reader.until((*BEGINS, *ENDS), emit))


def _start(rules: ToolRules) -> str:
    channel, message = rules.mark(CHANNEL), rules.mark(MESSAGE)
    json = f'" "? ({rules.mark(CONSTRAIN)}? "json")?'

    def called(tool: Tool) -> str:
        name = literal(f"to={NAMESPACE}{tool.name}")
        by_channel = f'{channel} "commentary " {name}'
        by_role = f'" " {name} {channel} "commentary"'
        return f"({by_channel} | {by_role}) {json} {message} {rules.arguments(tool)}"

    call = rules.any_tool(called)
    if rules.use.is_forced:
        return f"{_other_messages(rules)} {call}"
    return f"{_other_messages(rules)} ({call} | {_final(rules, rules.free_text())})"


def _other_messages(rules: Rules) -> str:
    """Thoughts, and what is said ahead of a call."""
    body = f"{rules.mark(MESSAGE)} {rules.text_until(END)}"
    following = f'{rules.mark(START)} "assistant"'
    return f'({rules.mark(CHANNEL)} ("analysis" | "commentary") {body} {following})*'


def _final(rules: Rules, content: str) -> str:
    return rules.rule(f'{rules.mark(CHANNEL)} "final" {rules.mark(MESSAGE)} {content}')


def _around_content(rules: Rules, content: str) -> str:
    return f"{_other_messages(rules)} {_final(rules, content)}"


FORMAT = CallFormat(
    name="harmony",
    models="gpt-oss",
    marks=(START, CHANNEL, MESSAGE, CALL),
    begins=(),
    kept_tokens=(*BEGINS, CONSTRAIN, *ENDS),
    reads=_reads,
    start=_start,
    is_whole=True,
    around_content=_around_content,
)
