"""Makes the tokenizer files in tests/data/families, and what tiktoken does with those of ranks.

Needs tiktoken, tokenizers and sentencepiece; the tests that read the files need no tiktoken:

    python -m tests.data.make_families
"""

from __future__ import annotations

import base64
import shutil
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.data.files import write_json, write_sentencepiece

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "families"
CORPUS = [
    "the quick brown fox jumps over the lazy dog; he said: it's what we're told, isn't it?",
    "Paris is the capital of France, and Berlin is the capital of Germany.",
    "def binary_search(items, target):\n    low, high = 0, len(items)\n\n\treturn low\n",
    "    for i in range(10):\n        total += values[i] * 2\n",
    "hello world, how are you? I am fine, thank you; and you?",
    "你好，世界！你是谁？我是一个人工智能助手。问：北京有多少人口？答：两千万。",
    "1234567890 100 200 3000 🙂🙂 🚀 naïve café Größe",
]
TEXTS = [
    "",
    " ",
    "hello",
    " hello  world \n\n and   you?\t\tyes\r\n",
    "你好，世界！你是谁？",
    "naïve cafe\u0301 🙂 👩‍👩‍👧 end \u0915\u094d\u0937",
    "IT'S we'Re isn'T 'ſ x'S",
    "1 12 123 1234 12345678 ٣٤",
    "def f(x):\n    if x:\n\t\treturn x  # done\n\n\n",
    " " * 100 + "x" + "\n" * 9 + " \u00a0\u3000\u2028\u0085 y",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "[gMASK]<sop><|user|>\nhello<|assistant|>sophistry sop",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>",
    "<|extra_0|><|extra_20|><|extra_204|><|extra_205|> <|im_end|>\u0338 <|im_end",
    "a" * 40 + "the" * 9 + "-" * 30,
]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GLM4_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
LLAMA3_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
QWEN_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|extra_{i}|>" for i in range(205)),
)
SPELLED = ("<n>", "<|tab|>", *(f"<|blank_{count}|>" for count in range(2, 81)))


def trained_ranks() -> dict[bytes, int]:
    """Token -> rank: the bytes, and what merges most often in the corpus."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert sorted(byte_of) == alphabet
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return {
        bytes(byte_of[letter] for letter in token): token_id
        for token, token_id in tokenizer.get_vocab().items()
    }


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Writes a file of ranks as tiktoken reads them."""
    lines = (
        f"{base64.b64encode(token).decode()} {rank}"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    path.write_text("\n".join(lines) + "\n")


def rank_cases(
    ranks: dict[bytes, int], digits: str, special: tuple[str, ...], composes: bool
) -> list[dict[str, Any]]:
    """The ids and texts that tiktoken makes of every test string."""
    encoding = tiktoken.Encoding(
        "family",
        pat_str=WORDS.replace("DIGITS", digits),
        mergeable_ranks=ranks,
        special_tokens={token: len(ranks) + i for i, token in enumerate(special)},
    )
    found = []
    for text in TEXTS:
        ids = encoding.encode(
            unicodedata.normalize("NFC", text) if composes else text, allowed_special="all"
        )
        cut = ids[1:-1]  # characters in halves
        found.append(
            {
                "text": text,
                "ids": ids,
                "decoded": encoding.decode([i for i in ids if i < len(ranks)], errors="replace"),
                "decoded_all": encoding.decode(ids, errors="replace"),
                "cut": encoding.decode(cut, errors="replace"),
            }
        )
    return found


def make_rank_families() -> dict[str, Any]:
    """Writes Qwen's, GLM-4's and Llama 3's files; the cases of each."""
    ranks = trained_ranks()
    golden: dict[str, Any] = {}
    for name, file, digits, special in (
        ("qwen", "qwen.tiktoken", "", QWEN_TOKENS),
        ("glm4", "tokenizer.model", "{1,3}", GLM4_TOKENS),
        ("llama3", "tokenizer.model", "{1,3}", LLAMA3_TOKENS),
    ):
        folder = FOLDER / name
        folder.mkdir()
        write_ranks(folder / file, ranks)
        golden[name] = rank_cases(ranks, digits, special, composes=name == "qwen")
    write_json(FOLDER / "qwen" / "config.json", {"model_type": "qwen"})
    write_json(FOLDER / "qwen" / "tokenizer_config.json", {"tokenizer_class": "QWenTokenizer"})
    write_json(FOLDER / "llama3" / "config.json", {"model_type": "llama"})
    write_json(FOLDER / "glm4" / "config.json", {"model_type": "chatglm"})
    added = {str(len(ranks) + i): token for i, token in enumerate(GLM4_TOKENS)}
    config = {
        "tokenizer_class": "ChatGLM4Tokenizer",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            key: {"content": token, "special": True} for key, token in added.items()
        },
    }
    write_json(FOLDER / "glm4" / "tokenizer_config.json", config)
    return golden


