"""Texts to vectors, and pairs of texts to scores: what a model's files say, in front of a queue.

A score is made in one of three ways: by a classification head of one label; by the share of yes
among the answers yes and no to the model's own question (Qwen3-Reranker); or as the cosine, or the
product, of two vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.embedding import Text
from predict.errors import UserError, quoted
from predict.loading.pooling import PoolingFiles
from predict.nn.pooling import Pooler, Vectors, check_pooling, normalized
from predict.nn.spec import DecoderSpec
from predict.system.bounds import is_integer
from predict.text.backends.base import check_room
from predict.text.tokenizer import Tokenizer

# What a reranker of the yes/no kind was trained to read (Qwen3-Reranker's page).
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TURNS = ("<|im_start|>", "<|im_end|>")
QUERY, DOCUMENT = ("query",), ("document", "passage")  # names of prompts, the first known one


@dataclass(frozen=True)
class Ranked:
    """A document's place in the list that was given, and its score."""

    index: int
    score: float


class Part(NamedTuple):
    """What one text says of a pair: both sides of it, or one where vectors are compared."""

    query: str | None
    document: str | None


@dataclass(frozen=True)
class Pairs:
    """The different parts of pairs, and the places [pairs, 1 or 2] of each pair's own in them."""

    parts: list[Part]
    places: npt.NDArray[np.intp]

    def scores(self, found: Vectors) -> Vectors:
        """Scores [pairs] of the parts' results [parts, size]."""
        own = found[self.places]
        return own[:, 0, 0] if own.shape[1] == 1 else np.einsum("ph,ph->p", own[:, 0], own[:, 1])


@dataclass(frozen=True)
class Rules:
    """How texts of one model are written, in plain values, which a server's front gets.

    scores_by: head, answers or vectors (see the module), or None. no_vectors, no_scores: why there
    are none; "" where there are. max_length: tokens of a text, longest: those that longer texts are
    cut to, where the files say so.
    """

    max_length: int
    no_vectors: str
    no_scores: str
    scores_by: str | None
    prompts: Mapping[str, str]
    default_prompt: str | None
    counts_prompt: bool
    longest: int | None
    normalize: bool  # vectors have length 1
    size: int  # values of a vector

    def check_vectors(self) -> None:
        """Raises UserError where the model makes no vectors."""
        if self.no_vectors:
            raise UserError(self.no_vectors)

    def check_scores(self) -> None:
        """Raises UserError where the model makes no scores."""
        if self.no_scores:
            raise UserError(self.no_scores)

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> Pairs:
        """What runs for the scores of pairs, each once. Raises UserError where there are none."""
        self.check_scores()
        if not pairs:
            raise UserError("documents is empty (allowed: one document and more)")
        places: dict[Part, int] = {}
        own = [
            [places.setdefault(part, len(places)) for part in self._parts(*pair)] for pair in pairs
        ]
        return Pairs([*places], np.array(own, np.intp))

    def _parts(self, query: str, document: str) -> list[Part]:
        if self.scores_by == "vectors":
            return [Part(query, None), Part(None, document)]
        return [Part(query, document)]

    def check_instruction(self, instruction: str | None) -> None:
        """Raises UserError for an instruction where no question takes one."""
        if instruction is not None and self.scores_by != "answers":
            raise UserError("instruction is for rerankers of the yes/no kind; leave it out")

    def prompt_named(self, name: str | None) -> str:
        """The text in front of a text. Raises UserError for an unknown name."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise UserError(f"prompt_name is {quoted(name)} (known: {known}); leave it out")
        return "" if name is None else self.prompts[name]


@dataclass(frozen=True)
class Writer:
    """Makes token ids of texts and of pairs. May be called by several threads."""

    rules: Rules
    tokenizer: Tokenizer

    def text(self, text: str, prompt: str = "", most: int | None = None) -> Text:
        """The tokens of a text behind a prompt; at most `most`, from its beginning on."""
        ids, _ = self.tokenizer.encode_pair(prompt + text, None, self.cut(most))
        skipped = 0
        if prompt and not self.rules.counts_prompt:
            whole, bare = self.tokenizer.encode(prompt), self.tokenizer.encode(prompt, False)
            skipped = len(whole) - len(self._behind(whole, bare))
        return Text(ids, num_skipped=min(skipped, max(len(ids) - 1, 0)))

    @staticmethod
    def _behind(whole: list[int], part: list[int]) -> list[int]:
        at = next((i for i in range(len(whole)) if whole[i : i + len(part)] == part), 0)
        return whole[at + len(part) :]

    def cut(self, most: int | None) -> int | None:
        """Tokens to cut a text at, -1 for the model's most; None: a longer one is refused."""
        rules = self.rules
        lengths = [rules.max_length if each == -1 else each for each in (most, rules.longest)]
        given = [each for each in lengths if each is not None]
        return min([*given, rules.max_length]) if given else None

    def part(self, part: Part, most: int | None = None, instruction: str | None = None) -> Text:
        """What runs for a score. Of both sides of a pair only the document is cut."""
        (query, document), tokenizer = part, self.tokenizer
        if query is None or document is None:
            side, names = (document, DOCUMENT) if query is None else (query, QUERY)
            return self.text(side or "", self._prompt_of(names), most)
        if self.rules.scores_by == "head":
            return Text(*tokenizer.encode_pair(query, document, self.cut(most)))
        before, behind = (tokenizer.encode(each, False) for each in (_BEFORE, _BEHIND))
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
        body = tokenizer.encode_literal(asked + document)
        cut = self.cut(most)
        if cut is not None and (room := cut - len(before) - len(behind)) < len(body):
            check_room(room - len(tokenizer.encode_literal(asked)), cut)
            body = body[:room]
        return Text([*before, *body, *behind])

    def _prompt_of(self, names: Sequence[str]) -> str:
        found = next((name for name in names if name in self.rules.prompts), None)
        return self.rules.prompt_named(found)


