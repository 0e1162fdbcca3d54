"""What run_quantization.py takes: its flag table, and the frozen config that flags become.

Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from predict.cli.flags import Flag, FlagValues, no_effect, not_yet, parse_flags, with_file
from predict.config.quantization import parse_quant_type
from predict.config.schemes import GROUP_SIZES, SchemeInfo, find, scheme_info
from predict.device.devices import kind_of
from predict.errors import UserError
from predict.gguf.files import gguf_of
from predict.system.files import find_model_dir

PROG = "run_quantization.py"
DESCRIPTION = "Quantizes a checkpoint with calibration data, layer by layer."
USAGE = "--model_name_or_path DIR --quant_type NAME --output_path OUT [--flag [VALUE] ...]"

WEIGHT_METHODS = ("abs_max_channel_wise", "groupwise", "abs_max", "avg", "blockwise")
ACT_METHODS = ("avg", "abs_max", "percentile", "mse", "kl")
CACHE_METHODS = tuple(f"{method}_headwise" for method in ACT_METHODS)
GROUP_SIZE = 128

_MODEL = "Model and data"
_TYPE = "Number format"
_PTQ = "Activation and cache scales"
_SMOOTH = "Shift, smooth, AWQ, clip"
_GPTQ = "GPTQ"
_COMPAT = "Known from PaddleNLP"
_NO_TRAINING = no_effect("nothing is trained here.")

# fmt: off
FLAGS: tuple[Flag, ...] = (
    Flag(_MODEL, "model_name_or_path", "str", None,
         "Directory of the unquantized checkpoint, or a hub name in the local caches. Required."),
    Flag(_MODEL, "output_path", "str", None,
         "Directory to write the quantized checkpoint to. An interrupted run keeps what it has "
         "finished there, and the same command goes on from it. Required.",
         aliases=("output_dir",)),
    Flag(_MODEL, "data_file", "str", None,
         'Calibration data: a text file, JSON lines {"src", "tgt"}, or a folder with quant.json or '
         "train.json. Not needed where nothing is calibrated.",
         aliases=("dataset_name_or_path",)),
    Flag(_MODEL, "dtype", "str", None,
         "Type of the tensors that stay in floating point; when not given, the checkpoint's.",
         choices=("float32", "bfloat16", "float16")),
    Flag(_MODEL, "batch_size", "int", 8,
         "Sequences per calibration batch.",
         aliases=("per_device_train_batch_size", "per_device_eval_batch_size")),
    Flag(_MODEL, "src_length", "int", 1024,
         "Tokens of a calibration sequence at most."),
    Flag(_MODEL, "chat_template", "str", None,
         "As in predictor.py: the tokenizer's own when not given; none turns it off.",
         null_words=()),
    Flag(_MODEL, "overwrite_output_dir", "bool", False,
         "Begin anew where --output_path holds an interrupted or finished run."),
    Flag(_MODEL, "inference_model", "bool", True,
         "Run the layers with the compiled operators where they are built; else plain Paddle."),
    Flag(_MODEL, "device", "str", "cpu",
         "cpu, gpu or gpu:N: where the layers run. Scales and codes are always found on the CPU."),
    Flag(_TYPE, "quant_type", "str", find("int8", "int8").name,
         "weight_only_int8, weight_only_int4, a8w8, a8w8_fp8 or w4a8 (other spellings too: wint8, "
         "w8a8, fp8, ...); with c8 in it, as in a8w8c8, the KV cache is int8 with calibrated "
         "scales."),
    Flag(_TYPE, "weight_quant_method", "str", "abs_max_channel_wise",
         "Which weights share a scale: an output channel, a group of its inputs, the whole matrix "
         "(abs_max, avg: fp8 only) or a block of 128 x 128 (blockwise: fp8 only).",
         choices=WEIGHT_METHODS),
    Flag(_TYPE, "weightonly_group_size", "int", -1,
         "Input channels per scale of weight-only types; -1 is one group, and 128 with "
         "--weight_quant_method groupwise.",
         aliases=("group_size",)),
    Flag(_TYPE, "weight_symmetric", "bool", True,
         "4 bits without zero points; false: each group has one."),
    Flag(_TYPE, "weight_search", "bool", True,
         "Weight-only types: scales with the least squared error; false: the largest value's."),
    Flag(_TYPE, "skip_list_names", "strs", [],
         "Linears whose name contains one of these stay in floating point."),
    Flag(_TYPE, "fp8_type", "strs", ["e4m3", "e4m3"],
         "Formats of fp8 activations and weights.",
         availability=not_yet("e4m3 works for both.", "*e5m2*")),
    Flag(_PTQ, "do_ptq", "bool", False,
         "Calibrate static activation scales (a8w8, a8w8_fp8); without it they are found at run "
         "time for each token. Weight-only types need none."),
    Flag(_PTQ, "static_experts", "bool", False,
         "Static activation scales for routed experts too, which then run on a CPU alone; without "
         "it each of their tokens finds its own."),
    Flag(_PTQ, "ptq_step", "int", 32,
         "Calibration batches for activation and cache scales."),
    Flag(_PTQ, "act_quant_method", "str", "avg",
         "Observer of activations.", choices=ACT_METHODS),
    Flag(_PTQ, "cachekv_quant_method", "str", "avg_headwise",
         "Observer of keys and values, per head.", choices=CACHE_METHODS),
    Flag(_SMOOTH, "shift", "bool", False,
         "Centre each input channel's range (Outlier Suppression+). Linears after a norm; with "
         "--shift_all_linears all.",
         aliases=("do_shift",)),
    Flag(_SMOOTH, "shift_all_linears", "bool", False, "Shift every linear's input."),
    Flag(_SMOOTH, "shift_sampler", "str", "ema",
         "How ranges of several batches become one: ema averages them, none takes the widest.",
         choices=("ema", "none"), null_words=()),
    Flag(_SMOOTH, "shift_step", "int", 32, "Calibration batches for shift."),
    Flag(_SMOOTH, "smooth", "bool", False,
         "SmoothQuant: move the spread of input channels into the weight. Linears after a norm; "
         "with --smooth_all_linears all.",
         aliases=("do_smooth",)),
    Flag(_SMOOTH, "smooth_all_linears", "bool", False, "Smooth every linear's input."),
    Flag(_SMOOTH, "smooth_sampler", "str", "none",
         "Inputs that the piecewise search tries scales on: none is the first batch's, multi_step "
         "those of all batches.",
         choices=("none", "multi_step"), null_words=()),
    Flag(_SMOOTH, "smooth_step", "int", 32, "Calibration batches for smooth."),
    Flag(_SMOOTH, "smooth_piecewise_search", "bool", False,
         "Search exponent and factor of each piece of channels in place of the exponent 0.5.",
         aliases=("do_piecewise_search",)),
    Flag(_SMOOTH, "smooth_k_piece", "int", 3, "Pieces of the piecewise search."),
    Flag(_SMOOTH, "smooth_search_piece", "bool", False,
         "Search the number of pieces too, up to --smooth_k_piece."),
    Flag(_SMOOTH, "search_alpha_min", "float", 0.2, "Smallest exponent of the search."),
    Flag(_SMOOTH, "search_alpha_max", "float", 0.8, "Largest exponent of the search."),
    Flag(_SMOOTH, "search_scale_min", "float", 1.0, "Smallest factor of the search."),
    Flag(_SMOOTH, "search_scale_max", "float", 5.0, "Largest factor of the search."),
    Flag(_SMOOTH, "do_awq", "bool", False,
         "AWQ: search input scales that protect important weights."),
    Flag(_SMOOTH, "awq_step", "int", 8, "Calibration batches for AWQ."),
    Flag(_SMOOTH, "auto_clip", "bool", False,
         "Search how far each group's range is clipped.",
         aliases=("do_autoclip", "autoclip")),
    Flag(_SMOOTH, "autoclip_step", "int", 8, "Calibration batches for the clip search."),
    Flag(_GPTQ, "do_gptq", "bool", False,
         "GPTQ: round column by column, later columns make up for earlier errors."),
    Flag(_GPTQ, "gptq_step", "int", 8, "Calibration batches for GPTQ."),
    Flag(_GPTQ, "gptq_percdamp", "float", 0.1,
         "Share of the Hessian's mean diagonal that is added to it."),
    Flag(_GPTQ, "gptq_actorder", "bool", True, "Columns with large inputs first."),
    Flag(_GPTQ, "gptq_static_groups", "bool", True,
         "With act-order, keep groups of neighbouring columns; false: groups follow the order, and "
         "inputs are gathered by it at run time; compressed-tensors 0.20 no longer reads that."),
    Flag(_COMPAT, "do_qat", "bool", False,
         "Training with quantization.",
         availability=not_yet("--do_ptq, --do_gptq and --do_awq work.")),
    Flag(_COMPAT, "qat_type", "str", None, "Format of --do_qat.",
         availability=not_yet("--do_ptq, --do_gptq and --do_awq work.")),
    Flag(_COMPAT, "load_quant_model", "bool", False,
         "Evaluate a quantized checkpoint.",
         availability=not_yet("quant/evaluate.py takes its directory as a --quant_type.")),
    Flag(_COMPAT, "max_length", "int", 2048, "Longest training example.",
         availability=no_effect("--src_length limits calibration sequences.")),
    Flag(_COMPAT, "bf16", "bool", False, "Model in bfloat16.",
         availability=no_effect("layers are calibrated in float32.")),
    Flag(_COMPAT, "fp16", "bool", False, "Model in float16.",
         availability=no_effect("layers are calibrated in float32.")),
    Flag(_COMPAT, "fp16_opt_level", "str", "O2", "Mixed precision.", availability=_NO_TRAINING),
    Flag(_COMPAT, "do_eval", "bool", False, "Evaluate during training.",
         availability=no_effect("quant/evaluate.py evaluates.")),
    Flag(_COMPAT, "eval_with_do_generation", "bool", False, "Evaluate by generating.",
         availability=no_effect("quant/evaluate.py evaluates.")),
    Flag(_COMPAT, "recompute", "bool", False, "Recompute activations.",
         availability=_NO_TRAINING),
    Flag(_COMPAT, "unified_checkpoint", "bool", True, "One format for all shards.",
         availability=no_effect("checkpoints are always whole.")),
    Flag(_COMPAT, "zero_padding", "bool", False, "Pack examples without padding.",
         availability=no_effect("nothing is ever padded here.")),
    Flag(_COMPAT, "save_sharding_stage1_model", "bool", False, "Sharded optimizer state.",
         availability=_NO_TRAINING),
    Flag(_COMPAT, "do_quant_debug", "bool", False, "Debugging aid.",
         availability=no_effect("PaddleNLP does not use it either.")),
    Flag(_COMPAT, "test_sample", "str", None, "Debugging aid.",
         availability=no_effect("PaddleNLP does not use it either.")),
)
# fmt: on


@dataclass(frozen=True)
class Rule:
    """A combination of flags that makes no sense; `message` may name any flag's value in braces."""

    broken: Callable[[FlagValues], bool]
    message: str


