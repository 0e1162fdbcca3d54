"""Makes the tokenizers in tests/data and what Hugging Face transformers says they should do.

Needs transformers 5, sentencepiece, protobuf and jinja2; the tests that read the files do not:

    python -m tests.data.make
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.data.files import write_json, write_sentencepiece

HERE = Path(__file__).resolve().parent
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Paris is the capital of France, and Berlin is the capital of Germany.",
    "def binary_search(items, target):\n    low, high = 0, len(items)\n    return low",
    "hello world, how are you? I am fine, thank you; and you?",
    "你好，世界！你是谁？ Größe, naïve café",
] * 8
TEXTS = [
    "",
    " ",
    "hello",
    " hello world",
    "hello  world\n\n  and you?",
    "naïve café 你好 🙂 end",
    "<s>hello</s> world",
    "ask <|user|> the fox <|end|>",
    "a<|end|>b",
    "hello<|user|>the fox<|end|>",
    "def f(x):\n    return x",
]
ADDED = ("<|user|>", "<|end|>")
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}\n"
        "{{ '<|user|>' + m['role'] + '\\n' + m['content'] + '<|end|>' }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|user|>assistant\\n' }}{% endif %}\n"
    ),
    "everything": (
        "{{- bos_token }}\n"
        "{%- set ns = namespace(count=0) %}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {%- set ns.count = ns.count + 1 %}\n"
        "    {%- if m.role == 'assistant' %}\n"
        "        {%- generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}\n"
        "    {%- else %}\n"
        "        {{- {'n': ns.count, 'text': m.content} | tojson }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "  {% if add_generation_prompt and strftime_now('%Y') | length == 4 %}\n"
        "[ask]\n"
        "  {% endif %}\n"
    ),
}
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": 'hello <b>"you"</b> 你好'}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "  hi  "},
        {"role": "user", "content": "and\nyou?"},
    ],
]


def make_byte_level(folder: Path) -> PreTrainedTokenizerFast:
    """A GPT-2 style tokenizer.json, as Llama 3 and Qwen use them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(ADDED),
        chat_template=TEMPLATES["chatml"],
    )
    wrapped.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def make_sentencepiece(folder: Path, legacy: bool) -> Any:
    """A Llama 2 style tokenizer.model with two tokens added by its config."""
    write_sentencepiece(
        folder, "tokenizer.model", CORPUS, 400, remove_extra_whitespaces=False, split_digits=True
    )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": legacy,
        "additional_special_tokens": list(ADDED),
        "added_tokens_decoder": {
            str(400 + i): {"content": token, "special": True} for i, token in enumerate(ADDED)
        },
    }
    write_json(folder / "tokenizer_config.json", config)
    return AutoTokenizer.from_pretrained(folder)


def texts_for(name: str) -> list[str]:
    """The test strings; for a sentencepiece model those without a space at the start of a piece.

    There transformers 5 leaves out the dummy prefix that sentencepiece itself adds.
    """
    if name == "byte_level":
        return TEXTS
    return [text for text in TEXTS if not text.startswith(" ") and "> " not in text]


def cases(tokenizer: Any, texts: list[str]) -> list[dict[str, Any]]:
    """Ids and texts of every test string."""
    found = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        found.append(
            {
                "text": text,
                "ids": ids,
                "plain_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
                "decoded": tokenizer.decode(
                    ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
                ),
                "decoded_all": tokenizer.decode(
                    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                ),
            }
        )
    return found


def main() -> None:
    golden: dict[str, Any] = {"tokenizers": {}, "templates": []}
    makers: dict[str, Callable[[Path], Any]] = {
        "byte_level": make_byte_level,
        "sentencepiece": lambda folder: make_sentencepiece(folder, legacy=False),
        "sentencepiece_legacy": lambda folder: make_sentencepiece(folder, legacy=True),
    }
    made: dict[str, Any] = {}
    for name, maker in makers.items():
        folder = HERE / "tokenizers" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made[name] = maker(folder)
        golden["tokenizers"][name] = cases(made[name], texts_for(name))
    for name, template in TEMPLATES.items():
        for messages in CONVERSATIONS:
            text = made["byte_level"].apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
            golden["templates"].append(
                {"name": name, "source": template, "messages": messages, "text": text}
            )
    write_json(HERE / "tokenizers.json", golden)


if __name__ == "__main__":
    main()
