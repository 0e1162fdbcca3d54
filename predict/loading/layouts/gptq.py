"""GPTQ checkpoints as AutoGPTQ, GPTQModel and transformers write them (Frantar et al. 2022).

qweight int32 [K * bits / 32, N] packed along K, qzeros int32 [G, N * bits / 32] packed along N,
scales [G, N], g_idx int32 [K] (optional). checkpoint_format "gptq" stores zero - 1.

GPTQModel's `dynamic` says otherwise for some linears: {pattern: settings}, of which the first
counts whose pattern, a regular expression, matches the front of a linear's name. A pattern behind
"-:" leaves its linears in float; "+:" in front of the others says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from predict.config.schemes import find
from predict.errors import UserError
from predict.loading.arrays import Shape
from predict.loading.layouts._stored import (
    WORDS,
    Stored,
    StoredPart,
    grouped,
    in_group_order,
    num_groups,
    unpacked,
)
from predict.loading.layouts.online import DENSE
from predict.schemes import Quantized
from predict.system.settings import pattern, refuse_unread, setting

BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2")
READ = "quant_method bits group_size desc_act dynamic checkpoint_format format"
# How codes were found, by which tool, on which device, and which kernels others run them by.
UNREAD = """
    method sym lm_head pack_dtype static_groups true_sequential damp_percent damp_auto_increment mse
    act_group_aware hyb_act gptaq foem hessian fallback failsafe fail_safe scale_search meta
    quantizer uri model_name_or_path model_file_base_name tokenizer dataset model_seqlen batch_size
    pad_token_id cache_block_outputs modules_in_block_to_quantize block_name_to_quantize
    module_name_preceding_first_block modules_to_not_convert max_input_length backend use_cuda_fp16
    use_exllama disable_exllama exllama_config cache_examples_on_gpu use_triton iters lr
    minmax_lr nsamples seqlen low_gpu_mem_usage enable_minmax_tuning enable_quanted_input
    gradient_accumulate_steps scale_dtype autoround_version provider data_type amp"""
# Settings of `dynamic` that say how codes were found, not how they are stored.
HOW_FOUND = (
    *("sym", "desc_act", "act_group_aware", "static_groups", "true_sequential", "mse"),
    *("scale_search", "damp_percent", "damp_auto_increment", "hessian", "gptaq", "foem"),
    *("fallback", "failsafe", "fail_safe"),
)


class Codes(NamedTuple):
    """How a quantized linear is stored."""

    bits: int
    group_size: int  # -1: all input features

    @property
    def scheme(self) -> str:
        return find(f"int{self.bits}").name

    @classmethod
    def of(cls, config: Mapping[str, Any], default: Codes, where: str) -> Codes:
        """What `config` says, and `default` where it says nothing. Raises UserError."""
        bits, size = (
            setting(config, name, value, where, int)
            for name, value in zip(cls._fields, default, strict=True)
        )
        if bits not in BITS:
            raise UserError(f"{where}: GPTQ with {bits} bits is not supported (allowed: 4, 8)")
        if size < 1 and size != -1:
            raise UserError(
                f"{where}: group_size {size!r} is not supported (allowed: a number of input "
                "features, -1 for all of them)"
            )
        return cls(bits, size)


class Gptq(Stored):
    """Integer weights with zero points, packed along the input features."""

    order_name = "g_idx"

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        super().__init__(*stored)
        refuse_unread(config, READ, UNREAD, where)
        self.codes = Codes.of(config, Codes(4, -1), where)
        self.dynamic = dynamic_rules(
            setting(config, "dynamic", {}, where, dict), self.codes, f"{where}, dynamic"
        )
        self.is_scattered = setting(config, "desc_act", False, where, bool)
        named = setting(config, "format", "gptq", where, str)
        self.format = setting(config, "checkpoint_format", named, where, str)
        if self.format not in FORMATS:
            raise UserError(
                f"{where}: checkpoint_format {self.format!r} is not supported (allowed: "
                f"{', '.join(FORMATS)}); convert it with the tool that made it"
            )

    @property
    def schemes(self) -> frozenset[str]:
        kinds = (self.codes, *(codes for _, codes in self.dynamic if codes is not None))
        return frozenset(codes.scheme for codes in kinds)

    def codes_of(self, part: StoredPart) -> Codes | None:
        """How a part is stored; None where config.json leaves it in float."""
        for names, codes in self.dynamic:
            if names.match(part.prefix):
                return codes
        return self.codes

    def _codes(self, part: StoredPart) -> Codes:
        codes = self.codes_of(part)
        assert codes is not None, part.prefix
        return codes

    def part_scheme(self, part: StoredPart) -> str:
        codes = self.codes_of(part)
        if codes is None or part["qweight"] not in self.checkpoint.tensors:
            return DENSE
        return codes.scheme

    def part_group_size(self, part: StoredPart) -> int:
        return self._codes(part).group_size

    def part_expected(self, part: StoredPart) -> Mapping[str, Shape]:
        rows, columns = part.out_features, part.in_features
        codes = self.codes_of(part)
        if codes is None:  # beside coded parts, and missing
            return {part["weight"]: (rows, columns)}
        bits, size = codes
        groups = num_groups(part, size)
        names: dict[str, Shape] = {
            part["qweight"]: (columns * bits // 32, rows),
            part["qzeros"]: (groups, rows * bits // 32),
            part["scales"]: (groups, rows),
        }
        if part["g_idx"] in self.checkpoint.tensors:
            names[part["g_idx"]] = (columns,)
        return names

    def read_part(self, part: StoredPart) -> Quantized:
        read, bits = self.checkpoint.read_as, self._codes(part).bits
        zeros = read(part["qzeros"], WORDS)
        if self.format == "gptq":
            # In whole words, as its writers subtracted: a borrow of theirs is this carry.
            ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
            zeros = (zeros.view(np.uint32) + ones).view(np.int32)
        middle = 0 if bits == 4 else 128  # int8 holds codes of 8 bits less 128
        codes = unpacked(read(part["qweight"], WORDS), bits, 0).T.astype(np.int16) - middle
        zero = unpacked(zeros, bits, 1).T.astype(np.float32) - middle
        weight = Quantized(
            np.ascontiguousarray(codes, np.int8),
            np.ascontiguousarray(self.scales(part["scales"]).T),
            np.ascontiguousarray(zero) if bits == 4 or zero.any() else None,
        )
        group_of = self.group_of_columns(part)
        if group_of is not None:
            weight = in_group_order(weight, group_of, part, self.is_scattered)
        return grouped(weight, part)


ModuleRule = tuple[re.Pattern[str], Codes | None]


def dynamic_rules(dynamic: Any, default: Codes, where: str) -> list[ModuleRule]:
    """GPTQModel's `dynamic` in its order, None for linears in float. Raises UserError."""
    if not isinstance(dynamic, Mapping):
        raise UserError(f"{where} is {dynamic!r}; it must be an object of patterns")
    rules: list[ModuleRule] = []
    for name, settings in dynamic.items():
        names = pattern(name.removeprefix("-:").removeprefix("+:"), where)
        if name.startswith("-:"):
            rules.append((names, None))
            continue
        if not isinstance(settings, Mapping):
            raise UserError(f"{where}, {name!r} is {settings!r}; it must be an object of settings")
        unknown = [key for key in settings if key not in (*Codes._fields, *HOW_FOUND)]
        if unknown:
            raise UserError(
                f"{where}, {name!r}: {', '.join(unknown)} of single linears is not supported "
                f"(known: {', '.join((*Codes._fields, *HOW_FOUND))}); quantize it again without"
            )
        rules.append((names, Codes.of(settings, default, f"{where}, {name!r}")))
    return rules