def _scheme(flags: FlagValues) -> SchemeInfo:
    return scheme_info(parse_quant_type(flags["quant_type"]).scheme)


RULES: tuple[Rule, ...] = (
    Rule(
        lambda f: f["model_name_or_path"] is None,
        "--model_name_or_path is needed: the directory of an unquantized checkpoint",
    ),
    Rule(
        lambda f: f["output_path"] is None,
        "--output_path is needed: the directory to write the quantized checkpoint to",
    ),
    Rule(
        lambda f: _scheme(f).group_size is not None,
        "--quant_type {quant_type} has no calibration: its scales are powers of two; use "
        "weight_only_int4, or round while reading with the engine's --quant_type",
    ),
    Rule(
        lambda f: f["do_ptq"] and f["do_gptq"],
        "--do_ptq and --do_gptq exclude each other: the first rounds to the nearest weights; leave "
        "one of them out",
    ),
    Rule(
        lambda f: f["do_gptq"] and not _scheme(f).has_groups,
        "--do_gptq rounds weight-only types, and --quant_type is {quant_type}; use "
        "weight_only_int8, weight_only_int4 or w4a8",
    ),
    Rule(
        lambda f: (f["do_awq"] or f["auto_clip"]) and not _scheme(f).has_groups,
        "--do_awq and --auto_clip work on weight-only types, and --quant_type is {quant_type}; use "
        "--smooth, or weight_only_int4",
    ),
    Rule(
        lambda f: (f["shift"] or (f["smooth"] and not f["do_awq"])) and not _scheme(f).has_smooth,
        "--shift and --smooth make int8 activations better, and --quant_type is {quant_type}; "
        "use a8w8, or --do_awq for weights alone",
    ),
    Rule(
        lambda f: f["shift"] and not f["do_ptq"],
        "--shift is for static activation scales; add --do_ptq",
    ),
    Rule(
        lambda f: f["static_experts"] and not (f["do_ptq"] and _scheme(f).has_static_scales),
        "--static_experts is about static activation scales, and --quant_type is {quant_type}, "
        "--do_ptq {do_ptq}; use a8w8 or a8w8_fp8 with --do_ptq, or leave --static_experts out",
    ),
    Rule(
        lambda f: f["shift_all_linears"] and not f["shift"],
        "--shift_all_linears needs --shift",
    ),
    Rule(
        lambda f: (f["smooth_all_linears"] or f["smooth_piecewise_search"]) and not f["smooth"],
        "--smooth_all_linears and --smooth_piecewise_search need --smooth",
    ),
    Rule(
        lambda f: f["smooth_piecewise_search"] and f["do_awq"],
        "--smooth_piecewise_search and --do_awq both choose the input scales; leave one out",
    ),
    Rule(
        lambda f: (
            f["weight_quant_method"] in ("abs_max", "avg", "blockwise")
            and not _scheme(f).has_blocks
        ),
        "--weight_quant_method {weight_quant_method} is for a8w8_fp8, and --quant_type is "
        "{quant_type}; use abs_max_channel_wise or groupwise",
    ),
    Rule(
        lambda f: (
            (f["weight_quant_method"] == "groupwise" or f["weightonly_group_size"] != -1)
            and not _scheme(f).has_groups
        ),
        "groups (--weight_quant_method groupwise, --weightonly_group_size) are for weight-only "
        "types, and --quant_type is {quant_type}; leave them out",
    ),
    Rule(
        lambda f: f["weight_quant_method"] == "blockwise" and f["do_ptq"],
        "--weight_quant_method blockwise finds activation scales at run time; leave --do_ptq out",
    ),
    Rule(
        lambda f: (
            not (f["weight_symmetric"] or (_scheme(f).is_weight_only and _scheme(f).bits == 4))
        ),
        "--weight_symmetric false is for weight_only_int4, and --quant_type is {quant_type}",
    ),
    *(
        Rule(
            lambda f, name=name: f[f"{name}_min"] > f[f"{name}_max"],  # type: ignore[misc]
            f"--{name}_min {{{name}_min}} is more than --{name}_max {{{name}_max}}; lower the "
            "first or raise the second",
        )
        for name in ("search_alpha", "search_scale")
    ),
)


