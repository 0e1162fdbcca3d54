"""Text and logits of several CPU ranks equal HF transformers' (tests/golden)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from predict.device import library
from tests.support.rank_models import RankProcesses

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")


PLAIN, WHOLE = {"inference_model": False}, {"cut": {"whole_experts": True}}
# By ranks, of which query heads are a multiple. What rows are without is compiled.
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        *((case, {}) for case in ("llama_gqa", "qwen3", "phi3_mini", "falcon_40b", "olmo2_gqa")),
        *(("mixtral_8x7b", {}), ("mixtral_8x7b", WHOLE), ("qwen2_moe_a2_7b", WHOLE | PLAIN)),
        *(("chatglm_2_6b", PLAIN), ("cohere_qk_norm", PLAIN), ("ernie_3_5_se_parallel", {})),
    ],
    3: [(case, {}) for case in ("gemma_2b", "falcon_7b", "opt_350m", "deepseek_v2_lite")],
    4: [
        *((case, {}) for case in ("llama_head_dim", "qwen3_tied", "gemma3_4b", "bloom_7b")),
        *((case, {}) for case in ("olmo2_gqa", "gpt_oss_20b", "qwen3_moe_30b", "deepseek_v3")),
        *((case, WHOLE) for case in ("gpt_oss_20b", "qwen3_moe_30b", "deepseek_v3")),
        *((case, PLAIN) for case in ("olmo2_gqa", "bloom_7b")),
    ],
}


@pytest.mark.parametrize(
    ("size", "case", "settings"),
    [(size, *row) for size, rows in CASES.items() for row in rows],
)
def test_text_and_logits_equal_transformers(
    ranks: Callable[[int], RankProcesses], size: int, case: str, settings: dict[str, Any]
) -> None:
    ranks(size).run("tests.support.rank_jobs:check_golden", case=case, **settings)
