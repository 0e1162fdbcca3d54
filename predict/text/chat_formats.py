"""Families' published chat formats, for checkpoints that bring no chat template: one table.

A format is a jinja template as Hugging Face's are, and the tokens that end an answer. A row of
CHOICES says for which checkpoints it was published. --chat_template takes a format's name, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.gguf.described import read_model_json

# The head of the templates below: sets `system` (none without such a message) and `turns`.
_SYSTEM = (
    "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none -%}"
    "{%- set turns = messages if system is none else messages[1:] -%}"
)
# The head of those without a place for a system message.
_NO_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' -%}"
    "{{- raise_exception('this format has no place for a system message') -}}"
    "{%- endif -%}{%- set turns = messages -%}"
)
_BY_TURNS = (
    "{%- for turn in turns -%}"
    "{%- if turn['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}"
    "{{- raise_exception('user and assistant speak by turns, the user first') -}}"
    "{%- endif -%}{%- endfor -%}"
)


@dataclass(frozen=True)
class ChatFormat:
    """A family's way to write a conversation."""

    template: str  # jinja
    stop_tokens: tuple[str, ...] = ()  # that end an answer, besides the model's own


def _by_turns(head: str, user: str, assistant: str, tail: str = "", system: bool = True) -> str:
    """A template of jinja expressions: for the beginning, for each kind of turn, for the end.

    `text` is a turn's content, `number` counts rounds from 0.
    """
    return "".join(
        [
            f"{_SYSTEM if system else _NO_SYSTEM}{_BY_TURNS}{{{{- {head or repr('')} -}}}}",
            "{%- for turn in turns -%}",
            "{%- set text = turn['content'] -%}{%- set number = loop.index0 // 2 -%}",
            f"{{%- if turn['role'] == 'user' -%}}{{{{- {user} -}}}}",
            f"{{%- else -%}}{{{{- {assistant} -}}}}{{%- endif -%}}",
            f"{{%- endfor -%}}{{{{- {tail or repr('')} -}}}}",
        ]
    )


def _by_roles(head: str, turn: str, tail: str, tool: str = "tool") -> str:
    """A template of jinja expressions, in which every message names its `role`.

    tool: the role of a tool's answer.
    """
    return (
        f"{{{{- {head or repr('')} -}}}}{{%- for turn in messages -%}}"
        f"{{%- set role = '{tool}' if turn['role'] == 'tool' else turn['role'] -%}}"
        f"{{%- set text = turn['content'] -%}}{{{{- {turn} -}}}}"
        f"{{%- endfor -%}}{{{{- {tail} -}}}}"
    )


_CHATML = r"'<|im_start|>' ~ role ~ '\n' ~ text ~ '<|im_end|>\n'"
_CHATML_TAIL = r"'<|im_start|>assistant\n'"
_HELPFUL = (
    r"'' if messages[0]['role'] == 'system' else "
    r"'<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'"
)
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user\\'s questions."
)
_GLM_STOPS = ("<|user|>", "<|observation|>")
_GEMMA_USER = (
    r"'<start_of_turn>user\n' ~ (text if number or not system else system ~ '\n\n' ~ text) | trim "
    r"~ '<end_of_turn>\n<start_of_turn>model\n'"
)

