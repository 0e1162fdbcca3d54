"""What requests ask for, on several CPU ranks: the tokens of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from predict.device import library
from tests.support import tiny
from tests.support.adapters import write_adapter
from tests.support.prefixes import TINY, write_prefix
from tests.support.rank_jobs import answers_of
from tests.support.rank_models import RankProcesses

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
PROMPTS = [[5, 9, 11, 30, 7, 8, 5, 9, 11], [101, 3], [77], [14, 15, 16, 17, 18]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 10}
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8}
# Fields of requests, by what they are for.
FIELDS: list[dict[str, Any]] = [
    *(
        {**DRAWN, "top_p": 0.9},
        {**DRAWN, "top_k": 20, "n": 2},
        {**DRAWN, "logprobs": 2, "min_p": 0.1},
    ),
    *({**GREEDY, "repetition_penalty": 1.4}, {**GREEDY, "no_repeat_ngram_size": 2}),
    *(
        {"num_beams": 3, "max_new_tokens": 6, "seed": None},
        {**GREEDY, "prompt_logprobs": 1},
        {**GREEDY, "bad_words": [[7]]},
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters and a prefix of it."""
    folder = tmp_path_factory.mktemp("model")
    tiny.write(folder / "model")
    for name, rank in (("all", 4), ("more", 13)):
        write_adapter(folder / name, tiny.CONFIG, rank, seed=rank)
    write_prefix(folder / "prefix", TINY, 37)
    return folder


Ranks = Callable[[int], RankProcesses]


def check(folder: Path, ranks: RankProcesses, requests: list[Any], **settings: Any) -> list[Any]:
    arguments = {"source": str(folder / "model"), "requests": requests, **settings}
    wanted = answers_of(0, 1, **arguments)
    for found in ranks.run("tests.support.rank_jobs:answers_of", **arguments):
        assert found == wanted
    return wanted


def test_answers_of_all_kinds_of_requests(folder: Path, ranks: Ranks) -> None:
    requests = [[PROMPTS[i % 4], fields] for i, fields in enumerate((GREEDY, *FIELDS))]
    check(folder, ranks(2), requests)


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_tokens_of_slices_are_those_of_whole_logits(ranks: Ranks, seed: int) -> None:
    for found in ranks(2).run("tests.support.rank_jobs:tokens_of_slices", seed=seed):
        for slices, whole in zip(found[::2], found[1::2], strict=True):
            assert slices == whole
        assert found[0][2:5] == [-1, 190, 0]
        assert len({str(tokens) for tokens in found}) == 4


@pytest.mark.parametrize("inference_model", [True, False])
def test_adapters_and_prefixes(folder: Path, ranks: Ranks, inference_model: bool) -> None:
    names: list[Any] = [None, "all", "more", "tuned"]
    requests = [[prompt, dict(GREEDY, adapter=name)] for prompt in PROMPTS for name in names]
    (answers, _) = check(
        folder,
        *(ranks(2), requests),
        lora_modules=[f"{name}={folder / name}" for name in ("all", "more")],
        prefix_path=[f"tuned={folder / 'prefix'}"],
        inference_model=inference_model,
    )
    assert len({str(each) for each in answers}) > len(PROMPTS)  # adapters say something else


def test_a_merged_adapter_and_drafts(folder: Path, ranks: Ranks) -> None:
    requests = [[prompt, GREEDY] for prompt in PROMPTS]
    drafts = {"speculate_method": "inference_with_reference", "speculate_max_draft_token_num": 4}
    check(folder, ranks(2), requests, lora_path=str(folder / "all"), **drafts)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_random_weights_are_those_of_one_rank(ranks: Ranks, whole_experts: bool) -> None:
    golden = Path(__file__).parents[1] / "golden"
    arguments: dict[str, Any] = {
        "source": str(golden / "mixtral_8x7b"),
        "requests": [[[1, 2, 3], GREEDY]],
    }
    wanted = answers_of(0, 1, **arguments, load_format="dummy")
    found = ranks(2).run(
        "tests.support.rank_jobs:answers_of",
        cut={"whole_experts": whole_experts},
        load_format="dummy",
        **arguments,
    )
    assert found == [wanted] * 2
