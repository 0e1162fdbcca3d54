"""Byte-level BPE from `vocab.json` and `merges.txt`, the files that GPT-2 began with.

The files do not say how text is cut into words before bytes are merged; the tokenizer's class in
tokenizer_config.json does, or the family. The result is a tokenizers.Tokenizer with the ids of
Hugging Face's classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system.files import json_type, read_json_object, read_text
from predict.text.backends.added import (
    CONFIG_FILE,
    MAX_TOKEN_ID,
    AddedToken,
    added_by_config,
    checked_content,
    checked_token_id,
    described_token,
    switch,
)
from predict.text.backends.base import explicit_ends
from predict.text.backends.fast import FastBackend, byte_level
from predict.text.backends.tiktoken_file import WORDS

VOCABULARY, MERGES = "vocab.json", "merges.txt"
MAX_MERGES_BYTES = 1 << 27  # 2 MB are usual
VERSION = "#version"  # how the first line of the merges begins
HINT = "the files may be cut short, or of two models: copy both again"
ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
LISTS = ("additional_special_tokens", "extra_special_tokens")
NOWHERE = -1  # the id of a token whose place the files do not say
END = "<|endoftext|>"
BLOOM_WORDS = " ?[^(\\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class MergeFamily:
    """How a tokenizer class cuts text, and its special tokens where no file names any.

    single_digits, composes: see predict.text.backends.fast.byte_level.
    """

    words: str = ""  # a regular expression; empty: GPT-2's
    single_digits: bool = False
    composes: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)


_END_ALONE = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
GPT2 = MergeFamily(roles=_END_ALONE)
STARCODER = MergeFamily(single_digits=True, roles=_END_ALONE)
QWEN2 = MergeFamily(
    words=WORDS.format(digits=""),
    composes=True,
    roles=dict.fromkeys(("eos_token", "unk_token", "pad_token"), END),
)
GPT_NEOX = MergeFamily(composes=True, roles={**_END_ALONE, "pad_token": "<|padding|>"})
COHERE = MergeFamily(
    single_digits=True,
    composes=True,
    roles={
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "sep_token": "<SEP>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "mask_token": "<MASK_TOKEN>",
    },
)
BLOOM = MergeFamily(
    words=BLOOM_WORDS,
    roles={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
)
# By tokenizer_class, "Fast" left out; PaddleNLP's are there, too.
CLASSES: Mapping[str, MergeFamily] = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "GPTTokenizer"), GPT2),
    "Qwen2Tokenizer": QWEN2,
    "GPTNeoXTokenizer": GPT_NEOX,
    "CohereTokenizer": COHERE,
    "BloomTokenizer": BLOOM,
}
# By model_type, where tokenizer_config.json names no such class.
MODEL_TYPES: Mapping[str, MergeFamily] = {
    **dict.fromkeys(("gpt2", "opt", "gpt", "phi"), GPT2),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), QWEN2),
    **dict.fromkeys(("starcoder2", "granite"), STARCODER),
    **dict.fromkeys(("gpt_neox", "stablelm", "olmoe"), GPT_NEOX),
    "cohere": COHERE,
    "bloom": BLOOM,
}
# Families whose class is GPT-2's and whose cuts are not: by MODEL_TYPES, and those that are refused
# without a tokenizer.json.
NAMED_AS_GPT2 = ("starcoder2", "granite")
NOT_TOLD = ("phi3", "olmo2")


def merges_backend(
    path: Path, model_type: str, config: Mapping[str, Any]
) -> tuple[FastBackend, dict[str, str]]:
    """The tokenizer of a folder's two files, and its special tokens by role.

    path: of vocab.json. model_type: config.json's, "" where it has none. Raises UserError where a
    file is missing, damaged or contradicts another one, and for a class whose cuts are not known.
    """
    family = _family(path, model_type, config)
    prefix = switch(path.parent, config, "add_prefix_space")
    roles = _roles(path.parent, config, family)
    tokens = _tokens(path.parent, config, roles)

    def build() -> Any:
        tokenizer = byte_level(
            _read_vocabulary(path),
            _read_merges(path.parent / MERGES),
            [family.words] if family.words else [],
            composes=family.composes,
            single_digits=family.single_digits,
            prefix=prefix,
        )
        tokenizer.encode_special_tokens = switch(path.parent, config, "split_special_tokens")
        _add(tokenizer, tokens, path)
        return tokenizer

    backend = FastBackend(path, build, HINT)
    special_tokens = {role: token.content for role, token in roles.items()}
    backend.put_around(explicit_ends(config, special_tokens, backend.token_to_id))
    return backend, special_tokens


def _family(path: Path, model_type: str, config: Mapping[str, Any]) -> MergeFamily:
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    family = CLASSES.get(named)
    if family is None or (family is GPT2 and model_type in NAMED_AS_GPT2):
        family = MODEL_TYPES.get(model_type)
    if family is None or (family is GPT2 and model_type in NOT_TOLD):
        raise UserError(
            f"{path}: how text is cut into words is not known for tokenizer_class {named[:40]!r} "
            f"of {CONFIG_FILE} and model_type {model_type[:40]!r} of config.json (known: "
            f"{', '.join(sorted(CLASSES))}; {', '.join(sorted(MODEL_TYPES))}); copy a "
            "tokenizer.json of the model into the folder"
        )
    return family


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Token -> id. UserError unless the ids are 0, 1, 2 and so on, in any order."""
    vocabulary = read_json_object(path)
    for token, token_id in vocabulary.items():
        checked_token_id(token_id, f"{path}: {token[:40]!r}")
    if not vocabulary or sorted(vocabulary.values()) != list(range(len(vocabulary))):
        taken = set(vocabulary.values())
        missing = next((i for i in range(len(vocabulary)) if i not in taken), 0)
        raise UserError(
            f"{path} has {len(vocabulary)} tokens, and none with the id {missing}; {HINT}"
        )
    return vocabulary


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """The pairs in the order in which they are merged. UserError naming the line that is none."""
    if not path.is_file():
        raise UserError(f"{path} is missing beside {VOCABULARY}; copy it from the checkpoint")
    size = path.stat().st_size
    if size > MAX_MERGES_BYTES:
        raise UserError(f"{path} has {size} bytes; a file of merges may have {MAX_MERGES_BYTES}")
    pairs = []
    # Not splitlines: a token may hold what Unicode calls the end of a line.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith(VERSION)):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise UserError(
                f"{path}, line {number} is {line[:40]!r} (allowed: two tokens with a space between "
                f"them); {HINT}"
            )
        pairs.append((left, right))
    return pairs


