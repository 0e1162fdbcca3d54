"""The rows that evaluate.py compares, one per quantization: TYPE[_gN][+METHOD...][@CACHE].

Imports no Paddle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from predict.config.cache import CACHE_TYPES
from predict.config.quantization import parse_quant_type
from predict.config.schemes import scheme_info
from predict.errors import UserError, one_of

UNQUANTIZED = "none"
# Flags of run_quantization.py that a method stands for.
METHODS: dict[str, tuple[str, ...]] = {
    "ptq": ("--do_ptq",),
    "smooth": ("--smooth", "--smooth_all_linears"),
    "piecewise": ("--smooth", "--smooth_all_linears", "--smooth_piecewise_search"),
    "shift": ("--do_ptq", "--shift", "--shift_all_linears"),
    "gptq": ("--do_gptq",),
    "awq": ("--do_awq",),
    "clip": ("--auto_clip",),
    "asym": ("--weight_symmetric", "false"),
}
GRAMMAR = (
    "write TYPE[_gN][+METHOD...][@CACHE], such as weight_only_int4_g128+gptq or none@dynamic, or "
    "the directory of a quantized checkpoint"
)


@dataclass(frozen=True)
class QuantRow:
    """One quantization to measure."""

    name: str  # as the command line has it
    quant_type: str | None  # None: unquantized, or as the checkpoint says
    checkpoint: str | None = None  # directory of a quantized checkpoint
    group_size: int = -1
    methods: tuple[str, ...] = ()
    cache: str | None = None  # of predict.config.quantization.CACHE_TYPES

    @property
    def calibrates(self) -> bool:
        """Whether run_quantization.py has to make a checkpoint of it first."""
        return bool(self.methods) or (self.cache == "static" and self.checkpoint is None)

    def quantization_flags(self) -> list[str]:
        """The command line of run_quantization.py, files apart."""
        assert self.quant_type is not None
        words = ["--quant_type", self.quant_type + "c8" * (self.cache == "static")]
        if self.group_size != -1:
            words += ["--weightonly_group_size", str(self.group_size)]
        for method in self.methods:
            words += METHODS[method]
        return words


def parse_row(text: str, cache: str | None = None, group_size: int = -1) -> QuantRow:
    """The row of a text; cache, group_size: where it has none. Raises UserError."""
    rest, at, own_cache = text.partition("@") if not Path(text).is_dir() else (text, "", "")
    if at:
        if own_cache not in CACHE_TYPES:
            raise one_of(f"the cache of {text!r}", own_cache, CACHE_TYPES)
        cache = own_cache
    if Path(rest).is_dir():
        if not (Path(rest) / "config.json").exists():
            raise UserError(f"--quant_type {rest} is a directory without config.json; {GRAMMAR}")
        return QuantRow(text, None, checkpoint=rest, cache=cache)
    rest, *methods = rest.split("+")
    for method in methods:
        if method not in METHODS:
            raise one_of(f"the method of {text!r}", method, METHODS)
    if rest == UNQUANTIZED:
        if methods:
            raise UserError(f"{text!r}: {UNQUANTIZED} has no weights to calibrate; {GRAMMAR}")
        if cache == "static":
            raise UserError(
                f"{text!r}: static cache scales are calibrated with quantized weights; use "
                "weight_only_int8@static, or another cache"
            )
        return QuantRow(text, None, cache=cache)
    grouped = re.fullmatch(r"(.+)_g(\d+)", rest)
    if grouped:
        rest, group_size = grouped[1], int(grouped[2])
    try:
        quant_type = parse_quant_type(rest)
    except UserError as error:
        raise UserError(f"{error}; {GRAMMAR}") from None
    if not scheme_info(quant_type.scheme).has_groups:
        if grouped:
            raise UserError(f"{text!r}: {quant_type.scheme} has no groups; leave _g out")
        group_size = -1
    if quant_type.cache_type and cache not in (None, quant_type.cache_type):
        raise UserError(f"{text!r} has a {quant_type.cache_type} cache of its own, not {cache}")
    cache = cache or quant_type.cache_type
    return QuantRow(text, quant_type.scheme, None, group_size, tuple(methods), cache)
