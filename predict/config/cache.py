"""The KV cache: how its blocks are taken, how large they are, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from predict.system.options import Checked, option
from predict.system.ranges import MAX_INT32, SHARE_ABOVE, Range

BLOCK_SIZES = (16, 32, 64, 128)
# By cachekv_int8_type: the row of predict.nn.cache_formats.
KV_FORMATS = {
    None: "dense",
    "dynamic": "int8_dynamic",
    "static": "int8_static",
    "fp8": "fp8",
    "int4": "int4",
}
CACHE_TYPES = tuple(name for name in KV_FORMATS if name)  # of --cachekv_int8_type


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Checked):
    """The KV cache. Raises UserError for other values."""

    # fmt: off
    attention: str = option("reserved",
        "reserved, block (--block_attn) or append (--append_attn).",
        group="Operators and cache", allowed=("reserved", "block", "append"), is_flag=False)
    block_size: int = option(64,
        "Tokens per block of the KV cache (16, 32, 64 or 128); in static mode it is the exported "
        "model's.",
        allowed=BLOCK_SIZES)
    prefix_caching: bool = option(True,
        "Keep the blocks of finished prompts and share them; needs --block_attn or --append_attn. "
        "Off under --benchmark unless given.")
    prefix_cache_state_budget: int | None = option(None,
        "Bytes for states that prompts leave behind, of models whose layers keep one beside the KV "
        "cache; when not given, 64 states where memory allows. See docs/hybrid_models.md.",
        allowed=Range(0, 1 << 50))
    mamba_ssm_cache_dtype: str = option("auto",
        "Dtype of the states that layers keep of each request beside the KV cache: auto (float32), "
        "float32, or on GPUs bfloat16. See docs/hybrid_models.md.",
        allowed=("auto", "float32", "bfloat16"))
    num_cache_blocks: int | None = option(None,
        "Blocks of the KV cache; when not given, what the batch needs or the memory holds.",
        allowed=Range(1, MAX_INT32))  # block tables hold int32
    gpu_memory_utilization: float = option(0.9,
        "Share of the device's memory for weights and KV cache.", allowed=SHARE_ABOVE)
    cachekv_int8_type: str | None = option(None,
        "KV cache in 8 bits: dynamic (int8, a scale per head and token), static (int8, scales of "
        "cachekv_scales.json), fp8, which latents take too; or in 4: int4.",
        group="Quantization", allowed=KV_FORMATS)
    # fmt: on

    @property
    def reserve_full(self) -> bool:
        """Whether a sequence takes its whole cache at admission (neither block nor append)."""
        return self.attention == "reserved"

    @property
    def state_dtype(self) -> str:
        """The dtype of states that may be rounded."""
        return "float32" if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype

    @property
    def shares_prefixes(self) -> bool:
        """Whether full blocks are shared between requests; a reserved cache shares nothing."""
        return self.prefix_caching and not self.reserve_full
