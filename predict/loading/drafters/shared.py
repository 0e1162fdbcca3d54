"""What drafters share with a model that was exported: written beside its program, and read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.config.quantization import QuantSettings
from predict.config.speculation import STATES
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.build import DecoderBuilder, expected_tensors
from predict.loading.drafters import open_drafter
from predict.loading.drafters._found import SHARED_FILE, Found, shared_checkpoint
from predict.loading.layouts import Layout
from predict.loading.layouts.online import Online
from predict.loading.memory import weight_bytes
from predict.loading.model import Weights, open_weights
from predict.loading.platform import Platform
from predict.loading.safetensors_writer import write
from predict.loading.sources import CheckpointSource
from predict.models import weight_names
from predict.nn.decoder import Decoder
from predict.nn.drafters import MEDUSA_TAPS
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import WeightPlan, plan_weights
from predict.nn.spec import DecoderSpec


class Shared(NamedTuple):
    """What a drafter shares with the model, checked and not read yet."""

    config: EngineConfig
    found: Found
    weights: Weights


def open_shared(
    config: EngineConfig, spec: DecoderSpec, reader: ConfigReader, platform: Platform
) -> Shared:
    """What a drafter shares with the model; its own files are checked as for a run.

    Raises UserError where there is no drafter, it does not fit, or the head is in codes.
    """
    opened = open_drafter(config, spec, reader, platform)
    found = None if opened is None else opened.found
    if found is None:
        raise UserError(
            "--return_full_hidden_states is for drafters of hidden states; add --speculate_method "
            f"{', '.join(STATES)}, or leave it out"
        )
    floats = config.changed(quant_type=None, moe_quant_type=None, lm_head_quant_type=None)
    weights = open_weights(floats, spec, reader, platform)
    if weights.layout.scheme(weights.plan.head) != "dense":
        raise UserError(
            "--return_full_hidden_states needs a head in floats, which drafters share, and the "
            "checkpoint's is in codes; export without it"
        )
    return Shared(config, found, weights)


def write_shared(shared: Shared, folder: Path) -> tuple[str, ...]:
    """Writes it beside the model's program; the hidden states that the drafter reads.

    The embedding, the head and the last norm, and of mtp the layer itself.
    """
    config, found, weights = shared
    plan = weights.plan
    made: dict[str, tuple[str, npt.NDArray[Any]]] = {}

    def keep(name: str, values: npt.NDArray[Any]) -> None:
        made[name] = ("F32", np.asarray(to_float32(values), np.float32))

    source = weights.source
    shape = dict(plan.matrices())[plan.embedding]
    keep(plan.embedding, source.host_matrix((plan.embedding,), shape))
    if not plan.spec.tie_word_embeddings:
        keep(f"{plan.head.prefixes[0]}.weight", weights.layout.read(plan.head).codes)
        bias = weights.layout.bias(plan.head)
        if bias is not None:
            keep(f"{plan.head.prefixes[0]}.bias", bias)
    if plan.final_norm is not None:
        for name in filter(None, (plan.final_norm.weight, plan.final_norm.bias)):
            keep(name, source.vector(name, plan.final_norm.size))
    if found.checkpoint.directory == Path(config.model.model_name_or_path):  # mtp, of the model
        for name, array in found.checkpoint.tensors.items():
            made[name] = (array.dtype, found.checkpoint.read(name))
    source.close()
    write(folder / SHARED_FILE, made)
    return MEDUSA_TAPS if found.form is None else tuple(dict.fromkeys(found.form.taps))


@dataclass(frozen=True)
class StoredShared:
    """Of a model that runs as a program, what a drafter shares with it, checked and not read yet.

    It has no layers, and nothing in a cache.
    """

    config: EngineConfig
    plan: WeightPlan
    layout: Layout
    source: CheckpointSource
    platform: Platform
    spec: None = None
    loading_bytes: int = 0  # it is in floats

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return weight_bytes(self.plan, self.layout.scheme, self.config.model.dtype)

    def read(self) -> Decoder:
        """Embedding, head and last norm."""
        config = self.config
        return DecoderBuilder(
            *(self.plan, self.source, self.layout, config.model.dtype, self.platform.compiled),
            config.max_length,
            place=self.platform.place,
            gpu=self.platform.gpu,
        ).build()


def open_stored(
    config: EngineConfig, spec: DecoderSpec, reader: ConfigReader, platform: Platform
) -> StoredShared:
    """What lies beside the program of `config`. Raises UserError where it is missing or wrong."""
    checkpoint = shared_checkpoint(config)
    names = weight_names(reader).found_in(checkpoint.tensors)
    if f"{names.head}.weight" in checkpoint.tensors:
        spec = replace(spec, tie_word_embeddings=False)
    plan = replace(plan_weights(spec, names), layers=())
    source = CheckpointSource(checkpoint)
    layout = Online(source, QuantSettings(), plan)
    parts = ("layers.", "mtp_", "mtp.")
    of_layers = [name for name in checkpoint.tensors if any(part in name for part in parts)]
    checkpoint.check(expected_tensors(plan, layout), of_layers)
    return StoredShared(config, plan, layout, source, platform)
