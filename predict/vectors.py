"""LLM's verbs of vectors and scores: embed, score, rerank; and what a prompt is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, cast

from predict.config.engine import EngineConfig
from predict.engine.addons import Addons
from predict.engine.answers import AnswerLoop
from predict.engine.embedding import Embedder, Text, VectorJob
from predict.engine.retrieval import (
    Ranked,
    Retrieval,
    check_dimensions,
    check_top,
    ranked,
    shortened,
)
from predict.errors import TokenizerError, UserError, quoted
from predict.loading.platform import Platform
from predict.loading.pooling import read_pooling
from predict.nn.pooling import Pooler, Vectors
from predict.nn.spec import DecoderSpec
from predict.system.bounds import is_integer, prompt_token_ids
from predict.text.tokenizer import Tokenizer

T = TypeVar("T")
Prompt = str | Sequence[int]
# Of generate: {"prompt": a text or token ids, "multi_modal_data": {"image": [...]}} besides.
SeenPrompt = Prompt | Mapping[str, Any]
# In the place of a prompt that its tokenizer failed on: its answer says so, the others are given.
PromptOrError = SeenPrompt | TokenizerError


def as_several(prompts: Prompt | Sequence[PromptOrError]) -> Sequence[PromptOrError]:
    """Prompts as a list; a text, or whole numbers, are one prompt. Raises UserError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not hasattr(prompts, "__len__"):
        raise UserError(
            f"prompts is {quoted(prompts)} (allowed: a text, token ids, or a list of these; for "
            "conversations use chat)"
        )
    if len(prompts) and all(is_integer(each) for each in prompts):
        return [cast("Sequence[int]", prompts)]
    return cast("Sequence[PromptOrError]", prompts)


_OPTIONS = ("instruction", "adapter")  # of scores


def _texts(name: str, given: Any) -> list[str]:
    """Texts as a list. Raises UserError."""
    several = [given] if isinstance(given, str) else given
    if isinstance(several, (bytes, bytearray, Mapping)) or not isinstance(several, Iterable):
        raise UserError(f"{name} is {quoted(given)} (allowed: a text, or a list of texts)")
    several = list(several)
    for index, each in enumerate(several):
        if not isinstance(each, str):
            raise UserError(f"{name}[{index}] is {quoted(each)} (allowed: a text)")
    return several


@dataclass(frozen=True)
class Asked(Generic[T]):
    """Texts to run, and what is made of their results [texts, size]."""

    texts: Sequence[Text]
    pooler: Pooler
    adapter: str | None
    finish: Callable[[Vectors], T]


