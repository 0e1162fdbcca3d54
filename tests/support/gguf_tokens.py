"""Vocabularies of tokenizer files, written into GGUF as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def add_byte_level(writer: gguf.GGUFWriter, folder: Path, way: str) -> None:
    held = json.loads((folder / "tokenizer.json").read_text())
    tokens = {i: token for token, i in held["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for token in held["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [m if isinstance(m, str) else " ".join(m) for m in held["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(way)
    add_tokens(writer, tokens, kinds)
    writer.add_token_merges(merges)
    add_config(writer, folder, {token: i for i, token in tokens.items()})


def add_sentencepiece(writer: gguf.GGUFWriter, folder: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(model.vocab_size())
    tokens = {i: model.id_to_piece(i) for i in ids}
    scores = {i: model.get_score(i) for i in ids}
    kinds = {i: kind_of(model, i) for i in ids}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        tokens[int(token_id)] = token["content"]
        kinds[int(token_id)] = CONTROL
        scores[int(token_id)] = -1000.0
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    add_tokens(writer, tokens, kinds)
    writer.add_token_scores([scores[i] for i in sorted(tokens)])
    add_config(writer, folder, {token: i for i, token in tokens.items()})


def kind_of(model: Any, i: int) -> int:
    checks = {
        UNKNOWN: model.is_unknown,
        CONTROL: model.is_control,
        UNUSED: model.is_unused,
        BYTE: model.is_byte,
    }
    return next((kind for kind, check in checks.items() if check(i)), NORMAL)


def add_tokens(writer: gguf.GGUFWriter, tokens: dict[int, str], kinds: dict[int, int]) -> None:
    assert sorted(tokens) == list(range(len(tokens)))
    writer.add_token_list([tokens[i] for i in sorted(tokens)])
    writer.add_token_types([kinds[i] for i in sorted(tokens)])


def add_config(writer: gguf.GGUFWriter, folder: Path, ids: dict[str, int]) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for role, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
    ):
        if config.get(role):
            add(ids[config[role]])
    writer.add_add_bos_token(bool(config.get("add_bos_token", False)))
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])
