"""Settings of every scheme, and runs of tiny models with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict import LLM, EngineConfig, SamplingParams
from tests.support.golden import step_logits


def normal(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def relative_error(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# Whole models.
SETTINGS: dict[str, dict[str, Any]] = {
    "weight_only_int8": {"quant_type": "weight_only_int8"},
    "weight_only_int8 group": {"quant_type": "wint8", "weightonly_group_size": 32},
    "weight_only_int4": {"quant_type": "weight_only_int4"},
    "weight_only_int4 group": {"quant_type": "weight_only_int4", "weightonly_group_size": 32},
    "weight_only_mxfp4": {"quant_type": "weight_only_mxfp4"},
    "a8w8": {"quant_type": "a8w8"},
    "a8w8_fp8": {"quant_type": "a8w8_fp8"},
    "a8w8_fp8 blocks": {"quant_type": "a8w8_fp8", "weight_block_size": (128, 128)},
    "w4a8": {"quant_type": "w4a8", "weightonly_group_size": 32},
    "head": {"quant_type": "weight_only_int8", "lm_head_quant_type": "weight_only_int4"},
    "head alone": {"lm_head_quant_type": "weight_only_int8"},
    "skip": {"quant_type": "weight_only_int4", "skip_list_names": ("layers.0.", "down_proj")},
}


def answer(directory: Path, **changes: Any) -> list[list[int]]:
    config = EngineConfig(
        **{"dtype": "float32", "inference_model": False, **changes},
        model_name_or_path=str(directory),
        max_length=64,
        batch_size=2,
    )
    llm = LLM(config)
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    return [list(o.token_ids) for o in llm.generate([[5, 6, 7, 8], [9, 10, 11]], params)]


def logits_of(directory: Path, **changes: Any) -> npt.NDArray[np.float32]:
    from predict.engine.batch import span_inputs
    from predict.engine.request_state import Request
    from predict.engine.scheduled import ScheduledSpan

    settings = {"dtype": "float32", "max_length": 64, "inference_model": False, **changes}
    llm = LLM(directory, **settings)
    request = Request(0, [5, 6, 7, 8, 20, 30], SamplingParams())
    inputs = span_inputs([ScheduledSpan(request, 6, 0, [0], True)], 64)
    logits: npt.NDArray[np.float32] = step_logits(llm, inputs)
    return logits


def on_this_cpu(name: str) -> bool:
    return "fp8" not in name
