"""An export's files held against each other and the run, all before Paddle reads any of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.loading.manifest import (
    EXPORT,
    Manifest,
    check_degree,
    check_files,
    check_manifest,
    check_spec,
    load_manifest,
    rank_folder,
)
from predict.loading.parameter_file import check_parameters
from predict.loading.program import PROGRAM_ENDINGS, held_tensors, picture_tensors
from predict.loading.program_blocks import called_blocks
from predict.loading.program_check import ProgramFile, TensorType, read_program
from predict.loading.tower_program import check_tower
from predict.nn.adapter_pages import page_tensors
from predict.nn.cuts import local_spec
from predict.nn.decoder import FINAL
from predict.nn.places import fields_of
from predict.nn.rope import num_tables
from predict.nn.spec import DecoderSpec


def check_export(
    config: EngineConfig,
    spec: DecoderSpec,
    paddle_version: str,
    library_abi: int | None,
    rank: int | None = None,
) -> Manifest:
    """The manifest of the export of `config`, once all of the export is looked at.

    Raises UserError where it is not whole, not ours, or not for this run. From what
    is cheapest and says most: fields, flags, config.json, operators, tensors, digests. spec: of the
    export's config.json, a rank's for one of several. library_abi: of the loaded library, None
    without one. Of an export for several ranks each looks at its program, and the process that
    starts them, whose rank is None, at what they share.
    """
    directory = Path(config.model.model_name_or_path)
    manifest = load_manifest(directory)
    check_manifest(manifest, config, paddle_version, library_abi)
    check_spec(manifest, directory, spec if spec.share is None else spec.share.whole)
    if manifest.ranks is None or rank is not None:
        check_program(manifest, spec, directory, config.model.model_prefix, rank)
    if spec.vision is not None:
        check_tower(manifest, spec.vision, directory, config.model.model_prefix)
    check_files(manifest, directory, rank)
    return manifest


def part_of(manifest: Manifest, spec: DecoderSpec, rank: int) -> DecoderSpec:
    """The network of a rank's program. spec: the whole one's."""
    ranks = manifest.part(rank)
    return local_spec(spec, rank, ranks.size, unit=ranks.unit, whole_experts=ranks.whole_experts)


def part_of_run(config: EngineConfig, spec: DecoderSpec, rank: int) -> DecoderSpec:
    """What a rank of a run has of the network; of an export what its program is made for.

    Raises UserError where the network cannot be shared so, or was exported for other ranks.
    """
    model, ranks = config.model, config.ranks
    if model.mode == "static":
        manifest = load_manifest(model.model_name_or_path)
        check_degree(manifest, config)
        return part_of(manifest, spec, rank)
    degree = ranks.tensor_parallel_degree
    return local_spec(spec, rank, degree, whole_experts=ranks.has_whole_experts)


def check_program(
    manifest: Manifest, spec: DecoderSpec, directory: Path, prefix: str, rank: int | None = None
) -> None:
    """Raises UserError where a program is not on the list, not as the manifest says, or not whole.

    spec, rank: of the rank whose program it is; None: of one process. Reads operators and headers;
    nothing of the weights.
    """
    names = [f"{rank_folder(rank)}{prefix}.{ending}" for ending in PROGRAM_ENDINGS]
    program, parameters = (directory / name for name in names)
    unknown = [name for name in names if name not in manifest.files]
    if unknown:
        programs = [name for name in manifest.files if name.endswith(".pdiparams")]
        raise UserError(
            f"the export in {directory} has no {' and no '.join(unknown)} (its program: "
            f"{', '.join(programs) or 'none'}); name its stem with --model_prefix"
        )
    missing = [str(path) for path in (program, parameters) if not path.exists()]
    if missing:
        raise UserError(f"the exported program lacks {' and '.join(missing)}; {EXPORT}")
    is_compiled = manifest.library_abi is not None
    of_ranks, pictures = manifest.ranks is not None, spec.vision is not None
    read = read_program(program, is_compiled, of_ranks, pictures)
    problems = [*_misfits(manifest, spec, read)]
    if problems:
        raise UserError(
            f"{directory}: the program and manifest.json disagree: {'; '.join(problems)}; {EXPORT}"
        )
    check_parameters(parameters, read.parameters)


def _misfits(manifest: Manifest, spec: DecoderSpec, program: ProgramFile) -> Iterator[str]:
    """What the program was made for, where the manifest says something else."""
    inputs = [(name, str(kind)) for name, kind in program.inputs.items()]
    expected, num_caches = _expected_inputs(manifest, spec)
    wanted = [(name, str(kind)) for name, kind in expected.items()]
    if len(inputs) != len(wanted):
        with_adapters = "without" if manifest.adapters is None else "with"
        yield (
            f"it takes {len(inputs)} inputs, and {manifest.num_layers} num_layers of kv_format "
            f"{manifest.kv_format}, {with_adapters} adapters, make {len(wanted)}"
        )
    else:
        different = [pair for pair in zip(inputs, wanted, strict=True) if pair[0] != pair[1]]
        for got, want in different[:1]:
            yield (
                f"it takes {' '.join(got)}, and kv_format {manifest.kv_format}, dtype "
                f"{manifest.dtype}, num_kv_heads {manifest.num_kv_heads}, block_size "
                f"{manifest.block_size} and head_dim {manifest.head_dim} make it {' '.join(want)}"
            )
    logits, *others = program.outputs
    taps = manifest.taps or ()
    hidden, caches = others[: len(taps)], others[len(taps) :]
    if logits != TensorType("float32", (-1, manifest.vocab_size)):
        yield f"its logits are {logits}, and vocab_size is {manifest.vocab_size}"
    state = TensorType(manifest.dtype, (-1, spec.hidden_size))
    if [each for each in hidden if each != state]:
        yield f"its hidden states are {', '.join(map(str, hidden))}, not {state} each"
    layers = [int(tap.partition(".")[2]) for tap in taps if tap != FINAL]
    if max(layers, default=0) >= manifest.num_layers:
        yield f"taps are {', '.join(taps)}, and num_layers is {manifest.num_layers}"
    if len(caches) != num_caches:
        yield f"it returns {len(caches)} cache tensors and takes {num_caches}"
    yield from _parameter_misfits(manifest, spec, program)
    yield from _call_misfits(manifest, spec, program)


def _expected_inputs(manifest: Manifest, spec: DecoderSpec) -> tuple[dict[str, TensorType], int]:
    """What the manifest makes a program take, and how many of that are caches."""
    fields = {
        field.name: TensorType(
            field.dtype, tuple(size if isinstance(size, int) else -1 for size in field.shape)
        )
        for field in fields_of(spec, manifest.adapters is not None)
    }
    is_packed = manifest.device == "cpu" and manifest.library_abi is not None
    pages = {} if manifest.adapters is None else page_tensors(spec, -1, is_packed)
    held = held_tensors(spec, manifest.kv_format, manifest.block_size, manifest.dtype, pages)
    dtype = "float32" if manifest.library_abi is None else manifest.dtype
    seen = picture_tensors(spec, dtype)
    inputs = fields | {name: TensorType(*kind) for name, kind in (held | seen).items()}
    return inputs, len(held) - len(pages)


def _parameter_misfits(
    manifest: Manifest, spec: DecoderSpec, program: ProgramFile
) -> Iterator[str]:
    """Of the parameters whose shape does not depend on scheme and device."""
    # The first one is an input where tokens of pictures have rows behind its own.
    given_rows = spec.vision is not None and bool(spec.vision.axes)
    for index, given in enumerate(spec.ropes[given_rows:]):
        rope, length = program.parameters.get(f"ropes_{index}"), manifest.max_length
        if rope is None or rope.dtype != "float32" or len(rope.shape) != 2:
            yield f"its rotary table is {rope}, not float32 of two dims"
        elif rope.shape[0] != length * num_tables(given, length):
            yield f"its rotary table has {rope.shape[0]} rows, and max_length is {length}"
    norm = program.parameters.get("head_norm_weight")
    if spec.head.norm and norm != TensorType(manifest.dtype, (spec.hidden_size,)):
        yield (
            f"head_norm_weight is {norm}, and dtype is {manifest.dtype} and config.json's "
            f"hidden_size {spec.hidden_size}"
        )


def _call_misfits(manifest: Manifest, spec: DecoderSpec, program: ProgramFile) -> Iterator[str]:
    """Of the library's operators: the schemes of weights, and the records of blocks."""
    if manifest.library_abi is None:
        return
    found = called_blocks(program.calls, [*spec.blocks()])
    yield from found.misfits
    layers = ",".join(sorted(found.schemes - {"dense"})) or "dense"
    if layers != manifest.scheme:
        yield f"its layers are {layers}, and scheme is {manifest.scheme}"
    if found.head != manifest.head_scheme:
        yield f"its LM head is {found.head}, and head_scheme is {manifest.head_scheme}"
    if spec.vision is not None and spec.vision.axes:
        first = manifest.max_length * num_tables(spec.ropes[0], manifest.max_length)
        placed = [each for name, each in program.calls if name.startswith("regatta_write_places")]
        if [(each["first"], [*each["axes"]]) for each in placed] != [(first, [*spec.vision.axes])]:
            yield f"places of pictures are not behind row {first}, by config.json's axes"
