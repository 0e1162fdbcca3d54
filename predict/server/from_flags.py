"""From the server's flags to its config: the engine's, what requests take over, and limits.

Imports no Paddle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from predict.cli.flags import FLAGS as PREDICTOR
from predict.cli.flags import FlagValues
from predict.cli.run_config import PredictorConfig
from predict.device.devices import kind_of
from predict.errors import UserError
from predict.loading.generation_config import DRAWING, read_recommended
from predict.request import SamplingParams
from predict.server.config import API_KEY_VARIABLE, ServerConfig
from predict.server.flags import CPU_BATCH_SIZE, GPU_BATCH_SIZE, REFUSED
from predict.system.options import flags_of, values_of
from predict.text import reasoning, tool_calls

# Fields of SamplingParams that flags say: how a request is sampled that does not say it.
SAMPLING = tuple(flag.name for flag in flags_of(SamplingParams) if flag.name not in REFUSED)
# Any of these says which operators and which cache an engine has.
_OPERATORS = ("inference_model", "block_attn", "append_attn", "avx_model")


def server_config(
    flags: FlagValues, environment: Mapping[str, str] = os.environ
) -> tuple[ServerConfig, list[str]]:
    """The server that the flags ask for, and what to tell whoever started it, a line each.

    environment: where a key may stand. Raises UserError.
    """
    run = PredictorConfig.from_flags(_engine_flags(flags))
    notes = [*run.notes]
    engine = run.engine.changed(allow_adapter_updates=flags["allow_adapter_updates"])
    if flags["batch_size"] is None:
        size = GPU_BATCH_SIZE if kind_of(engine.model.device) == "gpu" else CPU_BATCH_SIZE
        engine = engine.changed(batch_size=size)
        notes.append(f"--batch_size is {size} when not given: sequences that run together")
    if not any(flags.given(name) for name in _OPERATORS):
        notes.append(
            "--append_attn is on: a server's sequences take cache blocks as they grow, and share "
            "prefixes; --inference_model alone reserves the whole cache of each"
        )
    sampling, said = _sampling_defaults(flags, engine.model.model_name_or_path)
    notes += said
    for name, check in (
        ("tool_call_parser", tool_calls.format_of),
        ("reasoning_parser", reasoning.reasoning_of),
    ):
        if flags[name] not in ("auto", "none"):
            check(flags[name])
    settings = {"max_prompt_tokens": flags["src_length"], **values_of(flags.values, ServerConfig)}
    if "api_keys" not in settings and environment.get(API_KEY_VARIABLE):
        settings["api_keys"] = (environment[API_KEY_VARIABLE],)
    config = ServerConfig(engine=engine, sampling_defaults=sampling, **settings)
    has_keys = config.api_keys or config.api_key_file
    if not has_keys and config.host not in ("127.0.0.1", "localhost", "::1"):
        notes.append(
            f"--host {config.host} lets other machines in, and no --api_key is set: whoever "
            "reaches the port may ask"
        )
    if engine.adapters.allow_adapter_updates and not has_keys:
        notes.append(
            "--allow_adapter_updates without --api_key: whoever reaches the port may load and "
            "unload adapters"
        )
    allowed = {
        "--enable_sleep_mode": config.enable_sleep_mode,
        "--weights_root": config.weights_root,
    }
    if not has_keys and any(allowed.values()):
        given = " and ".join(flag for flag, is_given in allowed.items() if is_given)
        notes.append(f"{given} without --api_key: whoever reaches the port may change the model")
    return config, notes


def several_configs(
    flags: FlagValues, environment: Mapping[str, str] = os.environ
) -> dict[str, ServerConfig] | None:
    """The configs of --model_folders by name, each with all other flags; None without any.

    Raises UserError.
    """
    listed = flags["model_folders"] or ()
    if not listed:
        return None
    for other in ("model_name_or_path", "served_model_name"):
        if flags.given(other):
            raise UserError(f"--model_folders names the models; leave out --{other}")
    folders: dict[str, str] = {}
    for text in listed:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in folders:
            raise UserError(f"--model_folders has {text!r} (allowed: name=path, each name once)")
        folders[name] = path
    found: dict[str, ServerConfig] = {}
    for name, path in folders.items():
        values = {**flags.values, "model_name_or_path": path, "served_model_name": (name,)}
        explicit = flags.explicit | {"model_name_or_path", "served_model_name"}
        found[name] = server_config(FlagValues(values, explicit, flags.notes), environment)[0]
    return found


def _engine_flags(flags: FlagValues) -> FlagValues:
    """What the predictor would have been given for the same engine, without any sampling."""
    known = {flag.name: flag.default for flag in PREDICTOR}
    left_out = {*SAMPLING, "decode_strategy", "generation_config"}
    explicit = {name for name in flags.explicit if name in known and name not in left_out}
    values = {**known, **{name: flags[name] for name in explicit}}
    values["generation_config"] = "none"  # said: nothing is told of what it would have
    explicit.add("generation_config")
    if not any(flags.given(name) for name in _OPERATORS):
        values["append_attn"] = True
        explicit.add("append_attn")
    return FlagValues(values, frozenset(explicit), flags.notes)


def _sampling_defaults(flags: FlagValues, directory: str) -> tuple[dict[str, Any], list[str]]:
    """Fields of SamplingParams for requests that do not say them, and a note on where from."""
    given = {name: flags[name] for name in SAMPLING if flags.given(name)}
    greedy = flags["decode_strategy"] == "greedy_search" or given.get("top_p") == 0.0
    if greedy:
        drawing = [name for name in DRAWING if name in given and name != "top_p"]
        if drawing:
            raise UserError(
                f"greedy decoding takes the most likely token, so --{drawing[0]} cannot change it; "
                "leave one of the two out"
            )
        given.pop("top_p", None)
        given["temperature"] = 0.0
    wanted = flags["generation_config"]
    if wanted == "none":
        return given, []
    try:
        found = read_recommended(directory if wanted == "auto" else wanted)
    except UserError as error:
        if flags.given("generation_config"):
            raise
        return given, [f"{error}; nothing of it is taken (--generation_config none says so)"]
    if found is None:
        return given, []
    values = {**found.values}
    if found.greedy:
        values["temperature"] = 0.0
    if found.max_new_tokens is not None:
        values["max_new_tokens"] = found.max_new_tokens
    if greedy:
        values = {name: value for name, value in values.items() if name not in DRAWING}
    values = {name: value for name, value in values.items() if name not in given}
    if not values:
        return given, found.note
    said = ", ".join(f"{name} {value}" for name, value in values.items())
    notes = [f"{found.path}: requests that do not say it have {said}", *found.note]
    return {**values, **given}, notes
