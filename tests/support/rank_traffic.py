"""Random requests on two CPU ranks and on one process: the text must be the same.

    python -m tests.support.rank_traffic --count 1000 --seed 0

Where greedy text differs, the two best tokens must lie within NEAR of each other there.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from predict import LLM, EngineConfig, Guide, SamplingParams
from predict.engine.answers import News
from predict.engine.samples import Samples
from tests.support import tiny
from tests.support.adapters import write_adapter
from tests.support.drafts import draft_always
from tests.support.prefixes import TINY, write_prefix

NEAR = 1e-4  # of two logits, natural logarithms
BATCH, VOCAB = 4, 512
# How drafts are made; with them there are no beams.
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "lookups": {"speculate_method": "inference_with_reference", "speculate_max_ngram_size": 2},
    "model": {"speculate_method": "draft_model", "draft_model_quant_type": "weight_only_int8"},
}
GUIDES = (
    Guide(regex="[a-z]{2,6} [0-9]+"),
    Guide(choice=("yes", "no, never")),
    Guide(json_object=True),
)


class Asked(NamedTuple):
    """A request, the step that it comes before, and the step before which it is aborted."""

    prompt: list[int]
    params: SamplingParams
    step: int
    aborted: int | None


def write_folder(folder: Path) -> None:
    """A model with a tokenizer, adapters and a prefix."""
    tiny.write_with_tokenizer(folder / "model")
    for name, rank in (("all", 4), ("more", 13)):
        write_adapter(folder / name, {**tiny.CONFIG, "vocab_size": VOCAB}, rank, seed=rank)
    write_prefix(folder / "prefix", TINY, 21)


def made(folder: Path, method: str, degree: int) -> LLM:
    """An engine with few blocks, which answers outgrow, so that requests are preempted."""
    drafts = dict(METHODS[method])
    if method == "model":
        drafts["draft_model_name_or_path"] = str(folder / "model")
    config = EngineConfig(
        model_name_or_path=str(folder / "model"),
        dtype="float32",
        device="cpu",
        max_length=96,
        block_size=16,
        batch_size=BATCH,
        num_cache_blocks=9,
        attention="append",
        lora_modules=tuple(f"{name}={folder / name}" for name in ("all", "more")),
        max_lora_rank=16,
        prefix_path=(f"tuned={folder / 'prefix'}",),
        tensor_parallel_degree=degree,
        rank_timeout=60.0,
        **drafts,
    )
    llm = LLM(config)
    draft_always(llm)
    return llm


def random_requests(rng: random.Random, count: int, beams: bool) -> list[Asked]:
    """Requests of all kinds; many prompts begin alike."""
    heads = [[rng.randrange(3, VOCAB) for _ in range(34)] for _ in range(3)]
    found, step = list[Asked](), 0
    for _ in range(count):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.5:
            prompt = rng.choice(heads)[: rng.choice((16, 20, 34))] + prompt
        if rng.random() < 0.3:
            prompt += prompt[-8:] * 2  # what lookups find
        fields: dict[str, Any] = {"max_new_tokens": rng.randint(20, 60), "temperature": 0.0}
        kind = rng.random()
        if beams and kind < 0.12:
            prompt = prompt[:20]  # each beam has blocks of its own
            fields |= {"num_beams": rng.randint(2, BATCH), "max_new_tokens": rng.randint(1, 8)}
        elif kind < 0.5:
            fields |= {"temperature": rng.choice((0.7, 1.0)), "seed": rng.randrange(1 << 30)}
            fields |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"n": 2}))
        if not fields.get("num_beams"):
            fields |= rng.choice(
                (
                    *({}, {}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}),
                    *({"frequency_penalty": 0.4, "min_length": 3}, {"logit_bias": {7: 2.0}}),
                    *({"bad_words": [[9], [11, 12]]}, {"logprobs": 2}, {"prompt_logprobs": 1}),
                )
            )
            if rng.random() < 0.12:
                fields["guide"] = rng.choice(GUIDES)
            if rng.random() < 0.4:
                fields["adapter"] = rng.choice(("all", "more", "tuned"))
        step += rng.choice((0, 0, 1, 3))
        aborted = step + rng.randint(1, 12) if rng.random() < 0.1 else None
        found.append(Asked(prompt, SamplingParams(**fields), step, aborted))
    return found


def answers(llm: LLM, requests: Sequence[Asked]) -> list[list[tuple[int, ...]] | None]:
    """Token ids of all answers of each request; None of one that was aborted before its end."""
    found: list[list[tuple[int, ...]] | None] = [None] * len(requests)
    news: list[News] = []
    groups: dict[int, Samples] = {}
    left, step, num_used = set(range(len(requests))), 0, llm.stats().num_used_blocks
    while left:
        for index in sorted(left):
            asked = requests[index]
            if index not in groups and asked.step <= step:
                groups[index] = llm.samples(asked.prompt, asked.params, index)
                llm._add([groups[index]], news.append)
            elif asked.aborted is not None and asked.aborted <= step:
                llm._abort([groups[index]])
                left.discard(index)
        if left.intersection(groups):
            llm.step()
        for each in news:
            index = each.samples.prompt_index
            if each.output is not None and index in left:
                assert each.output.outputs[0].finish_reason != "error", each.output
                found[index] = [tuple(one.token_ids) for one in each.output.outputs]
                left.discard(index)
        news.clear()
        step += 1
    assert llm.stats().num_used_blocks == num_used
    return found


def is_close_call(one: LLM, asked: Asked, ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether the two best tokens lie within NEAR where greedy texts part."""
    if asked.params.temperature or asked.params.num_beams > 1:
        return False
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    params = replace(asked.params, max_new_tokens=at + 1, logprobs=2, n=1)
    (output,) = one.generate([asked.prompt], params)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    best = sorted((each.logprob for each in logprobs[at].values()), reverse=True)
    return best[0] - best[1] < NEAR


def compare(folder: Path, method: str, count: int, seed: int) -> Counter[str]:
    """What happened how often. Raises AssertionError where texts differ and nothing was close."""
    requests = random_requests(random.Random(seed), count, beams=method == "none")
    one, two = made(folder, method, 1), made(folder, method, 2)
    happened: Counter[str] = Counter()
    pairs = zip(requests, answers(one, requests), answers(two, requests), strict=True)
    for index, (asked, theirs, ours) in enumerate(pairs):
        if theirs is None or ours is None:
            happened["aborted"] += 1
            continue
        happened["compared"] += 1
        for a, b in zip(theirs, ours, strict=True):
            if a != b:
                assert is_close_call(one, asked, a, b), (method, seed, index, asked, a, b)
                happened["close"] += 1
    for llm, name in ((one, "one"), (two, "two")):
        stats = llm.stats()
        happened[f"preemptions, {name}"] = stats.num_preemptions
        happened[f"drafts, {name}"] = stats.num_draft_tokens
        happened[f"accepted, {name}"] = stats.num_accepted_draft_tokens
    return happened


def main() -> None:
    """By hand."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        for number, method in enumerate(METHODS):
            count = given.count // len(METHODS) + (number < given.count % len(METHODS))
            print(method, dict(compare(Path(folder), method, count, given.seed + number)))


if __name__ == "__main__":
    main()
