"""Writes quantized layers: first one file each, then the checkpoint's shards and JSON files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.loading.arrays import NUMPY_DTYPES, STORED_DTYPES
from predict.loading.checkpoint import Checkpoint
from predict.loading.companions import copy_companions
from predict.loading.formats import INDEX
from predict.loading.layouts import compressed_tensors, paddlenlp
from predict.loading.safetensors_reader import read_header
from predict.loading.safetensors_writer import (
    as_stored,
    shard_name,
    shards_of,
    write,
    write_index,
    write_json,
)
from predict.nn.hf_config import ConfigReader
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.plans import WeightPlan
from predict.system.outputs import sync_folder
from quant.calibrate import QuantizedLayer
from quant.config import QuantConfig
from quant.layer import LayerWeights
from quant.state import read_layer_scales

Tensors = dict[str, tuple[str, npt.NDArray[Any]]]

EXPERTS = r"re:.*\.experts\.\d+\."  # compressed-tensors' name of routed experts' linears
MAX_SHARD_BYTES = 4 << 30
# What an older checkpoint has, and the next one may lack; and what a killed run left half written.
WRITTEN = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    INDEX,
    *("act_scales.json", "weight_scales.json", "cachekv_scales.json"),
    ".*.part",
)


def float_dtype(config: QuantConfig, checkpoint: Checkpoint, plan: WeightPlan) -> str:
    """The safetensors dtype of tensors that stay in floating point."""
    if config.dtype is not None:
        return STORED_DTYPES[config.dtype]
    assert plan.final_norm is not None
    dtype = checkpoint.tensors[plan.final_norm.weight].dtype
    return dtype if dtype in STORED_DTYPES.values() else "F32"


def layer_tensors(
    layer: QuantizedLayer, config: QuantConfig, dtype: str
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of one layer under their checkpoint names, and its entries of the scale files.

    dtype: safetensors dtype of what stays in floating point. Entries by file: "act", "weight",
    "cache"; "loss" is each kind's relative output error.
    """
    weights = layer.weights
    tensors: Tensors = {}
    scales: dict[str, Any] = {"act": {}, "weight": {}, "cache": {}, "loss": layer.loss}
    for name, values in weights.vectors.items():
        tensors[name] = (dtype, as_stored(values, dtype))
    for table in weights.tables.values():
        kept = "F32" if table.plan.is_float32 else dtype
        values = table.values.reshape(table.plan.stored_shape)
        tensors[table.plan.name] = (kept, as_stored(values, kept))
    for key, linear in weights.linears.items():
        borders = np.cumsum(linear.plan.part_sizes)[:-1]
        matrices = np.split(linear.weight, borders)
        for index, prefix in enumerate(linear.plan.prefixes):
            if key not in layer.quantized:
                tensors[prefix + ".weight"] = (dtype, as_stored(matrices[index], dtype))
                continue
            part = layer.quantized[key][index]
            if config.shift:  # only PaddleNLP's layout has a place for it
                tensors.update(paddlenlp.linear_tensors(prefix, part))
                act, weight = paddlenlp.scale_entries(stem(weights, prefix), part)
                scales["act"].update(act)
                scales["weight"].update(weight)
            else:
                tensors.update(compressed_tensors.linear_tensors(config.scheme, prefix, part))
        if linear.bias is not None:
            # A correction for a shift is worth more digits than bfloat16 has.
            kept = "F32" if config.shift else dtype
            for prefix, bias in zip(
                linear.plan.prefixes, np.split(linear.bias, borders), strict=True
            ):
                tensors[prefix + ".bias"] = (kept, as_stored(bias, kept))
    if layer.key_range is not None and layer.value_range is not None:
        attention = stem(weights, weights.attention_name)
        block = weights.block_of(AttentionBlock)
        assert block is not None  # a latent cache has no ranges
        group = block.num_heads // block.num_kv_heads
        for letter, ranges in (("k", layer.key_range), ("v", layer.value_range)):
            # PaddleNLP lists every query head: the cache's head that it reads.
            name = f"{attention}.cache{letter}_matmul.activation_quanter"
            scales["cache"][name] = np.repeat(ranges, group).tolist()
    return tensors, scales


def stem(weights: LayerWeights, prefix: str) -> str:
    """A linear's name in PaddleNLP's scale files: with the family's name in front."""
    return f"{weights.spec.model_type}.layers.{prefix.partition('layers.')[2]}"


