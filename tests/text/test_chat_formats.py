"""Each family's chat format against its published text, written out here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from predict.errors import UserError
from predict.text.chat_formats import CHOICES, FORMATS, format_name
from predict.text.chat_template import load_chat_template, stop_tokens
from predict.text.tokenizer import Tokenizer

FOLDERS = Path(__file__).parents[1] / "data" / "families"
SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "user_token": "<reserved_106>",
    "assistant_token": "<reserved_107>",
}
ASK = [{"role": "user", "content": "你好 {{ x }}"}]
ROUNDS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
HELPFUL = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"
CHATML_ONE = "<|im_start|>user\n你好 {{ x }}<|im_end|>\n<|im_start|>assistant\n"
CHATML_TWO = (
    "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
)
# Format -> (a question, two rounds, two rounds behind a system message; None: it has no place).
PUBLISHED: dict[str, tuple[str, str, str | None]] = {
    "qwen": (HELPFUL + CHATML_ONE, HELPFUL + CHATML_TWO, BRIEF + CHATML_TWO),
    "chatml": (CHATML_ONE, CHATML_TWO, BRIEF + CHATML_TWO),
    "internlm2": ("<s>" + CHATML_ONE, "<s>" + CHATML_TWO, "<s>" + BRIEF + CHATML_TWO),
    "chatglm": (
        "你好 {{ x }}[gMASK]<sop>",
        "[Round 0]\n问：one\n答：1\n[Round 1]\n问：two\n答：[gMASK]<sop>",
        None,
    ),
    "chatglm2": (
        "[gMASK]sop[Round 1]\n\n问：你好 {{ x }}\n\n答：",
        "[gMASK]sop[Round 1]\n\n问：one\n\n答：1\n\n[Round 2]\n\n问：two\n\n答：",
        None,
    ),
    "chatglm3": (
        "[gMASK]sop<|user|>\n 你好 {{ x }}<|assistant|>",
        "[gMASK]sop<|user|>\n one<|assistant|>\n 1<|user|>\n two<|assistant|>",
        "[gMASK]sop<|system|>\n Be brief.<|user|>\n one<|assistant|>\n 1<|user|>\n two"
        "<|assistant|>",
    ),
    "glm4": (
        "[gMASK]<sop><|user|>\n你好 {{ x }}<|assistant|>",
        "[gMASK]<sop><|user|>\none<|assistant|>\n1<|user|>\ntwo<|assistant|>",
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\none<|assistant|>\n1<|user|>\ntwo<|assistant|>",
    ),
    "baichuan": (
        "<reserved_106>你好 {{ x }}<reserved_107>",
        "<reserved_106>one<reserved_107>1</s><reserved_106>two<reserved_107>",
        None,
    ),
    "baichuan2": (
        "<reserved_106>你好 {{ x }}<reserved_107>",
        "<reserved_106>one<reserved_107>1<reserved_106>two<reserved_107>",
        "Be brief.<reserved_106>one<reserved_107>1<reserved_106>two<reserved_107>",
    ),
    "gemma": (
        "<s><start_of_turn>user\n你好 {{ x }}<end_of_turn>\n<start_of_turn>model\n",
        "<s><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\n1<end_of_turn>\n"
        "<start_of_turn>user\ntwo<end_of_turn>\n<start_of_turn>model\n",
        None,
    ),
    "gemma3": (
        "<s><start_of_turn>user\n你好 {{ x }}<end_of_turn>\n<start_of_turn>model\n",
        "<s><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\n1<end_of_turn>\n"
        "<start_of_turn>user\ntwo<end_of_turn>\n<start_of_turn>model\n",
        "<s><start_of_turn>user\nBe brief.\n\none<end_of_turn>\n<start_of_turn>model\n1"
        "<end_of_turn>\n<start_of_turn>user\ntwo<end_of_turn>\n<start_of_turn>model\n",
    ),
    "falcon": (
        "User: 你好 {{ x }}\n\nAssistant:",
        "User: one\n\nAssistant: 1\n\nUser: two\n\nAssistant:",
        "Be brief.\n\nUser: one\n\nAssistant: 1\n\nUser: two\n\nAssistant:",
    ),
    "zephyr": (
        "<|user|>\n你好 {{ x }}</s>\n<|assistant|>\n",
        "<|user|>\none</s>\n<|assistant|>\n1</s>\n<|user|>\ntwo</s>\n<|assistant|>\n",
        "<|system|>\nBe brief.</s>\n<|user|>\none</s>\n<|assistant|>\n1</s>\n<|user|>\ntwo</s>\n"
        "<|assistant|>\n",
    ),
    "minicpm": ("<s><用户>你好 {{ x }}<AI>", "<s><用户>one<AI>1<用户>two<AI>", None),
    "phi3": (
        "<|user|>\n你好 {{ x }}<|end|>\n<|assistant|>\n",
        "<|user|>\none<|end|>\n<|assistant|>\n1<|end|>\n<|user|>\ntwo<|end|>\n<|assistant|>\n",
        "<|system|>\nBe brief.<|end|>\n<|user|>\none<|end|>\n<|assistant|>\n1<|end|>\n<|user|>\n"
        "two<|end|>\n<|assistant|>\n",
    ),
    "llama2": (
        "<s>[INST] 你好 {{ x }} [/INST]",
        "<s>[INST] one [/INST] 1 </s><s>[INST] two [/INST]",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\none [/INST] 1 </s><s>[INST] two [/INST]",
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\n你好 {{ x }}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<s><|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\ntwo<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\ntwo<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        "<s>[INST] 你好 {{ x }} [/INST]",
        "<s>[INST] one [/INST]1</s> [INST] two [/INST]",
        None,
    ),
    "vicuna": (
        f"<s>{VICUNA} USER: 你好 {{{{ x }}}} ASSISTANT:",
        f"<s>{VICUNA} USER: one ASSISTANT: 1</s>USER: two ASSISTANT:",
        "<s>Be brief. USER: one ASSISTANT: 1</s>USER: two ASSISTANT:",
    ),
}
# (what config.json, generation_config.json and the name say, the format; None: none).
CHECKPOINTS: list[tuple[dict[str, Any], dict[str, Any], str, str | None]] = [
    ({"model_type": "qwen"}, {"chat_format": "chatml"}, "Qwen-7B-Chat", "qwen"),
    ({"model_type": "qwen"}, {"chat_format": "raw"}, "Qwen-7B", None),
    ({"model_type": "qwen2"}, {}, "Qwen2-7B-Instruct", "qwen"),
    ({"model_type": "qwen2"}, {}, "Qwen2-7B", None),
    ({"model_type": "chatglm", "multi_query_attention": True}, {}, "chatglm2-6b-32k", "chatglm2"),
    ({"model_type": "chatglm", "multi_query_attention": True}, {}, "chatglm3-6b", "chatglm3"),
    ({"model_type": "chatglm", "multi_query_attention": True}, {}, "chatglm3-6b-base", None),
    ({"model_type": "chatglm", "multi_query_attention": True}, {}, "glm-4-9b-chat-1m", "glm4"),
    ({"model_type": "chatglm", "multi_query_attention": True}, {}, "glm-4-9b", None),
    ({"model_type": "chatglm_v2"}, {}, "anything", "chatglm2"),
    ({"model_type": "chatglm_v2"}, {}, "chatglm3_6b", "chatglm3"),
    ({"model_type": "glm"}, {}, "glm-4-9b-chat-hf", "glm4"),
    ({"model_type": "glm4"}, {}, "GLM-4-9B-0414", "glm4"),
    ({"model_type": "glm4"}, {}, "GLM-4-32B-Base-0414", None),
    ({"model_type": "baichuan", "z_loss_weight": 0}, {}, "x", "baichuan2"),
    ({"model_type": "baichuan", "vocab_size": 125696}, {}, "x", "baichuan2"),
    ({"model_type": "baichuan"}, {}, "Baichuan-13B-Chat", "baichuan"),
    ({"model_type": "llama"}, {}, "Baichuan2-7B-Chat", "baichuan2"),
    ({"model_type": "internlm2"}, {}, "internlm2-chat-7b", "internlm2"),
    ({"model_type": "internlm2"}, {}, "internlm2-7b", None),
    ({"model_type": "gemma"}, {}, "gemma-2b-it", "gemma"),
    ({"model_type": "gemma2"}, {}, "gemma-2-9b", None),
    ({"model_type": "gemma3_text"}, {}, "gemma-3-1b-it", "gemma3"),
    ({"model_type": "falcon"}, {}, "falcon-7b-instruct", "falcon"),
    ({"model_type": "stablelm"}, {}, "stablelm-zephyr-3b", "zephyr"),
    ({"model_type": "stablelm"}, {}, "stablelm-2-12b-chat", "chatml"),
    ({"model_type": "minicpm"}, {}, "MiniCPM-2B-sft-bf16", "minicpm"),
    ({"model_type": "phi3"}, {}, "Phi-3-mini-4k-instruct", "phi3"),
    ({"model_type": "phi3"}, {}, "phi-4", None),
    ({"model_type": "mistral"}, {}, "Mistral-7B-Instruct-v0.2", "mistral"),
    ({"model_type": "mistral"}, {}, "Mistral-7B-v0.1", None),
    ({"model_type": "bloom"}, {}, "bloom-7b1-chat", None),
    ({"model_type": "opt"}, {}, "opt-6.7b", None),
    ({"model_type": "gpt2"}, {}, "gpt2", None),
]
LLAMAS = [
    ("Llama-2-7b-chat-hf", "llama2"),
    ("Llama-2-7b-hf", None),
    ("Meta-Llama-3-8B-Instruct", "llama3"),
    ("vicuna-7b-v1.5", "vicuna"),
    ("TinyLlama-1.1B-Chat-v1.0", "zephyr"),
    ("italian-chatter", None),
]


def rendered(name: str, messages: list[dict[str, str]]) -> str:
    template = load_chat_template(Path("no such folder"), name, SPECIAL)
    assert template is not None
    return template.render(messages)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_writes_what_its_publisher_does(name: str) -> None:
    question, rounds, behind_system = PUBLISHED[name]
    assert rendered(name, ASK) == question
    assert rendered(name, ROUNDS) == rounds
    if behind_system is not None:
        assert rendered(name, [SYSTEM, *ROUNDS]) == behind_system
    else:
        with pytest.raises(UserError, match="no place for a system message"):
            rendered(name, [SYSTEM, *ROUNDS])


@pytest.mark.parametrize("name", ["chatglm2", "llama2", "gemma", "vicuna", "baichuan"])
def test_formats_of_turns_refuse_two_questions_in_a_row(name: str) -> None:
    with pytest.raises(UserError, match="user and assistant speak by turns"):
        rendered(name, [*ASK, *ASK])


@pytest.mark.parametrize("name", ["chatglm3", "glm4"])
def test_a_tools_answer_is_an_observation(name: str) -> None:
    text = rendered(name, [*ASK, {"role": "tool", "content": "7"}])
    assert "<|observation|>\n" in text


def folder_of(path: Path, name: str, **files: dict[str, Any]) -> Path:
    folder = path / name
    folder.mkdir(parents=True)
    for file, values in files.items():
        (folder / f"{file}.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(("config", "generation", "name", "expected"), CHECKPOINTS)
def test_a_checkpoints_files_and_name_choose_its_format(
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any],
    name: str,
    expected: str | None,
) -> None:
    folder = folder_of(tmp_path, name, config=config, generation_config=generation)
    special = SPECIAL if expected and expected.startswith("baichuan") else {}
    assert format_name(folder, special) == expected
    # A fine-tuned model in a folder of another name says what it came of.
    other = folder_of(tmp_path, "other", config={**config, "_name_or_path": f"org/{name}"})
    (other / "generation_config.json").write_text(json.dumps(generation))
    assert format_name(other, special) == expected


@pytest.mark.parametrize(("name", "expected"), LLAMAS)
def test_models_of_type_llama_are_told_by_their_names(
    tmp_path: Path, name: str, expected: str | None
) -> None:
    config = {"model_type": "llama"}
    assert format_name(folder_of(tmp_path, name, config=config), {}) == expected
    cached = folder_of(tmp_path / f"models--org--{name}" / "snapshots", "0a1b", config=config)
    assert format_name(cached, {}) == expected


def test_every_row_names_a_format_and_is_reached() -> None:
    assert {row.name for row in CHOICES} == set(FORMATS)
    reached = {expected for *_, expected in CHECKPOINTS} | {expected for _, expected in LLAMAS}
    assert reached - {None} == set(FORMATS) - {"chatglm"}  # see below


def test_a_checkpoints_own_template_and_the_flag_win(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "vicuna-7b", config={"model_type": "llama"})
    chosen = load_chat_template(folder, None, {"bos_token": "<s>"})
    assert chosen is not None
    assert chosen.render(ASK) == PUBLISHED["vicuna"][0]
    assert load_chat_template(folder, "none", SPECIAL) is None
    named = load_chat_template(folder, "llama2", SPECIAL)
    assert named is not None
    assert named.render(ASK) == "<s>[INST] 你好 {{ x }} [/INST]"
    (folder / "tokenizer_config.json").write_text('{"chat_template": "own"}')
    own = load_chat_template(folder, None, SPECIAL)
    assert own is not None
    assert own.render(ASK) == "own"
    with pytest.raises(UserError, match=r"neither a file nor a folder .*baichuan2.*vicuna"):
        load_chat_template(folder, "lama2", SPECIAL)


def copy_of(name: str, path: Path, called: str) -> Path:
    return shutil.copytree(FOLDERS / name, path / called)


@pytest.mark.parametrize(
    ("name", "called", "flag", "stops"),
    [
        ("qwen", "Qwen-7B-Chat", None, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]),
        ("qwen", "Qwen-7B-Chat", "none", ["<|endoftext|>"]),
        ("qwen", "Qwen-7B-Chat", "llama2", ["<|endoftext|>"]),
        ("chatglm3_6b", "model", None, ["</s>", "<|user|>", "<|observation|>"]),
        ("glm4", "glm-4-9b-chat", None, ["<|endoftext|>", "<|user|>", "<|observation|>"]),
        ("llama3", "Llama-3-8B-Instruct", None, ["<|end_of_text|>", "<|eot_id|>"]),
        ("internlm2", "internlm2-chat-7b", None, ["</s>", "<|im_end|>"]),
        ("chatglm_6b", "model", None, ["<eop>"]),
        ("baichuan_2", "model", None, ["</s>"]),
    ],
)
def test_the_formats_stop_tokens_end_an_answer(
    tmp_path: Path, name: str, called: str, flag: str | None, stops: list[str]
) -> None:
    folder = copy_of(name, tmp_path, called)
    if name == "qwen":
        (folder / "generation_config.json").write_text('{"chat_format": "chatml"}')
    tokenizer = Tokenizer.from_dir(folder, flag)
    assert set(tokenizer.eos_token_ids) == {tokenizer.token_to_id(stop) for stop in stops}


def test_a_template_from_elsewhere_keeps_the_stop_tokens_of_the_family(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "model", config={"model_type": "qwen"})
    (folder / "generation_config.json").write_text('{"chat_format": "chatml"}')
    (tmp_path / "own.jinja").write_text("x")
    assert stop_tokens(folder, str(tmp_path / "own.jinja"), {}) == ("<|im_end|>", "<|im_start|>")


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    assert tokenizer.chat_template is not None
    return tokenizer.encode_prompt(tokenizer.chat_template.render(messages), templated=True)


def test_chatglm3s_prompt_is_the_one_that_its_code_builds() -> None:
    """Role's token, then its line, then its message, each encoded alone."""
    tokenizer = Tokenizer.from_dir(FOLDERS / "chatglm3_6b")
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(FOLDERS / "chatglm3_6b" / "tokenizer.model")
    )
    first = model.vocab_size()
    roles = {"system": first + 5, "user": first + 6, "assistant": first + 7}
    expected = [first + 1, first + 3]
    for message in [SYSTEM, *ROUNDS]:
        expected += [roles[message["role"]], *model.encode("\n"), *model.encode(message["content"])]
    assert chat_ids(tokenizer, [SYSTEM, *ROUNDS]) == [*expected, roles["assistant"]]


