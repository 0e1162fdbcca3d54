"""manifest.json of an exported model: what the program was traced for, checked before it runs.

A manifest, like all of an export, may come from a stranger: every field has a kind and a range, and
what another file says too must agree with it. Its digests find what was damaged or edited by
accident; whoever writes them anew gains nothing by it, as nothing is believed because of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.config.cache import BLOCK_SIZES, KV_FORMATS
from predict.config.engine import EngineConfig
from predict.config.model import DTYPES
from predict.config.quantization import QuantSettings
from predict.config.schemes import GROUP_SIZES
from predict.errors import UserError, nearest
from predict.nn.blocks import ADAPTED, PAGE_RANKS
from predict.nn.spec import DecoderSpec
from predict.schemes import known_schemes
from predict.system.files import json_type, read_json_object

FILE_NAME = "manifest.json"
FORMAT = 2
EXPORT = "export it again with export/export_model.py"
# What a program that takes adapters was made for. Pages, adapters and ranks may be any number.
ADAPTERS = {"slots": list(ADAPTED), "page_ranks": PAGE_RANKS}
# A file is digested in parts of this size, side by side: 1.8 GB/s a core, 16 GB in parts.
PART_BYTES = 1 << 26
_READ_BYTES = 1 << 20


_MAY_LACK = ("adapters",)  # null then: an export without says what it said before there were any


@dataclass(frozen=True)
class FileDigest:
    """A file of an export: its size, and the SHA-256 of each 64 MiB of it."""

    num_bytes: int
    sha256: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Of a file as it is; reads all of it. Raises OSError."""
        size = path.stat().st_size
        starts = range(0, max(size, 1), PART_BYTES)
        if len(starts) == 1:
            return cls(size, (_part_digest(path, 0),))
        # Hashing leaves the interpreter free.
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, 16)) as pool:
            return cls(size, tuple(pool.map(lambda start: _part_digest(path, start), starts)))


