"""From flags to one run: rules between them, notes, what config files add, the frozen configs.

Imports no Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.cli.flags import Clash, FlagValues, RunOptions, check_rules
from predict.config.adapters import ADAPTER_FILES, LORA_CONFIG
from predict.config.cache import KV_FORMATS
from predict.config.engine import TOPICS, EngineConfig, check_params
from predict.config.model import AUTO, DTYPES
from predict.device.devices import default_name, on_cpu
from predict.errors import UserError
from predict.loading.generation_config import DRAWING, FILE, Recommended, read_recommended
from predict.request import EarlyStopping, SamplingParams, check_samples
from predict.system.files import find_model_dir, read_json_object
from predict.system.options import values_of

if TYPE_CHECKING:
    from predict.nn.hf_config import ConfigReader
    from predict.nn.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(RunOptions):
    """One run of the command line: the engine, how to sample, the files, and what to say first."""

    engine: EngineConfig
    sampling_params: SamplingParams
    max_new_tokens: int  # of a prompt that fills src_length
    notes: tuple[str, ...] = ()  # one line each, for stderr

    @classmethod
    def from_flags(cls, flags: FlagValues) -> PredictorConfig:
        """The run that the flags ask for, its model directory found.

        Raises UserError where flags exclude each other, a value is out of range, or the model
        directory does not exist.
        """
        flags, notes = _with_adapter(flags)
        check_rules(RULES, flags, flags.values)
        directory = find_model_dir(flags["model_name_or_path"])
        if directory != Path(flags["model_name_or_path"]):
            notes.append(f"{flags['model_name_or_path']} was found in {directory}")
        if flags["mode"] == "static":
            flags = _with_exported(flags, directory)
        flags, left_out = _with_recommended(flags, directory)
        dynamic = flags["mode"] == "dynamic"
        spec = _read_spec(directory, flags["model_type"]) if dynamic else None
        if spec is not None:
            flags = _with_avx_dtype(flags)
        draft = "draft_model_name_or_path"
        drafts = None if flags[draft] is None else find_model_dir(flags[draft], draft)
        flags, said = _with_lengths(flags, spec, _read_spec(drafts) if drafts else None)
        left_out += said
        notes += [note.message for note in NOTES if note.broken(flags)]
        notes += left_out
        check_rules(RULES, flags, flags.values)
        max_length = _max_length(flags)
        device, why_cpu = _device(flags)
        if why_cpu:
            notes.append(why_cpu)
        beams = flags["num_beams"] if flags["decode_strategy"] == "beam_search" else 1
        # Off in a benchmark unless asked for: its equal prompts would measure the cache alone.
        shares = flags.given("prefix_caching") or not flags["benchmark"]
        settings = {
            **values_of(flags.values, *TOPICS.values()),
            "model_name_or_path": str(directory),
            "device": device,
            "attention": _attention(flags),
            "max_length": max_length,
            "draft_model_name_or_path": None if drafts is None else str(drafts),
            "batch_size": flags["batch_size"] * max(beams, 1),  # each beam is a sequence
            "prefix_caching": flags["prefix_caching"] and shares,
        }
        if flags["avx_cachekv_type"] == "int8":  # which has dynamic scales
            settings["cachekv_int8_type"] = "dynamic"
        engine = EngineConfig(**settings).located()
        if engine.model.dtype == AUTO and spec is not None:
            from predict.loading.defaults import with_model_defaults  # slow

            engine = with_model_defaults(engine, *spec)
            notes.append(f"--dtype is {engine.model.dtype}, the checkpoint's")
        _check_adapters(engine)
        sampling_params = _sampling_params(flags, max_length)
        check_params(sampling_params, engine)
        run = {"num_requests": flags["batch_size"], **values_of(flags.values, RunOptions)}
        longest = min(max_length - flags["src_length"], flags["max_new_tokens"] or max_length)
        return cls(
            engine=engine,
            sampling_params=sampling_params,
            max_new_tokens=longest,
            notes=tuple(notes),
            **run,
        )


_AVX_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
# Values of a sampling flag that change nothing about greedy decoding.
_GREEDY_NEUTRAL = {
    "top_k": (0, 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "temperature": (0.0, 1.0),
}
# Flags of beam_search that are SamplingParams fields; early_stopping is a text here.
_BEAM_FLAGS = ("num_beams", "length_penalty", "early_stopping")
# Flags that a benchmark has no use for, and the values that change nothing.
_NOT_MEASURED: dict[str, tuple[Any, ...]] = {
    "num_return_sequences": (1,),
    "best_of": (None, 1),
    "stop": (None,),
    "stop_token_ids": (None,),
}
_EARLY_STOPPING: dict[str, EarlyStopping] = {"false": False, "true": True, "never": "never"}


def _sharpened(flags: FlagValues) -> bool:
    return any(flags.given(n) and flags[n] not in ok for n, ok in _GREEDY_NEUTRAL.items())


# fmt: off
RULES: tuple[Clash, ...] = (
    Clash(lambda f: f["model_name_or_path"] is None,
         "--model_name_or_path is needed: the directory of a model"),
    Clash(lambda f: f.given("max_length", "total_max_length")
         and f["max_length"] > f["total_max_length"],
         "--max_length {max_length} is more than --total_max_length {total_max_length}, which is "
         "the limit on prompt and output together; leave --total_max_length out"),
    Clash(lambda f: f.given("inference_model") and not f["inference_model"]
         and (f["block_attn"] or f["append_attn"] or f["avx_model"]),
         "--block_attn, --append_attn and --avx_model run the compiled operators, which "
         "--inference_model false turns off; leave one of the two out"),
    Clash(lambda f: f.given("prefix_caching") and f["prefix_caching"]
         and _attention(f) == "reserved",
         "--prefix_caching shares blocks between sequences, and without --block_attn or "
         "--append_attn each sequence reserves blocks of its own; add --append_attn"),
    Clash(lambda f: f["avx_model"] and f.given("device") and f["device"] != "cpu",
         "--avx_model is the CPU path, and --device is {device}; use --device cpu"),
    Clash(lambda f: f["avx_type"] and f["dtype"] not in (None, _AVX_DTYPES[f["avx_type"]]),
         "--avx_type {avx_type} does not agree with --dtype {dtype}: the CPU computes in the type "
         "of the model; use --avx_type fp16 with --dtype float16, bf16 with bfloat16, or leave "
         "--avx_type out"),
    Clash(lambda f: f["avx_cachekv_type"] == "fp16" and f["dtype"] not in (None, "float16"),
         "--avx_cachekv_type fp16 does not agree with --dtype {dtype}: the KV cache has the type "
         "of the model; leave --avx_cachekv_type out"),
    Clash(lambda f: f["avx_cachekv_type"] and f["cachekv_int8_type"],
         "--avx_cachekv_type {avx_cachekv_type} and --cachekv_int8_type {cachekv_int8_type} both "
         "name the type of the KV cache; leave --avx_cachekv_type out"),
    Clash(lambda f: f["decode_strategy"] == "greedy_search" and _sharpened(f),
         "--decode_strategy greedy_search takes the most likely token, so --top_k, --top_p, "
         "--min_p, --typical_p and --temperature cannot change it; leave them out, or use "
         "--decode_strategy sampling"),
    Clash(lambda f: f["decode_strategy"] == "beam_search"
         and (_sharpened(f) or f["speculate_method"]),
         "--decode_strategy beam_search neither samples nor takes draft tokens; leave --top_k, "
         "--top_p, --min_p, --typical_p, --temperature and --speculate_method out"),
    *(Clash(lambda f, name=name: f.given(name) and f["decode_strategy"] != "beam_search",  # type: ignore[misc]
           f"--{name} is about beams, and --decode_strategy is {{decode_strategy}}; add "
           f"--decode_strategy beam_search, or leave --{name} out")
      for name in _BEAM_FLAGS),
    Clash(lambda f: f["decode_strategy"] == "beam_search" and f["benchmark"],
         "--benchmark measures requests of one sequence each; leave --decode_strategy beam_search "
         "out"),
    *(Clash(lambda f, name=name, none=none: f["benchmark"] and f[name] not in none,  # type: ignore[misc]
           "--benchmark decodes one answer to each prompt, without an early stop; leave "
           f"--{name} out")
      for name, none in _NOT_MEASURED.items()),
    Clash(lambda f: f["export_precache"] and not (f["prefix_path"] or f.values.get("output_path")),
         "--export_precache needs --prefix_path: the folder or the .npy file of a tuned prefix"),
    Clash(lambda f: f["benchmark_file"] is not None and not f["benchmark"],
         "--benchmark_file {benchmark_file} needs --benchmark"),
    Clash(lambda f: f["benchmark"] and _max_length(f) <= f["src_length"],
         "--benchmark fills every prompt to --src_length {src_length}, which leaves no room for "
         "output below --max_length {max_length}; raise --max_length or lower --src_length"),
)
NOTES: tuple[Clash, ...] = (
    Clash(lambda f: f["mode"] == "static" and f["load_format"] == "dummy",
         "--load_format dummy has no effect here: an exported model brings its own weights"),
    Clash(lambda f: f.given("max_length", "total_max_length"),
         "--max_length counts prompt and output together; --max_new_tokens limits the output "
         "alone"),
    Clash(lambda f: f["decode_strategy"] == "sampling" and f["top_k"] == 1 and not f.given("top_k")
         and _sharpened(f),
         "--top_k is 1 when not given, which is greedy, so --top_p, --min_p, --typical_p and "
         "--temperature change nothing; add --top_k 0 to sample"),
)
# fmt: on


def _max_length(flags: FlagValues) -> int:
    """Tokens of prompt and output together that one sequence may take: the tightest limit."""
    limits = []
    if flags["max_new_tokens"] is not None:
        limits.append(flags["src_length"] + flags["max_new_tokens"])
    if flags["total_max_length"] is not None:
        limits.append(flags["total_max_length"])
    # An exported program has a limit of its own, which stands for the default.
    if flags.given("max_length") or flags["mode"] == "static" or not limits:
        limits.append(flags["max_length"])
    return int(min(limits))


def _device(flags: FlagValues) -> tuple[str, str]:
    """The device, and a line on why it is the CPU where the flags leave that open.

    Left open: a GPU where one is usable, as PaddleNLP's default is, but for what only the CPU runs
    (the plain operators; --avx_model asks for it). An exported program runs where it was made for.
    """
    if flags.given("device") or flags["mode"] == "static":
        return flags["device"], ""
    if flags["avx_model"]:
        return "cpu", ""
    if flags["inference_model"] is False:
        return "cpu", on_cpu("--inference_model false runs there, and not on a GPU")
    return default_name()


def _attention(flags: FlagValues) -> str:
    """append_attn replaces block_attn when both are given, as in PaddleNLP."""
    if flags["append_attn"]:
        return "append"
    return "block" if flags["block_attn"] else "reserved"


def _with_adapter(flags: FlagValues) -> tuple[FlagValues, list[str]]:
    """The flags with the adapter's directory found, and notes: PaddleNLP's adapters have a dtype.

    Theirs is the run's where --dtype is left out, as in PaddleNLP.
    """
    notes, name = [*flags.notes], flags["lora_path"]
    if name is None:
        return flags, notes
    directory = find_model_dir(name, "lora_path", ADAPTER_FILES)
    changed: dict[str, Any] = {"lora_path": str(directory)}
    path = directory / LORA_CONFIG
    dtype = read_json_object(path, missing_ok=True).get("dtype")
    if flags["dtype"] is None and dtype in DTYPES and flags["mode"] == "dynamic":
        changed["dtype"] = dtype
        notes.append(f"--dtype is {dtype}, that of {path}")
    return replace(flags, values={**flags.values, **changed}), notes


def _with_avx_dtype(flags: FlagValues) -> FlagValues:
    """The flags, with the dtype that flags of the CPU path name where --dtype is left out."""
    if flags["dtype"] is not None or not (flags["avx_type"] or flags["avx_cachekv_type"] == "fp16"):
        return flags
    dtype = _AVX_DTYPES.get(flags["avx_type"], "float16")
    return replace(flags, values={**flags.values, "dtype": dtype})


def _read_spec(
    directory: Path, model_type: str | None = None
) -> tuple[DecoderSpec, ConfigReader] | None:
    """The model's network; None where none can be read, which loading refuses by name."""
    from predict.loading.model import read_spec  # slow, and most runs need nothing of it here

    try:
        return read_spec(directory, model_type)
    except UserError:
        return None


