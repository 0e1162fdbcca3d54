"""An export's files held against each other and the run, all before Paddle reads any of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from predict.config.engine import EngineConfig
from predict.config.schemes import unfolded
from predict.errors import UserError, quoted
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
from predict.loading.program import PROGRAM_ENDINGS, held_tensors
from predict.loading.program_check import ProgramFile, TensorType, read_program
from predict.nn.adapter_pages import page_tensors
from predict.nn.blocks import Block
from predict.nn.cuts import local_spec
from predict.nn.decoder import FINAL
from predict.nn.kinds import known_kinds
from predict.nn.places import fields_of
from predict.nn.rope import num_tables
from predict.nn.spec import DecoderSpec
from predict.ops.records import read_records, settings_of


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
    read = read_program(program, is_compiled, manifest.ranks is not None)
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
    inputs = fields | {name: TensorType(*kind) for name, kind in held.items()}
    return inputs, len(held) - len(pages)


def _parameter_misfits(
    manifest: Manifest, spec: DecoderSpec, program: ProgramFile
) -> Iterator[str]:
    """Of the parameters whose shape does not depend on scheme and device."""
    for index, given in enumerate(spec.ropes):
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
    known = [(block.kind, settings_of(block)) for block in spec.blocks()]
    kinds, head = known_kinds(), None
    schemes: set[str] = set()
    for operator, attributes in program.calls:
        if operator == "regatta_logits":
            head = attributes.get("scheme")
        elif "scheme" in attributes:
            schemes.add(unfolded(attributes["scheme"]))
        for kind, settings in read_records(attributes["blocks"]) if "blocks" in attributes else ():
            own = kinds.get(kind, Block)
            schemes |= {unfolded(settings.pop(n)) for n in own.linears if n in settings}
            fields = {n: v for n, v in settings.items() if n not in ("kv_format", "adapters")}
            alike = [fields for known_kind, fields in known if known_kind == kind]
            if alike and alike[0].get("form") == "cheaper":  # no flag asks for one
                fields["form"] = "cheaper"
            # The weights may have biases that config.json does not tell of.
            biases = {n: "1" for n in own.biases.values() if fields.get(n) == "1"}
            if fields not in [{**one, **biases} for one in alike]:
                yield f"a block of kind {quoted(kind)} is none of config.json's"
    layers = ",".join(sorted(schemes - {"dense"})) or "dense"
    if layers != manifest.scheme:
        yield f"its layers are {layers}, and scheme is {manifest.scheme}"
    if head != manifest.head_scheme:
        yield f"its LM head is {head}, and head_scheme is {manifest.head_scheme}"
