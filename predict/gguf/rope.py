"""rope_scaling of a GGUF file: a method's numbers, or factors that a tensor has."""

from __future__ import annotations

import math
from array import array
from typing import Any

from predict.errors import UserError
from predict.gguf.metadata import GgufMetadata

MAX_FACTORS = 1 << 10  # frequencies of a head; the network's own limit is below


def scaling_of(data: GgufMetadata) -> dict[str, Any] | None:
    """rope_scaling: by the method's name, or by factors that a tensor has for each frequency."""
    original = data.optional("{arch}.rope.scaling.original_context_length")
    context = data.whole("{arch}.context_length")
    of_llama = data.has_tensor("rope_freqs.weight")  # what Llama 3's factors come to
    if of_llama or data.has_tensor("rope_factors_long.weight"):
        names = ["rope_freqs"] * 2 if of_llama else ["rope_factors_short", "rope_factors_long"]
        data.must_be("{arch}.rope.scaling.type", ("none", "linear", "longrope"))
        short, long = (_factors(data, f"{name}.weight") for name in names)
        factor = 1.0 if of_llama else data.real("{arch}.rope.scaling.attn_factor", 1.0)
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": factor,
            "original_max_position_embeddings": original or context,
        }
    old = data.real("{arch}.rope.scale_linear", 0.0)  # of before there were methods
    data.must_be("{arch}.rope.scaling.type", ("none", "linear", "yarn"))
    method = data.text("{arch}.rope.scaling.type", "linear" if old else "none")
    factor = data.real("{arch}.rope.scaling.factor", old or 1.0)
    if method == "none" or not factor:
        return None
    values = {"rope_type": method, "factor": factor}
    if method == "linear":
        return values
    data.must_be("{arch}.rope.scaling.yarn_ext_factor", (1.0, -1.0))  # -1: not said
    # What converters call yarn_attn_factor is the whole, as config.json's attention_factor.
    whole = data.real("{arch}.rope.scaling.yarn_attn_factor", yarn_mscale(factor, 1.0))
    return {
        **values,
        "original_max_position_embeddings": original or context,
        "beta_fast": data.real("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": data.real("{arch}.rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": data.real("{arch}.rope.scaling.attn_factor", 1.0) * whole,
    }


def yarn_mscale(factor: float, scale: float) -> float:
    """The factor of cos and sin where positions are stretched by `factor`."""
    return 1 + 0.1 * scale * math.log(max(factor, 1.0))


def _factors(data: GgufMetadata, name: str) -> list[float]:
    """The values of a small tensor."""
    tensor = data.tensor(name)
    count = math.prod(tensor.shape)
    if tensor.kind != "F32" or count > MAX_FACTORS:
        raise UserError(
            f"{data.file.path}: {name} has {count} values of type {tensor.kind} (allowed: F32, "
            f"{MAX_FACTORS} at most); convert the model again"
        )
    values = array("f")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        values.frombytes(file.read(tensor.num_bytes))
    return values.tolist()
