r"""Exports a checkpoint to a static model that `predict/predictor.py --mode static` runs.

    python export/export_model.py --model_name_or_path DIR --inference_model --output_path OUT \
        --dtype float32

Takes the predictor's flags, --output_path and --overwrite. Traces the same decoder that dynamic
mode calls, and writes <prefix>.json, <prefix>.pdiparams, config, tokenizer files and manifest.json:
the same bytes for the same model and flags. Leaves with 0, 1 (a full disk, or an error inside), 2
(wrong flags, files or model) or 128 + the number of the signal that ended it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from export.output_place import Kind, files_of, place_for, unbroken, written
from predict.cli.command import command
from predict.cli.flags import FLAGS, Flag, FlagValues, RunOptions, parse_flags
from predict.cli.run_config import PredictorConfig
from predict.config.engine import EngineConfig
from predict.device.devices import check_static
from predict.errors import EXIT_FAILURE, UserError
from predict.request import SamplingParams
from predict.system.console import say, show
from predict.system.files import read_json_object
from predict.system.options import flags_of
from predict.system.signals import Signals, kept

if TYPE_CHECKING:
    from predict.loading.manifest import Manifest
    from predict.loading.vision import TowerWeights
    from predict.nn.cache_formats import HeadScales, KvFormat
    from predict.nn.decoder import Decoder
    from predict.nn.hf_config import ConfigReader
    from predict.nn.spec import DecoderSpec

OWN_FLAGS = (
    Flag("Input and output", "output_path", "str", None, "Directory to write the static model to."),
    Flag(
        "Input and output",
        "overwrite",
        "bool",
        False,
        "Replace what is left of an earlier export in --output_path, too; one that is whole, and "
        "alone there, is replaced without it.",
    ),
    Flag(
        "Adapters",
        "enable_lora",
        "bool",
        False,
        "The program takes LoRA adapters of requests: its runs may have --lora_modules.",
    ),
    Flag(
        "Input and output",
        "runtime",
        "bool",
        False,
        "Write a folder for the C++ runtime in place of a static model: no program is traced.",
    ),
    Flag(
        "Input and output",
        "target",
        "str",
        None,
        "With --runtime: the processors that run the folder, x86_64 or aarch64; by default this "
        "machine's kind. Weights are packed for them on any machine.",
    ),
)
WHAT = "the static model"
# Weights live in the program; everything else of a checkpoint goes along.
COPIED = ("*.json", "*.model", "merges.txt", "vocab.txt", "*.jinja", "*.tiktoken")
POOLING = "pooling.safetensors"  # predict.loading.pooling writes it
NOT_COPIED = ("*.index.json", "manifest.json", "modules.json")
# Flags of a run, which PaddleNLP's scripts pass here too: none changes the program.
OF_A_RUN = (
    *(
        flag.name
        for flag in flags_of(RunOptions, SamplingParams)
        if flag.name not in ("max_new_tokens", "task")
    ),
    *("decode_strategy", "prefix_path", "export_precache"),
    *("lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras"),
)


def export_model(
    config: EngineConfig,
    output_path: Path,
    overwrite: bool = False,
    signals: Signals | None = None,
    enable_lora: bool = False,
    gives_states: bool = False,
    task: str = "generate",
) -> None:
    """Writes the static model of `config` to `output_path`, a new or an empty folder.

    It comes to be there whole, at the end; until then it is a folder beside. overwrite: replaces an
    earlier export. signals: those that end the run, which wait while the folder is put in place.
    enable_lora: the program takes adapters of requests. gives_states: it gives the hidden states
    that the config's drafter reads, and what the drafter shares with the model lies beside it.
    task: embed, for one that gives hidden states too, as those of models that make no text always
    do.
    Raises UserError where the checkpoint cannot be read or the folder not written.
    """
    with kept():
        # First of all that imports it: Paddle's import, later, takes signals from its threads.
        import numpy  # noqa: F401

    check_static(config.model.device)
    _check_adapters(config, enable_lora)
    _check_ranks(config, enable_lora)
    prefix = config.model.model_prefix
    if not prefix or prefix != Path(prefix).name or prefix.startswith("."):
        raise UserError(
            f"--model_prefix {prefix!r} is the stem of files in --output_path; give a name without "
            "folders that does not begin with a dot"
        )
    with place_for(config, output_path, overwrite, export_kind()):
        _export(config, output_path, signals, enable_lora, gives_states, task)


def _check_adapters(config: EngineConfig, enable_lora: bool) -> None:
    if config.adapters.is_used and not enable_lora:
        raise UserError(
            "--lora_modules names adapters of requests, and a program takes them only when "
            "exported with --enable_lora; add it, merge one adapter with --lora_path, or leave "
            "--lora_modules out"
        )


def _check_ranks(config: EngineConfig, enable_lora: bool) -> None:
    degree = config.ranks.tensor_parallel_degree
    if degree == 1:
        return
    if enable_lora:
        raise UserError(
            "--enable_lora is of programs for one process, and --tensor_parallel_degree is "
            f"{degree}; leave one of the two out"
        )
    if config.model.inference_model is False:
        raise UserError(
            f"--tensor_parallel_degree {degree} exports programs that call the compiled operators, "
            "which add over ranks; leave out --inference_model false"
        )


def export_kind() -> Kind:
    """What this writes: a static model."""
    from predict.loading.manifest import FILE_NAME, RANK_FOLDER, load_manifest

    def sizes(folder: Path) -> dict[str, int]:
        return {name: file.num_bytes for name, file in load_manifest(folder).files.items()}

    patterns = (*COPIED, "*.pdiparams", "shared.safetensors", "*_tower.safetensors", POOLING)
    return Kind(WHAT, FILE_NAME, patterns, sizes, RANK_FOLDER)


def _export(
    config: EngineConfig,
    output_path: Path,
    signals: Signals | None,
    enable_lora: bool,
    gives_states: bool,
    task: str,
) -> None:
    from predict.device import library
    from predict.loading.cache_scales import head_scales
    from predict.loading.defaults import with_model_defaults
    from predict.loading.drafters.shared import open_shared, write_shared
    from predict.loading.layouts import with_stored_cache
    from predict.loading.manifest import rank_folder
    from predict.loading.model import load_decoder, read_spec
    from predict.loading.platform import platform_of
    from predict.loading.pooling import read_pooling, save_pooling
    from predict.loading.states import check_states
    from predict.loading.vision import open_tower_alone
    from predict.nn.adapter_pages import page_tensors
    from predict.nn.cuts import local_spec
    from predict.nn.decoder import FINAL
    from predict.sight import with_eyes
    from predict.system.progress import Progress

    source = Path(config.model.model_name_or_path)
    # One process makes the programs of all ranks, on the first of their GPUs.
    device, _, _ = config.model.device.partition(",")
    platform = platform_of(device, config.model.inference_model)
    config = config.changed(inference_model=platform.inference_model)  # what it is traced with
    spec, reader = read_spec(source, config.model.model_type)
    embeds = task == "embed" or not spec.makes_text
    spec = with_eyes(config, spec, platform.gpu is not None, reads_text=embeds)
    check_states(config, spec, platform.compiled is not None, exports=True)
    spec = spec.with_forms(config.model.latent_form)
    config = with_model_defaults(with_stored_cache(config, reader), spec, reader)
    _check_task(embeds, gives_states, config.model.pooling)
    shared = open_shared(config, spec, reader, platform) if gives_states else None
    pooling = read_pooling(source, spec, config.model.pooling) if embeds else None
    kv_format = spec.cache_format(config.kv_format)
    scales = head_scales(kv_format, source, spec, config.quantization.use_fake_parameter)
    backend = platform.backend
    size, whole_experts = config.ranks.tensor_parallel_degree, config.ranks.has_whole_experts
    specs = [local_spec(spec, rank, size, whole_experts=whole_experts) for rank in range(size)]
    import paddle

    platform.make_current()
    abi = None if platform.compiled is None else library.require().metadata.abi

    def load(rank: int) -> tuple[Decoder, DecoderSpec]:
        with Progress(spec.num_layers, unit="layer") as progress:
            return load_decoder(
                *(config, specs[rank], reader, platform), lambda layer: progress.on_finished()
            )

    tower = open_tower_alone(config, spec, reader, platform)
    decoder, own = load(0)
    with written(output_path, signals, WHAT) as folder:
        taps = write_shared(shared, folder) if shared else (FINAL,) * embeds
        for rank in range(size):
            if rank:
                del decoder, own  # a device has room for one part
                decoder, own = load(rank)
            part = folder / rank_folder(rank if size > 1 else None)
            part.mkdir(exist_ok=True)
            pages = page_tensors(own, -1, platform.packs_pages) if enable_lora else None
            _save(config, signals, backend, decoder, own, part, pages, taps)
        stem = None if tower is None else _save_tower(config, signals, backend, tower, folder)
        _stage("writing the other files")
        programs = {f"{name}.json" for name in (config.model.model_prefix, stem) if name}
        _copy_files(source, folder, programs, kv_format, scales)
        _name_family(reader, folder)
        if pooling is not None:
            save_pooling(pooling, folder)
        described = (config, spec, decoder, folder, paddle.__version__, abi, enable_lora, taps)
        more: Any = {"task": "embed" if embeds else None, "ranks": _ranks(own), "tower": stem}
        manifest = dataclasses.replace(_manifest(*described), **more)
        _check_whole(manifest, spec, folder, config.model.model_prefix, output_path)
        manifest.save(folder)


def _save(
    config: EngineConfig,
    signals: Signals | None,
    backend: ModuleType,
    decoder: Decoder,
    spec: DecoderSpec,
    *more: Any,
) -> None:
    """Traces and writes a program. more: its folder, its pages, and its taps."""
    from predict.loading.program import save_program

    folder, pages, taps = more
    model, block_size = config.model, config.cache.block_size
    _stage("tracing the program")
    # Paddle does not live through an exception in the middle of tracing.
    with unbroken(signals, "the export ends once the program is written"):
        save_program(
            *(backend, decoder, spec, block_size, model.dtype, folder),
            *(model.model_prefix, config.kv_format, pages, taps),
        )
    if signals is not None:
        signals.check()


def _save_tower(
    config: EngineConfig,
    signals: Signals | None,
    backend: ModuleType,
    tower: TowerWeights,
    folder: Path,
) -> str:
    """Traces and writes a tower's program; the stem of its files."""
    from predict.loading.tower_program import save_tower, stem_of

    stem = stem_of(config.model.model_prefix)
    _stage("tracing the tower")
    with unbroken(signals, "the export ends once the tower is written"):
        save_tower(backend, tower.read(), config.model.dtype, folder, stem)
    return stem


