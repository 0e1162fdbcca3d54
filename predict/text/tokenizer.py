"""Text to token ids and back, from the tokenizer files of a checkpoint. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.errors import UserError
from predict.gguf.described import described_in, read_model_json
from predict.gguf.files import ENDING, gguf_of
from predict.gguf.opened import open_gguf
from predict.gguf.tokens import has_tokenizer
from predict.system.files import json_type, read_json_object
from predict.text.backends import chatglm, tiktoken_file
from predict.text.backends.added import CONFIG_FILE, MAX_TOKEN_ID, added_by_config, switch
from predict.text.backends.base import Backend, guarded, try_backend
from predict.text.backends.fast import FastBackend
from predict.text.backends.gguf_vocabulary import gguf_backend
from predict.text.backends.merges_file import VOCABULARY, merges_backend
from predict.text.backends.sentencepiece_model import FamilyDialect, SentencePieceBackend

if TYPE_CHECKING:
    from predict.text.chat_template import ChatTemplate

FAST_FILE = "tokenizer.json"
QWEN_FILE = "qwen.tiktoken"
CHATGLM_FILE = "ice_text.model"
SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
# In the order in which they are looked for: the first that is there is read.
FILES = (FAST_FILE, QWEN_FILE, CHATGLM_FILE, *SENTENCEPIECE_FILES, VOCABULARY)
CHATGLM_CLASSES = ("ChatGLMTokenizer", "ChatGLMv2Tokenizer")
REPLACEMENT = "\ufffd"
# Prompt tokens decoded before a continuation: enough for the longest UTF-8 sequence in byte tokens.
CONTEXT_TOKENS = 6
MAX_EOS_IDS = 1024
SPECIAL_ROLES = tuple(f"{r}_token" for r in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))


class Tokenizer:
    """A checkpoint's tokenizer, its special tokens and its chat template."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        extra_eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        closing_token_ids: Sequence[int] = (),
    ) -> None:
        """`special_tokens` maps "bos_token", "eos_token", "pad_token" and so on to their text.

        `closing_token_ids`: what the family's own code puts behind every prompt.
        """
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.vocab_size = backend.vocab_size
        self.bos_token_id = self._special_id("bos_token")
        self.pad_token_id = self._special_id("pad_token")
        eos_token_id = self._special_id("eos_token")
        ids = [] if eos_token_id is None else [eos_token_id]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*ids, *extra_eos_token_ids]))
        self.chat_template = chat_template
        self.closing_token_ids = tuple(closing_token_ids)

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether the folder, or the GGUF file, holds a tokenizer that `from_dir` reads."""
        file = gguf_of(path)
        if file is not None and not described_in(path, FAST_FILE).is_file():
            return has_tokenizer(open_gguf(file))
        return any(described_in(path, name).is_file() for name in FILES)

    @classmethod
    def from_dir(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint folder, or of a GGUF file.

        `chat_template` is the flag's value: None keeps the tokenizer's own, "none" turns it off, a
        file, a folder or the name of a published format replaces it. Raises UserError when a file
        is missing or damaged.
        """
        from predict.text.chat_template import load_chat_template, stop_tokens

        folder = Path(path)
        config = read_model_json(folder, CONFIG_FILE, missing_ok=True)
        special_tokens: Mapping[str, str] = _special_tokens(folder, config)
        for name in ("add_bos_token", "add_eos_token", "legacy"):
            switch(folder, config, name)
        path = _file_of(folder)
        backend, special_tokens, frame = _backend(path, config, special_tokens)
        if not 0 < backend.vocab_size <= MAX_TOKEN_ID:
            raise UserError(
                f"the tokenizer {path} has {backend.vocab_size} token ids (allowed: 1 to "
                f"{MAX_TOKEN_ID}); the id of an added token may be damaged"
            )
        try_backend(path, backend)
        template = load_chat_template(folder, chat_template, special_tokens, frame)
        ends = _config_eos_token_ids(folder)
        if template is not None:
            stops = map(backend.token_to_id, stop_tokens(folder, chat_template, special_tokens))
            ends += [token_id for token_id in stops if token_id is not None]
        closing = backend.encode(frame[1], False) if frame[1] else ()
        return cls(backend, special_tokens, ends, template, closing)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in the text become their ids."""
        return guarded(self.backend.encode, text, add_special_tokens)

    def encode_prompt(self, text: str, templated: bool) -> list[int]:
        """Token ids of a prompt; a rendered chat template already holds its special tokens."""
        return self.encode(text, not templated)

    def encode_pair(
        self, text: str, second: str | None, most: int | None
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of a pair, as an encoder reads it, and the second text's place.

        most: tokens in all; the end of the last text is cut. Raises UserError for a pair where the
        tokenizer's files do not say how one is written.
        """
        return guarded(self.backend.encode_pair, text, second, most)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids` standing alone: a sentencepiece model drops one leading space."""
        return guarded(self.backend.decode, token_ids, skip_special_tokens)

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, special and added ones included."""
        return guarded(self.backend.vocabulary)

    def decode_continuation(
        self,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> str:
        """Text that `token_ids` add after the prompt, the leading space included.

        Decodes the prompt's last tokens with them, since neither sentencepiece's leading space nor
        a character whose bytes began in the prompt is seen from the output alone.
        """
        context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        whole = self.decode(context, skip_special_tokens)
        after = self.decode([*context, *token_ids], skip_special_tokens)
        # U+FFFD at the end are the prompt's own, or bytes of a character that these tokens end.
        for before in (whole, whole.rstrip(REPLACEMENT)):
            if whole and after.startswith(before):
                return after[len(before) :]
        return self.decode(token_ids, skip_special_tokens)

    def leaves_out(self, token_id: int) -> bool:
        """Whether texts leave a token out that has a text of its own, as special ones have."""
        return not self.decode([token_id]) and bool(self.decode([token_id], False))

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a word at the start of a text, within one, and behind a space.

        Without repeats. The variant behind a space counts only where the space changes the first
        token and adds none, as in vLLM: a space of its own could not be told from any other.
        """
        word = word.strip()
        first, inside = self.encode(word, False), guarded(self.backend.encode_inside, word)
        variants = [tuple(first), tuple(inside)]
        spaced = guarded(self.backend.encode_inside, " " + word)
        if len(spaced) == len(inside) and spaced[:1] != inside[:1]:
            variants.append(tuple(spaced))
        return [ids for ids in dict.fromkeys(variants) if ids]

    def token_to_id(self, token: str) -> int | None:
        """The id of one token's text, or None when the vocabulary lacks it."""
        return guarded(self.backend.token_to_id, token)

    def encode_literal(self, text: str) -> list[int]:
        """The token ids of a text within another, in which special tokens are not read."""
        return guarded(self.backend.encode_literal, text)

    def for_guides(self, eos_token_id: int) -> Any:
        """The argument of llguidance.LLTokenizer: the bytes of tokens, and how text is cut."""
        return guarded(self.backend.for_guides, eos_token_id)

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.token_to_id(token)


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> text from tokenizer_config.json, else special_tokens_map.json."""
    found: dict[str, str] = {}
    name = "special_tokens_map.json"
    files = ((name, read_model_json(folder, name, missing_ok=True)), (CONFIG_FILE, config))
    for name, values in files:
        for role, value in values.items():
            if not role.endswith("_token") or value is None:
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
            elif role in SPECIAL_ROLES:
                raise UserError(
                    f"{described_in(folder, name)}: {role} is {json_type(value)} (allowed: a "
                    "text, an object whose content is a text, null)"
                )
    return found


def _config_eos_token_ids(folder: Path) -> list[int]:
    """The ids that generation_config.json and config.json end a text with."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = described_in(folder, name)
        value = read_model_json(folder, name, True, constants=True).get("eos_token_id")
        values = [] if value is None else value if isinstance(value, list) else [value]
        whole = all(isinstance(i, int) and not isinstance(i, bool) for i in values)
        if not whole or len(values) > MAX_EOS_IDS:
            raise UserError(
                f"{path}: eos_token_id is {str(value)[:40]} (allowed: a token id, a list of at "
                f"most {MAX_EOS_IDS}, null)"
            )
        # Some say -1 for none.
        ids += [i for i in values if 0 <= i < MAX_TOKEN_ID]
    return ids


def _file_of(folder: Path) -> Path:
    """The tokenizer's file; UserError naming what was looked for when the folder has none."""
    file = gguf_of(folder)
    if file is not None and not described_in(folder, FAST_FILE).is_file():
        return file
    for name in FILES:
        path = described_in(folder, name)
        if path.is_file():
            return path
    raise UserError(
        f"{folder} has no tokenizer (looked for {', '.join(FILES)}); copy the tokenizer files of "
        "the checkpoint beside its weights"
    )


def _backend(
    path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> tuple[Backend, Mapping[str, str], tuple[str, str]]:
    """The file's backend, the special tokens by role, and a family's texts around every text.

    The special tokens include those that only the family's own code names.
    """
    if path.suffix == ENDING:
        backend, roles = gguf_backend(path, config, special_tokens)
        return backend, roles, ("", "")
    if path.name == FAST_FILE:
        return FastBackend.from_json(path, config, special_tokens), special_tokens, ("", "")
    if path.name == VOCABULARY:
        backend, roles = merges_backend(path, _model_type(path.parent), config)
        return backend, {**special_tokens, **roles}, ("", "")
    family = _rank_family(path)
    if family is not None:
        found = added_by_config(path.parent, config)
        added = {token.content: token.token_id for token in found.values()}
        special_tokens = {**family.roles, **special_tokens}
        backend = tiktoken_file.rank_backend(path, family, added, special_tokens)
        return backend, special_tokens, ("", "")
    dialect = _dialect(path, config)
    model = SentencePieceBackend(path, config, special_tokens, dialect)
    before, behind = dialect.ends or ((), ())
    return model, model.special_tokens, ("".join(before), "".join(behind))


def _rank_family(path: Path) -> tiktoken_file.RankFamily | None:
    """The family of a file of ranks; None for a sentencepiece model.

    Raises UserError where config.json names no family whose way to cut text is known.
    """
    if path.name == QWEN_FILE:
        return tiktoken_file.QWEN
    if not tiktoken_file.holds_ranks(path):
        return None
    model_type = _model_type(path.parent)
    if model_type not in tiktoken_file.FAMILIES:
        raise UserError(
            f"{path} holds ranks as tiktoken's files do, and how text is cut for them is not known "
            f"for model_type {model_type!r} of config.json (known: "
            f"{', '.join(sorted(tiktoken_file.FAMILIES))}); copy a {FAST_FILE} of the model into "
            "the folder"
        )
    return tiktoken_file.FAMILIES[model_type]


def _dialect(path: Path, config: Mapping[str, Any]) -> FamilyDialect:
    """The dialect of the model's family."""
    if path.name == CHATGLM_FILE:
        return chatglm.first(path.parent, config)
    model_type = _model_type(path.parent)
    if model_type in ("chatglm", "chatglm_v2") or config.get("tokenizer_class") in CHATGLM_CLASSES:
        return chatglm.second()
    marks = read_json_object(path.parent / "generation_config.json", True, constants=True)
    ids = {role: marks.get(f"{role}_id") for role in ("user_token", "assistant_token")}
    return FamilyDialect(special_pieces={role: i for role, i in ids.items() if type(i) is int})


def _model_type(folder: Path) -> str:
    """config.json's model_type, "" where it has none."""
    path = folder / "config.json"
    value = read_json_object(path, missing_ok=True, constants=True).get("model_type")
    return value if isinstance(value, str) else ""


def tokenizer_of(
    directory: str | Path,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    chat_template: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Tokenizer | None, Sequence[int]]:
    """The tokenizer of a model, where it has one, and the ids that end an answer.

    vocab_size, eos_token_ids: what its config.json says. tokenizer: one that was given in place of
    the directory's. Raises UserError where it is another model's.
    """
    if tokenizer is None and Tokenizer.exists(directory):
        tokenizer = Tokenizer.from_dir(directory, chat_template)
    if tokenizer is None:
        return None, eos_token_ids
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens and config.json "
            f"says vocab_size {vocab_size}; they do not belong to one model"
        )
    # An id that the model cannot make ends nothing, and has no logit to suppress.
    known = [i for i in tokenizer.eos_token_ids if i < vocab_size]
    return tokenizer, known or eos_token_ids
