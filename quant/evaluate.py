r"""Perplexity, KL divergence, top-1 agreement, size and speed of quantizations, as one table.

    python quant/evaluate.py --model_name_or_path DIR --data_file heldout.txt \
        --quant_type weight_only_int8,weight_only_int4_g128,weight_only_int4_g128+gptq \
        --calibration_file calibration.txt --output_file table.json

Each row is compared with the unquantized model, window by window, through the engine's own decoder,
on the CPU or a GPU; rows are calibrated on the CPU. Leaves with 0, 1, 2 or 128 + a signal as
predictor.py does.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # run as a script: import from the checkout, not from this folder
    _HERE = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != _HERE]
    sys.path.insert(0, os.path.dirname(_HERE))

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.cli.command import run_command
from predict.cli.flags import FlagValues, parse_flags
from predict.config.cache import CACHE_TYPES
from predict.config.model import AUTO, DTYPES
from predict.config.schemes import scheme_info
from predict.device.devices import kind_of
from predict.errors import EXIT_FAILURE, UserError
from predict.system.console import say, show
from predict.system.files import find_model_dir
from predict.system.options import Checked, flags_of, option, values_of
from predict.system.outputs import check_output, locked
from predict.system.ranges import COUNT, LENGTH, MAX_INT64, Range
from quant.config import check_device
from quant.rows import UNQUANTIZED, QuantRow, parse_row

if TYPE_CHECKING:
    from predict.config.engine import EngineConfig
    from predict.llm import LLM
    from predict.system.progress import Progress
    from predict.system.signals import Signals
    from quant.config import QuantConfig
    from quant.data import TokenArray

PROG = "evaluate.py"
DESCRIPTION = "Measures what quantization costs and brings."
USAGE = "--model_name_or_path DIR --quant_type A,B,... --data_file TEXT [--flag [VALUE] ...]"
DECODE_PROMPT, DECODE_TOKENS, WARM_UP = 32, 64, 4  # tokens


@dataclass(frozen=True)
class Result:
    """One row of the table; sizes in bytes, KL in nats per token."""

    perplexity: float
    perplexity_ratio: float
    kl: float
    top1_agreement: float
    weight_bytes: int
    decode_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Checked):
    """What one run measures."""

    # fmt: off
    model_name_or_path: str = option(help=
        "Directory of the unquantized checkpoint, or a hub name in the local caches. Required.",
        group="Model and rows")
    rows: tuple[QuantRow, ...] = option(help=
        "Rows of the table: TYPE[_gN][+METHOD...][@CACHE], or directories of quantized "
        "checkpoints. TYPE is a --quant_type of predictor.py, or none. METHOD calibrates first: "
        "ptq, smooth, piecewise, shift, gptq, awq, clip, asym. CACHE is dynamic, static, fp8 or "
        "int4. Required.",
        name="quant_type", kind="strs", allowed=tuple)
    cachekv_int8_type: str | None = option(None,
        "KV cache of the rows that name none.", allowed=CACHE_TYPES)
    weightonly_group_size: int = option(-1,
        "Group size of the weight-only rows that name none; -1 is one group.")
    skip_list_names: tuple[str, ...] = option((),
        "Linears with one of these in their name stay in --dtype.")
    data_file: str = option("",
        'Held-out text, or JSON lines {"src", "tgt"}; when not given, heldout.txt of the model.',
        group="Texts and results", flag_default=None)
    calibration_file: str | None = option(None,
        "Another text, for rows with a METHOD or the static cache; when not given, "
        "calibration.txt of the model.")
    output_file: str | None = option(None, "Write the table as JSON.")
    src_length: int = option(1024, "Tokens of a window.", allowed=LENGTH)
    max_tokens: int | None = option(None,
        "Stop after about this many tokens of the held-out text.", allowed=Range(2, MAX_INT64))
    ptq_step: int = option(32, "Calibration batches of every method.", allowed=COUNT)
    dtype: str = option(AUTO,
        "Type of activations and of what is not quantized; auto, as when not given, is the "
        "checkpoint's.",
        group="Device", allowed=(*DTYPES, AUTO), flag_default=None,
        null_words=(AUTO, "none", ""))
    device: str = option("cpu",
        "cpu, gpu, gpu:N, or another type that the installed Paddle has (npu, npu:1, ...). When "
        "not given: gpu where one is usable and the compiled operators run, else cpu.",
        flag_default=None)
    inference_model: bool = option(True,
        "Use the compiled operators; false: plain Paddle. A type that the compiled operators of "
        "the CPU lack runs on plain Paddle, beside an unquantized model on plain Paddle.")
    block_size: int = option(64, "Tokens per block of the KV cache.")
    # fmt: on
    notes: tuple[str, ...] = ()  # one line each, for stderr

    @classmethod
    def from_flags(cls, flags: FlagValues) -> EvaluateConfig:
        """The config of a command line; every file and name is checked. Raises UserError."""
        from quant.data import find_data_file

        values = values_of(flags.values, cls)
        if flags["src_length"] < 2:
            raise UserError(
                f"--src_length is {flags['src_length']}, and a window needs 2 tokens at least: "
                "each is told from those before it"
            )
        model = find_model_dir(values["model_name_or_path"])
        cache, group_size = flags["cachekv_int8_type"], flags["weightonly_group_size"]
        rows = tuple(parse_row(text, cache, group_size) for text in values["rows"])
        names = [row.name for row in rows]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"--quant_type has {name} more than once")
        data_file = flags["data_file"] or _beside(model, "heldout.txt")
        if data_file is None:
            raise UserError("--data_file is needed: a text that the model was not trained on")
        calibration = flags["calibration_file"] or _beside(model, "calibration.txt")
        for row in rows:
            if row.calibrates and calibration is None:
                raise UserError(f"{row.name} needs calibration data; give --calibration_file")
        if calibration is not None and Path(calibration).resolve() == Path(data_file).resolve():
            raise UserError(
                f"--calibration_file and --data_file are both {data_file}: calibrating on the text "
                "that is measured hides the loss; give two texts"
            )
        find_data_file(data_file)
        if flags["output_file"] is not None:
            files = {"data_file": data_file, "calibration_file": calibration}
            check_output(
                "output_file",
                flags["output_file"],
                files=files,
                folders={"model_name_or_path": model},
            )
            for row in rows:
                folders = {"quant_type": row.checkpoint}
                check_output("output_file", flags["output_file"], folders=folders)
        device, why_cpu = device_of(flags)
        values |= {"model_name_or_path": str(model), "rows": rows, "device": device}
        values |= {"data_file": data_file, "calibration_file": calibration}
        if values.get("dtype", AUTO) == AUTO:
            values["dtype"] = _dtype(model, device, rows)
        config = cls(**values, notes=(*flags.notes, *([why_cpu] if why_cpu else [])))
        for row in rows:
            config.check(row)
        return config

    def check(self, row: QuantRow) -> None:
        """Raises UserError where a row cannot be made, before any is measured."""
        from predict.config.schemes import check_support
        from predict.loading.layouts.online import check_group_size
        from predict.loading.model import read_spec
        from predict.models import weight_names
        from predict.nn.plans import plan_weights
        from quant.data import find_data_file

        engine_config(self, row, self.model_name_or_path)  # its own checks
        check_device(self.device, self.inference_model)
        if kind_of(self.device) == "gpu" and row.quant_type is not None:
            check_support(row.quant_type, self.device, True, self.dtype, None, row.group_size)
        if row.calibrates:
            find_data_file(str(self.calibration_file), "--calibration_file")
            self.quantization(row, Path("not made yet"))
        if row.group_size != -1:
            spec, reader = read_spec(self.model_name_or_path)
            for linear in plan_weights(spec, weight_names(reader)).linears():
                if not any(
                    part in prefix for part in self.skip_list_names for prefix in linear.prefixes
                ):
                    check_group_size(linear, row.group_size)

    def quantization(self, row: QuantRow, folder: Path) -> QuantConfig:
        """How run_quantization.py makes a row's checkpoint in `folder`. Raises UserError."""
        from quant.config import QuantConfig, parse_command_line

        words = ["--model_name_or_path", self.model_name_or_path, "--output_path", str(folder)]
        words += ["--data_file", str(self.calibration_file)]
        for method in ("ptq", "smooth", "shift", "awq", "autoclip", "gptq"):
            words += [f"--{method}_step", str(self.ptq_step)]
        if self.skip_list_names:
            words += ["--skip_list_names", ",".join(self.skip_list_names)]
        return QuantConfig.from_flags(parse_command_line([*words, *row.quantization_flags()]))


