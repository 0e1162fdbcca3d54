"""Exports a checkpoint to a folder for the C++ runtime (`export_model.py --runtime`)."""

from __future__ import annotations

import dataclasses
import platform as host
from pathlib import Path
from typing import TYPE_CHECKING

from export.output_place import place_for, written
from predict.config.engine import EngineConfig
from predict.errors import UserError, one_of
from predict.system.notes import LOG
from predict.system.signals import Signals, kept

if TYPE_CHECKING:
    from export.runtime_folder import TextPart
    from predict.loading.platform import Platform
    from predict.nn.spec import DecoderSpec
    from predict.text.tokenizer import Tokenizer


def export_runtime(
    config: EngineConfig,
    output_path: Path,
    target: str | None = None,
    overwrite: bool = False,
    signals: Signals | None = None,
) -> None:
    """Writes the runtime's folder of `config` to `output_path`, a new or an empty folder.

    It comes to be there whole, at the end. target: the processors that run it; None: this machine's
    kind. overwrite, signals: as export_model has them. Raises UserError where the checkpoint cannot
    be read, the runtime does not run it, or the folder cannot be written.
    """
    with kept():
        # First of all that imports it: Paddle's import, later, takes signals from its threads.
        import numpy  # noqa: F401
    from export.runtime_folder import KIND, PACKINGS

    target = host.machine() if target is None else target
    if target not in PACKINGS:
        raise one_of("--target", target, [*PACKINGS])
    _check(config)
    with place_for(config, output_path, overwrite, KIND):
        _export(config, output_path, target, signals)


def _check(config: EngineConfig) -> None:
    """Raises UserError for flags of what the runtime does not do."""
    model, drafts = config.model, config.speculation.speculate_method
    asked = {
        f"--device {model.device}": model.device != "cpu",
        "--inference_model false": model.inference_model is False,
        "--lora_modules": config.adapters.is_used,
        "--prefix_path": bool(config.adapters.prefixes),
        f"--speculate_method {drafts}": drafts is not None,
        f"--pooling {model.pooling}": model.pooling is not None,
        "--tensor_parallel_degree above 1": config.ranks.tensor_parallel_degree > 1,
    }
    if found := [flag for flag, is_there in asked.items() if is_there]:
        raise UserError(
            f"the C++ runtime does not run with {' and '.join(found)} yet (allowed: --device cpu, "
            "one process, compiled operators; no adapters, prefixes, drafts or vectors); export a "
            "static model without --runtime, or leave the flags out"
        )


def _check_spec(spec: DecoderSpec) -> None:
    """Raises UserError for a network that the runtime does not run."""
    why = ""
    others = [b.kind for b in spec.blocks() if not (b.is_fused or b.composes)]
    if others:
        why = f"has blocks of the kind {others[0]}, which csrc/blocks has not"
    elif any(spec.states):
        why = "keeps a state of each request beside its KV cache"
    elif spec.sees_both_ways or not spec.makes_text:
        why = "makes vectors or scores, and no text"
    if why:
        raise UserError(
            f"{spec.model_type} {why}, so that the C++ runtime does not run it yet (allowed: "
            "decoders with a KV cache alone, of kinds in csrc/blocks); export a static model "
            "without --runtime"
        )


def _export(config: EngineConfig, output_path: Path, target: str, signals: Signals | None) -> None:
    from export import runtime_folder
    from predict.loading.cache_scales import head_scales
    from predict.loading.defaults import with_model_defaults
    from predict.loading.generation_config import read_recommended
    from predict.loading.layouts import with_stored_cache
    from predict.loading.model import load_decoder, read_spec
    from predict.loading.platform import platform_of
    from predict.system.progress import Progress
    from predict.text.tokenizer import tokenizer_of

    source = Path(config.model.model_name_or_path)
    platform = platform_of(config.model.device, config.model.inference_model)
    _check_library(platform)
    config = config.changed(inference_model=True)  # other operators pack nothing
    spec, reader = read_spec(source, config.model.model_type)
    spec = dataclasses.replace(spec, vision=None)  # text alone
    _check_spec(spec)
    spec = spec.with_forms(config.model.latent_form)
    config = with_model_defaults(with_stored_cache(config, reader), spec, reader)
    kv_format = spec.cache_format(config.kv_format)
    scales = head_scales(kv_format, source, spec, config.quantization.use_fake_parameter)
    tokenizer, stop_ids = tokenizer_of(source, spec.vocab_size, spec.eos_token_ids)
    recommended = read_recommended(source)
    for note in () if recommended is None else recommended.note:
        LOG.warning(note)
    text = _text(tokenizer, source)
    platform.make_current()
    with Progress(spec.num_layers, unit="layer") as progress:
        decoder, spec = load_decoder(
            *(config, spec, reader, platform), lambda layer: progress.on_finished()
        )
    with written(output_path, signals, runtime_folder.KIND.what) as folder:
        arrays = runtime_folder.arrays_of(decoder)
        arrays |= runtime_folder.scale_tensors(spec, config.kv_format, scales)
        runtime_folder.write_weights(arrays, folder)
        values = runtime_folder.regatta_json(decoder, spec, config, target, stop_ids, recommended)
        runtime_folder.write_described(folder, values, text)


def _check_library(platform: Platform) -> None:
    from predict.device import library

    if platform.compiled is None:
        library.require()  # raises: it packs the weights


def _text(tokenizer: Tokenizer | None, source: Path) -> TextPart:
    """The text file of a tokenizer that Regatta::text knows; a note says why there is none."""
    from export.export_text import text_file
    from export.runtime_folder import TextPart

    if tokenizer is None:
        return TextPart(None, "the checkpoint has no tokenizer")
    try:
        return TextPart(text_file(tokenizer, source))
    except UserError as error:
        LOG.warning(f"the folder runs on token ids alone: {error}")
        return TextPart(None, str(error))
