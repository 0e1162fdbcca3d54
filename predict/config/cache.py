"""The KV cache: how its blocks are taken, how large they are, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from predict.config.checks import check_fields
from predict.errors import UserError

ATTENTIONS = ("reserved", "block", "append")
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
class CacheConfig:
    """The KV cache. Raises UserError for other values."""

    attention: str = "reserved"  # reserved | block (--block_attn) | append (--append_attn)
    block_size: int = 64  # tokens per cache block
    num_cache_blocks: int | None = None  # None: from the memory that is free
    prefix_caching: bool = True  # only effective when attention is not reserved
    gpu_memory_utilization: float = 0.9  # share of the device's memory for weights and cache
    cachekv_int8_type: str | None = None  # dynamic | static | fp8 | int4

    def __post_init__(self) -> None:
        choices = {"attention": ATTENTIONS, "cachekv_int8_type": tuple(filter(None, KV_FORMATS))}
        check_fields(self, choices=choices)
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UserError(
                f"block_size {self.block_size} is not supported (allowed: {sizes}); "
                "set --block_size to one of these"
            )

    @property
    def reserve_full(self) -> bool:
        """Whether a sequence takes its whole cache at admission (neither block nor append)."""
        return self.attention == "reserved"

    @property
    def shares_prefixes(self) -> bool:
        """Whether full blocks are shared between requests; a reserved cache shares nothing."""
        return self.prefix_caching and not self.reserve_full