FORMATS: Mapping[str, ChatFormat] = {
    "qwen": ChatFormat(_by_roles(_HELPFUL, _CHATML, _CHATML_TAIL), ("<|im_end|>", "<|im_start|>")),
    "chatml": ChatFormat(_by_roles("", _CHATML, _CHATML_TAIL), ("<|im_end|>",)),
    "internlm2": ChatFormat(_by_roles("bos_token", _CHATML, _CHATML_TAIL), ("<|im_end|>",)),
    # A first question is asked as it is.
    "chatglm": ChatFormat(
        _by_turns(
            "",
            r"text if turns | length == 1 else '[Round ' ~ number ~ ']\n问：' ~ text ~ '\n答：'",
            r"text ~ '\n'",
            "'[gMASK]<sop>'",
            system=False,
        )
    ),
    "chatglm2": ChatFormat(
        _by_turns(
            "'[gMASK]sop'",
            r"'[Round ' ~ (number + 1) ~ ']\n\n问：' ~ text ~ '\n\n答：'",
            r"text ~ '\n\n'",
            system=False,
        )
    ),
    "chatglm3": ChatFormat(
        _by_roles(
            "'[gMASK]sop'", r"'<|' ~ role ~ '|>\n ' ~ text", "'<|assistant|>'", "observation"
        ),
        _GLM_STOPS,
    ),
    "glm4": ChatFormat(
        _by_roles(
            "'[gMASK]<sop>'", r"'<|' ~ role ~ '|>\n' ~ text", "'<|assistant|>'", "observation"
        ),
        _GLM_STOPS,
    ),
    # user_token and assistant_token: the pieces whose ids generation_config.json has.
    "baichuan": ChatFormat(
        _by_turns(
            "",
            "user_token ~ text",
            "assistant_token ~ text ~ eos_token",
            "assistant_token",
            system=False,
        )
    ),
    "baichuan2": ChatFormat(
        _by_turns("system or ''", "user_token ~ text", "assistant_token ~ text", "assistant_token")
    ),
    "gemma": ChatFormat(
        _by_turns("bos_token", _GEMMA_USER, r"text | trim ~ '<end_of_turn>\n'", system=False),
        ("<end_of_turn>",),
    ),
    "gemma3": ChatFormat(
        _by_turns("bos_token", _GEMMA_USER, r"text | trim ~ '<end_of_turn>\n'"),
        ("<end_of_turn>",),
    ),
    "falcon": ChatFormat(
        _by_turns(
            r"system | trim ~ '\n\n' if system else ''",
            r"'User: ' ~ (text | trim) ~ '\n\nAssistant:'",
            r"' ' ~ (text | trim) ~ '\n\n'",
        )
    ),
    "zephyr": ChatFormat(
        _by_roles("", r"'<|' ~ role ~ '|>\n' ~ text ~ eos_token ~ '\n'", r"'<|assistant|>\n'")
    ),
    "minicpm": ChatFormat(
        _by_turns("bos_token", "'<用户>' ~ (text | trim) ~ '<AI>'", "text | trim", system=False)
    ),
    "phi3": ChatFormat(
        _by_roles("", r"'<|' ~ role ~ '|>\n' ~ text ~ '<|end|>\n'", r"'<|assistant|>\n'"),
        ("<|end|>",),
    ),
    "llama2": ChatFormat(
        _by_turns(
            "",
            r"bos_token ~ '[INST] ' ~ ('<<SYS>>\n' ~ (system | trim) ~ '\n<</SYS>>\n\n' "
            r"if system and not number else '') ~ (text | trim) ~ ' [/INST]'",
            "' ' ~ (text | trim) ~ ' ' ~ eos_token",
        )
    ),
    "llama3": ChatFormat(
        _by_roles(
            "bos_token",
            r"'<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' ~ (text | trim) "
            r"~ '<|eot_id|>'",
            r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
        ),
        ("<|eot_id|>",),
    ),
    "mistral": ChatFormat(
        _by_turns(
            "bos_token", "'[INST] ' ~ text ~ ' [/INST]'", "text ~ eos_token ~ ' '", system=False
        )
    ),
    "vicuna": ChatFormat(
        _by_turns(
            f"bos_token ~ (system or '{_VICUNA}') ~ ' '",
            "'USER: ' ~ text ~ ' ASSISTANT:'",
            "' ' ~ text ~ eos_token",
        )
    ),
}


@dataclass(frozen=True)
class ModelMarks:
    """The properties of a checkpoint that tell a chat model from others of its family."""

    config: Mapping[str, Any]  # config.json
    generation: Mapping[str, Any]  # generation_config.json
    special_tokens: Mapping[str, str]  # by role
    names: str  # its names in small letters, "-" around and between their words

    def is_named(self, *patterns: str) -> bool:
        """Whether each pattern is found among the names, as whole words."""
        return all(re.search(f"-(?:{pattern})-", self.names) for pattern in patterns)


@dataclass(frozen=True)
class FormatOf:
    """The checkpoints that a format was published for."""

    model_types: tuple[str, ...]  # of config.json
    name: str  # of FORMATS
    fits: Callable[[ModelMarks], bool]


