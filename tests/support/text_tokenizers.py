"""Small tokenizers with the steps of published ones, and strings to compare libraries on."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from predict.text import tokenizer as ours
from predict.text.backends.fast import FastBackend
from predict.text.backends.gguf_vocabulary import DEEPSEEK3
from predict.text.backends.sentencepiece_model import SentencePieceBackend
from predict.text.backends.tiktoken_file import WORDS
from tests.support.paths import DEMO, ROOT

SCRIPTS = (
    "naïve café Ångström, Việt Nam, straße",
    "ελληνικά και кириллица, հայերեն",
    "中文字符，日本語のテキスト、한국어 문장",
    "עברית עם ניקוד שָׁלוֹם والعربية مع تشكيلٍ",
    "हिन्दी में लिखा हुआ, বাংলা, தமிழ், ไทยภาษา",
    "👩‍👩‍👧 🇫🇷 ✈️ 1️⃣ 𝔘𝔫𝔦 ﬁ ½ Ⅷ ٣٤٥ ①",
    "e\u0301 a\u0323\u0307 \u1100\u1161\u11a8 \u2126 \ufb1d \u0958",
    "tabs\tand  spaces \n\n  lines\r\n\r\n\u00a0\u2003\u2028\u3000end",
    "def f(x):\n    return x ** 2  # I'm, they'LL 12345678\n",
)
SPACE = "▁"
PAGE = ROOT / "docs" / "runtime-format.md"


@functools.cache
def trained(byte_level: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of 1,500 tokens or so and its merges: of bytes, or of characters."""
    tokenizer = Tokenizer(models.BPE())
    texts = [(DEMO / "heldout.txt").read_text()[:60_000], *SCRIPTS * 3]
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        letters = pre_tokenizers.ByteLevel.alphabet()
    else:
        texts = [text.replace(" ", SPACE) for text in texts]
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
        letters = [SPACE]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=letters, show_progress=False, limit_alphabet=300
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def bytes_tokenizer(*cuts: str, nfc: bool = False, **model: Any) -> Tokenizer:
    vocabulary, merges = trained(True)
    made = Tokenizer(models.BPE(vocabulary, merges, **model))
    if nfc:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cuts))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def template(made: Tokenizer, single: str, *ends: str) -> Any:
    return processors.TemplateProcessing(
        single=single, special_tokens=[(end, made.token_to_id(end)) for end in ends]
    )


def gpt2() -> Tokenizer:
    made = bytes_tokenizer()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def llama3() -> Tokenizer:
    made = bytes_tokenizer(WORDS.format(digits="{1,3}"), ignore_merges=True)
    made.add_special_tokens(
        ["<|begin_of_text|>", "<|eot_id|>", "<|reserved_1|>", "<|reserved_11|>"]
    )
    made.post_processor = processors.Sequence(
        [processors.ByteLevel(), template(made, "<|begin_of_text|> $A", "<|begin_of_text|>")]
    )
    return made


def qwen() -> Tokenizer:
    made = bytes_tokenizer(WORDS.format(digits=""), nfc=True)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("café")])
    return made


def deepseek() -> Tokenizer:
    made = bytes_tokenizer(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3)
    made.add_special_tokens(["<｜begin▁of▁sentence｜>", "<｜User｜>"])
    return made


