"""What a server is started with: its engine, where it listens, what it lets in, and what it says.

Imports no Paddle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.config.engine import EngineConfig, check_params
from predict.errors import UserError
from predict.request import MAX_SAMPLES, SamplingParams
from predict.server.key_file import fits_header, read_keys
from predict.system.bounds import MAX_SCHEMA_BYTES, MAX_STOPS
from predict.system.options import Checked, option
from predict.system.ranges import COUNT, LENGTH, MAX_COUNT, SECONDS, Range

API_KEY_VARIABLE = "REGATTA_API_KEY"
PORTS = Range(0, 65535)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Checked):
    """Every setting of a server, its limits among them. Raises UserError for a value out of range.

    The limits are per request unless they say otherwise.
    """

    engine: EngineConfig
    # Fields of SamplingParams, by name, for requests that do not say them: of
    # generation_config.json and of the command line.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    # fmt: off
    host: str = option("127.0.0.1",
        "Address to listen on; 0.0.0.0 or :: lets other machines in.", group="Server")
    port: int = option(8000,
        "Port to listen on; 0 takes one that is free, and says which.", allowed=PORTS)
    api_keys: tuple[str, ...] = option((),
        "Keys, one of which a client must show as Authorization: Bearer KEY. When not given, "
        "$REGATTA_API_KEY, which other users of the machine do not see in a list of processes.",
        name="api_key", hidden=True)
    api_key_file: str | None = option(None,
        "JSON file of more keys, with names and limits, read again when it changes.",
        is_file=True)
    served_model_names: tuple[str, ...] = option((),
        "Names of the model in requests; answers have the first. When not given, the name of its "
        "folder.",
        name="served_model_name")
    model_folders: tuple[str, ...] = option((),
        "Several models in one server, as name=path name=path: each loads when it is asked for, "
        "and the one used longest ago goes to sleep where there is no room.",
        kind="pairs", null_words=())
    max_models_bytes: int | None = option(None,
        "Bytes of weights and caches of models that are awake together. When not given, one model "
        "is awake at a time.",
        allowed=Range(1, 1 << 50))
    allowed_origins: tuple[str, ...] = option((),
        "Web pages of these origins may ask, as https://example.org, or * for all (CORS).")
    root_path: str = option("",
        "Path that a proxy in front takes off, as /llm.", flag_default=None)
    chat_page: bool = option(True, "Show a page to chat on at /.")
    tool_call_parser: str = option("auto",
        "How the model writes calls of tools; auto finds it by its chat template, none leaves "
        "calls in the text.",
        null_words=())
    reasoning_parser: str = option("auto",
        "How the model marks what it thinks; auto finds it by its chat template, none leaves "
        "thoughts in the text.",
        null_words=())
    max_body_bytes: int = option(8 << 20,
        "Bytes of a request's body; more is 413.",
        group="Limits of a server", allowed=Range(1024, 1 << 30))
    max_prompt_tokens: int | None = option(None,
        "Tokens of a prompt; more is 400. When not given, --src_length, or else what --max_length "
        "leaves.",
        allowed=LENGTH)
    max_prompts: int = option(128, "Prompts of one request.", allowed=Range(1, 1 << 16))
    max_answers: int = option(128,
        "Answers to one prompt: n, best_of, beams.", allowed=Range(1, MAX_SAMPLES))
    max_stop: int = option(16, "Stop texts of one request.", allowed=Range(0, MAX_STOPS))
    max_schema_bytes: int = option(64 << 10,
        "Bytes of a request's schemas, tools or grammar.", allowed=Range(0, MAX_SCHEMA_BYTES))
    max_queue: int = option(512,
        "Answers that wait for a place in the batch; behind them comes 429 with Retry-After.",
        allowed=Range(0, MAX_COUNT))
    max_stored_responses: int = option(1024,
        "Answers of /v1/responses that are kept for later requests, the latest ones; 0 keeps none.",
        allowed=Range(0, MAX_COUNT))
    max_stored_bytes: int = option(128 << 20,
        "Bytes of these answers and of the conversations ahead of them.",
        allowed=Range(1024, 1 << 40))
    max_connections: int = option(4096,
        "Connections of all clients; more are 503.", allowed=COUNT)
    request_timeout: float = option(600.0,
        "Seconds for one request, its waiting included.", allowed=SECONDS)
    body_timeout: float = option(30.0,
        "Seconds in which a request's headers, and then its body, must have come.",
        allowed=SECONDS)
    keep_alive_timeout: float = option(75.0,
        "Seconds after which an idle connection is closed.", allowed=SECONDS)
    retry_after: float = option(1.0,
        "Seconds that 429 and 503 tell a client to wait.", allowed=SECONDS)
    drain_timeout: float | None = option(None,
        "Seconds that running answers have after SIGTERM or Ctrl-C; when not given, as long as "
        "--request_timeout lets them.",
        allowed=SECONDS)
    tokenizer_threads: int = option(2, "Threads that tokenize prompts.", allowed=Range(1, 256))
    access_log: bool = option(True,
        "Write a line of JSON on stderr for each request.", group="What a server says")
    log_format: str = option("text",
        "text writes lines for people on stderr, json all of them as JSON, those of requests too.",
        allowed=("text", "json"))
    otlp_traces_endpoint: str | None = option(None,
        "Send spans of requests there, by OTLP over HTTP, as http://127.0.0.1:4318/v1/traces. "
        "Needs the packages of regatta[otel].")
    log_requests: bool = option(False,
        "Write prompts and answers into these lines too. They may be secret.")
    enable_sleep_mode: bool = option(False,
        "Let clients put the model to sleep and wake it up: POST /sleep, /wake_up. With "
        "--api_key_file, those whose keys have admin.",
        group="Weights that change")
    weights_root: str | None = option(None,
        "Folder below which clients may name weights for the model, of the same shapes: POST "
        "/update_weights. With --api_key_file, those whose keys have admin.",
        is_file=True)
    adapter_root: str | None = option(None,
        "Folder that clients load adapters and prefixes from; nothing outside of it is read, "
        "whatever links lead there.",
        group="Adapters", is_file=True)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "api_keys", tuple(dict.fromkeys(self.api_keys)))
        for key in self.api_keys:
            if not fits_header(key):
                raise UserError(
                    f"--api_key or {API_KEY_VARIABLE} has a key that no HTTP header takes "
                    "(allowed: visible ASCII characters); make another one"
                )
        for origin in self.allowed_origins:
            if origin != "*" and "://" not in origin:
                raise UserError(
                    f"--allowed_origins has {origin!r} (allowed: *, or a scheme and a host, as "
                    "https://example.org)"
                )
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise UserError(
                f"--root_path {self.root_path!r} is not supported (allowed: a path that begins "
                "with a slash and ends with none, as /llm)"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise UserError(
                f"--otlp_traces_endpoint {endpoint!r} is not supported (allowed: an address, as "
                "http://127.0.0.1:4318/v1/traces)"
            )
        if self.model_folders and (self.enable_sleep_mode or self.weights_root is not None):
            raise UserError(
                "--model_folders puts models to sleep and wakes them by itself; leave out "
                "--enable_sleep_mode and --weights_root"
            )
        if self.api_key_file is not None:
            read_keys(Path(self.api_key_file))
        self._check_adapters()
        check_params(self.params({}), self.engine)

    def _check_adapters(self) -> None:
        if self.engine.adapters.allow_adapter_updates != (self.adapter_root is not None):
            given, missing = "--allow_adapter_updates", "--adapter_root"
            if self.adapter_root is not None:
                given, missing = missing, given
            raise UserError(
                f"{given} needs {missing}: clients load adapters of that folder alone; add "
                f"{missing}, or leave {given} out"
            )
        if self.weights_root is not None and not os.path.isdir(self.weights_root):
            raise UserError(f"--weights_root {self.weights_root} is no folder; make it first")
        if self.adapter_root is not None and not os.path.isdir(self.adapter_root):
            raise UserError(f"--adapter_root {self.adapter_root} is no folder; make it first")
        for name in self.model_names:
            if name in self.engine.adapters.names:
                flag = "lora_modules" if name in self.engine.adapters.directories else "prefix_path"
                raise UserError(
                    f"--{flag} has an adapter {name!r}, which is the model's name too; "
                    "requests name the one they mean: give it another name, or the model "
                    "(--served_model_name)"
                )

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request that says these fields. Raises UserError."""
        return SamplingParams(**{**self.sampling_defaults, **given})

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a request may call the model by; the first is the one in answers."""
        if self.served_model_names:
            return self.served_model_names
        return (os.path.basename(os.path.normpath(self.engine.model.model_name_or_path)),)

    @property
    def max_prompt_length(self) -> int:
        """Tokens that a prompt may have: one at least is left for the answer."""
        most = self.engine.max_length - 1
        return most if self.max_prompt_tokens is None else min(self.max_prompt_tokens, most)

    @property
    def max_in_flight(self) -> int:
        """Answers that may run or wait; behind them comes 429."""
        return self.engine.scheduling.batch_size + self.max_queue
