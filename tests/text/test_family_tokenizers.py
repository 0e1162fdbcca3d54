"""Families' own tokenizer files against tiktoken, sentencepiece and what their publishers wrote.

tests/data/make_families.py made the files, and what tiktoken does with those of ranks.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.errors import UserError
from predict.text.backends.tiktoken_file import RankFamily, rank_backend
from predict.text.detokenizer import Detokenizer
from predict.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
FOLDERS = DATA / "families"
GOLDEN: dict[str, Any] = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
NAMES = sorted(path.name for path in FOLDERS.iterdir())
CASES = [
    pytest.param(name, case, id=f"{name}-{case['text'][:12]!r}")
    for name, cases in GOLDEN.items()
    for case in cases
]
PREFIXES = {"glm4": ("[gMASK]", "<sop>"), "llama3": ("<|begin_of_text|>",), "qwen": ()}
TEXTS = [
    "",
    " ",
    "  ",
    "hello",
    " hello  world \n\n and   you?\t\tyes\r\n",
    "你好，世界！ 你是谁？\n答：🙂 👩‍👩‍👧",
    "def f(x):\n    if x:\n\t\treturn x  # done\n\n\n",
    " " * 200 + "x" + "\n" * 9,
    "a sophistry of eop, <n> and <|tab|> and <|blank_7|>",
]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_dir(FOLDERS / name)


def model_of(name: str) -> Any:
    (path,) = FOLDERS.joinpath(name).glob("*.model")
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    return [token_id for token_id in found if token_id is not None]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_ranks_give_the_ids_and_texts_of_tiktoken(name: str, case: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
    first = ids_of(tokenizer, *PREFIXES[name])
    assert len(first) == len(PREFIXES[name])
    assert tokenizer.encode(case["text"]) == [*first, *case["ids"]]
    assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded_all"]
    assert tokenizer.decode(case["ids"][1:-1], skip_special_tokens=False) == case["cut"]


def lowest_rank_merges(ranks: dict[bytes, int], word: bytes) -> list[int]:
    """What a table of ranks means: the pair of lowest rank merges, the first of equals."""
    if word in ranks:
        return [ranks[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        pairs = [ranks.get(parts[i] + parts[i + 1], 10**9) for i in range(len(parts) - 1)]
        if not pairs or min(pairs) == 10**9:
            return [ranks[part] for part in parts]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.text("abc", min_size=2, max_size=7), unique=True, max_size=25),
    words=st.lists(st.text("abc", min_size=1, max_size=24), max_size=12),
)
def test_any_table_of_ranks_merges_as_tiktoken_does(tokens: list[str], words: list[str]) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {token.encode(): 256 + i for i, token in enumerate(tokens)}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks"
        path.write_text("\n".join(lines))
        made = rank_backend(path, RankFamily("", (), {}), {}, {})
    for word in words:
        assert made.encode(word, False) == lowest_rank_merges(ranks, word.encode())


class PublishedChatGlm:
    """ChatGLM-6B's text tokenizer, from its publisher's description."""

    def __init__(self) -> None:
        self.model = model_of("chatglm_6b")
        self.num_image_tokens = 20

    def encode(self, text: str) -> list[int]:
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for length in range(80, 1, -1):
            text = text.replace(" " * length, f"<|blank_{length}|>")
        return [i + self.num_image_tokens for i in self.model.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        of_text = [i - self.num_image_tokens for i in ids if i >= self.num_image_tokens]
        text: str = self.model.decode(of_text).replace("<n>", "\n").replace("<|tab|>", "\t")
        for length in range(2, 81):
            text = text.replace(f"<|blank_{length}|>", " " * length)
        return text


@pytest.mark.parametrize("text", TEXTS)
def test_chatglm_6b_reads_and_writes_as_published(text: str) -> None:
    tokenizer, published = tokenizer_of("chatglm_6b"), PublishedChatGlm()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == published.encode(text)
    assert tokenizer.decode(ids) == published.decode(ids)
    behind = ids_of(tokenizer, "[gMASK]", "<sop>")
    assert len(behind) == 2
    assert tokenizer.encode(text) == [*ids, *behind]
    assert tokenizer.encode(f"{text}[gMASK]<sop>", add_special_tokens=False) == [*ids, *behind]


def test_ids_of_chatglms_image_tokens_have_no_text() -> None:
    tokenizer = tokenizer_of("chatglm_6b")
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.decode([0, 19, *ids, 5]) == "hello"
    assert tokenizer.vocab_size == 20 + model_of("chatglm_6b").vocab_size()
    assert tokenizer.eos_token_ids == (tokenizer.token_to_id("<eop>"),)


def test_a_chatglm_config_sets_its_number_of_image_tokens(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "chatglm_6b", tmp_path / "model")
    shifted = Tokenizer.from_dir(folder).encode("hello")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for number, offset in ((0, 0), (None, 20000)):
        changed = {**config, "num_image_tokens": number}
        kept = {key: value for key, value in changed.items() if value is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(kept))
        assert Tokenizer.from_dir(folder).encode("hello") == [i - 20 + offset for i in shifted]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["chatglm2_6b", "chatglm3_6b"])
def test_chatglm_2_and_3_put_their_two_tokens_in_front(name: str, text: str) -> None:
    tokenizer, model = tokenizer_of(name), model_of(name)
    num_pieces = model.vocab_size()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == model.encode(text)
    assert tokenizer.encode(text) == [num_pieces + 1, num_pieces + 3, *ids]
    assert tokenizer.decode(ids) == model.decode(ids)


def test_chatglm3_finds_roles_in_a_text_and_sop_only_behind_gmask() -> None:
    tokenizer, model = tokenizer_of("chatglm3_6b"), model_of("chatglm3_6b")
    num_pieces = model.vocab_size()
    names = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>")
    assert ids_of(tokenizer, *names) == [num_pieces + i for i in range(7)]
    text = "[gMASK]sop<|user|>\n sop eop<|assistant|>"
    front, user, assistant = [num_pieces + 1, num_pieces + 3], num_pieces + 6, num_pieces + 7
    expected = [*front, user, *model.encode("\n sop eop"), assistant]
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    # As the publisher encodes a turn: the role's line, then its message.
    assert model.encode("\n hello") == [*model.encode("\n"), *model.encode("hello")]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["baichuan_2", "internlm2"])
def test_baichuan_and_internlm2_encode_as_sentencepiece(name: str, text: str) -> None:
    tokenizer, model = tokenizer_of(name), model_of(name)
    ids = model.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == ([1, *ids] if name == "internlm2" else ids)
    assert tokenizer.decode(ids) == model.decode(ids)


def test_names_of_a_config_replace_those_of_unused_pieces() -> None:
    tokenizer, model = tokenizer_of("internlm2"), model_of("internlm2")
    text = "<|im_start|>user\nhello<|im_end|>\n"
    expected = [4, *model.encode("user\nhello"), 3, *model.encode("\n")]
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.decode(expected, skip_special_tokens=False).startswith("<|im_start|> user")
    assert tokenizer.vocabulary()["<|im_start|>"] == 4
    assert "[UNUSED_TOKEN_1]" not in tokenizer.vocabulary()


def test_baichuans_tokens_of_roles_are_special() -> None:
    tokenizer, model = tokenizer_of("baichuan_2"), model_of("baichuan_2")
    ids = [9, *model.encode("hello"), 10]
    assert tokenizer.encode("<reserved_106>hello<reserved_107>") == ids
    assert tokenizer.decode(ids) == "hello"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [text for text in TEXTS if "<n>" not in text])
def test_decoding_undoes_encoding(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    # This sentencepiece model removes one space at the beginning; more are a token of their own.
    loses = name == "chatglm_6b" and text.startswith(" ") and not text.startswith("  ")
    assert tokenizer.decode(tokenizer.encode(text)) == (text[1:] if loses else text)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), skip=st.booleans())
def test_pieces_join_to_the_text_of_the_whole(name: str, seed: int, skip: bool) -> None:
    """Random tokens: broken bytes, stray special tokens, spaces and lines."""
    tokenizer, rng = tokenizer_of(name), random.Random(seed)
    choice = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.choice([3, 300]))]
    token_ids, prompt = rng.choices(choice, k=rng.randrange(40)), rng.choices(choice, k=3)
    stream = Detokenizer(tokenizer, skip).stream(prompt)
    pieces = [stream.append([token_id]) for token_id in token_ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode_continuation(prompt, token_ids, skip)


@pytest.mark.parametrize("name", NAMES)
def test_a_guide_reads_the_tokens_of_every_family(name: str) -> None:
    tokenizer = tokenizer_of(name)
    made = llguidance.LLTokenizer(tokenizer.for_guides(tokenizer.eos_token_ids[0]))
    ids = tokenizer.encode("hello\n 你好", add_special_tokens=False)
    text = "".join(made.decode_bytes([i]).decode("latin-1") for i in ids)
    assert text.encode("latin-1").decode().strip() == "hello\n 你好"


RANKS = (FOLDERS / "qwen" / "qwen.tiktoken").read_text().splitlines()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([*RANKS[:-1], "IQ"], r"line 420 is b'IQ' .allowed: a token in base64"),
        ([*RANKS[:-1], "I=Q= 419"], "line 420 is"),
        ([*RANKS[:-1], "IQI 419"], "line 420: b'IQI' is not base64"),
        ([*RANKS[:-1], "IQIQ -1"], "line 420 is"),
        ([*RANKS[:-1], RANKS[0]], "the token .* stands in line 1, too"),
        ([*RANKS[:-1], "IQIQIQIQ 7"], "the rank 7 stands in line 8, too"),
        ([*RANKS[:-1], "IQIQIQIQ 2000000000"], r"the rank is 2000000000 .allowed: 0 to 4194303"),
        ([*RANKS[:-1], "IQIQIQIQ 99999999999"], "line 420 is"),
        ([*RANKS[:-1], "IQIQIQIQ 4000000"], "420 tokens, and none of rank 419"),
        (RANKS[:100], "no token for the byte 0x.*156 lack"),
        ([*RANKS, "A" * 4096 + " 420"], r"the token has 3072 bytes .allowed: 1024"),
        ([], "no token for the byte 0x00 .*256 lack"),
        (["version https://git-lfs.github.com/spec/v1"], "line 1 is"),
    ],
)
def test_a_damaged_file_of_ranks_is_named(tmp_path: Path, lines: list[str], said: str) -> None:
    (tmp_path / "qwen.tiktoken").write_text("\n".join(lines))
    with pytest.raises(UserError, match=f"qwen\\.tiktoken.*{said}.*copy it again"):
        Tokenizer.from_dir(tmp_path)


def test_a_file_of_ranks_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "qwen.tiktoken").open("wb") as file:
        file.truncate(1 << 27)
    with pytest.raises(UserError, match="134217728 bytes; a file of ranks may have 67108864"):
        Tokenizer.from_dir(tmp_path)


def test_ranks_of_a_family_that_is_not_known_are_refused(tmp_path: Path) -> None:
    shutil.copy(FOLDERS / "glm4" / "tokenizer.model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(UserError, match=r"'mistral' of config\.json \(known: chatglm, .*llama\)"):
        Tokenizer.from_dir(tmp_path)


def test_added_tokens_follow_the_ranks(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "glm4", tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"421": {"content": "[gMASK]"}}})
    )
    with pytest.raises(UserError, match=r"ids 421 to 421 \(allowed: 420 to 420, each once\)"):
        Tokenizer.from_dir(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"420": {"content": "[gMASK]"}}})
    )
    with pytest.raises(UserError, match=r"puts \[gMASK\] <sop> in front of a text"):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_image_tokens": -1}, "num_image_tokens is -1 .allowed: a whole number from 0"),
        ({"num_image_tokens": "20"}, "num_image_tokens is a text"),
        ({"num_image_tokens": 10**9}, "num_image_tokens is 1000000000"),
        ({"do_lower_case": True}, "do_lower_case is True, which this tokenizer does not do"),
        ({"remove_space": True}, "remove_space is True"),
    ],
)
def test_a_chatglm_config_that_cannot_be_followed_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(FOLDERS / "chatglm_6b", tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(changes))
    with pytest.raises(UserError, match=f"tokenizer_config.json: {said}"):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize("name", ["chatglm_6b", "chatglm2_6b", "baichuan_2"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_sentencepiece_model_that_is_cut_short_is_refused(
    tmp_path: Path, name: str, share: float
) -> None:
    folder = shutil.copytree(FOLDERS / name, tmp_path / "model")
    (path,) = folder.glob("*.model")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=re.escape(path.name) + ".*copy it again"):
        Tokenizer.from_dir(folder)