def pieces_tokenizer(**model: Any) -> Tokenizer:
    """Characters, byte tokens and an unknown token, as sentencepiece has them."""
    vocabulary, merges = trained(False)
    ahead = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    moved = {token: i for i, token in enumerate(ahead)}
    moved |= {token: i + len(ahead) for token, i in vocabulary.items()}
    values = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, **model}
    made = Tokenizer(models.BPE(moved, merges, **values))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    strip = [decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.post_processor = template(made, "<s> $A </s>", "<s>", "</s>")
    return made


def llama2() -> Tokenizer:
    made = pieces_tokenizer()
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    return made


def mistral() -> Tokenizer:
    made = pieces_tokenizer()
    made.add_special_tokens(["[INST]", "[/INST]"])
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    return made


def gemma() -> Tokenizer:
    made = pieces_tokenizer()
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_tokens([AddedToken("\n" * n, normalized=False) for n in range(2, 12)])
    made.add_tokens([AddedToken(SPACE * n, normalized=False) for n in range(2, 12)])
    made.add_special_tokens(["<start_of_turn>", *(f"<unused{i}>" for i in range(99))])
    return made


def unknowns() -> Tokenizer:
    """No byte tokens: what is unknown stays so, each by itself; a Metaspace that decodes, too."""
    made = pieces_tokenizer(byte_fallback=False, fuse_unk=False)
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    made.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    return made


def added() -> Tokenizer:
    """Every switch of added tokens."""
    made = bytes_tokenizer(nfc=True)
    made.add_special_tokens(
        [
            AddedToken("<mask>", lstrip=True),
            AddedToken("<left>", rstrip=True, normalized=True),
            AddedToken("<both>", lstrip=True, rstrip=True),
        ]
    )
    words = [AddedToken("return", single_word=True), AddedToken("cafe\u0301", normalized=True)]
    made.add_tokens([*words, AddedToken(" the", normalized=False), AddedToken("é")])
    return made


def behaviors() -> Tokenizer:
    """Every way to cut, at a text and at a pattern, and what is asked of the rest."""
    made = bytes_tokenizer()
    cuts: tuple[str | Regex, ...] = (Regex(r"[aeiou]|(?=z)"), "n", Regex("e"), "q", " ")
    ways = ("merged_with_previous", "merged_with_next", "contiguous", "removed", "isolated")
    steps: list[Any] = [
        pre_tokenizers.Split(pattern, way) for pattern, way in zip(cuts, ways, strict=True)
    ]
    steps += [pre_tokenizers.Split(Regex(r"\w+"), "contiguous", invert=True)]
    steps += [pre_tokenizers.Digits(individual_digits=False)]
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=True)]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return made


def python_of(made: Tokenizer) -> ours.Tokenizer:
    """The tokenizer as Regatta's Python has it."""
    backend: Any = FastBackend(DEMO / "tokenizer.json", lambda: made, "")
    return ours.Tokenizer(backend, {})


BUILDERS: Mapping[str, Callable[[], Tokenizer]] = {
    made.__name__: made
    for made in (
        gpt2, llama3, qwen, deepseek, llama2, mistral, gemma, unknowns, added, behaviors,
    )
}  # fmt: skip


@functools.cache
def differing() -> frozenset[int]:
    """The code points that the page lists: the two libraries know them by different Unicodes."""
    listed = re.findall(r"```text code-points\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ends = [word.split("-") for word in " ".join(listed).split()]
    return frozenset(c for end in ends for c in range(int(end[0], 16), int(end[-1], 16) + 1))


def added_to(tokenizer: ours.Tokenizer) -> list[str]:
    """The texts of its added tokens."""
    backend = tokenizer.backend
    if isinstance(backend, SentencePieceBackend):
        return [token.content for token in backend.described().added]
    assert isinstance(backend, FastBackend)
    return [token["content"] for token in json.loads(backend.described()[0])["added_tokens"]]


def strings(tokenizer: ours.Tokenizer, count: int, seed: int = 0) -> Iterator[str]:
    """Random Unicode, code, all scripts, white space, and special tokens among them."""
    dice = random.Random(seed)
    tokens = added_to(tokenizer)
    code = (DEMO / "heldout.txt").read_text()
    yield from ("", " ", "\n", *SCRIPTS)

    def part() -> str:
        kind = dice.randrange(8)
        if kind == 0:
            return "".join(map(chr, (dice.randrange(32, 127) for _ in range(dice.randrange(20)))))
        if kind in (1, 2):
            most = (0x800, 0x3100, 0x10000, 0x20000, 0x110000)[dice.randrange(5)]
            points = (dice.randrange(most) for _ in range(dice.randrange(12)))
            return "".join(
                chr(c) for c in points if not 0xD800 <= c < 0xE000 and c not in differing()
            )
        if kind == 3:
            at = dice.randrange(len(code) - 80)
            return code[at : at + dice.randrange(80)]
        if kind == 4:
            return "".join(dice.choices(" \t\n\r\u00a0\u3000", k=dice.randrange(8)))
        if kind == 5 and tokens:
            return dice.choice(tokens)
        if kind == 6:
            return dice.choice("aze0é中▁") * dice.randrange(40)
        text = dice.choice(SCRIPTS)
        at = dice.randrange(len(text))
        return text[at : at + dice.randrange(20)]

    for _ in range(count):
        yield "".join(part() for _ in range(dice.randrange(6)))
