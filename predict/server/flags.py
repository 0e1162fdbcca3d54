"""The server's command line: its own rows, and the predictor's that build an engine.

Imports nothing slow: --help must answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from predict.cli.flags import FLAGS as PREDICTOR
from predict.cli.flags import Flag, FlagValues, RunOptions, parse_flags, with_file
from predict.server.config import ServerConfig
from predict.system.flag import Availability, not_here
from predict.system.options import flags_of
from predict.system.ranges import BATCH, LENGTH

PROG = "python -m predict.server"
DESCRIPTION = "Answers requests of OpenAI's API over HTTP with one model."
USAGE = "[FLAGS.json] --model_name_or_path DIR [--flag [VALUE] ...]"

CPU_BATCH_SIZE, GPU_BATCH_SIZE = 32, 256

_ENGINE = "Other than in the predictor"

# fmt: off
OWN_FLAGS: tuple[Flag, ...] = (
    *flags_of(ServerConfig),
    Flag("Adapters", "allow_adapter_updates", "bool", False,
         "Let clients load and unload adapters and tuned prefixes while requests run: POST "
         "/v1/load_lora_adapter, /v1/unload_lora_adapter, /v1/load_prefix, /v1/unload_prefix. "
         "Needs --adapter_root."),
    # Rows of the predictor that mean something else to a server.
    Flag(_ENGINE, "batch_size", "int", None,
         f"Sequences decoded together; when not given, {CPU_BATCH_SIZE} on the CPU and "
         f"{GPU_BATCH_SIZE} on a GPU.",
         allowed=BATCH),
    Flag(_ENGINE, "append_attn", "bool", None,
         "As in the predictor, and on when none of --inference_model, --block_attn, --append_attn "
         "and --avx_model is given."),
    Flag(_ENGINE, "src_length", "int", None,
         "As --max_prompt_tokens: a longer prompt is refused, not cut.",
         allowed=LENGTH),
    Flag(_ENGINE, "max_new_tokens", "int", None,
         "Longest answer in tokens of requests that do not say it."),
    Flag(_ENGINE, "generation_config", "str", "auto",
         "Sampling of requests that do not say how, below what flags say: auto is the model's "
         "generation_config.json; else such a file, or its folder; none leaves it out."),
)
# fmt: on

_EACH_SAYS = not_here("each request says it.")
_NO_FILES = not_here("requests come over HTTP. predict/predictor.py answers files.")
_NO_BENCHMARK = not_here("python -m predict.bench.serving measures a server.")
# Rows of the predictor that a server refuses.
REFUSED: dict[str, Availability] = {
    **{flag.name: _NO_BENCHMARK for flag in flags_of(RunOptions)},
    **dict.fromkeys(("data_file", "output_file", "resume"), _NO_FILES),
    "decode_strategy": not_here("each request says num_beams.", "beam_search"),
    **dict.fromkeys(("num_beams", "length_penalty", "early_stopping"), _EACH_SAYS),
    **dict.fromkeys(("num_return_sequences", "best_of"), _EACH_SAYS),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _EACH_SAYS),
}


def _flags() -> tuple[Flag, ...]:
    """All rows: the model first, then the server, then what else an engine takes."""
    own = {flag.name for flag in OWN_FLAGS}
    kept = [
        replace(flag, availability=REFUSED[flag.name]) if flag.name in REFUSED else flag
        for flag in PREDICTOR
        if flag.name not in own
    ]
    model = [flag for flag in kept if flag.group == kept[0].group]
    return (*model, *OWN_FLAGS, *kept[len(model) :])


FLAGS = _flags()


def parse(argv: Sequence[str]) -> FlagValues:
    """The flags of a command line, whose first word may be a .json file of flags.

    Raises UserError; SystemExit(0) after --help.
    """
    return parse_flags(with_file(argv, FLAGS), FLAGS, PROG, DESCRIPTION, USAGE)