def _roles(folder: Path, config: Mapping[str, Any], family: MergeFamily) -> dict[str, AddedToken]:
    """The special tokens by role: of the config files, else of the family; a null means none.

    special_tokens_map.json counts where tokenizer_config.json has no added_tokens_decoder.
    """
    roles = {role: AddedToken(text, NOWHERE, True) for role, text in family.roles.items()}
    for name, values in _files(folder, config):
        for role in ROLES:
            if role not in values:
                continue
            roles.pop(role, None)
            if values[role] is not None:
                roles[role] = _special(values[role], f"{folder / name}: {role}")
    return {role: roles[role] for role in ROLES if role in roles}


def _files(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files that name special tokens; what a later one says counts."""
    yield CONFIG_FILE, config
    if not config.get("added_tokens_decoder"):
        name = "special_tokens_map.json"
        yield name, read_json_object(folder / name, missing_ok=True)


def _special(value: Any, where: str) -> AddedToken:
    """A special token: its text, or an object as config files describe one."""
    if isinstance(value, dict):
        return described_token(value, NOWHERE, True, where)
    return AddedToken(checked_content(value, where), NOWHERE, True)


def _tokens(
    folder: Path, config: Mapping[str, Any], roles: Mapping[str, AddedToken]
) -> list[AddedToken]:
    """All added tokens in the order of their ids; those whose place no file says come last."""
    extras = [token for each in _files(folder, config) for token in _extras(folder, *each)]
    special = {token.content: token for token in (*roles.values(), *extras)}
    found = added_by_config(folder, config)
    if not found:
        path = folder / "added_tokens.json"
        for content, value in read_json_object(path, missing_ok=True).items():
            where = f"{path}: {content[:40]!r}"
            is_special = content in special
            found[checked_content(content, where)] = AddedToken(
                content, checked_token_id(value, where), is_special, normalized=not is_special
            )
    placed = sorted(found.values(), key=lambda token: token.token_id)
    return [*placed, *(token for text, token in special.items() if text not in found)]


def _extras(folder: Path, name: str, values: Mapping[str, Any]) -> Iterator[AddedToken]:
    """The special tokens without a role that a file lists."""
    for key in LISTS:
        value = values.get(key) or []
        if isinstance(value, dict):  # by roles of the family's own
            value = list(value.values())
        if not isinstance(value, list):
            raise UserError(
                f"{folder / name}: {key} is {json_type(value)} (allowed: a list of tokens, null)"
            )
        for token in value:
            yield _special(token, f"{folder / name}: {key}")


def _add(tokenizer: Any, tokens: list[AddedToken], path: Path) -> None:
    """Adds the tokens. UserError where one would get another id than its file says."""
    from tokenizers import AddedToken as LibraryToken

    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(
        [
            LibraryToken(
                token.content,
                special=token.special,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                single_word=token.single_word,
            )
            for token in tokens
        ]
    )
    if tokenizer.get_vocab_size() > MAX_TOKEN_ID:
        raise UserError(f"{path} and the files beside it have more than {MAX_TOKEN_ID} tokens")
    for token in tokens:
        token_id = tokenizer.token_to_id(token.content)
        if token.token_id not in (NOWHERE, token_id):
            raise UserError(
                f"{path} has {size} tokens, and the added token {token.content[:40]!r} would be "
                f"{token_id}; {CONFIG_FILE} or added_tokens.json says that its id is "
                f"{token.token_id} (allowed: ids that follow, without a gap); {HINT}"
            )