class VectorVerbs:
    """The verbs, over a loaded model."""

    config: EngineConfig
    platform: Platform
    spec: DecoderSpec
    tokenizer: Tokenizer | None
    addons: Addons
    answers: AnswerLoop
    embedder: Embedder

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None = None,
        normalize: bool | None = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        adapter: str | None = None,
    ) -> Vectors:
        """Vectors [prompts, size] of texts or token ids: hidden states behind the last norm.

        pooling: "last", the last token's, "cls", the first one's, "mean", or another of POOLINGS;
        None: as the model's files say, with their dense layers, and "last" where they say nothing
        and tokens see those before them alone. normalize: to length 1; None: as the files say, and
        true where they say nothing. dimensions: of the vector that many values, of length 1 again.
        prompt_name: of the files' prompts, put in front of texts. Runs to its end, without
        sampling. Raises UserError for a prompt that cannot run, for a model with a prefix
        (prefix_path), and for an exported program without hidden states (export it with --task
        embed).
        """
        asked = self.asked_vectors(
            *(prompts, pooling, normalize),
            dimensions=dimensions,
            prompt_name=prompt_name,
            adapter=adapter,
        )
        return self._made(asked)

    def asked_vectors(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None = None,
        normalize: bool | None = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        adapter: str | None = None,
    ) -> Asked[Vectors]:
        """What `embed` runs. Raises UserError."""
        retrieval = self.retrieval
        if pooling is None and retrieval.says_nothing and not self.spec.sees_both_ways:
            pooling = "last"
        pooler = retrieval.pooler(pooling, normalize)
        prompt = retrieval.rules.prompt_named(prompt_name)
        check_dimensions(dimensions, retrieval.size_of(pooler))
        several = cast("Sequence[Prompt]", as_several(prompts))
        texts = [
            retrieval.writer.text(each, prompt)
            if isinstance(each, str)
            else Text(prompt_token_ids(each, self.spec.vocab_size - 1))
            for each in several
        ]
        finish = partial(shortened, dimensions=dimensions, normalize=pooler.normalize)
        return Asked(texts, pooler, adapter, finish)

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> Vectors:
        """Scores [pairs] of queries and documents, one of each, or one query for all documents.

        Higher is closer: by the model's classification head, by its share of yes (instruction: the
        question's first line), or by the cosine, or product, of two vectors. options: instruction,
        adapter. Raises UserError where the model has none of these.
        """
        return self._made(self.asked_scores(queries, documents, **options))

    def asked_scores(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> Asked[Vectors]:
        """What `score` runs. Raises UserError."""
        for name, value in options.items():
            if name not in _OPTIONS:
                raise UserError(f"{quoted(name)} is no option (allowed: {', '.join(_OPTIONS)})")
            if not isinstance(value, (str, type(None))):
                raise UserError(f"{name} is {quoted(value)} (allowed: a text)")
        several = _texts("documents", documents)
        asked = _texts("queries", queries)
        asked = asked * len(several) if isinstance(queries, str) else asked
        if len(asked) != len(several):
            raise UserError(
                f"{len(asked)} queries for {len(several)} documents (allowed: one for all, or one "
                "for each)"
            )
        adapter, retrieval = options.pop("adapter", None), self.retrieval
        pooler, writer = retrieval.score_pooler(), retrieval.writer
        retrieval.rules.check_instruction(options.get("instruction"))
        pairs = retrieval.rules.pairs([*zip(asked, several, strict=True)])
        texts = [writer.part(part, **options) for part in pairs.parts]
        return Asked(texts, pooler, adapter, pairs.scores)

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any
    ) -> list[Ranked]:
        """The documents' places and scores, the best first, at most top_n; see `score`."""
        return self._made(self.asked_order(query, documents, top_n, **options))

    def asked_order(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any
    ) -> Asked[list[Ranked]]:
        """What `rerank` runs. Raises UserError."""
        if not isinstance(query, str):
            raise UserError(f"query is {quoted(query)} (allowed: a text)")
        check_top(top_n)
        asked = self.asked_scores(query, documents, **options)
        return Asked(
            *(asked.texts, asked.pooler, asked.adapter),
            lambda found: ranked(asked.finish(found), top_n),
        )

    def _made(self, asked: Asked[T]) -> T:
        return asked.finish(self.run_texts(asked.texts, asked.pooler, asked.adapter))

    @cached_property
    def retrieval(self) -> Retrieval:
        """How the model makes vectors and scores. Raises UserError for wrong files."""
        model = self.config.model
        files = read_pooling(model.model_name_or_path, self.spec, model.pooling)
        return Retrieval(files, self.spec, self.tokenizer, self.config.max_length)

    def add_texts(self, texts: Sequence[Text], pooler: Pooler, adapter: str | None) -> VectorJob:
        """Queues texts for `embedder`, whose rounds run between steps. Raises UserError."""
        if self.answers.refusal is not None:
            raise UserError(self.answers.refusal)
        found, prefix = self.addons.find(adapter)
        if prefix.num_tokens:
            raise UserError("embed takes no tuned prefix; load the model without prefix_path")
        return self.embedder.add(texts, pooler, found)

    def run_texts(self, texts: Sequence[Text], pooler: Pooler, adapter: str | None) -> Vectors:
        """The texts' results, [texts, size]. Raises UserError, EngineError."""
        self.platform.make_current()
        job = self.add_texts(texts, pooler, adapter)
        try:
            while not job.is_finished:
                self.embedder.step(waits=False)
        finally:
            self.embedder.abort(job)
        if job.vectors is None:
            raise job.error or AssertionError
        return job.vectors
