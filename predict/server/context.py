"""State that all routes share, and the record of the request that is being answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from predict.server.access_log import AccessLog
from predict.server.config import ServerConfig
from predict.server.engine_client import EngineHandle
from predict.server.errors import ApiError
from predict.server.front_model import FrontModel
from predict.server.key_file import NO_KEY, Key
from predict.server.lifecycle import Lifecycle
from predict.server.limits import Admission, Held
from predict.server.metrics import Metrics
from predict.server.model_text import ModelText
from predict.server.served_models import ServedModels
from predict.server.store import Store
from predict.server.tracing import Trace, Tracer
from predict.server.wire import ModelInfo

RECORD = "regatta.record"  # the key of a request's Record in its ASGI scope
REFUSED = "regatta.refused"  # and of the ApiError of a body that was refused ahead of the routes


@dataclass
class Record:
    """A request that is being answered; `log`: further fields of its line in the access log."""

    request_id: str
    deadline: float  # of the event loop's clock
    started: float = field(default_factory=time.perf_counter)
    log: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # kind of an error, for the metrics
    body: Held | None = None  # counted bytes, until its prompts are token ids
    key: Key = NO_KEY  # that was shown
    priority: int | None = None  # of its header
    trace: Trace | None = None  # where there is a collector
    turn: AsyncExitStack | None = None  # of one of several models, until its end


@dataclass
class Context:
    """A server: its engine, its model's text, its settings and counters."""

    engine: EngineHandle
    front: FrontModel
    config: ServerConfig
    lifecycle: Lifecycle
    metrics: Metrics
    admission: Admission
    model_text: ModelText
    models: ServedModels
    store: Store
    log: AccessLog | None  # None: nothing is logged
    version: str
    tracer: Tracer | None = None  # None: nothing is traced
    # Of a server with several models: when this one is awake (see Rota.turn), and the others.
    take_turn: Callable[[float], AbstractAsyncContextManager[None]] | None = None
    beside: list[Context] = field(default_factory=list)

    @property
    def retry_after(self) -> str:
        """Seconds for the header Retry-After."""
        return str(max(1, round(self.config.retry_after)))

    def info(self) -> ModelInfo:
        """The loaded model. Raises ApiError 503 before it is loaded and after the engine's end."""
        if self.engine.is_ready and not self.engine.is_sleeping:
            return self.engine.info
        raise self.unavailable()

    def unavailable(self) -> ApiError:
        """The error for a request that no engine can answer."""
        if self.engine.is_ready:
            what = "the model sleeps; POST /wake_up wakes it"
        elif self.engine.is_alive:
            what = "the model is loading"
        else:
            what = f"the engine has ended: {self.engine.failure or 'nobody knows why'}"
        return ApiError(503, f"{what}; try again later", headers={"Retry-After": self.retry_after})


def record_of(request: Request) -> Record:
    """The record of a request."""
    found: Record = request.scope[RECORD]
    return found
