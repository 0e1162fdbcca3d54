"""An adapter merged into a model's checkpoint, and what that is as a checkpoint to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.loading.adapters.base import Base
from predict.loading.adapters.merge import MergedCheckpoint
from predict.loading.adapters.read import read_adapter
from predict.loading.arrays import StoredArray
from predict.loading.checkpoint import Checkpoint
from predict.loading.conversion import FUSED, Conversion, FileLayout, Options, cast
from predict.loading.layouts import stored_method
from predict.loading.paddle_checkpoint import as_paddle
from predict.loading.sources import with_stored_head
from predict.models import spec_of, weight_names, with_family
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import WeightPlan, plan_weights
from predict.nn.weights import WeightNames

TIED = "tie_word_embeddings"


def with_adapter(
    directory: str,
    checkpoint: Checkpoint,
    plan: WeightPlan,
    names: WeightNames,
    reader: ConfigReader,
) -> tuple[MergedCheckpoint, WeightPlan]:
    """The checkpoint with the adapter of `directory` merged, and the plan that reads it.

    The plan is another one where the LM head of a tied model becomes a matrix of its own. Raises
    UserError for an adapter that does not fit, and for a checkpoint that is quantized already.
    """
    adapter = read_adapter(directory)
    method = stored_method(reader, checkpoint)
    if method is not None:
        raise UserError(
            f"{reader.path} says that the weights are quantized ({method}), and an adapter is "
            "added before that: merge it into the unquantized checkpoint (predict/"
            "merge_lora_params.py) and quantize the result, or give the unquantized one with "
            "--quant_type"
        )
    base = Base.of(plan, names, checkpoint.shapes, reader, checkpoint.takes_turns)
    merged = MergedCheckpoint(checkpoint, adapter, base)
    if merged.adapter.unties_head:
        plan = plan_weights(replace(plan.spec, tie_word_embeddings=False), names)
    return merged, plan


class Merging(Conversion):
    """A checkpoint with an adapter merged, on its way into a folder, in the checkpoint's layout.

    Tensors keep their dtypes unless another is asked for. Raises UserError as with_adapter does.
    """

    def __init__(
        self,
        source: Path,
        adapter: Path,
        max_shard_bytes: int,
        dtype: str | None = None,
        inputs: Mapping[str, Any] | None = None,
    ):
        """inputs: what tells the adapter from others, for going on after an interruption."""
        reader = with_family(ConfigReader.from_dir(source), None)
        checkpoint = Checkpoint(source)
        names = weight_names(reader).found_in(checkpoint.tensors)
        plan = plan_weights(with_stored_head(spec_of(reader), names, checkpoint), names)
        self.merged, _ = with_adapter(str(adapter), checkpoint, plan, names, reader)
        layout: FileLayout = "paddle" if checkpoint.is_paddle else "hf"
        super().__init__(source, Options(layout, dtype, max_shard_bytes))
        self.inputs.update(inputs or {})

    def _open(self) -> Checkpoint:
        return self.merged

    def _arrays(self) -> Mapping[str, StoredArray]:
        merged = self.merged
        stored = {**merged.under.as_hugging_face()}
        if merged.adapter.unties_head:
            stored[merged.base.head] = stored[merged.base.embedding]
        arrays = {
            name: array
            if self.options.dtype or array.dtype == stored[name].dtype
            else cast(array, stored[name].dtype, name)
            for name, array in merged.as_hugging_face().items()
        }
        return as_paddle(arrays, self.config) if merged.is_paddle else arrays

    def _config_values(self) -> dict[str, Any]:
        values = {k: v for k, v in super()._config_values().items() if k not in FUSED}
        if not self.merged.adapter.unties_head:
            return values
        for inner in ("text_config", "llm_config"):
            if isinstance(values.get(inner), dict):
                values[inner] = {**values[inner], TIED: False}
        return {**values, TIED: False}
