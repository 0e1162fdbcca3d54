"""A server on Ray Serve from its start to its end. To be imported when Ray is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from predict.config.engine import EngineConfig
from predict.errors import EXIT_FAILURE
from predict.scale_out.cluster import Share, failure_of
from predict.scale_out.serving.first_block import FirstBlockRouter
from predict.scale_out.serving.front import RayFront
from predict.scale_out.serving.replica import Replica
from predict.server.config import ServerConfig
from predict.system.console import say

APP = "regatta"
ENGINES, FRONTS = "engines", "fronts"
MAX_CONNECTIONS_PER_FRONT = 4096  # requests that a front may have at a time
HEALTH_SECONDS = 5.0
# Settings that both deployments have.
KEPT_ALIVE: dict[str, Any] = {
    "user_config": {},
    "max_constructor_retry_count": 1,
    "health_check_period_s": HEALTH_SECONDS,
    "graceful_shutdown_timeout_s": HEALTH_SECONDS,
}
LOOK_SECONDS = 0.2  # between two looks at whether all requests have ended


@dataclass(frozen=True)
class Scale:
    """How many replicas there are, and what makes them more."""

    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float  # of each replica
    num_fronts: int
    share: Share
    is_cluster: bool  # several machines: each has a proxy


def start(config: ServerConfig, scale: Scale) -> None:
    """Starts proxies, fronts and replicas; returns when requests are answered.

    Raises UserError or EngineError where a model cannot be loaded.
    """
    logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
    for name in ("ray.serve", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    serve.start(
        proxy_location=ProxyLocation.EveryNode if scale.is_cluster else ProxyLocation.HeadOnly,
        http_options=HTTPOptions(
            host=config.host,
            port=config.port,
            root_path=config.root_path,
            keep_alive_timeout_s=round(config.keep_alive_timeout),
        ),
        logging_config=logs,
    )
    on_loopback = not scale.is_cluster
    engines = _engines(config.engine, scale).bind(config.engine, scale.share.num_cpus, on_loopback)
    room = config.engine.scheduling.batch_size * (scale.max_replicas - 1)
    own = replace(config, max_queue=config.max_queue + room)
    try:
        serve.run(
            _fronts(config, scale).bind(own, engines, on_loopback),
            name=APP,
            route_prefix="/",
            logging_config=logs,
        )
    except (RayError, RayServeException, RuntimeError) as error:
        raise failure_of(f"{error}\n{_said()}", "the server does not start") from error


def _said() -> str:
    """What Ray Serve knows of deployments that do not start."""
    found = serve.status().applications.get(APP)
    return "" if found is None else "\n".join(each.message for each in found.deployments.values())


def _engines(engine: EngineConfig, scale: Scale) -> Any:
    batch_size = engine.scheduling.batch_size
    router: Any = {
        "request_router_class": FirstBlockRouter,
        "request_router_kwargs": {"room": batch_size},
    }
    return serve.deployment(
        Replica,
        name=ENGINES,
        # A batch that runs, and one that waits for places in it.
        max_ongoing_requests=2 * batch_size,
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.min_replicas,
            initial_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=scale.target_ongoing_requests,
        ),
        request_router_config=RequestRouterConfig(**router),
        ray_actor_options={"num_cpus": scale.share.num_cpus, "num_gpus": scale.share.num_gpus},
        **KEPT_ALIVE,
    )


def _fronts(config: ServerConfig, scale: Scale) -> Any:
    return serve.deployment(
        serve.ingress()(RayFront),
        name=FRONTS,
        num_replicas=scale.num_fronts,
        max_ongoing_requests=MAX_CONNECTIONS_PER_FRONT,
        ray_actor_options={"num_cpus": 0},
        **KEPT_ALIVE,
    )


def finish(drain_timeout: float | None, is_cluster: bool) -> int:
    """Refuses new requests, finishes those that run, and ends all; the exit status.

    is_cluster: other applications of its Ray Serve go on.
    """
    fronts = serve.get_deployment_handle(FRONTS, APP)
    deadline = None if drain_timeout is None else time.monotonic() + drain_timeout
    left = 0
    try:
        fronts.broadcast("drain").results()
        while left := sum(fronts.broadcast("num_requests").results()):
            if deadline is not None and time.monotonic() > deadline:
                say(f"{left} requests are broken off after --drain_timeout {drain_timeout:g} s")
                break
            time.sleep(LOOK_SECONDS)
    except (RayError, RayServeException) as error:
        say(f"warning: not all fronts can be asked whether they are done: {type(error).__name__}")
    if is_cluster:
        serve.delete(APP)
    else:
        shutdown: Callable[[], None] = serve.shutdown
        shutdown()
    return EXIT_FAILURE if left else 0
