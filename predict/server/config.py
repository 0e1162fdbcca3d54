"""What a server is started with: its engine, where it listens, what it lets in, and what it says.

Imports no Paddle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from predict.config.checks import check_fields
from predict.config.engine import EngineConfig, check_params
from predict.errors import UserError
from predict.guide import MAX_SCHEMA_BYTES
from predict.request import SamplingParams

API_KEY_VARIABLE = "REGATTA_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Every setting of a server, its limits among them. Raises UserError for a value out of range.

    The limits are per request unless they say otherwise; each is a flag of the same name.
    """

    engine: EngineConfig
    # Fields of SamplingParams, by name, for requests that do not say them: of
    # generation_config.json and of the command line.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    # where it listens, and for whom
    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free, which the start says
    root_path: str = ""  # of a proxy that takes it off
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: everybody is let in
    allowed_origins: tuple[str, ...] = ()  # of CORS; empty: no header of it is ever sent
    served_model_names: tuple[str, ...] = ()  # empty: the name of the model's folder
    chat_page: bool = True  # whether / shows it
    adapter_root: str | None = None  # that clients load adapters from; None: they load none

    # what the texts of an answer mean: names of predict.text's tables, auto or none
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    # limits
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None  # None: what the engine's max_length leaves
    max_prompts: int = 128  # in one request
    max_answers: int = 128  # of one prompt: n, best_of, beams
    max_stop: int = 16  # stop texts
    max_schema_bytes: int = 64 << 10  # of a schema, a grammar or all tools of a request, as JSON
    max_queue: int = 512  # answers that wait, of all requests: behind them comes 429
    max_connections: int = 4096  # of all clients
    body_timeout: float = 30.0  # seconds in which a body has to come
    request_timeout: float = 600.0  # seconds from a request's first line to its last word
    retry_after: float = 1.0  # seconds, as 429 and 503 say
    drain_timeout: float | None = None  # seconds after SIGTERM; None: what runs takes its time
    keep_alive_timeout: float = 75.0  # seconds that a connection may be idle
    tokenizer_threads: int = 2

    # what it says
    access_log: bool = True  # a line of JSON on stderr for each request
    log_requests: bool = False  # prompts and answers in it too

    def __post_init__(self) -> None:
        check_fields(
            self, choices={}, files=("adapter_root",), others=("engine", "sampling_defaults")
        )
        object.__setattr__(self, "api_keys", tuple(dict.fromkeys(self.api_keys)))
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
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
        if self.max_schema_bytes > MAX_SCHEMA_BYTES:
            raise UserError(
                f"--max_schema_bytes {self.max_schema_bytes} is more than the engine takes "
                f"(allowed: at most {MAX_SCHEMA_BYTES}); lower it"
            )
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
        most = self.engine.scheduling.max_length - 1
        return most if self.max_prompt_tokens is None else min(self.max_prompt_tokens, most)

    @property
    def max_in_flight(self) -> int:
        """Answers that may run or wait; behind them comes 429."""
        return self.engine.scheduling.batch_size + self.max_queue