def _dtype(model: Path, device: str, rows: Sequence[QuantRow]) -> str:
    """The checkpoint's dtype, or the nearest that runs all rows."""
    from predict.config.engine import EngineConfig
    from predict.loading.defaults import with_model_defaults
    from predict.loading.model import read_spec

    quant_type = next((row.quant_type for row in rows if row.quant_type is not None), None)
    config = EngineConfig(model_name_or_path=str(model), device=device, quant_type=quant_type)
    return with_model_defaults(config, *read_spec(model)).model.dtype


def device_of(flags: FlagValues) -> tuple[str, str]:
    """The device that is asked for, or what predictor.py would take and a line that says so."""
    from predict.device.devices import default_name, on_cpu

    if flags["device"] is not None:
        return str(flags["device"]), ""
    if not flags["inference_model"]:
        return "cpu", on_cpu("plain Paddle runs there alone")
    return default_name()


FLAGS = flags_of(EvaluateConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""

    def action(signals: Signals) -> int:
        words = sys.argv[1:] if argv is None else argv
        flags = parse_flags(words, FLAGS, PROG, DESCRIPTION, USAGE)
        config = EvaluateConfig.from_flags(flags)
        for note in config.notes:
            say(f"note: {note}")
        if config.output_file is None:
            return 0 if show(table(run(config))) else EXIT_FAILURE
        with locked("output_file", config.output_file):
            from predict.bench.report import write_json

            results = run(config)
            values = {name: asdict(result) for name, result in results.items()}
            write_json(values, config.output_file)
        show(table(results))
        return 0

    return run_command(action)


def run(config: EvaluateConfig, progress: bool | None = None) -> dict[str, Result]:
    """Results by row, the unquantized model's first, in the order of the command line.

    progress: whether to show a bar; None: when stderr is a terminal. Raises UserError.
    """
    from predict.system.progress import Progress
    from predict.text.tokenizer import Tokenizer
    from quant.data import read_sequences
    from quant.run_quantization import run as quantize

    tokenizer = Tokenizer.from_dir(config.model_name_or_path, "none")
    windows = [
        w for w in read_sequences(config.data_file, tokenizer, config.src_length) if len(w) > 1
    ]
    if config.max_tokens is not None:
        windows = windows[: -(-config.max_tokens // config.src_length)]
    if not windows:
        raise UserError(
            f"--data_file {config.data_file} has no two tokens in a row: nothing can be told from "
            "what stands before it; give a longer text"
        )
    num_tokens = sum(map(len, windows))
    if num_tokens < config.src_length and config.max_tokens is None:
        say(
            f"warning: --data_file {config.data_file} has {num_tokens} tokens, less than one "
            f"window of --src_length {config.src_length}: numbers of so short a text say little"
        )
    results: dict[str, Result] = {}
    references: dict[bool | None, Model] = {}  # by --inference_model
    rows = [QuantRow(UNQUANTIZED, None), *(row for row in config.rows if row.name != UNQUANTIZED)]
    with (
        tempfile.TemporaryDirectory(prefix="regatta-evaluate-") as folder,
        Progress(len(rows) * len(windows), progress, unit="window") as bar,
    ):
        for number, row in enumerate(rows):
            directory = row.checkpoint or config.model_name_or_path
            if row.calibrates:
                directory = str(Path(folder) / str(number))
                quantize(config.quantization(row, Path(directory)))
            engine = engine_config(config, row, directory)
            if engine.model.inference_model not in references:
                plain = engine_config(
                    config, rows[0], config.model_name_or_path, engine.model.inference_model
                )
                references[engine.model.inference_model] = Model(plain)
            reference = references[engine.model.inference_model]
            # No name for the row's model: it is gone before the next one takes its memory.
            results[row.name] = measure(
                reference if number == 0 else Model(engine), reference, windows, bar
            )
    return results


def engine_config(
    config: EvaluateConfig, row: QuantRow, directory: str, inference_model: bool | None = None
) -> EngineConfig:
    """The engine of a row, whose checkpoint is in `directory`. Raises UserError.

    inference_model: None chooses the compiled operators where they have the row's type.
    """
    from predict.config.engine import EngineConfig

    quant_type = None if row.calibrates else row.quant_type
    if inference_model is None:
        inference_model = config.inference_model and is_compiled_for(config, row)
    tokens = config.src_length + DECODE_PROMPT + DECODE_TOKENS
    return EngineConfig(
        model_name_or_path=directory,
        dtype=config.dtype,
        device=config.device,
        inference_model=inference_model,
        attention="append" if inference_model else "reserved",
        block_size=config.block_size,
        src_length=config.src_length,
        max_length=tokens,
        prefix_caching=False,
        quant_type=quant_type,
        weightonly_group_size=-1 if quant_type is None else row.group_size,
        skip_list_names=() if quant_type is None else config.skip_list_names,
        cachekv_int8_type=row.cache,
        chat_template="none",
    )


def is_compiled_for(config: EvaluateConfig, row: QuantRow) -> bool:
    """Whether the CPU's compiled operators have the row's type; on a GPU nothing else runs."""
    from predict.config.schemes import check_support

    if row.quant_type is None or config.device != "cpu":
        return True
    try:
        check_support(row.quant_type, config.device, compiled=True)
    except UserError:
        return False
    return True


class Model:
    """One engine, and a cache of its own for windows."""

    def __init__(self, config: EngineConfig):
        """Loads the engine; raises UserError."""
        from predict.engine.kv_cache import allocate_caches
        from predict.llm import LLM
        from predict.loading.cache_scales import head_scales
        from predict.loading.model import read_spec
        from predict.nn.places import placing_of

        spec, _ = read_spec(config.model.model_name_or_path)
        if spec.prefix is not None:
            raise UserError(
                f"{config.model.model_name_or_path}: the tokens of this model's prompts see those "
                "behind them, so that a text has no perplexity; evaluate another model"
            )
        self.llm = LLM(config)

        self.config = config = self.llm.config  # a checkpoint may bring its cache type
        self.placing = placing_of(spec, config.max_length)
        self.place = self.llm.platform.device.place()
        kv_format = spec.cache_format(config.kv_format)
        scales = head_scales(kv_format, config.model.model_name_or_path, spec)
        self.caches = allocate_caches(
            spec,
            -(-config.scheduling.src_length // config.cache.block_size),
            config.cache.block_size,
            config.model.dtype,
            config.kv_format,
            scales,
        )

    def logits(self, window: TokenArray) -> Any:
        """float32 logits [n - 1, vocab_size] of a window's tokens but the last, in one step."""
        import paddle
        from predict.nn.decoder import forward
        from predict.nn.inputs import RowKind, to_tensors
        from quant.layer import first_step

        inputs = first_step(window, self.config.cache.block_size)
        if self.placing is not None:
            inputs = self.placing.placed(inputs, [self.placing.of(window.tolist())])
        assert self.llm.decoder is not None  # the mode is dynamic
        with paddle.no_grad():
            tensors = to_tensors(inputs, self.place)
            decoder, kind = self.llm.decoder, RowKind.ALL
            found, _ = forward(self.llm.platform.backend, decoder, tensors, self.caches, rows=kind)
        assert found.logits is not None
        return found.logits.numpy()[:-1]


def measure(model: Model, reference: Model, windows: Sequence[TokenArray], bar: Progress) -> Result:
    """One row, against `reference`, which may be the same."""
    from quant.metrics import Comparison

    comparison = Comparison()
    for window in windows:
        expected = reference.logits(window)
        logits = expected if model is reference else model.logits(window)
        comparison.update(logits, expected, window[1:])
        bar.on_finished()
    return Result(
        comparison.perplexity,
        comparison.perplexity_ratio,
        comparison.kl,
        comparison.top1_agreement,
        weight_bytes(model.llm),
        decode_tokens_per_s(model.llm, windows[0]),
    )


def weight_bytes(llm: LLM) -> int:
    """Bytes of the weights, scales and embedding included, as the compiled operators hold them."""
    from predict.nn.decoder import map_tensors

    decoder = llm.decoder
    assert decoder is not None  # the mode is dynamic
    total = 0

    def count(path: str, tensor: Any) -> Any:
        nonlocal total
        if not path.startswith("ropes_"):
            total += tensor.size * tensor.element_size()
        return tensor

    map_tensors(decoder, count)
    if llm.platform.compiled is None:
        # Plain Paddle has a byte for each 4-bit code.
        for block in decoder.blocks():
            stored = (
                each for each in block.linears().values() if scheme_info(each.scheme).bits == 4
            )
            codes = (each.tensors[0] for each in stored)
            total -= sum(tensor.size // 2 for tensor in codes)
    return int(total)


def decode_tokens_per_s(llm: LLM, window: TokenArray) -> float:
    """Tokens per second of one sequence after its prompt; the median between two tokens."""
    from statistics import median

    from predict.request import SamplingParams

    params = SamplingParams(
        max_new_tokens=WARM_UP + DECODE_TOKENS, temperature=0.0, ignore_eos=True
    )
    prompt = [int(token) for token in window[:DECODE_PROMPT]]
    (output,) = llm.generate([prompt], params)
    return 1.0 / median(output.metrics.inter_token_latencies[WARM_UP:])


def table(results: dict[str, Result]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| weights and cache | perplexity | ratio | KL, nats | same top token | weights, MiB "
        "| decode, tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        lines.append(
            f"| {name} | {result.perplexity:.3f} | {result.perplexity_ratio:.4f} "
            f"| {result.kl:.5f} | {result.top1_agreement:.2%} | {result.weight_bytes / 2**20:.1f} "
            f"| {result.decode_tokens_per_s:.1f} |"
        )
    return "\n".join(lines)


def _beside(model: Path, name: str) -> str | None:
    path = model / name
    return str(path) if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
