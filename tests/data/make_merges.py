"""Makes tests/data/merges: tiny vocab.json and merges.txt, and what transformers does with them.

Needs transformers 5; the tests that read the files do not:

    python -m tests.data.make_merges

Merges are learned from slices of texts that nothing cut into words before, so that each way to cut
gives other ids. Two families publish a tokenizer.json alone, or call their class GPT-2's: their
golden is that of a tokenizer.json with the published way.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.data.files import write_json
from tests.support.packed import pack

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "merges"
TEXTS = [
    "",
    " ",
    "hello",
    "Hello world, how are you? I am fine, thank you; and you?",
    " hello  world \n\n and   you?\t\tyes\r\n",
    "你好，世界！你是谁？ 问：北京有多少人口？答：两千万。",
    "naïve cafe\u0301 Größe 🙂 👩‍👩‍👧 end \u0915\u094d\u0937 \u1e9b\u0323 ﬁ ½ ²",
    "IT'S we'Re isn'T 'ſ x'S he's we're they'll I'd",
    "1 12 123 1234 12345678  42   7 ٣٤ 3.14 x1y22z333",
    "def f(x):\n    if x:\n\t\treturn x  # done\n\n\n",
    "    for i in range(10):\n        total += values[i] * 2\n",
    " " * 30 + "x" + "\n" * 9 + " \u00a0\u3000\u2028\u0085 y",
    "a...b!!! (c|d) [e|f] ,g, , 。h、i، j",
    "<|endoftext|>hello<|endoftext|> <|endoftext|>",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "</s>hello <pad> world</s><s> <unk>",
    "before <|strips|> behind  <|both|>  x <|word|> y<|word|>z <|caf\u00e9|> <|cafe\u0301|>",
    "<BOS_TOKEN>hi<|END_OF_TURN_TOKEN|><PAD><|padding|>",
    "a" * 20 + "the" * 9 + "-" * 15 + "=" * 7,
    "Ċ Ġ literal letters of bytes; __init__ self.x != 'a\\n'",
]
ENDS = ("<|endoftext|>",)


@dataclass(frozen=True)
class Family:
    """A folder. files: their JSON by name, {id} of a token behind the vocabulary as "+0", "+1", ...

    in_vocabulary: special tokens of vocab.json itself. reader: the class of transformers; empty
    where `published` is its tokenizer.json's way.
    """

    files: dict[str, Any]
    in_vocabulary: tuple[str, ...] = ENDS
    reader: str = "GPT2Tokenizer"
    published: Any = None
    unread: tuple[str, ...] = field(default=())  # keys that transformers would take for tokens


def added(content: str, special: bool = True, **switches: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, **switches, "special": special}


def of_class(name: str, **values: Any) -> dict[str, Any]:
    return {"tokenizer_class": name, **values}


QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
FAMILIES = {
    "gpt2": Family(
        {
            "config.json": {"model_type": "gpt2"},
            "tokenizer_config.json": {"add_prefix_space": False},
        }
    ),
    "gpt2_prefixed": Family(
        {
            "tokenizer_config.json": of_class(
                "GPT2Tokenizer",
                add_prefix_space=True,
                add_bos_token=True,
                add_eos_token=True,
                added_tokens_decoder={
                    "+0": added("<|strips|>", False, lstrip=True, normalized=True),
                    "+1": added("<|both|>", lstrip=True, rstrip=True),
                    "+2": added("<|word|>", single_word=True),
                },
            )
        }
    ),
    "opt": Family(
        {
            "config.json": {"model_type": "opt"},
            "tokenizer_config.json": of_class(
                "GPT2Tokenizer", add_bos_token=True, add_prefix_space=False, errors="replace"
            ),
            "special_tokens_map.json": {
                "bos_token": added("</s>", normalized=True),
                "eos_token": added("</s>", normalized=True),
                "unk_token": added("</s>", normalized=True),
                "pad_token": "<pad>",
            },
        },
        ("<s>", "<pad>", "</s>", "<unk>"),
    ),
    "gpt_paddlenlp": Family(
        {
            "config.json": {"model_type": "gpt"},
            "tokenizer_config.json": of_class(
                "GPTTokenizer", pad_token="<|endoftext|>", eol_token="Ċ", add_prefix_space=False
            ),
            "special_tokens_map.json": {"eos_token": "<|endoftext|>", "eol_token": "Ċ"},
        },
        unread=("eol_token",),
    ),
    "qwen2": Family(
        {
            "config.json": {"model_type": "qwen2"},
            "tokenizer_config.json": of_class(
                "Qwen2Tokenizer",
                bos_token=None,
                eos_token="<|im_end|>",
                pad_token="<|endoftext|>",
                unk_token=None,
                errors="replace",
                additional_special_tokens=["<|im_start|>", "<|im_end|>"],
                added_tokens_decoder={
                    **{f"+{i}": added(token) for i, token in enumerate(QWEN_TOKENS)},
                    "+3": added("<|caf\u00e9|>", False, normalized=True),
                },
            ),
        },
        (),
        "Qwen2Tokenizer",
    ),
    "qwen2_older": Family(
        {
            "config.json": {"model_type": "qwen2_moe"},
            "added_tokens.json": {token: f"+{i}" for i, token in enumerate(QWEN_TOKENS)},
            "special_tokens_map.json": {
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|extra|>"],
                "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
            },
        },
        (),
        "Qwen2Tokenizer",
    ),
    "phi": Family(
        {
            "config.json": {"model_type": "phi"},
            "tokenizer_config.json": of_class("CodeGenTokenizer"),
            "added_tokens.json": {" " * (8 - i): f"+{i}" for i in range(7)} | {"\t\t": "+7"},
        },
        reader="CodeGenTokenizer",
    ),
    "gpt_neox": Family(
        {
            "config.json": {"model_type": "gpt_neox"},
            "tokenizer_config.json": of_class("GPTNeoXTokenizerFast"),
        },
        ("<|endoftext|>", "<|padding|>"),
        "GPTNeoXTokenizer",
    ),
    "cohere": Family(
        {
            "config.json": {"model_type": "cohere"},
            "tokenizer_config.json": of_class("CohereTokenizer", add_bos_token=True),
        },
        (
            "<PAD>",
            "<UNK>",
            "<CLS>",
            "<SEP>",
            "<MASK_TOKEN>",
            "<BOS_TOKEN>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        "CohereTokenizer",
    ),
    "starcoder2": Family(
        {
            "config.json": {"model_type": "starcoder2"},
            "tokenizer_config.json": of_class("GPT2Tokenizer", add_prefix_space=False),
        },
        reader="",
        published=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
    ),
    "bloom": Family(
        {
            "config.json": {"model_type": "bloom"},
            "tokenizer_config.json": of_class("BloomTokenizerFast", add_prefix_space=False),
        },
        ("<unk>", "<s>", "</s>", "<pad>"),
        "",
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(" ?[^(\\s|[.,!?…。，、।۔،])]+"), "isolated"), LETTERS]
        ),
    ),
}


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of pieces of the texts, and its merges."""
    rng = random.Random(0)
    slices = []
    for text in [text for text in TEXTS if "<" not in text] * 40:  # no special token is learned
        begin = rng.randrange(len(text) + 1)
        slices.append(text[begin : begin + rng.randrange(2, 7)])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = LETTERS
    trainer = trainers.BpeTrainer(
        vocab_size=620,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(slices, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def numbered(value: Any, size: int) -> Any:
    """The value with ids in place of "+0" and so on."""
    if isinstance(value, dict):
        return {numbered(key, size): numbered(each, size) for key, each in value.items()}
    if isinstance(value, str) and value.startswith("+") and value[1:].isdigit():
        return size + int(value[1:])
    return value


def write(folder: Path, family: Family, vocab: dict[str, int], merges: Any) -> None:
    folder.mkdir(parents=True)
    whole = dict(vocab)
    for token in family.in_vocabulary:
        whole[token] = len(whole)
    write_json(folder / "vocab.json", whole)
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    for name, value in family.files.items():
        write_json(folder / name, numbered(value, len(whole)))


def reader(family: Family, source: Path, folder: Path) -> Any:
    shutil.copytree(source, folder)
    for path in folder.glob("*_*.json"):
        values = json.loads(path.read_text())
        write_json(path, {key: v for key, v in values.items() if key not in family.unread})
    if family.reader:
        return getattr(transformers, family.reader).from_pretrained(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    lines = (folder / "merges.txt").read_text().split("\n")[1:-1]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer, made.decoder = family.published, decoders.ByteLevel()
    made.add_special_tokens(list(family.in_vocabulary))
    made.save(str(folder / "tokenizer.json"))
    ends = ("<s>", "</s>") if "<s>" in family.in_vocabulary else ENDS * 2
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=ends[0], eos_token=ends[1]
    )


def cases(tokenizer: Any) -> list[dict[str, Any]]:
    """What transformers makes of every text."""
    made = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        made.append(
            {
                "ids": ids,
                "with_ends": tokenizer.encode(text),
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                "decoded_all": tokenizer.decode(ids, skip_special_tokens=False),
            }
        )
    return made


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    vocab, merges = trained()
    golden: dict[str, Any] = {"texts": TEXTS, "families": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for name, family in FAMILIES.items():
            write(FOLDER / name, family, vocab, merges)
            tokenizer = reader(family, FOLDER / name, Path(temporary) / name)
            golden["families"][name] = {
                "cases": cases(tokenizer),
                "size": len(tokenizer),
                "bos": tokenizer.bos_token_id,
                "eos": tokenizer.eos_token_id,
            }
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n"
    (HERE / "merges.json").write_text(text, encoding="utf-8")
    pack(HERE / "merges.json")


if __name__ == "__main__":
    main()
