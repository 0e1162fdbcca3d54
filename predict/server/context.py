"""What all routes share, and what is known of the request that is being answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from predict.server.access_log import AccessLog
from predict.server.config import ServerConfig
from predict.server.engine_client import Engine, EngineDied
from predict.server.errors import ApiError
from predict.server.front_model import FrontModel
from predict.server.lifecycle import Lifecycle
from predict.server.limits import Admission, Held
from predict.server.metrics import Metrics
from predict.server.model_text import ModelText
from predict.server.served_models import ServedModels
from predict.server.wire import ModelInfo

RECORD = "regatta.record"  # the key of a request's Record in its ASGI scope


@dataclass
class Record:
    """A request on its way; `log` is what the access log says of it besides."""

    request_id: str
    deadline: float  # of the event loop's clock
    started: float = field(default_factory=time.perf_counter)
    log: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # kind of an error, for the metrics
    body: Held | None = None  # bytes that count until its prompts are token ids


@dataclass
class Context:
    """A server: its engine, its model's text, its settings and counters."""

    engine: Engine
    front: FrontModel
    config: ServerConfig
    lifecycle: Lifecycle
    metrics: Metrics
    admission: Admission
    model_text: ModelText
    models: ServedModels
    log: AccessLog | None  # None: nothing is logged
    version: str

    @property
    def retry_after(self) -> str:
        """Seconds that a client should wait, for the header Retry-After."""
        return str(max(1, round(self.config.retry_after)))

    def info(self) -> ModelInfo:
        """What the engine has loaded. Raises ApiError 503 before that, and behind its end."""
        if self.engine.is_ready:
            return self.engine.info
        raise self.unavailable()

    def unavailable(self) -> ApiError:
        """The error for a request that no engine can answer."""
        if self.engine.is_alive:
            what = "the model is loading"
        else:
            what = f"the engine has ended: {self.engine.failure or 'nobody knows why'}"
        return ApiError(503, f"{what}; try again later", headers={"Retry-After": self.retry_after})


def record_of(request: Request) -> Record:
    """What is known of a request."""
    found: Record = request.scope[RECORD]
    return found


__all__ = ["RECORD", "Context", "EngineDied", "Record", "record_of"]
