"""OLMo 3: <function_calls>f(a="text", b=[1, 2]) and more on lines of their own</function_calls>.

Values are JSON, as the template writes those of earlier turns; Python's literals are read too.
"""

from __future__ import annotations

import json
import re
from string import hexdigits

from predict.text.lark import literal
from predict.text.markup import Emit, Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import Outcome
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool
from predict.text.tool_calls._values import PYTHON

BEGIN, END, LINE = "<function_calls>", "</function_calls>", "\n"
_WORD, _BETWEEN, _NUMBER = (re.compile(p) for p in (r"[A-Za-z_]*", r"[\s,:]*", r"[\d+\-.]*"))
_IN_TEXT = re.compile(r"""[^'"\\]*""")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_AS_JSON = {"(": "[", ")": "]"}  # a tuple's
_ESCAPES = '"\\/bfnrtu'  # JSON's; Python's others stand for themselves


def _reads(reader: Reader, output: Output) -> Steps[None]:
    marks: tuple[str, ...] = (BEGIN,)
    while mark := (yield from reader.until(marks, output.content)):
        marks = (BEGIN,)
        if mark == END:
            continue
        reader.record()
        text = mark
        outcome = yield from _call(reader, output)
        while outcome is Outcome.WHOLE:
            text = ""
            marks = (BEGIN, END)
            reader.record()
            outcome = yield from _call(reader, output)
        if outcome is Outcome.CUT:
            yield from reader.until((END,), output.arguments)
        else:
            output.content(reader.rejected(text))


def _call(reader: Reader, output: Output) -> Steps[Outcome]:
    """Reads name(key=value, ...), and begins the call at its parenthesis."""
    yield from reader.spaces()
    name = yield from reader.run(NAME_CHARACTERS)
    if not name or not (yield from reader.literal("(")):
        return Outcome.NONE
    reader.recorded()
    output.begin_call(name)
    separator = "{"
    yield from reader.spaces()
    while not (yield from reader.literal(")")):
        key = yield from reader.run(NAME_CHARACTERS)
        yield from reader.spaces()
        if not key or not (yield from reader.literal("=")):
            output.arguments(separator + key)
            return Outcome.CUT
        output.arguments(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from reader.spaces()
        if not (yield from _value(reader, output.arguments)):
            return Outcome.CUT
        yield from reader.spaces()
        if (yield from reader.literal(",")):
            yield from reader.spaces()
        elif (yield from reader.peek()) != ")":
            return Outcome.CUT
    output.arguments("{}" if separator == "{" else "}")
    return Outcome.WHOLE


def _value(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads a literal and emits it as JSON; False, with no more read, where it breaks off."""
    closers: list[str] = []
    while True:
        character = yield from reader.peek()
        if character and character in "\"'":
            if not (yield from _text(reader, emit)):
                return False
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
            reader.take(1)
            emit(_AS_JSON.get(character, character))
        elif closers and character == closers[-1]:
            closers.pop()
            reader.take(1)
            emit(_AS_JSON.get(character, character))
        else:
            number = yield from reader.run(_NUMBER)
            word = yield from reader.run(_WORD)
            between = (yield from reader.run(_BETWEEN)) if closers else ""
            if not number and not word and not between:
                return False
            if "," in between and (yield from reader.peek()) == closers[-1]:
                between = between.rstrip().removesuffix(",")  # which Python allows, and JSON not
            emit(f"{number}{PYTHON.get(word, word)}{between}")
            if closers or (yield from reader.peek()) in tuple("0123456789+-."):
                continue  # as behind an exponent's letter
        if not closers:
            return True


def _text(reader: Reader, emit: Emit) -> Steps[bool]:
    quote = reader.take(1)
    emit('"')
    while character := (yield from reader.peek()):
        if character == quote:
            reader.take(1)
            emit('"')
            return True
        piece = reader.matched(_IN_TEXT) or reader.take(1)
        if piece != "\\":
            emit(json.dumps(piece, ensure_ascii=False)[1:-1])
            continue
        escaped = yield from reader.peek()
        reader.take(len(escaped))
        if escaped == "x":
            digits = ""
            while len(digits) < 2 and (yield from reader.peek()) in tuple(hexdigits):
                digits += reader.take(1)
            emit(f"\\u{digits:0>4}")
        elif escaped and escaped in _ESCAPES:
            emit("\\" + escaped)
        else:
            emit(json.dumps(escaped if escaped == "'" else "\\" + escaped)[1:-1])
    return False


def _start(rules: ToolRules) -> str:
    call = rules.any_tool(lambda tool: f'{literal(tool.name + "(")} {_parameters(rules, tool)} ")"')
    rest = rules.rule(f"{rules.calls(call, literal(LINE))} {rules.mark(END)}")
    return rules.amid_text(BEGIN, rest, "/[ \\n]{0,2}/")


def _parameters(rules: ToolRules, tool: Tool) -> str:
    """The parameters of a tool in the order of its schema; any, where it names none."""
    properties = list(rules.properties(tool).items())
    if not properties:
        one = rules.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {rules.json({}, False)}')
        return f'({one} (", " {one})*)?'
    required = tool.parameters.get("required")
    needed = required if isinstance(required, list) else []
    # Of what may follow: with a parameter ahead of it, and without.
    behind = first = ""
    for name, schema in reversed(properties):
        one = f"{literal(name + '=')} {rules.json(schema, tool.strict)} {behind}"
        more = f'", " {one}'
        if name in needed:
            behind, first = rules.rule(more), rules.rule(one)
        else:
            behind, first = (
                rules.rule(f"({each})?" if not rest else f"{each} | {rest}")
                for each, rest in ((more, behind), (one, first))
            )
    return first


FORMAT = CallFormat(
    name="olmo3",
    models="OLMo 3",
    marks=("<functions>", BEGIN, END),
    begins=(BEGIN,),
    kept_tokens=(BEGIN, END),
    reads=lambda reader, output, _: _reads(reader, output),
    start=_start,
)
