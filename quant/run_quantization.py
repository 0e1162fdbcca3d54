r"""Quantizes a checkpoint, layer by layer, with calibration data where the method needs it.

    python quant/run_quantization.py --model_name_or_path DIR --quant_type weight_only_int4 \
        --weight_quant_method groupwise --do_gptq --data_file calibration.txt --output_path OUT

Only one layer's weights are in memory at a time; hidden states lie in files. An interrupted run
goes on from its last finished layer when the same command is given again. Leaves with 0, 1, 2 or
128 + a signal as predictor.py does.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # run as a script: import from the checkout, not from this folder
    _HERE = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != _HERE]
    sys.path.insert(0, os.path.dirname(_HERE))

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.cli.command import run_command
from predict.errors import UserError
from predict.system.console import say
from predict.system.outputs import check_place, resumable, write_whole
from predict.system.signals import Signals
from quant.config import QuantConfig, parse_command_line

if TYPE_CHECKING:
    from predict.loading.sources import CheckpointSource
    from predict.nn.plans import WeightPlan
    from quant.calibrate import Batches, LayerQuantizer
    from quant.data import TokenArray
    from quant.state import RunState

# What a finished layer does not depend on: where it is stored, and how it is computed.
NOT_INPUTS = (
    "output_path",
    "overwrite_output_dir",
    "inference_model",
    "device",
    "model_name_or_path",
    "data_file",
)


@dataclass(frozen=True)
class QuantSummary:
    """What a run did: bytes of all tensors before and after, mean relative output error by kind."""

    bytes_before: int
    bytes_after: int
    num_tokens: int  # of calibration
    loss: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""

    def action(signals: Signals) -> int:
        flags = parse_command_line(sys.argv[1:] if argv is None else argv)
        config = QuantConfig.from_flags(flags)
        for note in config.notes:
            say(f"note: {note}")
        say(describe(config, run(config, signals=signals)))
        return 0

    return run_command(action)


def run(
    config: QuantConfig, progress: bool | None = None, signals: Signals | None = None
) -> QuantSummary:
    """Writes the quantized checkpoint of `config` to its --output_path.

    Everything is read and checked before any layer is computed. progress: whether to show a bar;
    None: when stderr is a terminal. signals: those that end the run. Raises UserError.
    """
    output = config.output_path
    check_place("output_path", output, {"model_name_or_path": config.model_name_or_path})
    data = None if config.data_file is None else os.path.realpath(config.data_file)
    if data is not None and Path(data).is_relative_to(os.path.realpath(output)):
        raise UserError(
            f"--output_path {output} holds the --data_file {config.data_file}; choose another "
            "--output_path"
        )
    if output.is_dir() and not os.access(output, os.W_OK | os.X_OK):
        raise UserError(f"--output_path {output} cannot be written: permission denied")
    with resumable("output_path", output, "the last finished layer"):
        return _run(config, progress, signals or Signals())


def _run(config: QuantConfig, progress: bool | None, signals: Signals) -> QuantSummary:
    from predict.loading.arrays import num_bytes
    from predict.loading.checkpoint import Checkpoint
    from predict.loading.layouts import quantization_config
    from predict.loading.model import read_spec
    from predict.loading.platform import platform_of
    from predict.loading.sources import CheckpointSource, check_sizes, with_stored_head
    from predict.models import weight_names
    from predict.nn.plans import plan_weights
    from predict.system.progress import Progress
    from quant.layer import check_layers
    from quant.methods import check_methods
    from quant.writer import float_dtype, write_config, write_tensors

    source_dir = Path(config.model_name_or_path)
    spec, reader = read_spec(source_dir)
    if quantization_config(reader):
        raise UserError(
            f"{reader.path} has a quantization_config, or lies beside one: this checkpoint is "
            "quantized already; pass the unquantized one"
        )
    names = weight_names(reader)
    check_layers(plan_weights(spec, names), reader)
    checkpoint = Checkpoint(source_dir)
    names = names.found_in(checkpoint.tensors)
    spec = with_stored_head(spec, names, checkpoint)
    check_sizes(spec, names, checkpoint)
    plan = plan_weights(spec, names)
    written = plan_weights(spec, names.with_separate_experts())
    source = CheckpointSource(checkpoint)
    check(config, plan, checkpoint, source)
    for note in (*reader.notes, *check_methods(config, written)):
        say(f"note: {note}")
    sequences = read_calibration(config) if config.calibrated else []
    state = _opened_state(config, sequences, spec.num_layers)
    platform = platform_of(config.device, config.inference_model)
    platform.make_current()
    from quant.calibrate import LayerQuantizer

    quantizer = LayerQuantizer(config, platform.backend)
    if state.num_done:
        say(f"going on after layer {state.num_done} of {spec.num_layers}")
    dtype = float_dtype(config, checkpoint, plan)
    layers = range(spec.num_layers)
    scale_files = [state.layer_path(index, ".json") for index in layers]
    try:
        if config.calibrated and state.num_done == 0:
            _embed(plan, source, sequences, state)
        state.save()
        with Progress(spec.num_layers, progress, unit="layer") as bar:
            for _ in range(state.num_done):
                bar.on_finished()
            for index in range(state.num_done, spec.num_layers):
                _quantize_layer(index, plan, written, source, quantizer, sequences, state, dtype)
                state.finish_layer(index)
                bar.on_finished()
                signals.check()
        after = write_tensors(
            config,
            source_dir,
            lambda: _others(plan, source, dtype),
            [state.layer_path(index, ".safetensors") for index in layers],
            scale_files,
        )
    except KeyboardInterrupt:
        without = " without --overwrite_output_dir" if config.overwrite_output_dir else ""
        say(
            f"{state.num_done} of {spec.num_layers} layers are kept in {state.folder}; the same "
            f"command{without} goes on after them"
        )
        raise
    loss = _mean_loss(scale_files)
    with signals.held("the checkpoint is complete in a moment"):
        write_config(config, source_dir, written)
        state.remove()
    before = sum(map(num_bytes, checkpoint.tensors.values()))
    return QuantSummary(before, after, sum(map(len, sequences)), loss)


def _opened_state(config: QuantConfig, sequences: Any, num_layers: int) -> RunState:
    """What an earlier run of the same inputs has kept; a new state without one."""
    from predict.loading.checkpoint import checkpoint_digest
    from quant.data import digest
    from quant.state import RunState

    inputs = {
        "model": checkpoint_digest(Path(config.model_name_or_path)),
        "data": digest(sequences),
    }
    named = (f.name for f in fields(config) if f.compare and f.name not in NOT_INPUTS)
    inputs |= {name: getattr(config, name) for name in named}
    return RunState.open(config.output_path, inputs, num_layers, config.overwrite_output_dir)


def check(config: QuantConfig, plan: WeightPlan, checkpoint: Any, source: CheckpointSource) -> None:
    """Raises UserError where the checkpoint is not whole, or the config does not fit it."""
    from predict.config.quantization import QuantSettings
    from predict.loading.build import expected_tensors
    from predict.loading.layouts.online import Online, check_group_size

    layout = Online(source, QuantSettings(), plan)
    checkpoint.check(expected_tensors(plan, layout), plan.ignored)
    skipped = 0
    for linear in plan.linears():
        if linear.head_parts or config.skips(linear.prefixes):
            skipped += 1
        else:
            check_group_size(linear, config.weightonly_group_size)
    if skipped == len(list(plan.linears())):
        raise UserError(
            f"--skip_list_names {','.join(config.skip_list_names)} leaves no linear to quantize; "
            "shorten it"
        )


def read_calibration(config: QuantConfig) -> list[TokenArray]:
    """The calibration sequences; raises UserError where there are none, or no tokenizer."""
    from predict.text.tokenizer import Tokenizer
    from quant.data import read_sequences

    assert config.data_file is not None  # QuantConfig's own check
    tokenizer = Tokenizer.from_dir(config.model_name_or_path, config.chat_template)
    wanted = config.num_batches * config.batch_size
    return read_sequences(config.data_file, tokenizer, config.src_length, wanted)


def describe(config: QuantConfig, summary: QuantSummary) -> str:
    """The last lines of a run."""
    gib = (summary.bytes_before / 2**30, summary.bytes_after / 2**30)
    lines = [
        f"{config.output_path}: {gib[1]:.3f} GiB of tensors, {gib[1] / gib[0]:.0%} of the "
        f"{gib[0]:.3f} GiB before"
    ]
    if summary.num_tokens:
        lines.append(f"calibrated with {summary.num_tokens} tokens")
    if summary.loss:
        shown = ", ".join(f"{kind} {value:.2e}" for kind, value in summary.loss.items())
        lines.append(f"mean relative output error of the linears: {shown}")
    if config.cachekv:
        lines.append("for the int8 cache, run it with --cachekv_int8_type static")
    return "\n".join(lines)


def _quantize_layer(
    index: int,
    plan: WeightPlan,
    written: WeightPlan,
    source: CheckpointSource,
    quantizer: LayerQuantizer,
    sequences: Sequence[TokenArray],
    state: RunState,
    dtype: str,
) -> None:
    """Computes one layer and writes its files, and its successor's inputs."""
    from predict.loading import safetensors_writer as safetensors_file
    from quant.layer import LayerWeights
    from quant.writer import layer_tensors

    spec, config = plan.spec, quantizer.config
    layer = LayerWeights.read(index, plan, source, written)
    batches: Batches | None = None
    output = None
    if sequences:
        from quant.calibrate import Batches

        lengths = tuple(map(len, sequences))
        shape = (sum(lengths), spec.hidden_size)
        batches = Batches(state.read_hidden(index, shape), lengths, config.batch_size)
        if index + 1 < spec.num_layers:
            output = state.new_hidden(index + 1, shape)
    ropes = _ropes(plan, max(map(len, sequences), default=1))
    result = quantizer.quantize(layer, batches, ropes, output)
    for note in result.notes:
        say(f"warning: {note}")
    if output is not None:
        output.flush()  # type: ignore[attr-defined]  # a memory map
    tensors, scales = layer_tensors(result, config, dtype)
    safetensors_file.write(state.layer_path(index, ".safetensors"), tensors)
    write_whole(state.layer_path(index, ".json"), json.dumps(scales).encode())