_GLM = ("chatglm", "chatglm_v2")
# The first that fits is taken.
CHOICES = (
    FormatOf(("qwen",), "qwen", lambda it: it.generation.get("chat_format") == "chatml"),
    FormatOf(("qwen2",), "qwen", lambda it: it.is_named("chat|instruct")),
    FormatOf(("chatglm",), "chatglm", lambda it: not it.config.get("multi_query_attention")
           and "gmask_token" in it.special_tokens),
    FormatOf(_GLM, "chatglm3", lambda it: it.is_named("chatglm3") and not it.is_named("base")),
    FormatOf((*_GLM, "glm"), "glm4", lambda it: it.is_named("glm-?4", "chat")),
    FormatOf(("glm4",), "glm4", lambda it: not it.is_named("base")),
    FormatOf(("chatglm",), "chatglm2", lambda it: it.is_named("chatglm2")),
    FormatOf(("chatglm_v2",), "chatglm2", lambda it: not it.is_named("chatglm3|glm-?4")),
    # PaddleNLP's are of model_type llama.
    FormatOf(("baichuan", "llama"), "baichuan2", lambda it: "user_token" in it.special_tokens
           and (is_baichuan_2(it.config) or it.is_named("baichuan-?2"))),
    FormatOf(("baichuan", "llama"), "baichuan", lambda it: "user_token" in it.special_tokens),
    FormatOf(("internlm2",), "internlm2", lambda it: it.is_named("chat")),
    FormatOf(("gemma", "gemma2"), "gemma", lambda it: it.is_named("it")),
    FormatOf(("gemma3_text",), "gemma3", lambda it: it.is_named("it")),
    FormatOf(("falcon",), "falcon", lambda it: it.is_named("instruct")),
    FormatOf(("stablelm",), "zephyr", lambda it: it.is_named("zephyr")),
    FormatOf(("stablelm",), "chatml", lambda it: it.is_named("chat")),
    FormatOf(("minicpm",), "minicpm", lambda it: it.is_named("sft|dpo")),
    FormatOf(("phi3",), "phi3", lambda it: it.is_named("phi-?3", "instruct")),
    FormatOf(("mistral",), "mistral", lambda it: it.is_named("instruct")),
    FormatOf(("llama",), "llama2", lambda it: it.is_named("llama-?2", "chat")),
    FormatOf(("llama",), "llama3", lambda it: it.is_named("llama-?3", "instruct")),
    FormatOf(("llama",), "vicuna", lambda it: it.is_named("vicuna")),
    FormatOf(("llama",), "zephyr", lambda it: it.is_named("tinyllama", "chat")),
)  # fmt: skip


def is_baichuan_2(config: Mapping[str, Any]) -> bool:
    """Whether config.json is a Baichuan 2's.

    It trained with a z-loss, the weight of which not all of them have. All have 125,696 tokens;
    the first generation has 64,000.
    """
    return config.get("z_loss_weight") is not None or config.get("vocab_size") == 125696


def format_name(folder: Path, special_tokens: Mapping[str, str]) -> str | None:
    """The published format of the checkpoint in a folder; None where none is known for it."""
    config = _read(folder, "config.json")
    checkpoint = ModelMarks(
        config, _read(folder, "generation_config.json"), special_tokens, names_of(folder, config)
    )
    model_type = config.get("model_type")
    rows = (row for row in CHOICES if model_type in row.model_types and row.fits(checkpoint))
    return next((row.name for row in rows), None)


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_model_json(folder, name, missing_ok=True, constants=True)


def names_of(folder: Path, config: Mapping[str, Any]) -> str:
    """The folder's name, that of its repository in Hugging Face's cache, and those in its files.

    In small letters, "-" around and between their words.
    """
    path = folder.resolve()
    found = [path.name, config.get("_name_or_path")]
    found.append(_read(folder, "tokenizer_config.json").get("name_or_path"))
    if path.parent.name == "snapshots":
        found.append(path.parent.parent.name.split("--")[-1])
    words = (Path(name).name.lower() for name in found if isinstance(name, str))
    return "".join(f"-{re.sub(r'[^a-z0-9]+', '-', name)}-" for name in words)