def _check_whole(
    manifest: Manifest, spec: DecoderSpec, folder: Path, prefix: str, output_path: Path
) -> None:
    """Raises UserError where a program is not whole: Paddle does not notice that a disk is full."""
    from predict.loading.exported import check_program, part_of
    from predict.loading.tower_program import check_tower

    try:
        for rank in range(manifest.num_ranks) if manifest.ranks else (None,):
            own = spec if rank is None else part_of(manifest, spec, rank)
            check_program(manifest, own, folder, prefix, rank)
        if spec.vision is not None:
            check_tower(manifest, spec.vision, folder, prefix)
    except UserError as error:
        raise UserError(
            f"the static model was not written whole to {output_path}: make room there, or "
            f"choose another --output_path ({error})",
            EXIT_FAILURE,
        ) from None


def _check_task(embeds: bool, gives_states: bool, pooling: str | None) -> None:
    if embeds and gives_states:
        raise UserError(
            "--return_full_hidden_states is of programs that draft, and this one makes vectors "
            "(--task embed, or a model that makes no text); give one of them"
        )
    if pooling is not None and not embeds:
        raise UserError(
            f"--pooling {pooling} is of programs that make vectors; add --task embed, "
            "or leave it out"
        )


def _stage(what: str) -> None:
    """Says what is being done, to somebody who waits for it."""
    if sys.stderr.isatty():
        say(what)