def train(folder: Path, file: str, size: int, **options: Any) -> None:
    """Writes a sentencepiece model with byte tokens into a new folder."""
    folder.mkdir()
    write_sentencepiece(folder, file, CORPUS * 8, size, **options)


def make_sentencepiece_families() -> None:
    chatglm = FOLDER / "chatglm_6b"
    symbols = ["<pad>", "[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>"]
    # It removes spaces at the ends of texts, which the others keep.
    train(chatglm, "ice_text.model", 560, user_defined_symbols=[*symbols, *SPELLED])
    write_json(chatglm / "config.json", {"model_type": "chatglm"})
    config = {
        "tokenizer_class": "ChatGLMTokenizer",
        "num_image_tokens": 20,
        "do_lower_case": False,
        "remove_space": False,
        "bos_token": "<sop>",
        "eos_token": "<eop>",
        "end_token": "</s>",
        "gmask_token": "[gMASK]",
        "mask_token": "[MASK]",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    write_json(chatglm / "tokenizer_config.json", config)
    options: dict[str, Any] = {"remove_extra_whitespaces": False, "split_digits": True}
    for name in ("chatglm2_6b", "chatglm3_6b"):
        train(FOLDER / name, "tokenizer.model", 420, **options)
        write_json(FOLDER / name / "config.json", {"model_type": "chatglm"})
        hub_name = f"THUDM/{name.replace('_', '-')}"
        config = {"tokenizer_class": "ChatGLMTokenizer", "name_or_path": hub_name}
        write_json(FOLDER / name / "tokenizer_config.json", config)
    baichuan = FOLDER / "baichuan_2"
    reserved = [f"<reserved_{i}>" for i in range(100, 110)]
    train(
        baichuan,
        "tokenizer.model",
        420,
        add_dummy_prefix=False,
        user_defined_symbols=reserved,
        **options,
    )
    write_json(baichuan / "config.json", {"model_type": "baichuan", "z_loss_weight": 0})
    write_json(
        baichuan / "tokenizer_config.json",
        {"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False, "add_eos_token": False},
    )
    ids = {"user_token_id": 3 + 6, "assistant_token_id": 3 + 7, "eos_token_id": 2}
    write_json(baichuan / "generation_config.json", ids)
    internlm = FOLDER / "internlm2"
    unused = [f"[UNUSED_TOKEN_{i}]" for i in range(2)]
    train(internlm, "tokenizer.model", 420, control_symbols=unused, **options)
    names = {"3": "<|im_end|>", "4": "<|im_start|>"}
    config = {
        "tokenizer_class": "InternLM2Tokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "added_tokens_decoder": {
            key: {"content": text, "special": True} for key, text in names.items()
        },
    }
    write_json(internlm / "tokenizer_config.json", config)
    write_json(internlm / "config.json", {"model_type": "internlm2"})


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    golden = make_rank_families()
    make_sentencepiece_families()
    write_json(HERE / "families.json", golden)


if __name__ == "__main__":
    main()
