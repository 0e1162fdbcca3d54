r"""Writes a checkpoint's tokenizer as the file that `Regatta::text` reads, the library in C++.

    python export/export_text.py DIR FILE

The library knows a closed list of steps (docs/runtime-format.md). A tokenizer that needs another is
refused by the step's name. Leaves with 0, or with 2 for wrong arguments, files or steps.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from export import text_layout as layout
from export.text_layout import Step, TextFile, refuse
from export.text_pieces import pieces_file
from predict.cli.command import command
from predict.errors import UserError
from predict.system.console import show
from predict.system.files import find_model_dir, parse_json
from predict.system.outputs import check_output, write_whole
from predict.system.signals import Signals
from predict.text.backends.base import Ends
from predict.text.backends.fast import FastBackend, byte_letters
from predict.text.backends.sentencepiece_model import SentencePieceBackend
from predict.text.tokenizer import Tokenizer

# How GPT-2 cuts text: what ByteLevel does by itself.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass
class Decoding:
    """How tokens become text. space: what is written for a space, "" for none of that."""

    byte_level: bool = False
    byte_fallback: bool = False
    replaced: list[tuple[str, str]] = field(default_factory=list)
    strip: int = 0
    bare_start: bool = False


def text_file(tokenizer: Tokenizer, path: Path) -> bytes:
    """The file's bytes. path: what errors name. Raises UserError for a step that is not known."""
    backend = tokenizer.backend
    if isinstance(backend, SentencePieceBackend):
        file = pieces_file(backend, path)
    else:
        assert isinstance(backend, FastBackend)  # there are no others
        text, ends = backend.described()
        file = _Export(text, path, ends).file()
    file.check(path)
    data = file.data()
    if len(data) > layout.MAX_BYTES:
        refuse(path, f"a file of {len(data)} bytes, above {layout.MAX_BYTES},")
    return data