def _copy_files(
    source: Path,
    folder: Path,
    programs: Collection[str],
    kv_format: KvFormat,
    scales: Mapping[int, HeadScales] | None,
) -> None:
    """Copies what else a run reads. programs: names of files that are the export's own."""
    from predict.loading.cache_scales import SCALES_FILE, save_head_scales
    from predict.loading.companions import write_described

    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            own = path.name in programs or any(path.match(other) for other in NOT_COPIED)
            if path.is_file() and not own:
                shutil.copyfile(path, folder / path.name)
    write_described(source, folder)
    if scales is not None and not (source / SCALES_FILE).exists():
        save_head_scales(kv_format, folder, scales)


def _name_family(reader: ConfigReader, folder: Path) -> None:
    """Writes the model_type that --model_type gave into config.json, if it had none."""
    path = folder / "config.json"
    if read_json_object(path, constants=True).get("model_type") is None:
        path.write_text(json.dumps(dict(reader.values), indent=2) + "\n", encoding="utf-8")


def _manifest(
    config: EngineConfig,
    spec: DecoderSpec,
    decoder: Decoder,
    folder: Path,
    paddle_version: str,
    library_abi: int | None,
    enable_lora: bool,
    taps: Sequence[str],
) -> Manifest:
    """What the export in `folder` is, its files' digests included."""
    from predict.loading.manifest import ADAPTERS, FORMAT, FileDigest, Manifest, facts_of
    from predict.nn.decoder import layer_schemes

    rounded = dataclasses.asdict(config.quantization.settings)
    return Manifest(
        format=FORMAT,
        paddle_version=paddle_version,
        library_abi=library_abi,
        device=config.model.device.partition(":")[0],
        dtype=config.model.dtype,
        scheme=layer_schemes(decoder),
        head_scheme=decoder.head.linear.scheme,
        rounded={**rounded, "skip": list(config.quantization.settings.skip)},
        block_size=config.cache.block_size,
        max_length=config.max_length,
        **facts_of(spec),
        kv_format=config.kv_format,
        adapters=ADAPTERS if enable_lora else None,
        taps=list(taps) or None,
        files={name: FileDigest.of(path) for name, path in files_of(folder)},
    )


