r"""Exports a checkpoint to a static model that `predict/predictor.py --mode static` runs.

    python export/export_model.py --model_name_or_path DIR --inference_model --output_path OUT \
        --dtype float32

Takes the predictor's flags and --output_path. Traces the same decoder that dynamic mode calls, and
writes <prefix>.json, <prefix>.pdiparams, config, tokenizer files and manifest.json.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from predict.config import EngineConfig, PredictorConfig
from predict.errors import UserError
from predict.flags import FLAGS, Flag, parse_flags

OUTPUT_PATH = Flag(
    "Input and output", "output_path", "str", None, "Directory to write the static model to."
)
# Weights live in the program; everything else of a checkpoint goes along.
COPIED = ("*.json", "*.model", "merges.txt", "vocab.txt", "*.jinja", "*.tiktoken")
NOT_COPIED = ("*.index.json", "manifest.json")


def export_model(config: EngineConfig, output_path: Path) -> None:
    """Writes the static model of `config` to `output_path`, created where it does not exist.

    The manifest is written last, so that an interrupted export is not taken for a whole one.
    Raises UserError where the checkpoint cannot be read or the directory not written.
    """
    from predict import library, llm
    from predict.engine.program import save_program
    from predict.formats import with_stored_cache
    from predict.kv_formats import SCALES_FILE, head_scales, kv_format_of, save_head_scales
    from predict.manifest import FILE_NAME, FORMAT, Manifest
    from predict.nn.decoder import layer_schemes

    source = Path(config.model_name_or_path)
    if output_path.resolve() == source.resolve():
        raise UserError(
            f"--output_path {output_path} is the checkpoint's own directory; choose another one"
        )
    device = llm.choose_gpu(config)
    spec, reader = llm.read_spec(source)
    config = with_stored_cache(config, reader)
    kv_format = kv_format_of(config.kv_format)
    scales = head_scales(kv_format, source, spec)
    backend = llm.choose_backend(config.inference_model)
    import paddle

    if device is None:
        paddle.set_device("cpu")
    compiled = library.load() if llm.is_compiled(backend) else None
    decoder = llm.load_decoder(config, spec, reader, backend, device)
    try:
        output_path.mkdir(parents=True, exist_ok=True)
        (output_path / FILE_NAME).unlink(missing_ok=True)
        save_program(
            backend,
            decoder,
            spec,
            config.block_size,
            config.dtype,
            output_path,
            config.model_prefix,
            config.kv_format,
        )
        for pattern in COPIED:
            for path in sorted(source.glob(pattern)):
                if not any(path.match(other) for other in NOT_COPIED):
                    shutil.copy(path, output_path / path.name)
        if scales is not None and not (source / SCALES_FILE).exists():
            save_head_scales(kv_format, output_path, scales)
        Manifest(
            format=FORMAT,
            paddle_version=paddle.__version__,
            library_abi=None if compiled is None else compiled.metadata.abi,
            device=config.device.partition(":")[0],
            dtype=config.dtype,
            scheme=layer_schemes(decoder),
            head_scheme=decoder.head.scheme,
            rounded=dataclasses.asdict(config.quantization),
            block_size=config.block_size,
            max_length=config.max_length,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            eos_token_ids=list(spec.eos_token_ids),
            model_type=spec.model_type,
            kv_format=config.kv_format,
        ).save(output_path)
    except OSError as error:
        raise UserError(
            f"the static model cannot be written to {output_path}: {error.strerror}; choose "
            "another --output_path, or make room there"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    description = "Exports a checkpoint to a static model for --mode static."
    try:
        flags = parse_flags(argv, (*FLAGS, OUTPUT_PATH), "export_model.py", description)
        if flags["output_path"] is None:
            raise UserError("--output_path is needed: the directory to write the static model to")
        if flags["mode"] != "dynamic":
            raise UserError("--mode static runs an exported model; leave --mode out when exporting")
        config = PredictorConfig.from_flags(flags).engine
        export_model(config, Path(flags["output_path"]))
    except UserError as error:
        print(f"export_model.py: error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"The static model is in {flags['output_path']}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
