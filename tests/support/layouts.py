"""Golden checkpoints of other projects' quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from predict.config.quantization import QuantSettings
from predict.loading.build import expected_tensors
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts import layout_of
from predict.loading.sources import CheckpointSource
from predict.models import family_of, weight_names
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import WeightPlan, plan_weights

GOLDEN = Path(__file__).parents[1] / "golden_quantized"
MIXED = "gptq_dynamic"  # its linears have different schemes
CASES = sorted({path.parent.name for path in GOLDEN.glob("*/golden.json")} - {MIXED})
SCHEMES = {
    "awq": "weight_only_int4",
    "ct_fp8_block": "a8w8_fp8",
    "ct_fp8_dynamic": "a8w8_fp8",
    "ct_fp8_static": "a8w8_fp8",
    "ct_w4a16": "weight_only_int4",
    "ct_w4a16_asym": "weight_only_int4",
    "ct_w4a8": "w4a8",
    "ct_w8a16": "weight_only_int8",
    "ct_w8a8": "a8w8",
    "fp8_block": "a8w8_fp8",
    "gptq_8bit_channel": "weight_only_int8",
    "gptq_act_order": "weight_only_int4",
    "gptq_asym_v2": "weight_only_int4",
    "gptq_sym": "weight_only_int4",
}


def open_layout(directory: Path, **settings: Any) -> tuple[Any, WeightPlan]:
    """The directory's layout and plan, its tensors' names and shapes checked."""
    reader = ConfigReader.from_dir(directory)
    plan = plan_weights(family_of(reader).spec(reader), weight_names(reader))
    checkpoint = Checkpoint(directory)
    source = CheckpointSource(checkpoint)
    layout = layout_of(reader, checkpoint, source, QuantSettings(**settings), plan)
    checkpoint.check(expected_tensors(plan, layout), (*plan.ignored, *layout.ignored))
    return layout, plan
