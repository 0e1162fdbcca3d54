"""Files of byte-pair ranks, as tiktoken has them: `qwen.tiktoken`, GLM-4's and Llama 3's.

A line is a token's bytes in base64 and its rank, which is its id. The tokens, and how text is cut
before it is merged, become a tokenizers.Tokenizer with the same ids.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.text.backends.added import MAX_TOKEN_ID
from predict.text.backends.base import Ends
from predict.text.backends.fast import FastBackend, byte_letters, byte_level

MAX_FILE_BYTES = 1 << 26  # of ranks: 4 MB are usual
MAX_TOKEN_BYTES = 1024  # of one token: the longest that we know are 128 spaces
# How text is cut into words before bytes are merged; {digits}: how many stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2})[ \t]+([0-9]{1,10})\s*")
HINT = "the file may be cut short, or changed by an editor: copy it again"


@dataclass(frozen=True)
class RankFamily:
    """A family's own additions to its file of ranks."""

    digits: str  # of WORDS
    special_tokens: tuple[str, ...]  # behind the ranks, where the config files name none
    roles: Mapping[str, str]  # "eos_token" and so on, where the config files name none
    first: tuple[str, ...] = ()  # in front of a text
    composes: bool = False  # text is brought to Unicode's composed form (NFC) first


QWEN = RankFamily(
    digits="",
    special_tokens=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *(f"<|extra_{i}|>" for i in range(205)),
    ),
    roles={"eos_token": "<|endoftext|>"},
    composes=True,
)
GLM4 = RankFamily(
    digits="{1,3}",
    special_tokens=(
        *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    ),
    roles={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    first=("[gMASK]", "<sop>"),
)
LLAMA3 = RankFamily(
    digits="{1,3}",
    special_tokens=(
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(4)),
        *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
    ),
    roles={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    first=("<|begin_of_text|>",),
)
# By model_type. GLM-4 calls itself chatglm, too; PaddleNLP's models have names of their own.
FAMILIES: Mapping[str, RankFamily] = {
    **dict.fromkeys(("chatglm", "chatglm_v2", "glm", "glm4"), GLM4),
    "llama": LLAMA3,
}


def holds_ranks(path: Path) -> bool:
    """Whether the file begins with a line of ranks; a sentencepiece model does not."""
    with path.open("rb") as file:
        return _LINE.fullmatch(file.readline(4 * MAX_TOKEN_BYTES)) is not None


def rank_backend(
    path: Path, family: RankFamily, added: Mapping[str, int], special_tokens: Mapping[str, str]
) -> FastBackend:
    """The tokenizer of a file of ranks.

    `added`: the special tokens that the config files have, with their ids; where it is empty, the
    family's follow the ranks. `special_tokens`: by role.
    """
    backend = FastBackend(path, lambda: _tokenizer(path, family, added), HINT)
    first = family.first
    if "bos_token" in special_tokens and family.roles.get("bos_token") in first:
        first = (special_tokens["bos_token"],)
    ids = tuple(backend.token_to_id(token) for token in first)
    if None in ids:
        raise UserError(
            f"{path}: this family puts {' '.join(first)} in front of a text, and the config files "
            "do not name all of them; copy tokenizer_config.json of the checkpoint again"
        )
    backend.put_around(Ends(tuple(i for i in ids if i is not None), ()))
    return backend


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> id. UserError naming the line that is no token and rank, or stands there twice.

    The ranks are 0, 1, 2 and so on, in any order, and each single byte has one.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise UserError(f"{path} has {size} bytes; a file of ranks may have {MAX_FILE_BYTES}")
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}  # rank -> its line
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        token, rank = _token_and_rank(line, where)
        if token in ranks:
            raise UserError(
                f"{where}: the token {token!r} stands in line {lines[ranks[token]]}, too; {HINT}"
            )
        if rank in lines:
            raise UserError(f"{where}: the rank {rank} stands in line {lines[rank]}, too; {HINT}")
        ranks[token], lines[rank] = rank, number
    missing = next((i for i in range(len(ranks)) if i not in lines), None)
    if missing is not None:
        raise UserError(f"{path} has {len(ranks)} tokens, and none of rank {missing}; {HINT}")
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise UserError(
            f"{path} has no token for the byte 0x{absent[0]:02x} (needed: all 256 bytes; "
            f"{len(absent)} lack); {HINT}"
        )
    return ranks


def _token_and_rank(line: bytes, where: str) -> tuple[bytes, int]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise UserError(
            f"{where} is {line[:40]!r} (allowed: a token in base64, a space, a whole number); "
            f"{HINT}"
        )
    try:
        token = base64.b64decode(found[1], validate=True)
    except binascii.Error as error:
        raise UserError(f"{where}: {found[1][:40]!r} is not base64: {error}; {HINT}") from None
    rank = int(found[2])
    if len(token) > MAX_TOKEN_BYTES:
        raise UserError(
            f"{where}: the token has {len(token)} bytes (allowed: {MAX_TOKEN_BYTES}); {HINT}"
        )
    if rank >= MAX_TOKEN_ID:
        raise UserError(f"{where}: the rank is {rank} (allowed: 0 to {MAX_TOKEN_ID - 1}); {HINT}")
    return token, rank


def _tokenizer(path: Path, family: RankFamily, added: Mapping[str, int]) -> Any:
    from tokenizers import AddedToken

    ranks = read_ranks(path)
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    merges = [(spell(left), spell(right)) for left, right in _merges(ranks)]
    cut = WORDS.format(digits=family.digits)
    tokenizer = byte_level(vocabulary, merges, [cut], composes=family.composes, whole_words=True)
    # Normalized: they are looked for in the composed text.
    names = _behind_ranks(path, len(ranks), added) if added else family.special_tokens
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=True, special=True) for name in names]
    )
    return tokenizer


def _behind_ranks(path: Path, num_ranks: int, added: Mapping[str, int]) -> Sequence[str]:
    """The added tokens by id; UserError unless their ids follow the ranks without a gap."""
    by_id = {token_id: name for name, token_id in added.items()}
    wanted = range(num_ranks, num_ranks + len(added))
    if sorted(by_id) != list(wanted):
        raise UserError(
            f"{path} has {num_ranks} ranks, and tokenizer_config.json adds {len(added)} tokens "
            f"with the ids {min(by_id)} to {max(by_id)} (allowed: {wanted[0]} to {wanted[-1]}, "
            "each once); copy both files of the same checkpoint again"
        )
    return [by_id[token_id] for token_id in wanted]


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that make up each token, in the order in which they are merged."""
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