def _part_digest(path: Path, start: int) -> str:
    state = hashlib.sha256()
    left = PART_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (data := file.read(min(left, _READ_BYTES))):
            state.update(data)
            left -= len(data)
    return state.hexdigest()


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
    adapters: dict[str, Any] | None = None  # ADAPTERS where requests may have some
    files: dict[str, FileDigest] = field(default_factory=dict)  # all but the manifest, by name
    digest: str = field(default="", compare=False)  # SHA-256 of all fields above, as read

    def save(self, directory: Path) -> None:
        """Writes manifest.json, its digest made anew."""
        values = {**self._values, "digest": self.own_digest}
        text = json.dumps(values, indent=2)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    @property
    def _values(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {k: v for k, v in values.items() if not (k in _MAY_LACK and v is None)}

    @property
    def own_digest(self) -> str:
        """SHA-256 of all fields but `digest`, which finds an edit of any."""
        values = {name: value for name, value in self._values.items() if name != "digest"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _Kind:
    """What a field may hold, in words and as a test."""

    allowed: str
    fits: Callable[[Any], bool]


def _number(least: int, most: int) -> _Kind:
    return _Kind(
        f"a whole number of {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def _one_of(names: Iterable[str]) -> _Kind:
    names = tuple(names)
    return _Kind("one of " + ", ".join(names), lambda value: value in names)


_TEXT = _Kind("a text of 1 to 64 characters", lambda v: isinstance(v, str) and 0 < len(v) <= 64)
_SHA256 = _Kind("64 hexadecimal digits", lambda value: _is_sha256(value))
_KINDS: Mapping[str, _Kind] = {
    "format": _number(FORMAT, FORMAT),
    "paddle_version": _TEXT,
    "library_abi": _Kind(
        "null or a whole number of 1 to 1000000",
        lambda value: value is None or (type(value) is int and 1 <= value <= 1000000),
    ),
    "device": _one_of(("cpu", "gpu")),
    "dtype": _one_of(DTYPES),
    "scheme": _Kind(
        "one or several, joined by commas, of " + ", ".join(known_schemes()),
        lambda value: isinstance(value, str) and {*value.split(",")} <= {*known_schemes()},
    ),
    "block_size": _Kind(
        "one of " + ", ".join(map(str, BLOCK_SIZES)),
        lambda value: type(value) is int and value in BLOCK_SIZES,
    ),
    "max_length": _number(2, 1 << 26),
    "num_layers": _number(1, 1 << 16),
    "num_kv_heads": _number(1, 1 << 16),
    "head_dim": _number(1, 1 << 16),
    "vocab_size": _number(1, (1 << 31) - 1),
    "eos_token_ids": _Kind(
        "a list of token ids",
        lambda value: isinstance(value, list) and all(_is_token(item) for item in value),
    ),
    "model_type": _TEXT,
    "head_scheme": _one_of(known_schemes()),
    "rounded": _Kind(
        f"an object of {', '.join(f.name for f in dataclasses.fields(QuantSettings))}",
        lambda value: isinstance(value, dict) and _are_settings(value),
    ),
    "kv_format": _one_of(KV_FORMATS.values()),
    "adapters": _Kind(
        f"null, or {json.dumps(ADAPTERS)}", lambda value: value is None or _is_adapters(value)
    ),
    "files": _Kind(
        "an object of file names, without folders, with num_bytes and a list sha256 of a digest "
        "for each 64 MiB",
        lambda value: (
            isinstance(value, dict)
            and all(_is_file_name(name) and _is_digest(entry) for name, entry in value.items())
        ),
    ),
    "digest": _SHA256,
}


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and {*value} <= {*"0123456789abcdef"}


def _is_adapters(value: Any) -> bool:
    return json.dumps(value, sort_keys=True) == json.dumps(ADAPTERS, sort_keys=True)


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..", FILE_NAME) and not {"/", "\\", "\0"} & {*name}


def _is_digest(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"num_bytes", "sha256"}:
        return False
    size, parts = value["num_bytes"], value["sha256"]
    if type(size) is not int or not 0 <= size < 1 << 50 or not isinstance(parts, list):
        return False
    return len(parts) == max(-(-size // PART_BYTES), 1) and all(map(_is_sha256, parts))


def _are_settings(value: dict[str, Any]) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {
        "scheme": lambda v: v is None or v in known_schemes(),
        "expert_scheme": lambda v: v is None or v in known_schemes(),
        "group_size": lambda v: type(v) is int and v in GROUP_SIZES,
        "block_size": lambda v: type(v) is int and v in (-1, 128),
        "head_scheme": lambda v: v is None or v in known_schemes(),
        "fake": lambda v: type(v) is bool,
        "skip": lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
    }
    return all(name in kinds and kinds[name](item) for name, item in value.items())


def load_manifest(directory: str | Path) -> Manifest:
    """Reads manifest.json; raises UserError where it is missing, broken or of another format."""
    path = Path(directory) / FILE_NAME
    if not path.exists():
        raise UserError(
            f"{directory} holds no {FILE_NAME}: --mode static runs what "
            "export/export_model.py wrote; export the model first, or use --mode dynamic"
        )
    values = read_json_object(path)
    if values.get("format") != FORMAT:
        raise UserError(f"{path} has format {values.get('format')!r}, not {FORMAT}; {EXPORT}")
    for name in values:
        if name not in _KINDS:
            guess = nearest(name, _KINDS)
            hint = f"; did you mean {guess}?" if guess else ""
            raise UserError(f"{path} has the field {name[:60]!r}, which is not known{hint}")
    for name, kind in _KINDS.items():
        if name not in values and name in _MAY_LACK:
            continue
        if name not in values:
            raise UserError(f"{path} lacks the field {name!r}; {EXPORT}")
        value = values[name]
        if not kind.fits(value):
            got = json_type(value) if isinstance(value, (dict, list)) else json.dumps(value)[:80]
            raise UserError(f"{path}: {name} is {got} (allowed: {kind.allowed}); {EXPORT}")
    files = {
        name: FileDigest(entry["num_bytes"], tuple(entry["sha256"]))
        for name, entry in values["files"].items()
    }
    return Manifest(**{**values, "files": files})


def check_spec(manifest: Manifest, directory: str | Path, spec: DecoderSpec) -> None:
    """Raises UserError where the manifest and config.json, as `spec` has it, disagree."""
    names = ("model_type", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "eos_token_ids")
    differing = [
        f"{name} is {getattr(manifest, name)} in {FILE_NAME} and "
        f"{_plain(getattr(spec, name))} in config.json"
        for name in names
        if getattr(manifest, name) != _plain(getattr(spec, name))
    ]
    if differing:
        raise UserError(f"{directory}: {'; '.join(differing)}; one was edited: {EXPORT}")


def check_files(manifest: Manifest, directory: str | Path) -> None:
    """Raises UserError where a file is not as it was exported, or the manifest was edited.

    Reads all files whole, a file's parts side by side.
    """
    directory = Path(directory)
    if manifest.digest != manifest.own_digest:
        raise UserError(f"{directory / FILE_NAME} was edited: its digest is another; {EXPORT}")
    for name, wanted in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing, or is no file; {EXPORT}")
        size = path.stat().st_size
        if size != wanted.num_bytes:
            raise UserError(
                f"{path} is not as it was exported: it has {size} bytes, not {wanted.num_bytes}; "
                f"{EXPORT}"
            )
    for name, wanted in manifest.files.items():
        path = directory / name
        try:
            found = FileDigest.of(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        if found != wanted:
            raise UserError(
                f"{path} is not as it was exported: its SHA-256 is another than in {FILE_NAME}; it "
                f"was damaged or edited: {EXPORT}"
            )


def check_manifest(
    manifest: Manifest, config: EngineConfig, paddle_version: str, library_abi: int | None
) -> None:
    """Raises one UserError naming every way in which an export does not fit this run.

    library_abi: of the compiled library that is loaded, None without one.
    """
    problems = []
    device = config.model.device.partition(":")[0]
    facts = (
        ("dtype", manifest.dtype, config.model.dtype),
        ("device", manifest.device, device),
        ("block_size", manifest.block_size, config.cache.block_size),
    )
    for name, exported, wanted in facts:
        if exported != wanted:
            problems.append(f"{name} is {exported}, --{name} asks for {wanted}")
    if manifest.kv_format != config.kv_format:
        problems.append(
            f"its KV cache is {manifest.kv_format}, --cachekv_int8_type asks for {config.kv_format}"
        )
    if config.adapters.lora_modules and manifest.adapters is None:
        problems.append(
            "it takes no adapters of requests, and --lora_modules asks for some (an export with "
            "--enable_lora takes them; --lora_path merges one)"
        )
    problems += _quantization_problems(manifest, config.quantization.settings)
    if manifest.max_length < config.scheduling.max_length:
        problems.append(
            f"max_length is {manifest.max_length} tokens, --max_length asks for "
            f"{config.scheduling.max_length}"
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
    if (manifest.library_abi is not None) != config.model.inference_model:
        kind = "compiled" if manifest.library_abi is not None else "plain-Paddle"
        flag = "true" if manifest.library_abi is not None else "false"
        problems.append(f"it calls the {kind} operators; pass --inference_model {flag}")
    if problems:
        raise UserError(
            f"the exported model in {config.model.model_name_or_path} does not fit this run: "
            f"{'; '.join(problems)}. Change the flags to match, or {EXPORT}"
        )


def _quantization_problems(manifest: Manifest, asked: QuantSettings) -> list[str]:
    """Where flags that are given ask for other weights than the program holds."""
    problems = []
    schemes = manifest.scheme.split(",")
    if asked.scheme is not None and asked.scheme not in schemes:
        problems.append(f"its weights are {manifest.scheme}, --quant_type asks for {asked.scheme}")
    if asked.expert_scheme is not None and asked.expert_scheme not in schemes:
        problems.append(
            f"its weights are {manifest.scheme}, --moe_quant_type asks for {asked.expert_scheme}"
        )
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