def _ranks(spec: DecoderSpec) -> dict[str, Any] | None:
    """What a manifest says of the ranks. spec: of any of them."""
    if spec.share is None:
        return None
    ranks = dataclasses.asdict(spec.share.ranks)
    return {name: value for name, value in ranks.items() if name != "rank"}


def _notes(flags: FlagValues) -> Iterator[str]:
    """What is to be said of flags before the work."""
    of_a_run = OF_A_RUN if flags["return_full_hidden_states"] else (*OF_A_RUN, "speculate_method")
    given = [f"--{name}" for name in of_a_run if flags.given(name)]
    if given:
        verb = "has" if len(given) == 1 else "have"
        yield f"{', '.join(given)} {verb} no effect here: give it to the run of the static model"


def _export_runtime(config: EngineConfig, flags: FlagValues, signals: Signals) -> int:
    from export.export_runtime import export_runtime

    of_programs = ("enable_lora", "return_full_hidden_states", "model_prefix")
    given = [f"--{name}" for name in of_programs if flags.given(name)]
    given += [f"--task {flags['task']}"] * (flags["task"] != "generate")
    if given:
        raise UserError(
            f"{' and '.join(given)} is of static models, and --runtime writes a folder for the C++ "
            "runtime, which takes requests for text; leave one of the two out"
        )
    path = Path(flags["output_path"])
    export_runtime(config, path, flags["target"], flags["overwrite"], signals)
    show(f"The runtime's folder is {path}.")
    return 0


@command("interrupted: nothing was exported; what was there is as it was")
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code."""
    description = "Exports a checkpoint to a static model for --mode static."
    flags = parse_flags(words, (*FLAGS, *OWN_FLAGS), "export_model.py", description)
    if not flags["output_path"]:
        raise UserError("--output_path is needed: the directory to write the static model to")
    if flags["mode"] != "dynamic":
        raise UserError("--mode static runs an exported model; leave --mode out when exporting")
    config = PredictorConfig.from_flags(flags)
    _check_adapters(config.engine, flags["enable_lora"])
    for note in (*config.notes, *_notes(flags)):
        say(f"note: {note}")
    folder, enable_lora = Path(flags["output_path"]), flags["enable_lora"]
    if flags["runtime"]:
        return _export_runtime(config.engine, flags, signals)
    if flags["target"] is not None:
        raise UserError(
            "--target is of folders for the C++ runtime; add --runtime, or leave it out"
        )
    more = {"gives_states": flags["return_full_hidden_states"], "task": flags["task"]}
    export_model(config.engine, folder, flags["overwrite"], signals, enable_lora, **more)
    show(f"The static model is in {flags['output_path']}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