class _Export:
    """A tokenizers.Tokenizer, as its library writes it, on its way into a file."""

    def __init__(self, text: str, path: Path, ends: Ends | None) -> None:
        import tokenizers

        held = parse_json(text, f"{path}: its tokenizer")
        self.tokens = tokenizers.Tokenizer.from_str(text)
        self.path, self.model, self.ends = path, held["model"], ends
        self._check_model()
        self.added: Sequence[Mapping[str, Any]] = held["added_tokens"]
        self.byte_level = False
        self.steps = [*self._normalizers(held["normalizer"])]
        self.steps += [s for part in _flat(held["pre_tokenizer"]) for s in self._cut(part)]
        self.decoding = self._decoding(held["decoder"])
        if self.decoding.byte_level != self.byte_level:
            self._refuse("decoder", "that is ByteLevel, or is not, against the pre_tokenizer")
        self.post_processor = held["post_processor"]
        self._check_vocabulary()

    def file(self) -> TextFile:
        unknown = self.model.get("unk_token")
        flags = layout.IGNORE_MERGES * bool(self.model.get("ignore_merges"))
        flags |= layout.BYTE_FALLBACK * bool(self.model.get("byte_fallback"))
        flags |= layout.FUSE_UNKNOWN * bool(self.model.get("fuse_unk"))
        return TextFile(
            flags | layout.BYTE_LEVEL * self.byte_level,
            None if unknown is None else self._id(unknown, "unk_token"),
            self._template() if self.ends is None else (self.ends.first, self.ends.last),
            self.steps,
            self._added(),
            self._texts(),
            self._words(),
            self._merges(),
            self.decoding.strip,
            self.decoding.bare_start,
        )

    def _refuse(self, part: str, what: str) -> NoReturn:
        refuse(self.path, f"{part} {what}")

    def _id(self, token: str, where: str) -> int:
        for added in self.added:
            if added["content"] == token:
                return int(added["id"])
        if token not in self.model["vocab"]:
            raise UserError(f"{self.path}: {where} names {token!r}, which is no token of the model")
        return int(self.model["vocab"][token])

    def _normalizers(self, part: Any) -> Iterator[Step]:
        for step in _flat(part):
            kind = step["type"]
            if kind == "NFC":
                yield Step(layout.NFC)
            elif kind == "Prepend" and step["prepend"]:
                yield Step(layout.PREPEND, a=step["prepend"])
            elif kind == "Replace" and step["pattern"].get("String"):
                yield Step(layout.REPLACE, a=step["pattern"]["String"], b=step["content"])
            else:
                self._refuse("normalizer", _named(step))

    def _cut(self, step: Mapping[str, Any]) -> Iterator[Step]:
        kind = step["type"]
        if self.byte_level:
            self._refuse("pre_tokenizer", f"{kind} behind ByteLevel")
        if kind == "Split" and any(step["pattern"].values()):
            regex = step["pattern"].get("Regex")
            code, text = (
                (layout.SPLIT_REGEX, regex)
                if regex
                else (layout.SPLIT_TEXT, step["pattern"]["String"])
            )
            yield Step(code, layout.BEHAVIORS.index(step["behavior"]), step["invert"], text)
        elif kind == "Digits":
            way = layout.BEHAVIORS.index("Isolated" if step["individual_digits"] else "Contiguous")
            yield Step(layout.SPLIT_REGEX, way, a=r"\p{N}")
        elif kind == "Metaspace":
            scheme = layout.SCHEMES.index(step["prepend_scheme"])
            yield Step(layout.METASPACE, scheme, step["split"], step["replacement"])
        elif kind == "ByteLevel":
            self.byte_level = True
            if step["add_prefix_space"]:
                yield Step(layout.PREFIX_SPACE, a=" ")
            if step["use_regex"]:
                yield Step(layout.SPLIT_REGEX, a=GPT2_WORDS)
        else:
            self._refuse("pre_tokenizer", _named(step))

    def _decoding(self, part: Any) -> Decoding:
        steps = _flat(part)
        names = [step["type"] for step in steps]
        found = Decoding()
        if names == ["ByteLevel"]:
            found.byte_level = True
        elif names == ["Metaspace"]:
            found.replaced = [(steps[0]["replacement"], " ")]
            found.bare_start = steps[0]["prepend_scheme"] != "never"
        else:
            order = [n for n in ("ByteFallback", "Fuse", "Strip") if n in names]
            num_replaced = len(names) - len(order)
            texts = [s["pattern"].get("String") for s in steps[:num_replaced] if "pattern" in s]
            if names != ["Replace"] * num_replaced + order or not all(texts) or "Fuse" not in names:
                self._refuse("decoder", " + ".join(names) or "none")
            found.replaced = [
                (text, step["content"])
                for text, step in zip(texts, steps[:num_replaced], strict=True)
            ]
            found.byte_fallback = "ByteFallback" in names
            if "Strip" in names:
                if steps[-1]["content"] != " " or steps[-1]["stop"]:
                    self._refuse("decoder", _named(steps[-1]))
                found.strip = steps[-1]["start"]
        return found

    def _check_model(self) -> None:
        if self.model["type"] != "BPE":
            self._refuse("model", self.model["type"])
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if self.model.get(name):
                self._refuse("model", f"BPE with {name} {self.model[name]!r}")
        if len({*self.model["vocab"].values()}) != len(self.model["vocab"]):
            self._refuse("model", "BPE with two tokens of one id")

    def _check_vocabulary(self) -> None:
        letters = {*byte_letters().values()}
        if self.byte_level and self.model.get("byte_fallback") and letters - {*self.model["vocab"]}:
            self._refuse("model", "BPE with byte_fallback behind ByteLevel")
        spaced = any(" " in token for token in (*self.model["vocab"], *self._contents()))
        if self.decoding.bare_start and spaced:
            self._refuse("decoder", "Metaspace with a token that holds a space")

    def _contents(self) -> list[str]:
        return [token["content"] for token in self.added]

    def _template(self) -> tuple[Sequence[int], Sequence[int]]:
        """The ids around a text."""
        found: list[tuple[list[int], list[int]]] = []
        for step in _flat(self.post_processor):
            if step["type"] == "ByteLevel":  # offsets alone
                continue
            if step["type"] != "TemplateProcessing":
                self._refuse("post_processor", step["type"])
            ends: tuple[list[int], list[int]] = [], []
            texts = 0
            for item in step["single"]:
                texts += "Sequence" in item
                if "SpecialToken" in item:
                    ends[texts > 0].extend(
                        step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
                    )
            if texts != 1:
                self._refuse("post_processor", f"TemplateProcessing with {texts} texts")
            found.append(ends)
        if len(found) > 1:
            self._refuse("post_processor", "two of TemplateProcessing")
        return found[0] if found else ([], [])

    def _added(self) -> dict[tuple[bool, bytes], tuple[int, int]]:
        normalizer = self.tokens.normalizer
        normalize = str if normalizer is None else normalizer.normalize_str
        rows: dict[tuple[bool, bytes], tuple[int, int]] = {}
        for token in self.added:
            flags = sum(bit for name, bit in layout.SWITCHES.items() if token[name])
            late = bool(token["normalized"])
            content = (normalize(token["content"]) if late else token["content"]).encode()
            if not content or (late, content) in rows:
                self._refuse("added_tokens", f"{token['content']!r}, empty or there twice,")
            rows[late, content] = token["id"], flags
        return rows

    def _texts(self) -> dict[int, tuple[int, bytes]]:
        tokens = {i: token for token, i in self.model["vocab"].items()}
        tokens |= {t["id"]: self.tokens.id_to_token(t["id"]) for t in self.added}
        special = {token["id"] for token in self.added if token["special"]}
        texts = {i: self._text_of(token) for i, token in tokens.items()}
        return texts | {i: (texts[i][0] | layout.SPECIAL, texts[i][1]) for i in special}

    def _text_of(self, token: str) -> tuple[int, bytes]:
        if self.byte_level:
            found = _bytes_of(token)
            return layout.TEXT, token.encode() if found is None else found
        for old, new in self.decoding.replaced:
            token = token.replace(old, new)
        if self.decoding.byte_fallback and (byte := _byte_of(token)) is not None:
            return layout.BYTE, bytes([byte])
        return layout.TEXT, token.encode()

    def _words(self) -> dict[bytes, int]:
        """Tokens that a text is looked up among: all under ignore_merges, else single units."""
        words: dict[bytes, int] = {}
        whole = bool(self.model.get("ignore_merges"))
        for token, i in self.model["vocab"].items():
            is_byte = bool(self.model.get("byte_fallback")) and _byte_of(token) is not None
            if not (whole or len(token) == 1 or is_byte):
                continue
            word = _bytes_of(token) if self.byte_level else token.encode()
            if word is not None:
                words[word] = i
        return words

    def _merges(self) -> dict[tuple[int, int], tuple[int, int]]:
        ids = self.model["vocab"]
        merges = enumerate(self.model["merges"])
        return {(ids[a], ids[b]): (rank, ids[a + b]) for rank, (a, b) in merges}


