"""Which of llama.cpp's types stands beside which of ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from predict.config.quantization import parse_quant_type
from predict.config.schemes import GROUP_SIZES
from predict.errors import UserError, one_of, quoted

DENSE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Q8_0 has 8.5 bits for a weight, Q4_0 4.5: a float16 scale for each 32 weights of a row.
QUANTIZED = {"weight_only_int8": "Q8_0", "a8w8": "Q8_0", "weight_only_int4": "Q4_0"}
HEAD = "weight_only_int8"  # beside quantized layers
NONE = "none"
_GROUPED = re.compile(r"(?P<type>\w+?)_g(?P<size>\d{1,4})")


@dataclass(frozen=True)
class Kind:
    """How both sides store the weights of a run."""

    name: str  # as --quant_types has it
    dtype: str
    scheme: str | None  # None: in dtype
    group_size: int
    head_scheme: str | None  # of the LM head; None: in dtype

    @classmethod
    def parse(cls, name: str, dtype: str, head: str | None) -> Kind:
        """Of a name such as weight_only_int4_g64. head: the LM head's type beside quantized ones.

        Raises UserError for types that llama.cpp has nothing alike.
        """
        if name == NONE:
            return cls(name, dtype, None, -1, None)
        grouped = _GROUPED.fullmatch(name)
        size = int(grouped["size"]) if grouped else -1
        if size not in GROUP_SIZES:
            raise UserError(
                f"--quant_types has {quoted(name)} (allowed behind _g: "
                f"{', '.join(str(each) for each in GROUP_SIZES if each > 0)})"
            )
        scheme = _known(grouped["type"] if grouped else name)
        return cls(name, dtype, scheme, size, None if head is None else _known(head))

    @property
    def gguf_type(self) -> str:
        """Of the peer's matrices in the layers."""
        return DENSE[self.dtype] if self.scheme is None else QUANTIZED[self.scheme]

    @property
    def gguf_head_type(self) -> str:
        """Of the peer's LM head."""
        return DENSE[self.dtype] if self.head_scheme is None else QUANTIZED[self.head_scheme]

    @property
    def gguf_dense_type(self) -> str:
        """Of an embedding of its own."""
        return DENSE[self.dtype]

    @property
    def gguf_cache_type(self) -> str:
        """Of the peer's keys and values: as many bits as ours."""
        return "F32" if self.dtype == "float32" else "F16"

    @property
    def settings(self) -> dict[str, Any]:
        """Ours, as fields of EngineConfig."""
        values: dict[str, Any] = {"dtype": self.dtype, "quant_type": self.scheme}
        if self.scheme is not None:
            values |= {"lm_head_quant_type": self.head_scheme}
            values |= {"weightonly_group_size": self.group_size}
        return values

    @property
    def work(self) -> dict[str, str]:
        """As a file of peers says it: see benchmarks/README.md."""
        return {
            "dtype": self.dtype,
            "quant_type": self.scheme or NONE,
            "kv_format": "dense",
            "lm_head_quant_type": self.head_scheme or NONE,
        }


def _known(name: str) -> str:
    scheme = parse_quant_type(name).scheme
    if scheme not in QUANTIZED:
        raise one_of("quant_types", name, (NONE, *QUANTIZED))
    return scheme
