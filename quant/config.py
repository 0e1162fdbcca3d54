"""What run_quantization.py takes: its flag table, and the frozen config that flags become.

Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from predict.cli.flags import (
    COMPAT,
    Clash,
    Flag,
    FlagValues,
    check_rules,
    parse_flags,
    with_file,
    without_effect,
)
from predict.config.model import AUTO, DTYPES
from predict.config.quantization import parse_quant_type
from predict.config.schemes import GROUP_SIZES, SchemeInfo, find, scheme_info
from predict.device.devices import kind_of
from predict.errors import UserError
from predict.gguf.files import gguf_of
from predict.system.files import find_model_dir
from predict.system.flag import not_yet
from predict.system.options import Checked, flags_of, option, values_of
from predict.system.ranges import BATCH, COUNT, LENGTH, SHARE, SHARE_ABOVE, Range

PROG = "run_quantization.py"
DESCRIPTION = "Quantizes a checkpoint with calibration data, layer by layer."
USAGE = "--model_name_or_path DIR --quant_type NAME --output_path OUT [--flag [VALUE] ...]"

WEIGHT_METHODS = ("abs_max_channel_wise", "groupwise", "abs_max", "avg", "blockwise")
ACT_METHODS = ("avg", "abs_max", "percentile", "mse", "kl")
CACHE_METHODS = tuple(f"{method}_headwise" for method in ACT_METHODS)
WHOLE_METHODS = ("avg", "abs_max")  # one scale for all heads; a recipe of PaddleNLP's has it
GROUP_SIZE = 128

_FACTOR = Range(0.0, 1e6, whole=False, above=True)
_NO_TRAINING = "nothing is trained here."
_EVALUATE = "quant/evaluate.py evaluates."
_NOT_USED = "PaddleNLP does not use it either."
_TODAY = not_yet("--do_ptq, --do_gptq and --do_awq work.")

# fmt: off
RULES: tuple[Clash, ...] = (
    Clash(lambda c: c.info.group_size is not None,
         "--quant_type {quant_type} has no calibration: its scales are powers of two; use "
         "weight_only_int4, or round while reading with the engine's --quant_type"),
    Clash(lambda c: c.do_ptq and c.do_gptq,
         "--do_ptq and --do_gptq exclude each other: the first rounds to the nearest weights; "
         "leave one of them out"),
    Clash(lambda c: c.do_gptq and not c.info.has_groups,
         "--do_gptq rounds weight-only types, and --quant_type is {quant_type}; use "
         "weight_only_int8, weight_only_int4 or w4a8"),
    Clash(lambda c: (c.do_awq or c.auto_clip) and not c.info.has_groups,
         "--do_awq and --auto_clip work on weight-only types, and --quant_type is {quant_type}; "
         "use --smooth, or weight_only_int4"),
    Clash(lambda c: (c.shift or (c.smooth and not c.do_awq)) and not c.info.has_smooth,
         "--shift and --smooth make int8 activations better, and --quant_type is {quant_type}; "
         "use a8w8, or --do_awq for weights alone"),
    Clash(lambda c: c.shift and not c.do_ptq,
         "--shift is for static activation scales; add --do_ptq"),
    Clash(lambda c: c.static_experts and not c.static_activations,
         "--static_experts is about static activation scales, and --quant_type is {quant_type}, "
         "--do_ptq {do_ptq}; use a8w8 or a8w8_fp8 with --do_ptq, or leave --static_experts out"),
    Clash(lambda c: c.cachekv and c.cachekv_quant_method in WHOLE_METHODS,
         "--cachekv_quant_method {cachekv_quant_method} has one scale for all heads, and an int8 "
         "cache has one for each; use {cachekv_quant_method}_headwise"),
    Clash(lambda c: c.shift_all_linears and not c.shift,
         "--shift_all_linears needs --shift"),
    Clash(lambda c: (c.smooth_all_linears or c.smooth_piecewise_search) and not c.smooth,
         "--smooth_all_linears and --smooth_piecewise_search need --smooth"),
    Clash(lambda c: c.smooth_piecewise_search and c.do_awq,
         "--smooth_piecewise_search and --do_awq both choose the input scales; leave one out"),
    Clash(lambda c: c.weight_quant_method in ("abs_max", "avg", "blockwise")
         and not c.info.has_blocks,
         "--weight_quant_method {weight_quant_method} is for a8w8_fp8, and --quant_type is "
         "{quant_type}; use abs_max_channel_wise or groupwise"),
    Clash(lambda c: (c.weight_quant_method == "groupwise" or c.weightonly_group_size != -1)
         and not c.info.has_groups,
         "groups (--weight_quant_method groupwise, --weightonly_group_size) are for weight-only "
         "types, and --quant_type is {quant_type}; leave them out"),
    Clash(lambda c: c.weight_quant_method == "blockwise" and c.do_ptq,
         "--weight_quant_method blockwise finds activation scales at run time; leave --do_ptq "
         "out"),
    Clash(lambda c: not (c.weight_symmetric or (c.info.is_weight_only and c.info.bits == 4)),
         "--weight_symmetric false is for weight_only_int4, and --quant_type is {quant_type}"),
    Clash(lambda c: c.search_alpha_min > c.search_alpha_max,
         "--search_alpha_min {search_alpha_min} is more than --search_alpha_max "
         "{search_alpha_max}; lower the first or raise the second"),
    Clash(lambda c: c.search_scale_min > c.search_scale_max,
         "--search_scale_min {search_scale_min} is more than --search_scale_max "
         "{search_scale_max}; lower the first or raise the second"),
)
NOTES: tuple[Clash, ...] = (
    Clash(lambda c: not c.cachekv and c.cachekv_quant_method != CACHE_METHODS[0],
         "--cachekv_quant_method has no effect here: the cache has scales with c8 in --quant_type "
         "alone, and it is {quant_type}"),
)
# fmt: on
# PaddleNLP's apply_gptq (llm/utils/quant.py) reads no quant_type: PaddleSlim's GPTQ makes 4 bits.
GPTQ_TYPE = find("int4").name
_GPTQ_NOTE = (
    f"--do_gptq without --quant_type makes {GPTQ_TYPE}, as PaddleNLP rounds then; the checkpoint "
    "has the codes, where PaddleNLP writes the rounded weights as floating point"
)


def check_device(device: str, inference_model: bool) -> None:
    """Raises UserError for a name of no device, and for plain Paddle on a GPU."""
    if kind_of(device) == "gpu" and not inference_model:
        raise UserError(
            f"--inference_model=false runs on the CPU, and --device is {device}; leave one of the "
            "two out"
        )


def _with_fp8(quant_type: str, letters: str) -> str:
    """PaddleNLP's use_fp8: the quant_type with float8 where it has int8. Raises UserError."""
    plain, fp8 = find("int8", "int8").name, find("e4m3", "e4m3").name
    kind = parse_quant_type(quant_type)
    if kind.scheme not in (plain, fp8) or sorted(letters.lower()) != ["a", "w"]:
        raise UserError(
            f"--use_fp8 {letters} with --quant_type {quant_type} is not available in this release "
            f"(allowed: WA with {plain}, which is {fp8}); a float8 cache needs no calibration: run "
            "the model with --cachekv_int8_type fp8"
        )
    return fp8 + "c8" * (kind.cache_type is not None)