def quantization_config(config: QuantConfig, plan: WeightPlan) -> dict[str, Any]:
    """What config.json says of the quantized checkpoint. plan: of the names that are written."""
    if config.shift:
        return {
            "quant_type": config.scheme + "c8" * config.cachekv,
            "shift": True,
            "smooth": config.smooth,
            "shift_smooth_all_linears": config.shift_all_linears,
        }
    has_experts = any(linear.is_expert for linear in plan.linears())
    made = compressed_tensors.config(
        config.scheme,
        group_size=config.weightonly_group_size,
        symmetric=config.weight_symmetric,
        static=config.static_activations,
        block=config.weight_quant_method == "blockwise",
        per_tensor=config.per_tensor,
        ignore=["lm_head", *_kept_matrices(config, plan)],
        dynamic=() if config.static_experts or not has_experts else (EXPERTS,),
    )
    if config.do_gptq and config.gptq_actorder:
        # "group": readers have to gather inputs by weight_g_idx; "weight": by nothing.
        order = "group" if config.scatters_groups else "weight"
        made["config_groups"]["group_0"]["weights"]["actorder"] = order
    return made


def _kept_matrices(config: QuantConfig, plan: WeightPlan) -> list[str]:
    """Names of the matrices within layers that stay in floating point."""
    kept = [
        prefix
        for linear in plan.linears()
        if linear.head_parts or config.skips(linear.prefixes)
        for prefix in linear.prefixes
    ]
    tables = (table for block in plan.blocks() for table in block.tables())
    return kept + [t.name.removesuffix(".weight") for t in tables if len(t.shape) > 1]


def write_tensors(
    config: QuantConfig,
    source: Path,
    others: Callable[[], Tensors],
    layer_files: Sequence[Path],
    scale_files: Sequence[Path],
) -> int:
    """Joins the layers' files into a checkpoint in --output_path, but for its config.json.

    others: makes the tensors that belong to no layer. Returns the bytes of all tensors. An older
    checkpoint that is there is removed first: from its config.json on, so that a folder without it
    is none.
    """
    _remove_checkpoint(config.output_path)
    output = config.output_path
    shards = shards_of([path.stat().st_size for path in layer_files], MAX_SHARD_BYTES)
    names: dict[str, list[str]] = {}
    total = 0
    for number, indices in enumerate(shards):
        tensors = {} if number else others()
        for index in indices:
            tensors.update(read_tensors(layer_files[index]))
        file = shard_name(number, len(shards))
        write(output / file, tensors)
        names[file] = list(tensors)
        total += sum(array.nbytes for _, array in tensors.values())
    write_index(output / INDEX, names, total)
    _write_scales(config, scale_files)
    copy_companions(source, output)
    return total


def write_config(config: QuantConfig, source: Path, plan: WeightPlan) -> None:
    """Writes config.json, which makes the folder a checkpoint."""
    values = dict(ConfigReader.from_dir(source).values)
    values["quantization_config"] = quantization_config(config, plan)
    if config.dtype is not None:
        values["dtype" if "dtype" in values else "torch_dtype"] = config.dtype
    write_json(config.output_path / "config.json", values)


def _remove_checkpoint(folder: Path) -> None:
    """Deletes what `write_tensors` and `write_config` wrote, config.json first."""
    (folder / "config.json").unlink(missing_ok=True)
    sync_folder(folder)
    for pattern in WRITTEN:
        for path in folder.glob(pattern):
            path.unlink()


def read_tensors(path: Path) -> Tensors:
    """All tensors of one safetensors file."""
    tensors: Tensors = {}
    for name, info in read_header(path).items():
        array = np.fromfile(
            path, NUMPY_DTYPES[info.dtype], math.prod(info.shape), offset=info.offset
        )
        tensors[name] = (info.dtype, array.reshape(info.shape))
    return tensors


def _write_scales(config: QuantConfig, scale_files: Sequence[Path]) -> None:
    """act_scales.json, weight_scales.json and cachekv_scales.json, where there are any."""
    joined: dict[str, dict[str, Any]] = {"act": {}, "weight": {}, "cache": {}}
    for path in scale_files:
        found = read_layer_scales(path)
        for kind in joined:
            joined[kind].update(found[kind])
    for kind, name in (("act", "act"), ("weight", "weight"), ("cache", "cachekv")):
        if joined[kind]:
            write_json(config.output_path / f"{name}_scales.json", joined[kind])