def _ropes(plan: WeightPlan, num_positions: int) -> tuple[Any, ...]:
    import paddle
    from predict.nn.rope import rope_table

    spec = plan.spec
    return tuple(
        paddle.to_tensor(rope_table(rope, dim, num_positions, spec.max_position))
        for dim, rope in zip(spec.rotary_dims, spec.ropes, strict=True)
    )


def _embed(
    plan: WeightPlan, source: CheckpointSource, sequences: Sequence[TokenArray], state: RunState
) -> None:
    """Writes the inputs of layer 0."""
    import numpy as np

    from predict.device.place import to_float32

    spec = plan.spec
    table = source.matrix((plan.embedding,), (spec.vocab_size, spec.hidden_size))
    ids = np.concatenate(sequences)
    if ids.max() >= spec.vocab_size:
        raise UserError(
            f"the tokenizer makes token {ids.max()}, and config.json says vocab_size "
            f"{spec.vocab_size}; they do not belong to one model"
        )
    hidden = state.new_hidden(0, (len(ids), spec.hidden_size))
    hidden[:] = to_float32(table[ids])
    hidden.flush()  # type: ignore[attr-defined]  # a memory map


def _others(plan: WeightPlan, source: CheckpointSource, dtype: str) -> Any:
    """Tensors that belong to no layer: embedding, last norm and LM head."""
    from predict.device.place import to_float32
    from predict.loading.safetensors_writer import as_stored

    spec = plan.spec
    names = {plan.embedding: (spec.vocab_size, spec.hidden_size)}
    if not spec.tie_word_embeddings:
        names[plan.head.prefixes[0] + ".weight"] = (spec.vocab_size, spec.hidden_size)
    made = {
        name: (dtype, as_stored(to_float32(source.matrix((name,), shape)), dtype))
        for name, shape in names.items()
    }
    assert plan.final_norm is not None  # check_layers
    name, size = plan.final_norm.weight, plan.final_norm.size
    return made | {name: (dtype, as_stored(to_float32(source.vector(name, size)), dtype))}


def _mean_loss(scale_files: Sequence[Path]) -> dict[str, float]:
    from quant.state import read_layer_scales

    found: dict[str, list[float]] = {}
    for path in scale_files:
        for kind, value in read_layer_scales(path)["loss"].items():
            found.setdefault(kind, []).append(value)
    return {kind: sum(values) / len(values) for kind, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