@dataclass(frozen=True, kw_only=True)
class QuantConfig(Checked):
    """What one run quantizes, and how. Raises UserError where its parts do not fit together."""

    # fmt: off
    model_name_or_path: str = option(help=
        "Directory of the unquantized checkpoint, or a hub name in the local caches. Required.",
        group="Model and data")
    output_path: Path = option(help=
        "Directory to write the quantized checkpoint to. An interrupted run keeps what it has "
        "finished there, and the same command goes on from it. Required.",
        aliases=("output_dir",), kind="str", allowed=Path)
    data_file: str | None = option(None,
        'Calibration data: a text file, JSON lines {"src", "tgt"}, or a folder with quant.json or '
        "train.json. Not needed where nothing is calibrated.",
        aliases=("dataset_name_or_path",))
    dtype: str | None = option(None,
        "Type of the tensors that stay in floating point; auto, as when not given, is the "
        "checkpoint's.",
        allowed=DTYPES, null_words=(AUTO, "none", ""))
    batch_size: int = option(8,
        "Sequences per calibration batch.",
        aliases=("per_device_train_batch_size", "per_device_eval_batch_size"),
        allowed=BATCH)
    src_length: int = option(1024, "Tokens of a calibration sequence at most.", allowed=LENGTH)
    chat_template: str | None = option(None,
        "As in predictor.py: the tokenizer's own when not given; none turns it off.",
        null_words=())
    overwrite_output_dir: bool = option(False,
        "Begin anew where --output_path holds an interrupted or finished run.")
    inference_model: bool = option(True,
        "Run the layers with the compiled operators where they are built; else plain Paddle.")
    device: str = option("cpu",
        "cpu, gpu or gpu:N: where the layers run. Scales and codes are always found on the CPU.")
    quant_type: str = option("",
        "weight_only_int8, weight_only_int4, a8w8, a8w8_fp8 or w4a8 (other spellings too: wint8, "
        "w8a8, fp8, ...); with c8 in it, as in a8w8c8, the KV cache is int8 with calibrated "
        "scales. When not given, a8w8, and weight_only_int4 with --do_gptq.",
        group="Number format", flag_default=None)
    use_fp8: str = option("",
        "PaddleNLP's letters of what is float8 in an a8w8: WA, weights and activations, which is "
        "a8w8_fp8.",
        flag_default=None)
    weight_quant_method: str = option("abs_max_channel_wise",
        "Which weights share a scale: an output channel, a group of its inputs, the whole matrix "
        "(abs_max, avg: fp8 only) or a block of 128 x 128 (blockwise: fp8 only).",
        allowed=WEIGHT_METHODS)
    weightonly_group_size: int = option(-1,
        "Input channels per scale of weight-only types; -1 is one group, and 128 with "
        "--weight_quant_method groupwise.",
        aliases=("group_size",), allowed=GROUP_SIZES)
    weight_symmetric: bool = option(True, "4 bits without zero points; false: each group has one.")
    weight_search: bool = option(True,
        "Weight-only types: scales with the least squared error; false: the largest value's.")
    skip_list_names: tuple[str, ...] = option((),
        "Linears whose name contains one of these stay in floating point.")
    fp8_type: tuple[str, ...] = option(("e4m3", "e4m3"),
        "Formats of fp8 activations and weights.",
        availability=not_yet("e4m3 works for both.", "*e5m2*"))
    do_ptq: bool = option(False,
        "Calibrate static activation scales (a8w8, a8w8_fp8); without it they are found at run "
        "time for each token. Weight-only types need none.",
        group="Activation and cache scales")
    static_experts: bool = option(False,
        "Static activation scales for routed experts too, which then run on a CPU alone; without "
        "it each of their tokens finds its own.")
    ptq_step: int = option(32,
        "Calibration batches for activation and cache scales.", allowed=COUNT)
    act_quant_method: str = option("avg", "Observer of activations.", allowed=ACT_METHODS)
    cachekv_quant_method: str = option("avg_headwise",
        "Observer of keys and values, per head, of an int8 cache.",
        allowed=(*CACHE_METHODS, *WHOLE_METHODS))
    shift: bool = option(False,
        "Centre each input channel's range (Outlier Suppression+). Linears after a norm; with "
        "--shift_all_linears all.",
        aliases=("do_shift",), group="Shift, smooth, AWQ, clip")
    shift_all_linears: bool = option(False, "Shift every linear's input.")
    shift_sampler: str = option("ema",
        "How ranges of several batches become one: ema averages them, none takes the widest.",
        allowed=("ema", "none"), null_words=())
    shift_step: int = option(32, "Calibration batches for shift.", allowed=COUNT)
    smooth: bool = option(False,
        "SmoothQuant: move the spread of input channels into the weight. Linears after a norm; "
        "with --smooth_all_linears all.",
        aliases=("do_smooth",))
    smooth_all_linears: bool = option(False, "Smooth every linear's input.")
    smooth_sampler: str = option("none",
        "Inputs that the piecewise search tries scales on: none is the first batch's, multi_step "
        "those of all batches.",
        allowed=("none", "multi_step"), null_words=())
    smooth_step: int = option(32, "Calibration batches for smooth.", allowed=COUNT)
    smooth_piecewise_search: bool = option(False,
        "Search exponent and factor of each piece of channels in place of the exponent 0.5.",
        aliases=("do_piecewise_search",))
    smooth_k_piece: int = option(3, "Pieces of the piecewise search.", allowed=Range(1, 64))
    smooth_search_piece: bool = option(False,
        "Search the number of pieces too, up to --smooth_k_piece.")
    search_alpha_min: float = option(0.2, "Smallest exponent of the search.", allowed=SHARE)
    search_alpha_max: float = option(0.8, "Largest exponent of the search.", allowed=SHARE)
    search_scale_min: float = option(1.0, "Smallest factor of the search.", allowed=_FACTOR)
    search_scale_max: float = option(5.0, "Largest factor of the search.", allowed=_FACTOR)
    do_awq: bool = option(False, "AWQ: search input scales that protect important weights.")
    awq_step: int = option(8, "Calibration batches for AWQ.", allowed=COUNT)
    auto_clip: bool = option(False,
        "Search how far each group's range is clipped.",
        aliases=("do_autoclip", "autoclip"))
    autoclip_step: int = option(8, "Calibration batches for the clip search.", allowed=COUNT)
    do_gptq: bool = option(False,
        "GPTQ: round column by column, later columns make up for earlier errors.", group="GPTQ")
    gptq_step: int = option(8, "Calibration batches for GPTQ.", allowed=COUNT)
    gptq_percdamp: float = option(0.1,
        "Share of the Hessian's mean diagonal that is added to it.", allowed=SHARE_ABOVE)
    gptq_actorder: bool = option(True, "Columns with large inputs first.")
    gptq_static_groups: bool = option(True,
        "With act-order, keep groups of neighbouring columns; false: groups follow the order, and "
        "inputs are gathered by it at run time; compressed-tensors 0.20 no longer reads that.")
    notes: tuple[str, ...] = field(default=(), compare=False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = self.quant_type or (GPTQ_TYPE if self.do_gptq else find("int8", "int8").name)
        if self.use_fp8:
            chosen = _with_fp8(chosen, self.use_fp8)
        object.__setattr__(self, "quant_type", chosen)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        check_rules(RULES, self, values)
        if self.weight_quant_method == "groupwise" and self.weightonly_group_size == -1:
            object.__setattr__(self, "weightonly_group_size", GROUP_SIZE)
        if self.do_awq:  # it chooses the input scales
            object.__setattr__(self, "smooth", False)
        check_device(self.device, self.inference_model)
        if kind_of(self.device) not in ("cpu", "gpu"):
            raise UserError(
                f"--device {self.device} does not calibrate (allowed: cpu, gpu, gpu:N); use "
                "--device cpu: what it writes runs on every device"
            )
        if self.calibrated and self.data_file is None:
            raise UserError(
                f"{', '.join(self.calibrated)} needs calibration data; give --data_file"
            )

    def skips(self, prefixes: Sequence[str]) -> bool:
        """Whether a linear of these names stays in floating point."""
        return any(part in prefix for part in self.skip_list_names for prefix in prefixes)

    @property
    def scheme(self) -> str:
        """The scheme of the weights."""
        return parse_quant_type(self.quant_type).scheme

    @property
    def cachekv(self) -> bool:
        """Whether keys and values have static int8 scales."""
        return parse_quant_type(self.quant_type).cache_type is not None

    @property
    def info(self) -> SchemeInfo:
        """The scheme's row."""
        return scheme_info(self.scheme)

    @property
    def per_tensor(self) -> bool:
        """Whether a matrix has one scale."""
        return self.info.has_blocks and self.weight_quant_method in ("abs_max", "avg")

    @property
    def static_activations(self) -> bool:
        """Whether activation scales are calibrated."""
        return self.do_ptq and self.info.has_static_scales

    @property
    def scatters_groups(self) -> bool:
        """Whether GPTQ's groups are of columns that lie apart."""
        return (
            self.do_gptq
            and self.gptq_actorder
            and not self.gptq_static_groups
            and self.weightonly_group_size != -1
        )

    @property
    def uses_moments(self) -> bool:
        """Whether weights are rounded with the inputs' second moments."""
        return self.do_gptq or self.do_awq or self.auto_clip

    @property
    def calibrated(self) -> dict[str, int]:
        """What reads calibration data, by flag, and how many batches of them."""
        phases = (
            ("--do_ptq", self.static_activations, self.ptq_step),
            ("an int8 cache (c8)", self.cachekv, self.ptq_step),
            ("--shift", self.shift, self.shift_step),
            ("--smooth", self.smooth, self.smooth_step),
            ("--do_awq", self.do_awq, self.awq_step),
            ("--auto_clip", self.auto_clip, self.autoclip_step),
            ("--do_gptq", self.do_gptq, self.gptq_step),
        )
        return {name: count for name, on, count in phases if on}

    @property
    def num_batches(self) -> int:
        """Batches that the longest phase reads."""
        return max(self.calibrated.values(), default=0)

    @classmethod
    def from_flags(cls, flags: FlagValues) -> QuantConfig:
        """The config of a command line; raises UserError."""
        values = values_of(flags.values, cls)
        model = find_model_dir(values["model_name_or_path"])
        if gguf_of(model) is not None:
            raise UserError(
                f"--model_name_or_path {model} is GGUF, which is quantized already, or not "
                "calibrated from; pass the directory of the model's safetensors files"
            )
        made = cls(**{**values, "model_name_or_path": str(model)})
        said = {each.name: getattr(made, each.name) for each in fields(made)}
        notes = [note.message.format(**said) for note in NOTES if note.broken(made)]
        if made.do_gptq and not flags.given("quant_type"):
            notes.insert(0, _GPTQ_NOTE)
        return replace(made, notes=(*flags.notes, *notes))


# fmt: off
FLAGS: tuple[Flag, ...] = (
    *flags_of(QuantConfig),
    Flag(COMPAT, "do_qat", "bool", False,
         "Training with quantization.",
         availability=_TODAY),
    Flag(COMPAT, "qat_type", "str", None, "Format of --do_qat.",
         availability=_TODAY),
    Flag(COMPAT, "load_quant_model", "bool", False,
         "Evaluate a quantized checkpoint.",
         availability=not_yet("quant/evaluate.py takes its directory as a --quant_type.")),
    *without_effect(
        ("max_length", "int", 2048, "Longest training example.",
         "--src_length limits calibration sequences."),
        ("bf16", "bool", False, "Model in bfloat16.", "layers are calibrated in float32."),
        ("fp16", "bool", False, "Model in float16.", "layers are calibrated in float32."),
        ("fp16_opt_level", "str", "O2", "Mixed precision.", _NO_TRAINING),
        ("do_eval", "bool", False, "Evaluate during training.", _EVALUATE),
        ("eval_with_do_generation", "bool", False, "Evaluate by generating.", _EVALUATE),
        ("eval_accumulation_steps", "int", None, "Steps between moves of predictions.", _EVALUATE),
        ("recompute", "bool", False, "Recompute activations.", _NO_TRAINING),
        ("unified_checkpoint", "bool", True, "One format for all shards.",
         "checkpoints are always whole."),
        ("zero_padding", "bool", False, "Pack examples without padding.",
         "nothing is ever padded here."),
        ("save_sharding_stage1_model", "bool", False, "Sharded optimizer state.", _NO_TRAINING),
        ("do_quant_debug", "bool", False, "Debugging aid.", _NOT_USED),
        ("test_sample", "str", None, "Debugging aid.", _NOT_USED)),
)
# fmt: on


def parse_command_line(argv: Sequence[str]) -> FlagValues:
    """The flags of a command line; a .json file as its first word gives flags that it may change.

    Raises UserError, and SystemExit(0) after --help.
    """
    return parse_flags(with_file(argv, FLAGS), FLAGS, PROG, DESCRIPTION, USAGE)