def _flat(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a part, those of a Sequence one by one."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    lists = ("normalizers", "pretokenizers", "decoders", "processors")
    return [step for name in lists for inner in part.get(name, ()) for step in _flat(inner)]


def _named(step: Mapping[str, Any]) -> str:
    values = {name: value for name, value in step.items() if name != "type"}
    return (
        f"{step['type']} {json.dumps(values, ensure_ascii=False)[:200]}" if values else step["type"]
    )


_LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


def _bytes_of(token: str) -> bytes | None:
    """What a byte-level token's letters stand for; None where one stands for no byte."""
    found = [_LETTER_BYTES.get(letter) for letter in token]
    return None if None in found else bytes(byte for byte in found if byte is not None)


def _byte_of(token: str) -> int | None:
    """20 for <0x14>, and 4 for <0x+4>, as tokenizers has it; None for what is no byte token."""
    found = re.fullmatch("<0x([+0-9A-Fa-f][0-9A-Fa-f])>", token)
    return None if found is None else int(found[1], 16)


def export_text(folder: Path, target: Path) -> None:
    """Writes the tokenizer of a checkpoint folder, or of a GGUF file, to `target`."""
    write_whole(target, text_file(Tokenizer.from_dir(folder, "none"), folder))


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code."""
    if len(words) != 2 or any(word.startswith("-") for word in words):
        raise UserError("two names are needed: python export/export_text.py DIR FILE")
    folder = find_model_dir(words[0], "DIR")
    check_output("FILE", words[1], folders={"DIR": folder})
    export_text(folder, Path(words[1]))
    show(f"The text file is {words[1]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
