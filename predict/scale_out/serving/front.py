"""A front: the server's own application, in a replica of Ray Serve's ingress deployment."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from predict.scale_out.serving.engines import Engines, ServeReplicas
from predict.scale_out.serving.loopback import listen_on_loopback
from predict.server.app import create_app
from predict.server.config import ServerConfig
from predict.server.front_model import FrontModel
from predict.server.lifecycle import Lifecycle
from predict.server.metrics import Metrics
from predict.server.tracing import Tracer
from predict.system.notes import LOG, OnStderr


class RayFront:
    """What Ray Serve makes one of for each front, behind its HTTP proxy."""

    def __init__(self, config: ServerConfig, engines: Any, on_loopback: bool) -> None:
        """engines: the handle of the replicas' deployment. on_loopback: see there."""
        if on_loopback:
            listen_on_loopback()
        LOG.addHandler(OnStderr())
        metrics, endpoint = Metrics(), config.otlp_traces_endpoint
        self._lifecycle = Lifecycle()
        self._engines = Engines(ServeReplicas(engines), config.retry_after, metrics.answer_ended)
        self._app = create_app(
            self._engines,
            FrontModel.load(config, reads_pictures=False),
            config,
            lifecycle=self._lifecycle,
            metrics=metrics,
            tracer=None if endpoint is None else Tracer(endpoint),
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application; Ray Serve asks for it."""
        return self._app

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Returns when requests can be answered: Ray Serve calls this before it sends any."""
        await self._engines.ready()

    async def drain(self) -> None:
        """From now on new requests are refused, as a server that is ending does."""
        self._lifecycle.drain()

    async def num_requests(self) -> int:
        return self._lifecycle.num_requests