@dataclass(frozen=True)
class Retrieval:
    """How one model makes vectors and scores."""

    files: PoolingFiles
    spec: DecoderSpec
    tokenizer: Tokenizer | None
    max_length: int

    @property
    def says_nothing(self) -> bool:
        """Whether neither files nor flags name a pooling."""
        return self.files.embed is None

    def pooler(self, pooling: str | None = None, normalize: bool | None = None) -> Pooler:
        """The way to vectors. pooling, normalize: in place of what the files say.

        Raises UserError where neither files nor flags nor the caller name a pooling.
        """
        if pooling is not None:
            check_pooling(pooling)
            return Pooler((pooling,), normalize=True if normalize is None else normalize)
        found = self.files.embed
        if found is None:
            raise UserError(self._no_vectors())
        return found if normalize is None else replace(found, normalize=normalize)

    def size_of(self, pooler: Pooler) -> int:
        """Values of a vector."""
        if pooler.layers:
            return len(pooler.layers[-1].weight)
        return self.spec.hidden_size * len(pooler.poolings)

    def score_pooler(self) -> Pooler:
        """The way to scores. Raises UserError where there is none."""
        self.rules.check_scores()
        if self.rules.scores_by == "answers":
            return Pooler((), answers=self._answers())
        if self.files.score is not None:
            return self.files.score
        return self.pooler(normalize=True if self.files.similarity == "cosine" else None)

    @cached_property
    def writer(self) -> Writer:
        """Makes token ids of texts. Raises UserError without a tokenizer."""
        if self.tokenizer is None:
            raise UserError("this model was loaded without a tokenizer; pass token ids")
        return Writer(self.rules, self.tokenizer)

    @cached_property
    def rules(self) -> Rules:
        """How texts are written."""
        no_vectors = self._no_vectors() if self.says_nothing else ""
        by, no_scores = self._scores_by()
        files = self.files
        return Rules(
            *(self.max_length, no_vectors, no_scores, by, dict(files.prompts)),
            *(files.default_prompt, files.counts_prompt, files.max_length),
            files.embed is None or files.embed.normalize,
            self.spec.hidden_size if files.embed is None else self.size_of(files.embed),
        )

    def _no_vectors(self) -> str:
        return (
            f"pooling is not known: the files of this {self.spec.model_type} have no modules.json "
            "that names one; start with --pooling last, mean or cls, as the model was trained"
        )

    def _scores_by(self) -> tuple[str | None, str]:
        if self.files.num_labels > 1:
            return None, (
                f"the model's classification head has {self.files.num_labels} labels (allowed for "
                "scores: 1); use a reranker, or an embedding model"
            )
        if self.files.score is not None:
            return "head", ""
        if self.files.answers:
            if self.spec.makes_text and self._answers() is not None:
                return "answers", ""
            return None, (
                f"this {self.spec.model_type} is said to answer yes or no, and knows no tokens "
                "yes, no, <|im_start|> and <|im_end|>; copy the reranker's tokenizer again"
            )
        if not self.says_nothing:
            if self.files.similarity in ("cosine", "dot"):
                return "vectors", ""
            return None, (
                "config_sentence_transformers.json: similarity_fn_name is "
                f"{self.files.similarity} (allowed for scores: cosine, dot); compare the vectors "
                "yourself"
            )
        if self.spec.makes_text and self._answers() is not None:
            return "answers", ""
        return None, (
            f"this {self.spec.model_type} has no classification head, names no pooling, and knows "
            "no tokens yes, no, <|im_start|> and <|im_end|> to answer with (one of these is "
            "needed); use a reranker, or give --pooling of an embedding model"
        )

    def _answers(self) -> tuple[int, int] | None:
        if self.tokenizer is None:
            return None
        no, yes, *turns = map(self.tokenizer.token_to_id, ("no", "yes", *_TURNS))
        return None if no is None or yes is None or None in turns else (no, yes)


def no_text(model_type: str) -> str:
    """What a request for an answer hears of a model that makes none."""
    return (
        f"this {model_type} makes vectors and scores, and no text; use embed, score or rerank "
        "(/v1/embeddings, /v1/score, /v1/rerank)"
    )


def check_dimensions(dimensions: Any, size: int) -> None:
    """Raises UserError for dimensions that vectors of `size` values do not have."""
    if dimensions is not None and not (is_integer(dimensions) and 0 < dimensions <= size):
        raise UserError(
            f"dimensions is {quoted(dimensions)} (allowed: 1 to {size}, the vectors' size)"
        )


def shortened(vectors: Vectors, dimensions: int | None, normalize: bool) -> Vectors:
    """The first so many values of vectors, of length 1 again where they had it."""
    if dimensions is None:
        return vectors
    return normalized(vectors[:, :dimensions]) if normalize else vectors[:, :dimensions]


def check_top(top_n: Any) -> None:
    """Raises UserError for a number of documents that no answer has."""
    if top_n is not None and not (is_integer(top_n) and top_n > 0):
        raise UserError(f"top_n is {quoted(top_n)} (allowed: 1 and more)")


def ranked(scores: Sequence[float] | Vectors, top_n: int | None) -> list[Ranked]:
    """The best first, the earlier of two alike; top_n: so many."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [Ranked(index, float(scores[index])) for index in order[:top_n]]