def _with_lengths(
    flags: FlagValues,
    model: tuple[DecoderSpec, ConfigReader] | None,
    draft: tuple[DecoderSpec, ConfigReader] | None,
) -> tuple[FlagValues, list[str]]:
    """The flags, lengths that they leave open within what the two models can take.

    That is the table of learned positions; a draft model takes what it was made for.
    """
    if flags.given("max_length") or flags.given("total_max_length"):
        return flags, []
    learned = None if model is None else model[0].num_learned_positions
    limits = [] if learned is None else [(learned, "all positions that the model has learned")]
    if draft is not None:
        limits.append((draft[0].max_context, "the positions that the draft model was made for"))
    most, words = min(limits, default=(_max_length(flags), ""))
    if most >= _max_length(flags):
        return flags, []
    changed = {"max_length": most, "total_max_length": most}
    if not flags.given("src_length"):
        changed["src_length"] = min(flags["src_length"], most - 1)
    note = f"--max_length is {most}, {words}"
    return replace(flags, values={**flags.values, **changed}), [note]


def _check_adapters(engine: EngineConfig) -> None:
    """Raises UserError where a folder of --lora_modules is missing: before any weight is read."""
    for name, path in engine.adapters.directories.items():
        if not Path(path).is_dir():
            raise UserError(
                f"--lora_modules {name}={path}: {path} is no folder; give an adapter's, with its "
                "adapter_config.json or lora_config.json"
            )


