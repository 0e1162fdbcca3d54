"""The server's command line: its own rows, and the predictor's that build an engine.

Imports nothing slow: --help must answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from predict.cli.flags import FLAGS as PREDICTOR
from predict.cli.flags import Availability, Flag, FlagValues, not_here, parse_flags, with_file

PROG = "python -m predict.server"
DESCRIPTION = "Answers requests of OpenAI's API over HTTP with one model."
USAGE = "[FLAGS.json] --model_name_or_path DIR --dtype TYPE [--flag [VALUE] ...]"

CPU_BATCH_SIZE, GPU_BATCH_SIZE = 32, 256

_SERVER = "Server"
_LIMITS = "Limits of a server"
_LOGS = "What a server says"
_ADAPTERS = "Adapters"
_ENGINE = "Other than in the predictor"

# fmt: off
OWN_FLAGS: tuple[Flag, ...] = (
    Flag(_SERVER, "host", "str", "127.0.0.1",
         "Address to listen on; 0.0.0.0 or :: lets other machines in."),
    Flag(_SERVER, "port", "int", 8000,
         "Port to listen on; 0 takes one that is free, and says which."),
    Flag(_SERVER, "api_key", "strs", None,
         "Keys, one of which a client must show as Authorization: Bearer KEY. When not given, "
         "$REGATTA_API_KEY, which other users of the machine do not see in a list of processes."),
    Flag(_SERVER, "served_model_name", "strs", None,
         "Names of the model in requests; answers have the first. When not given, the name of its "
         "folder."),
    Flag(_SERVER, "allowed_origins", "strs", None,
         "Web pages of these origins may ask, as https://example.org, or * for all (CORS)."),
    Flag(_SERVER, "root_path", "str", None,
         "Path that a proxy in front takes off, as /llm."),
    Flag(_SERVER, "chat_page", "bool", True,
         "Show a page to chat on at /."),
    Flag(_SERVER, "tool_call_parser", "str", "auto",
         "How the model writes calls of tools; auto finds it by its chat template, none leaves "
         "calls in the text.",
         null_words=()),
    Flag(_SERVER, "reasoning_parser", "str", "auto",
         "How the model marks what it thinks; auto finds it by its chat template, none leaves "
         "thoughts in the text.",
         null_words=()),
    Flag(_LIMITS, "max_body_bytes", "int", 8 << 20,
         "Bytes of a request's body; more is 413."),
    Flag(_LIMITS, "max_prompt_tokens", "int", None,
         "Tokens of a prompt; more is 400. When not given, --src_length, or else what --max_length "
         "leaves."),
    Flag(_LIMITS, "max_prompts", "int", 128,
         "Prompts of one request."),
    Flag(_LIMITS, "max_answers", "int", 128,
         "Answers to one prompt: n, best_of, beams."),
    Flag(_LIMITS, "max_stop", "int", 16,
         "Stop texts of one request."),
    Flag(_LIMITS, "max_schema_bytes", "int", 64 << 10,
         "Bytes of a request's schemas, tools or grammar."),
    Flag(_LIMITS, "max_queue", "int", 512,
         "Answers that wait for a place in the batch; behind them comes 429 with Retry-After."),
    Flag(_LIMITS, "max_connections", "int", 4096,
         "Connections of all clients; more are 503."),
    Flag(_LIMITS, "request_timeout", "float", 600.0,
         "Seconds for one request, its waiting included."),
    Flag(_LIMITS, "body_timeout", "float", 30.0,
         "Seconds in which a request's headers, and then its body, must have come."),
    Flag(_LIMITS, "keep_alive_timeout", "float", 75.0,
         "Seconds after which an idle connection is closed."),
    Flag(_LIMITS, "retry_after", "float", 1.0,
         "Seconds that 429 and 503 tell a client to wait."),
    Flag(_LIMITS, "drain_timeout", "float", None,
         "Seconds that running answers have after SIGTERM or Ctrl-C; when not given, as long as "
         "--request_timeout lets them."),
    Flag(_LIMITS, "tokenizer_threads", "int", 2,
         "Threads that tokenize prompts."),
    Flag(_LOGS, "access_log", "bool", True,
         "Write a line of JSON on stderr for each request."),
    Flag(_LOGS, "log_requests", "bool", False,
         "Write prompts and answers into these lines too. They may be secret."),
    Flag(_ADAPTERS, "allow_adapter_updates", "bool", False,
         "Let clients load and unload adapters and tuned prefixes while requests run: POST "
         "/v1/load_lora_adapter, /v1/unload_lora_adapter, /v1/load_prefix, /v1/unload_prefix. "
         "Needs --adapter_root."),
    Flag(_ADAPTERS, "adapter_root", "str", None,
         "Folder that clients load adapters and prefixes from; nothing outside of it is read, "
         "whatever links lead there."),
    # Rows of the predictor that mean something else to a server.
    Flag(_ENGINE, "batch_size", "int", None,
         f"Sequences decoded together; when not given, {CPU_BATCH_SIZE} on the CPU and "
         f"{GPU_BATCH_SIZE} on a GPU."),
    Flag(_ENGINE, "append_attn", "bool", None,
         "As in the predictor, and on when none of --inference_model, --block_attn, --append_attn "
         "and --avx_model is given."),
    Flag(_ENGINE, "src_length", "int", None,
         "As --max_prompt_tokens: a longer prompt is refused, not cut."),
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
_REFUSED: dict[str, Availability] = {
    "data_file": _NO_FILES,
    "output_file": _NO_FILES,
    "resume": _NO_FILES,
    "benchmark": _NO_BENCHMARK,
    "benchmark_file": _NO_BENCHMARK,
    "total_request_num": _NO_BENCHMARK,
    "decode_strategy": not_here("each request says num_beams.", "beam_search"),
    "num_beams": _EACH_SAYS,
    "length_penalty": _EACH_SAYS,
    "early_stopping": _EACH_SAYS,
    "num_return_sequences": _EACH_SAYS,
    "best_of": _EACH_SAYS,
    "logprobs": _EACH_SAYS,
    "prompt_logprobs": _EACH_SAYS,
}


def _flags() -> tuple[Flag, ...]:
    """All rows: the model first, then the server, then what else an engine takes."""
    own = {flag.name for flag in OWN_FLAGS}
    kept = [
        replace(flag, availability=_REFUSED[flag.name]) if flag.name in _REFUSED else flag
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
