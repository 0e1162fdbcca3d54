"""manifest.json of an exported model: what the program was traced for, checked before it runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.config import EngineConfig
from predict.errors import UserError
from predict.files import read_json_object
from predict.quantization import QuantSettings

FILE_NAME = "manifest.json"
FORMAT = 1
EXPORT = "export it again with export/export_model.py"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts that a static run must share with the export."""

    format: int
    paddle_version: str
    library_abi: int | None  # None: traced from plain-Paddle operators
    device: str  # cpu | gpu: the weights' layout is the device's
    dtype: str
    scheme: str  # of the layers' linears; several are joined by commas
    block_size: int  # tokens
    max_length: int  # tokens; rows of the rotary table
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eos_token_ids: list[int]
    model_type: str
    head_scheme: str = "dense"  # of the LM head
    rounded: dict[str, Any] = field(default_factory=dict)  # the export's own QuantSettings
    kv_format: str = "dense"

    def save(self, directory: Path) -> None:
        """Writes manifest.json."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def load_manifest(directory: str | Path) -> Manifest:
    """Reads manifest.json; raises UserError where it is missing, broken or of another format."""
    path = Path(directory) / FILE_NAME
    if not path.exists():
        raise UserError(
            f"{directory} holds no {FILE_NAME}: --mode static runs what "
            "export/export_model.py wrote; export the model first, or use --mode dynamic"
        )
    try:
        values = read_json_object(path)
    except UserError as error:
        raise UserError(f"{error}; {EXPORT}") from None
    try:
        if values["format"] != FORMAT:
            raise UserError(f"{path} has format {values['format']}, not {FORMAT}; {EXPORT}")
        return Manifest(**values)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a manifest ({error}); {EXPORT}") from None


def check_manifest(
    manifest: Manifest, config: EngineConfig, paddle_version: str, library_abi: int | None
) -> None:
    """Raises one UserError naming every way in which an export does not fit this run.

    library_abi: of the compiled library that is loaded, None without one.
    """
    problems = []
    device = config.device.partition(":")[0]
    facts = (
        ("dtype", manifest.dtype, config.dtype),
        ("device", manifest.device, device),
        ("block_size", manifest.block_size, config.block_size),
    )
    for name, exported, wanted in facts:
        if exported != wanted:
            problems.append(f"{name} is {exported}, --{name} asks for {wanted}")
    if manifest.kv_format != config.kv_format:
        problems.append(
            f"its KV cache is {manifest.kv_format}, --cachekv_int8_type asks for {config.kv_format}"
        )
    problems += _quantization_problems(manifest, config.quantization)
    if manifest.max_length < config.max_length:
        problems.append(
            f"max_length is {manifest.max_length} tokens, --max_length asks for {config.max_length}"
        )
    if manifest.paddle_version != paddle_version:
        problems.append(
            f"it was traced with Paddle {manifest.paddle_version}, and {paddle_version} is "
            "installed"
        )
    if manifest.library_abi is not None and library_abi is None:
        problems.append(
            "it calls the compiled operators, which are not built here "
            "(build them: python csrc/setup_cpu.py install)"
        )
    elif manifest.library_abi is not None and manifest.library_abi != library_abi:
        problems.append(
            f"it calls operators of ABI {manifest.library_abi}, and the library has {library_abi}"
        )
    if (manifest.library_abi is not None) != config.inference_model:
        kind = "compiled" if manifest.library_abi is not None else "plain-Paddle"
        flag = "true" if manifest.library_abi is not None else "false"
        problems.append(f"it calls the {kind} operators; pass --inference_model {flag}")
    if problems:
        raise UserError(
            f"the exported model in {config.model_name_or_path} does not fit this run: "
            f"{'; '.join(problems)}. Change the flags to match, or {EXPORT}"
        )


def _quantization_problems(manifest: Manifest, asked: QuantSettings) -> list[str]:
    """Where flags that are given ask for other weights than the program holds."""
    problems = []
    schemes = manifest.scheme.split(",")
    if asked.scheme is not None and asked.scheme not in schemes:
        problems.append(f"its weights are {manifest.scheme}, --quant_type asks for {asked.scheme}")
    if asked.head_scheme not in (None, manifest.head_scheme):
        problems.append(
            f"its LM head is {manifest.head_scheme}, --lm_head_quant_type asks for "
            f"{asked.head_scheme}"
        )
    flags = {
        "group_size": "weightonly_group_size",
        "block_size": "weight_block_size",
        "skip": "skip_list_names",
    }
    default = QuantSettings()
    for name, flag in flags.items():
        wanted, exported = getattr(asked, name), manifest.rounded.get(name, getattr(default, name))
        if wanted != getattr(default, name) and _plain(wanted) != _plain(exported):
            problems.append(f"it was exported with --{flag} {exported}, not {wanted}")
    return problems


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
