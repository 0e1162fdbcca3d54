"""Answers as each format's makers publish them, with what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from predict.text.deltas import AnswerParts, Call, Delta, Parser, joined
from predict.text.tool_calls import Tool, ToolUse, format_of, parser_of

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool(name="now")
USE = ToolUse(tools=(WEATHER, NOW))

Called = tuple[str, str]  # a name, and arguments


@dataclass(frozen=True)
class Published:
    """An answer of a format. valid: whether the format's guide takes it."""

    format: str
    text: str
    calls: tuple[Called, ...]
    content: str | None = None
    reasoning: str | None = None
    valid: bool = True

    @property
    def answer(self) -> AnswerParts:
        calls = [Call("", name, arguments) for name, arguments in self.calls]
        return AnswerParts(self.content, self.reasoning, calls)


BERLIN = ("get_weather", '{"city": "Berlin"}')
KOELN = ("get_weather", '{"city": "Köln 🌧", "unit": "celsius"}')
TRICKY = ("get_weather", r'{"city": "a}\"]{</tool_call>[\\", "tags": ["{", "}"]}')
NONE = ("now", "{}")

HERMES = (
    Published(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin"}}\n</tool_call>',
        (BERLIN,),
    ),
    Published(
        "hermes",
        "I'll look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Köln 🌧", "unit": "celsius"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (KOELN, NONE),
        "I'll look.",
    ),
    Published(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {TRICKY[1]}}}\n</tool_call>',
        (TRICKY,),
    ),
    # Hermes 2 Pro puts the name last.
    Published(
        "hermes",
        '<tool_call>\n{"arguments": {"city": "Berlin"}, "name": "get_weather"}\n</tool_call>',
        (BERLIN,),
        valid=False,
    ),
)
LLAMA = (
    Published(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Berlin"}}',
        (BERLIN,),
    ),
    Published(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Berlin"}}; '
        '{"name": "now", "parameters": {}}',
        (BERLIN, NONE),
    ),
    Published(
        "llama3_json",
        'Let me see. <|python_tag|>{"name": "now", "parameters": {}}',
        (NONE,),
        "Let me see.",
    ),
    Published(
        "llama3_json",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Berlin"}}',
        (BERLIN,),
        valid=False,
    ),
)
MISTRAL = (
    Published(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Berlin"}}, '
        '{"name": "now", "arguments": {}}]',
        (BERLIN, NONE),
    ),
    Published(
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "0123abcDE"}]',
        (NONE,),
        valid=False,
    ),
)
MISTRAL_NAMED = (
    Published(
        "mistral",
        f"Wait.[TOOL_CALLS]get_weather[ARGS]{KOELN[1]}[TOOL_CALLS]now[ARGS]{{}}",
        (KOELN, NONE),
        "Wait.",
    ),
    Published("mistral", "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}", (NONE,)),
)
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK_V3 = (
    Published(
        "deepseek_v3",
        f"Yes.<｜tool▁calls▁begin｜>{_V3.format(*KOELN)}\n{_V3.format(*NONE)}<｜tool▁calls▁end｜>",
        (KOELN, NONE),
        "Yes.",
    ),
)
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK_V31 = (
    Published(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{_V31.format(*BERLIN)}{_V31.format(*NONE)}<｜tool▁calls▁end｜>",
        (BERLIN, NONE),
    ),
)
HARMONY = (
    Published(
        "harmony",
        "<|channel|>analysis<|message|>The user wants weather — ja.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Berlin"}<|call|>',
        (("get_weather", '{"city":"Berlin"}'),),
        reasoning="The user wants weather — ja.",
    ),
    Published(
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant"
        "<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        (),
        "2 + 2 = 4.",
        "Easy.",
    ),
    Published(
        "harmony",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        (NONE,),
        "I will look.",
    ),
    # Behind <|start|>assistant, with which the prompt ends.
    Published(
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Berlin"}<|call|>',
        (BERLIN,),
    ),
)
QWEN3_CODER = (
    Published(
        "qwen3_coder",
        'Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln "🌧"\n'
        "</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=tags>\n["a", "</b>"]\n</parameter>\n</function>\n</tool_call>',
        (
            (
                "get_weather",
                r'{"city": "Köln \"🌧\"", "unit": "celsius", "days": 3, "tags": ["a", "</b>"]}',
            ),
        ),
        "Let me look.",
    ),
    Published(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n\nb\\<c>\n\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (("get_weather", r'{"city": "a\n\nb\\<c>\n"}'), NONE),
    ),
)
# 4.5 writes each tag on a line of its own, 4.7 none.
GLM45 = (
    Published(
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        '<arg_value>Köln "🌧"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n'
        '<arg_key>tags</arg_key>\n<arg_value>["a"]</arg_value>\n</tool_call>',
        (("get_weather", r'{"city": "Köln \"🌧\"", "days": 3, "tags": ["a"]}'),),
        "I look.",
    ),
    Published(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>1\n</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        (("get_weather", r'{"city": "1\n"}'), NONE),
    ),
)
MINIMAX = (
    Published(
        "minimax_m2",
        'Both.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Köln\n<b></parameter>\n<parameter name="unit">celsius</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        (("get_weather", r'{"city": "Köln\n<b>", "unit": "celsius", "days": 2}'), NONE),
        "Both.",
    ),
)
SEED = (
    Published(
        "seed_oss",
        "Let me look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Köln\n<b>"
        "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        (("get_weather", r'{"city": "Köln\n<b>", "days": 3}'),),
        "Let me look.",
    ),
)
_K2 = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI = (
    Published(
        "kimi_k2",
        "So.<|tool_calls_section_begin|>"
        f"{_K2.format('get_weather', 0, KOELN[1])}{_K2.format('now', 1, '{}')}"
        "<|tool_calls_section_end|>",
        (KOELN, NONE),
        "So.",
    ),
)
_LIST = (
    '[{"name": "get_weather", "arguments": {"city": "Köln 🌧", "unit": "celsius"}}, '
    '{"name": "now", "arguments": {}}]'
)
HUNYUAN = (
    Published("hunyuan", f"So. <tool_calls>{_LIST}</tool_calls>", (KOELN, NONE), "So."),
    # Within an answer that is marked, whose last mark is cut off here.
    Published("hunyuan", f"<tool_calls>{_LIST}</tool_calls>\n", (KOELN, NONE), valid=False),
)
GRANITE = (
    Published("granite", f"<|tool_call|>{_LIST}", (KOELN, NONE)),
    Published("granite", f"<tool_call>{_LIST}", (KOELN, NONE), valid=False),
)
OLMO = (
    Published(
        "olmo3",
        'I look.\n<function_calls>get_weather(city="Köln \\"🌧\\")", days=3, tags=["a", ")"])\n'
        "now()</function_calls>",
        (
            ("get_weather", r'{"city": "Köln \"🌧\")", "days": 3, "tags": ["a", ")"]}'),
            NONE,
        ),
        "I look.",
    ),
    # As Python writes it.
    Published(
        "olmo3",
        "<function_calls>\nget_weather(city='a\\'\\x41\"b', x={'k': (None, True, -2.5e-3)}, n=[])\n"
        "</function_calls>",
        (
            (
                "get_weather",
                r"""{"city": "a'\u0041\"b", "x": {"k": [null, true, -2.5e-3]}, "n": []}""",
            ),
        ),
        valid=False,
    ),
)
ALL = (
    *HERMES,
    *HUNYUAN,
    *GRANITE,
    *OLMO,
    *QWEN3_CODER,
    *GLM45,
    *MINIMAX,
    *SEED,
    *KIMI,
    *LLAMA,
    *MISTRAL,
    *MISTRAL_NAMED,
    *DEEPSEEK_V3,
    *DEEPSEEK_V31,
    *HARMONY,
)


def read(parser: Parser, pieces: Sequence[str]) -> AnswerParts:
    """What a parser makes of pieces, without ids."""
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    answer = joined([*deltas, *parser.finish()])
    for call in answer.calls:
        assert call.id
        call.id = ""
    return answer


def read_format(name: str, pieces: Sequence[str], use: ToolUse = USE) -> AnswerParts:
    """What a format's parser makes of pieces."""
    return read(parser_of(format_of(name), use), pieces)
