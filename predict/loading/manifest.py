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
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.config.cache import BLOCK_SIZES, KV_FORMATS
from predict.config.engine import EngineConfig
from predict.config.model import DTYPES
from predict.config.quantization import DEFAULT_ACTIVATIONS, QuantSettings
from predict.config.ranks import RANKS
from predict.errors import UserError
from predict.names import hint
from predict.nn.adapter_pages import PAGE_RANKS
from predict.nn.inputs import ADAPTED
from predict.nn.shares import Ranks
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
# By a QuantSettings' field.
ROUNDING_FLAGS = {
    "group_size": "weightonly_group_size",
    "block_size": "weight_block_size",
    "skip": "skip_list_names",
}
_SETTINGS = tuple(each.name for each in dataclasses.fields(QuantSettings))
# Null then: an export without them says what it said before there were any.
_MAY_LACK = ("adapters", "taps", "task", "ranks", "tower")
RANK_FOLDER = re.compile(r"rank_(0|[1-9]\d?)")  # of a program for one of several ranks


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


def _kind(allowed: str, fits: Callable[[Any], bool], **options: Any) -> Any:
    """A field, and what it may hold in a file, in words and as a test."""
    return field(metadata={"allowed": allowed, "fits": fits}, **options)


def _is_number(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _number(least: int, most: int) -> Any:
    return _kind(f"a whole number of {least} to {most}", lambda v: _is_number(v, least, most))


def _text(**options: Any) -> Any:
    words = "a text of 1 to 64 characters"
    return _kind(words, lambda v: isinstance(v, str) and 0 < len(v) <= 64, **options)


def _one_of(values: Iterable[Any], **options: Any) -> Any:
    known = [*values]
    words = f"one of {', '.join(map(str, known))}"
    return _kind(words, lambda v: type(v) is type(known[0]) and v in known, **options)


def _are_taps(value: Any) -> bool:
    known = re.compile(r"norm|layers\.(0|[1-9]\d{0,4})")
    listed = isinstance(value, list) and 0 < len(value) <= 8
    return listed and all(isinstance(tap, str) and known.fullmatch(tap) for tap in value)


def _are_settings(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= {*_SETTINGS}


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_file_name(name) and _is_digest(entry) for name, entry in value.items()
    )


def _is_file_name(path: str) -> bool:
    """Whether it names a file of an export, in it or in a rank's folder."""
    folder, has_folder, name = path.rpartition("/")
    if has_folder and not RANK_FOLDER.fullmatch(folder):
        return False
    return name not in ("", ".", "..", FILE_NAME) and not {"/", "\\", "\0"} & {*name}


def _are_ranks(value: Any) -> bool:
    match value:
        case {"size": size, "unit": unit, "whole_experts": bool()} if len(value) == 3:
            return _is_number(size, 2, int(RANKS.high)) and _is_number(unit, 1, 1 << 20)
    return False


def _is_digest(value: Any) -> bool:
    match value:
        case {"num_bytes": int(size), "sha256": list(parts)} if len(value) == 2:
            is_as_long = len(parts) == max(-(-size // PART_BYTES), 1)
            return _is_number(size, 0, 1 << 50) and is_as_long and {*map(type, parts)} == {str}
    return False


def _sorted_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts that a static run must share with the export."""

    format: int = _number(FORMAT, FORMAT)
    paddle_version: str = _text()
    library_abi: int | None = _kind(  # None: traced from plain-Paddle operators
        "null or a whole number of 1 to 1000000",
        lambda value: value is None or _is_number(value, 1, 1000000),
    )
    device: str = _one_of(("cpu", "gpu"))  # the weights' layout is the device's
    dtype: str = _one_of(DTYPES)
    scheme: str = _kind(  # of the layers' linears
        "one or several, joined by commas, of " + ", ".join(known_schemes()),
        lambda value: isinstance(value, str) and {*value.split(",")} <= {*known_schemes()},
    )
    block_size: int = _one_of(BLOCK_SIZES)  # tokens
    max_length: int = _number(2, 1 << 26)  # tokens; rows of the rotary table
    num_layers: int = _number(1, 1 << 16)
    num_kv_heads: int = _number(1, 1 << 16)
    head_dim: int = _number(1, 1 << 16)
    vocab_size: int = _number(1, (1 << 31) - 1)
    eos_token_ids: list[int] = _kind(  # noqa: RUF009
        "a list of token ids",
        lambda v: isinstance(v, list) and all(_is_number(i, 0, (1 << 31) - 1) for i in v),
    )
    model_type: str = _text()
    head_scheme: str = _one_of(known_schemes(), default="dense")  # of the LM head
    # The export's own QuantSettings.
    rounded: dict[str, Any] = _kind(  # noqa: RUF009
        f"an object of {', '.join(_SETTINGS)}", _are_settings, default_factory=dict
    )
    kv_format: str = _one_of(KV_FORMATS.values(), default="dense")
    # ADAPTERS where requests may have some; compared as texts, as 8.0 is 8 to Python.
    adapters: dict[str, Any] | None = _kind(  # noqa: RUF009
        f"null, or {json.dumps(ADAPTERS)}",
        lambda value: value is None or _sorted_json(value) == _sorted_json(ADAPTERS),
        default=None,
    )
    # Hidden states that the program gives besides (predict.nn.decoder.check_taps), in order.
    taps: list[str] | None = _kind(  # noqa: RUF009
        'null, or a list of up to 8 of "norm" and "layers." with the number of a layer',
        lambda value: value is None or _are_taps(value),
        default=None,
    )
    task: str | None = _kind(  # embed: it gives vectors
        "null or embed", lambda value: value in (None, "embed"), default=None
    )
    # Of several ranks: how many, and what of Ranks is alike on each.
    ranks: dict[str, Any] | None = _kind(  # noqa: RUF009
        'null, or an object of "size", "unit" and "whole_experts"',
        lambda value: value is None or _are_ranks(value),
        default=None,
    )
    tower: str | None = _kind(  # the stem of the program that makes rows of pictures
        "null, or a name of 1 to 200 characters",
        lambda value: (
            value is None or (isinstance(value, str) and len(value) <= 200 and _is_file_name(value))
        ),
        default=None,
    )
    files: dict[str, FileDigest] = _kind(  # noqa: RUF009  (all but the manifest, by name)
        "an object of file names, without folders but those of ranks, with num_bytes and a list "
        "sha256 of a digest for each 64 MiB",
        _are_files,
        default_factory=dict,
    )
    digest: str = _text(default="", compare=False)  # SHA-256 of all fields above, as read

    def part(self, rank: int) -> Ranks:
        """How a rank's program is cut."""
        assert self.ranks is not None
        return Ranks(rank, **self.ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks that run its programs."""
        return 1 if self.ranks is None else self.ranks["size"]

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
        return hashlib.sha256(_sorted_json(values).encode()).hexdigest()


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
    kinds = {each.name: each.metadata for each in dataclasses.fields(Manifest)}
    for name in values:
        if name not in kinds:
            said = f"{path} has the field {name[:60]!r}, which is not known"
            raise UserError(said + hint(name, kinds))
    for name, kind in kinds.items():
        if name not in values and name in _MAY_LACK:
            continue
        if name not in values:
            raise UserError(f"{path} lacks the field {name!r}; {EXPORT}")
        value = values[name]
        if not kind["fits"](value):
            got = json_type(value) if isinstance(value, (dict, list)) else json.dumps(value)[:80]
            raise UserError(f"{path}: {name} is {got} (allowed: {kind['allowed']}); {EXPORT}")
    files = {
        name: FileDigest(entry["num_bytes"], tuple(entry["sha256"]))
        for name, entry in values["files"].items()
    }
    return Manifest(**{**values, "files": files})


def facts_of(spec: DecoderSpec) -> dict[str, Any]:
    """What a manifest and config.json both say of a network."""
    names = ("model_type", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "eos_token_ids")
    return {name: _plain(getattr(spec, name)) for name in names}


def check_spec(manifest: Manifest, directory: str | Path, spec: DecoderSpec) -> None:
    """Raises UserError where the manifest and config.json, as `spec` has it, disagree."""
    differing = [
        f"{name} is {getattr(manifest, name)} in {FILE_NAME} and {value} in config.json"
        for name, value in facts_of(spec).items()
        if getattr(manifest, name) != value
    ]
    if differing:
        raise UserError(f"{directory}: {'; '.join(differing)}; one was edited: {EXPORT}")


def rank_folder(rank: int | None) -> str:
    """Of a rank's program within an export; of one process the export itself."""
    return "" if rank is None else f"rank_{rank}/"


def check_files(manifest: Manifest, directory: str | Path, rank: int | None = None) -> None:
    """Raises UserError where a file is not as it was exported, or the manifest was edited.

    Reads the files of the folder, or those of a rank in its own, whole; a file's parts side by
    side.
    """
    directory = Path(directory)
    own = rank_folder(rank).rstrip("/")
    if manifest.digest != manifest.own_digest:
        raise UserError(f"{directory / FILE_NAME} was edited: its digest is another; {EXPORT}")
    files = {n: file for n, file in manifest.files.items() if n.rpartition("/")[0] == own}
    for name, wanted in files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing, or is no file; {EXPORT}")
        size = path.stat().st_size
        if size != wanted.num_bytes:
            raise UserError(
                f"{path} is not as it was exported: it has {size} bytes, not {wanted.num_bytes}; "
                f"{EXPORT}"
            )
    for name, wanted in files.items():
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


def check_degree(manifest: Manifest, config: EngineConfig) -> None:
    """Raises UserError where the export is for another number of ranks."""
    own, degree = manifest.num_ranks, config.ranks.tensor_parallel_degree
    if own != degree:
        raise UserError(
            f"the exported model in {config.model.model_name_or_path} is for "
            f"{own} rank{'s' * (own > 1)}, and --tensor_parallel_degree is {degree}; give {own}, "
            f"or export it again with --tensor_parallel_degree {degree}"
        )


def check_manifest(
    manifest: Manifest, config: EngineConfig, paddle_version: str, library_abi: int | None
) -> None:
    """Raises one UserError naming every way in which an export does not fit this run.

    library_abi: of the compiled library that is loaded, None without one.
    """
    check_degree(manifest, config)
    ours, theirs = config.quantization.settings, manifest.rounded
    schemes, is_compiled = manifest.scheme.split(","), manifest.library_abi is not None
    # What the export has, what the run is to have, and by which flag, where they may differ.
    facts = [
        ("dtype", manifest.dtype, config.model.dtype, "dtype"),
        ("device", manifest.device, config.model.device.partition(":")[0], "device"),
        ("block_size", manifest.block_size, config.cache.block_size, "block_size"),
        ("its KV cache", manifest.kv_format, config.kv_format, "cachekv_int8_type"),
    ]
    experts = config.ranks.expert_parallel_degree
    if manifest.num_ranks > 1 and experts is not None:
        of = manifest.num_ranks if manifest.part(0).whole_experts else 1
        facts.append(("its experts' degree", str(of), str(experts), "expert_parallel_degree"))
    for flag, scheme in (("quant_type", ours.scheme), ("moe_quant_type", ours.expert_scheme)):
        if scheme is not None and scheme not in schemes:
            facts.append(("the scheme of its weights", manifest.scheme, scheme, flag))
    if ours.head_scheme is not None:
        scheme = ours.head_scheme
        facts.append(("its LM head", manifest.head_scheme, scheme, "lm_head_quant_type"))
    if ours.activations is not None:
        made = theirs.get("activations") or DEFAULT_ACTIVATIONS
        what = "activations beside weight-only codes"
        facts.append((what, made, ours.activations, "weight_only_activations"))
    for name, flag in ROUNDING_FLAGS.items():
        wanted, default = _plain(getattr(ours, name)), _plain(getattr(QuantSettings(), name))
        if wanted != default:
            facts.append((f"its --{flag}", theirs.get(name, default), wanted, flag))
    problems = [
        f"{what} is {exported}, --{flag} asks for {wanted}"
        for what, exported, wanted, flag in facts
        if exported != wanted
    ]
    if config.adapters.lora_modules and manifest.adapters is None:
        problems.append(
            "it takes no adapters of requests, and --lora_modules asks for some (an export with "
            "--enable_lora takes them; --lora_path merges one)"
        )
    if manifest.max_length < config.max_length:
        problems.append(
            f"max_length is {manifest.max_length} tokens, --max_length asks for {config.max_length}"
        )
    if manifest.paddle_version != paddle_version:
        problems.append(
            f"it was traced with Paddle {manifest.paddle_version}, and {paddle_version} is "
            "installed"
        )
    if is_compiled and library_abi is None:
        problems.append(
            "it calls the compiled operators, which are not built here "
            "(build them: python csrc/setup_cpu.py install)"
        )
    elif is_compiled and manifest.library_abi != library_abi:
        problems.append(
            f"it calls operators of ABI {manifest.library_abi}, and the library has {library_abi}"
        )
    # Without the library --inference_model runs the plain operators, as the export was made.
    asked = config.model.inference_model
    if asked not in (None, is_compiled) and (is_compiled or library_abi is not None):
        kind, value = ("compiled", "true") if is_compiled else ("plain-Paddle", "false")
        problems.append(f"it calls the {kind} operators; pass --inference_model {value}")
    if problems:
        raise UserError(
            f"the exported model in {config.model.model_name_or_path} does not fit this run: "
            f"{'; '.join(problems)}. Change the flags to match, or {EXPORT}"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
