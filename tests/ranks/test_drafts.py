"""Drafts over ranks: the same drafts, of which the same stand, and the text of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.device import library
from predict.device.place import to_float32
from predict.engine.choices import Row
from predict.engine.step import Choices
from predict.loading.checkpoint import Checkpoint
from predict.loading.drafters import open_drafter
from predict.loading.model import read_spec
from predict.loading.platform import platform_of
from predict.nn.shares import Ranks
from tests.support import drafters, tiny
from tests.support.checkpoints import changed
from tests.support.draft_heads import write_followed, write_knowing
from tests.support.drafts import METHODS, config, draft_always
from tests.support.golden import GOLDEN
from tests.support.paths import DEMO

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=16, ignore_eos=True, seed=3)
SLOW = pytest.mark.slow
Made = tuple[Path, dict[str, Any]]


def of_demo(method: str) -> Callable[[Path], Made]:
    return lambda folder: (DEMO, {"speculate_method": method, **METHODS[method]})


def knowing(method: str, of: str) -> Callable[[Path], Made]:
    """A head that is often right."""

    def made(folder: Path) -> Made:
        model = write_followed(folder / "model", 1.0)
        head = write_knowing(folder / "head", method, of)
        return model, {"speculate_method": method, "draft_model_name_or_path": str(head)}

    return made


def eagle3(folder: Path) -> Made:
    """A head on three states, with a vocabulary and a matrix of its own."""
    model = tiny.write(folder / "model", {"num_hidden_layers": drafters.LAYERS})
    own = {**drafters.HEAD_CONFIG, "draft_vocab_size": drafters.NUM_DRAFT_TOKENS}
    head = drafters.write_head(folder / "head", own, drafters.eagle3())
    return model, {"speculate_method": "eagle", "draft_model_name_or_path": str(head)}


def mtp(folder: Path) -> Made:
    case = "deepseek_v3"
    checkpoint = Checkpoint(GOLDEN / case)
    there = {name: to_float32(checkpoint.read(name)) for name in checkpoint.tensors}
    there |= drafters.mtp_tensors(there, drafters.MTP_CASES[case])
    values = {name: ("F32", value) for name, value in there.items()}
    return changed(case, folder / "model", values), {"speculate_method": "mtp"}


# A way to make a model and its drafter, and how many ranks run them.
CASES: dict[str, tuple[Callable[[Path], Made], int]] = {
    "lookahead": (of_demo("lookahead"), 2),
    "inference_with_reference": (of_demo("inference_with_reference"), 2),
    "draft_model": (of_demo("draft_model"), 2),
    "draft_model, 3": (of_demo("draft_model"), 3),
    "eagle": (knowing("eagle", "token"), 2),
    "eagle 3": (eagle3, 2),
    "medusa": (knowing("medusa", "state"), 2),
    "mtp": (mtp, 2),
    "mtp, 4": (mtp, 4),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "eagle" else SLOW) for c in CASES]
)
def test_drafts_and_text_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    make, size = CASES[case]
    model, settings = make(tmp_path)
    settings = {"speculate_max_draft_token_num": 3, "block_size": 16, "dtype": "float32"} | settings
    prompts = [[(7 * i + j * j) % 60 for j in range(3 + 5 * i)] for i in range(5)]
    params = [GREEDY if index % 2 else DRAWN for index in range(len(prompts))]
    found = []
    for degree in (1, size):
        given = {**settings, "tensor_parallel_degree": degree, "rank_timeout": 60.0}
        llm = LLM(config(model, given))
        draft_always(llm)
        texts = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        stats = llm.stats()
        assert stats.num_draft_tokens > 0
        assert stats.num_used_blocks == 0
        found.append((texts, stats.num_draft_tokens, stats.num_accepted_draft_tokens))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "mtp" else SLOW) for c in ("mtp", "eagle 3", "medusa")],
)
def test_programs_of_ranks_draft_as_one_process(tmp_path: Path, case: str) -> None:
    make, size = CASES[case]
    model, settings = make(tmp_path)
    settings = {"block_size": 16, "dtype": "float32"} | settings
    found = []
    for degree in (1, size):
        given = {**settings, "tensor_parallel_degree": degree, "rank_timeout": 60.0}
        if degree > 1:
            folder = tmp_path / "static"
            export_model(config(model, given), folder, gives_states=True)
            model, given["mode"] = folder, "static"
        llm = LLM(config(model, given))
        draft_always(llm)
        texts = [each.outputs[0].token_ids for each in llm.generate([[5, 9, 30], [4]], GREEDY)]
        stats = llm.stats()
        found.append((texts, stats.num_draft_tokens, stats.num_accepted_draft_tokens))
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_a_request_that_fails_beside_drafts_of_states_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = CASES["eagle"][0](tmp_path)
    settings = {"block_size": 16, "dtype": "float32"} | settings
    found = []
    for degree in (1, 2):
        given = {**settings, "tensor_parallel_degree": degree, "rank_timeout": 60.0}
        llm = LLM(config(model, given))
        draft_always(llm)
        choices = llm.engine.sampler.choices

        def failing(rows: Sequence[Row], *others: Any, choices: Any = choices) -> Choices:
            if any(row.request.token_ids[0] == 40 for row in rows):
                raise RuntimeError("token 40")
            return choices(rows, *others)

        monkeypatch.setattr(llm.engine.sampler, "choices", failing)
        prompts = [[first, 3, 9, first + 1] for first in (20, 30, 40, 50)]
        ends = [each.outputs[0] for each in llm.generate(prompts, GREEDY)]
        assert [end.finish_reason for end in ends] == ["length", "length", "error", "length"]
        assert llm.stats().num_used_blocks == 0
        found.append([end.token_ids for end in ends])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("case", "is_cut"), [("eagle", True), ("eagle 3", True), ("medusa", False)]
)
def test_a_rank_has_its_part_of_a_drafter_s_layer(tmp_path: Path, case: str, is_cut: bool) -> None:
    model, settings = CASES[case][0](tmp_path)
    given = config(model, settings)
    spec, reader = read_spec(model)
    platform = platform_of("cpu", True)
    whole = open_drafter(given, spec, reader, platform)
    parts = [open_drafter(given, spec, reader, platform, Ranks(rank, 2)) for rank in range(2)]
    assert whole is not None
    for part in parts:
        assert part is not None
        assert (part.num_bytes < whole.num_bytes) == is_cut
        assert (part.spec != whole.spec) == is_cut