def _with_exported(flags: FlagValues, directory: Path) -> FlagValues:
    """The flags with an exported model's own values for those that the command line left out."""
    from predict.loading.manifest import load_manifest  # it imports this module

    manifest = load_manifest(directory)
    most = manifest.max_length
    if flags.given("max_new_tokens") and flags["max_new_tokens"] >= most:
        raise UserError(
            f"--max_new_tokens {flags['max_new_tokens']} leaves no room for a prompt: this program "
            f"was exported for {most} tokens of prompt and output together; lower it, or export "
            "with a larger --max_length"
        )
    limited = flags.given("max_new_tokens") or flags.given("total_max_length")
    exported = {
        "dtype": manifest.dtype,
        "device": manifest.device,
        "inference_model": manifest.library_abi is not None,
        "block_size": manifest.block_size,
        "max_length": most if limited else min(flags["max_length"], most),
    }
    if flags["avx_cachekv_type"] is None:
        types = {row: kind for kind, row in KV_FORMATS.items()}
        exported["cachekv_int8_type"] = types.get(manifest.kv_format)
    left_out = {name: exported[name] for name in exported if not flags.given(name)}
    return replace(flags, values={**flags.values, **left_out})


def _with_recommended(flags: FlagValues, directory: Path) -> tuple[FlagValues, list[str]]:
    """The flags, with the sampling that --generation_config asks for.

    What a flag says stays; what is left out is told in one line, unless the flag said none.
    """
    wanted: str = flags["generation_config"]
    if wanted != "none":
        found = read_recommended(directory if wanted == "auto" else wanted)
        if found is None:
            return flags, [f"--generation_config {wanted}: there is no {FILE}"]
        return replace(flags, values={**flags.values, **_not_given(flags, found)}), found.note
    if flags.given("generation_config"):
        return flags, []
    try:
        found = read_recommended(directory)
    except UserError:  # nothing of it is taken, so that nothing in it is wrong
        return flags, []
    values = {} if found is None else _not_given(flags, found)
    if found is None or all(value == flags[name] for name, value in values.items()):
        return flags, [] if found is None else found.note
    said = [f"{name} {values[name]}" for name in found.values if name in values]
    return flags, [
        *found.note,
        f"{found.path} recommends {', '.join(said) or 'sampling'}, which --generation_config auto "
        "takes and none, the default, leaves out",
    ]


def _not_given(flags: FlagValues, found: Recommended) -> dict[str, Any]:
    """What is recommended of the flags that the command line leaves open."""
    values = dict(found.values)
    if found.samples:
        values.setdefault("top_k", 0)  # the flag's own default is greedy
    if flags["decode_strategy"] != "sampling":
        values = {name: value for name, value in values.items() if name not in DRAWING}
    return {name: value for name, value in values.items() if not flags.given(name)}


def _sampling_params(flags: FlagValues, max_length: int) -> SamplingParams:
    """How each output token is chosen and when the output ends."""
    values = {**values_of(flags.values, SamplingParams), "max_length": max_length}
    searches = flags["decode_strategy"] == "beam_search"
    values["early_stopping"] = _EARLY_STOPPING[flags["early_stopping"]]
    if not searches:
        values = {name: value for name, value in values.items() if name not in _BEAM_FLAGS}
    if searches or flags["decode_strategy"] == "greedy_search" or flags["top_p"] == 0.0:
        values |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    params = SamplingParams(**values)
    check_samples(params)
    return params