def test_chatglms_prompts_have_the_tokens_that_its_code_puts_around_them() -> None:
    for name in ("chatglm_6b", "chatglm2_6b"):
        tokenizer = Tokenizer.from_dir(FOLDERS / name)
        assert tokenizer.chat_template is not None
        text = tokenizer.chat_template.render(ROUNDS)
        plain = text.removeprefix("[gMASK]sop").removesuffix("[gMASK]<sop>")
        assert plain != text
        assert chat_ids(tokenizer, ROUNDS) == tokenizer.encode(plain)


def test_baichuan2s_prompt_is_the_one_that_its_code_builds() -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / "baichuan_2")
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(FOLDERS / "baichuan_2" / "tokenizer.model")
    )
    ids = {"user": 9, "assistant": 10}
    expected = model.encode("Be brief.")
    for message in ROUNDS:
        expected += [ids[message["role"]], *model.encode(message["content"])]
    assert chat_ids(tokenizer, [SYSTEM, *ROUNDS]) == [*expected, ids["assistant"]]


@pytest.mark.parametrize(
    ("name", "query"), [("chatglm_6b", "问：{{query}}"), ("chatglm2_6b", "[gMASK]sop问：{{query}}")]
)
def test_paddlenlps_templates_of_chatglm_get_the_tokens_around_them(
    tmp_path: Path, name: str, query: str
) -> None:
    folder = copy_of(name, tmp_path, "model")
    (folder / "chat_template.json").write_text(json.dumps({"query": query}))
    tokenizer = Tokenizer.from_dir(folder)
    assert chat_ids(tokenizer, [{"role": "user", "content": "a"}]) == tokenizer.encode("问：a")