def check_device(device: str, inference_model: bool) -> None:
    """Raises UserError for a name of no device, and for plain Paddle on a GPU."""
    if kind_of(device) == "gpu" and not inference_model:
        raise UserError(
            f"--inference_model=false runs on the CPU, and --device is {device}; leave one of the "
            "two out"
        )


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """What one run quantizes, and how. Raises UserError where its parts do not fit together."""

    model_name_or_path: str
    output_path: Path
    scheme: str
    cachekv: bool = False  # static int8 scales of keys and values
    data_file: str | None = None
    dtype: str | None = None  # of what stays in floating point; None: the checkpoint's
    batch_size: int = 8
    src_length: int = 1024  # tokens
    chat_template: str | None = None
    overwrite: bool = False
    inference_model: bool = True
    device: str = "cpu"  # cpu | gpu | gpu:N
    weight_method: str = "abs_max_channel_wise"
    group_size: int = -1
    symmetric: bool = True
    weight_search: bool = True
    skip: tuple[str, ...] = ()
    do_ptq: bool = False
    static_experts: bool = False
    ptq_step: int = 32
    act_method: str = "avg"
    cache_method: str = "avg"
    shift: bool = False
    shift_all: bool = False
    shift_average: bool = True
    shift_step: int = 32
    smooth: bool = False
    smooth_all: bool = False
    smooth_many: bool = False
    smooth_step: int = 32
    piecewise: bool = False
    k_piece: int = 3
    search_piece: bool = False
    alpha_range: tuple[float, float] = (0.2, 0.8)
    scale_range: tuple[float, float] = (1.0, 5.0)
    do_awq: bool = False
    awq_step: int = 8
    auto_clip: bool = False
    autoclip_step: int = 8
    do_gptq: bool = False
    gptq_step: int = 8
    damping: float = 0.1
    act_order: bool = True
    static_groups: bool = True
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_device(self.device, self.inference_model)
        if kind_of(self.device) not in ("cpu", "gpu"):
            raise UserError(
                f"--device {self.device} does not calibrate (allowed: cpu, gpu, gpu:N); use "
                "--device cpu: what it writes runs on every device"
            )
        if self.needs_data and self.data_file is None:
            raise UserError(
                f"{', '.join(self.calibrated)} needs calibration data; give --data_file"
            )
        if self.group_size not in GROUP_SIZES:
            raise UserError(
                f"--weightonly_group_size {self.group_size} is not supported (allowed: "
                f"{', '.join(map(str, GROUP_SIZES))}; -1 is one scale per output channel)"
            )

    def skips(self, prefixes: Sequence[str]) -> bool:
        """Whether a linear of these names stays in floating point."""
        return any(part in prefix for part in self.skip for prefix in prefixes)

    @property
    def info(self) -> SchemeInfo:
        """The scheme's row."""
        return scheme_info(self.scheme)

    @property
    def per_tensor(self) -> bool:
        """Whether a matrix has one scale."""
        return self.info.has_blocks and self.weight_method in ("abs_max", "avg")

    @property
    def static_activations(self) -> bool:
        """Whether activation scales are calibrated."""
        return self.do_ptq and self.info.has_static_scales

    @property
    def scatters_groups(self) -> bool:
        """Whether GPTQ's groups are of columns that lie apart."""
        return self.do_gptq and self.act_order and not self.static_groups and self.group_size != -1

    @property
    def uses_moments(self) -> bool:
        """Whether weights are rounded with the inputs' second moments."""
        return self.do_gptq or self.do_awq or self.auto_clip

    @property
    def calibrated(self) -> tuple[str, ...]:
        """What reads calibration data, by flag."""
        wanted = {
            "--do_ptq": self.static_activations,
            "an int8 cache (c8)": self.cachekv,
            "--shift": self.shift,
            "--smooth": self.smooth,
            "--do_awq": self.do_awq,
            "--auto_clip": self.auto_clip,
            "--do_gptq": self.do_gptq,
        }
        return tuple(name for name, on in wanted.items() if on)

    @property
    def needs_data(self) -> bool:
        """Whether anything reads calibration data."""
        return bool(self.calibrated)

    @property
    def num_batches(self) -> int:
        """Batches that the longest phase reads."""
        steps = (
            (self.static_activations or self.cachekv, self.ptq_step),
            (self.shift, self.shift_step),
            (self.smooth, self.smooth_step),
            (self.do_awq, self.awq_step),
            (self.auto_clip, self.autoclip_step),
            (self.do_gptq, self.gptq_step),
        )
        return max((count for on, count in steps if on), default=0)

    @classmethod
    def from_flags(cls, flags: FlagValues) -> QuantConfig:
        """The config of a command line; raises UserError."""
        quant_type = parse_quant_type(flags["quant_type"])
        for rule in RULES:
            if rule.broken(flags):
                raise UserError(rule.message.format(**flags.values))
        group_size = flags["weightonly_group_size"]
        if flags["weight_quant_method"] == "groupwise" and group_size == -1:
            group_size = GROUP_SIZE
        model = find_model_dir(flags["model_name_or_path"])
        if gguf_of(model) is not None:
            raise UserError(
                f"--model_name_or_path {model} is GGUF, which is quantized already, or not "
                "calibrated from; pass the directory of the model's safetensors files"
            )
        output = Path(flags["output_path"])
        return cls(
            model_name_or_path=str(model),
            output_path=output,
            scheme=quant_type.scheme,
            cachekv=quant_type.cache_type is not None,
            data_file=flags["data_file"],
            dtype=flags["dtype"],
            batch_size=flags["batch_size"],
            src_length=flags["src_length"],
            chat_template=flags["chat_template"],
            overwrite=flags["overwrite_output_dir"],
            inference_model=flags["inference_model"],
            device=flags["device"],
            weight_method=flags["weight_quant_method"],
            group_size=group_size,
            symmetric=flags["weight_symmetric"],
            weight_search=flags["weight_search"],
            skip=tuple(flags["skip_list_names"]),
            do_ptq=flags["do_ptq"],
            static_experts=flags["static_experts"],
            ptq_step=flags["ptq_step"],
            act_method=flags["act_quant_method"],
            cache_method=flags["cachekv_quant_method"].removesuffix("_headwise"),
            shift=flags["shift"],
            shift_all=flags["shift_all_linears"],
            shift_average=flags["shift_sampler"] == "ema",
            shift_step=flags["shift_step"],
            smooth=flags["smooth"] and not flags["do_awq"],
            smooth_all=flags["smooth_all_linears"],
            smooth_many=flags["smooth_sampler"] == "multi_step",
            smooth_step=flags["smooth_step"],
            piecewise=flags["smooth_piecewise_search"],
            k_piece=flags["smooth_k_piece"],
            search_piece=flags["smooth_search_piece"],
            alpha_range=(flags["search_alpha_min"], flags["search_alpha_max"]),
            scale_range=(flags["search_scale_min"], flags["search_scale_max"]),
            do_awq=flags["do_awq"],
            awq_step=flags["awq_step"],
            auto_clip=flags["auto_clip"],
            autoclip_step=flags["autoclip_step"],
            do_gptq=flags["do_gptq"],
            gptq_step=flags["gptq_step"],
            damping=flags["gptq_percdamp"],
            act_order=flags["gptq_actorder"],
            static_groups=flags["gptq_static_groups"],
            notes=flags.notes,
        )


def parse_command_line(argv: Sequence[str]) -> FlagValues:
    """The flags of a command line; a .json file as its first word gives flags that it may change.

    Raises UserError, and SystemExit(0) after --help.
    """
    return parse_flags(with_file(argv, FLAGS), FLAGS, PROG, DESCRIPTION, USAGE)
