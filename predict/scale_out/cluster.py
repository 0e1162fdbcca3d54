"""The Ray that a command runs on: one of its own on this machine, or one that is there.

A Ray of its own listens on the loopback interface alone, behind a token that dies with it, with no
dashboard; and no Ray that is started here reports its usage to anybody.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.cli.flags import Flag
from predict.config.engine import EngineConfig
from predict.errors import EXIT_FAILURE, EngineError, UserError
from predict.system.console import Unfailing
from predict.system.ranges import Range
from predict.system.signals import kept

ROOT = Path(__file__).resolve().parents[2]  # the folder of the package
MIN_STORE_BYTES = 128 << 20  # Ray refuses less than 75 MiB
NO_REPORTS = "RAY_USAGE_STATS_ENABLED"  # Ray's own switch; what a user sets stands
# The switch for systems without clusters is the one that keeps every process of a Ray, its agents
# and workers too, off the other interfaces.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
# Rows of the flag table that only commands on Ray have.
RAY_FLAGS = (
    Flag("Replicas", "cpus_per_replica", "int", None,
         "CPUs that a replica reserves, and threads that its operators use, of all its ranks "
         "together; when not given, those of this machine are shared evenly.",
         allowed=Range(1, 1 << 12)),
    Flag("Replicas", "ray_address", "str", None,
         "Run on this Ray cluster, whose machines have Regatta and the model at the same paths "
         "(auto: the cluster of this machine); when not given, one is started on this machine, for "
         "this command alone."),
)  # fmt: skip


@dataclass(frozen=True)
class Share:
    """What of a machine each replica reserves, and computes with."""

    num_cpus: int
    num_gpus: int = 0


def share_of(device: str, num_replicas: int, cpus_per_replica: int | None) -> Share:
    """The share of one of `num_replicas` replicas; raises UserError for what replicas cannot have.

    device: as EngineConfig has it. cpus_per_replica: None shares this machine's CPUs evenly.
    """
    cpus = cpus_per_replica or max(len(os.sched_getaffinity(0)) // num_replicas, 1)
    name, _, index = device.partition(":")
    if name not in ("cpu", "gpu"):
        raise UserError(
            f"--device {device}: replicas share CPUs and NVIDIA GPUs (allowed: cpu, gpu); run one "
            "predict/predictor.py or server for each such device"
        )
    if index not in ("", "0"):
        raise UserError(
            f"--device {device} names one GPU, and each replica is given one of its own; use "
            "--device gpu"
        )
    return Share(cpus, 0 if name == "cpu" else 1)


def check_ray() -> None:
    """Raises ModuleNotFoundError where Ray is not installed; imports nothing."""
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")


@contextlib.contextmanager
def connected(
    address: str | None, share: Share, num_replicas: int, store_bytes: int = MIN_STORE_BYTES
) -> Iterator[None]:
    """Ray is there until the end of the block.

    address: of a running Ray ("auto": the one of this machine), which is left as it was; None
    starts one for the block, with room for `num_replicas` and a store of `store_bytes` for objects.
    What Ray says goes to its own folder of logs alone, unless REGATTA_TRACEBACK is set. Raises
    UserError where it cannot be reached or started.
    """
    os.environ.setdefault(NO_REPORTS, "0")
    if not address:
        os.environ.update(LOOPBACK, RAY_AUTH_TOKEN=secrets.token_hex(32))
    talks = bool(os.environ.get("REGATTA_TRACEBACK"))
    size: dict[str, Any] = {
        "num_cpus": share.num_cpus * num_replicas,
        "num_gpus": share.num_gpus * num_replicas,
        "object_store_memory": store_bytes,
        "include_dashboard": False,
    }
    with contextlib.ExitStack() as stack:
        if not talks:
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
            # Lines on the deaths of workers, tracebacks in them, are printed there.
            stack.enter_context(contextlib.redirect_stdout(Unfailing(None)))
        with kept(blocked=False):
            import ray

            try:
                with _in_folder(ROOT), contextlib.nullcontext() if talks else _silent():
                    ray.init(
                        address=address or "local",  # whatever RAY_ADDRESS says
                        **({} if address else size),
                        logging_level=logging.ERROR,
                        log_to_driver=talks,
                    )
            except (ConnectionError, OSError, ValueError, RuntimeError) as error:
                where = (
                    f"--ray_address {address} is not reached" if address else "Ray does not start"
                )
                raise UserError(f"{where}: {error}", exit_code=EXIT_FAILURE) from None
        try:
            yield
        finally:
            with kept(blocked=False):
                ray.shutdown()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What C++ writes to stderr goes nowhere: a line on the level of what is written there."""
    before = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def on_workers(config: EngineConfig) -> EngineConfig:
    """The config with names of files that hold in another process's folder, too."""
    names = ("model_name_or_path", "draft_model_name_or_path", "lora_path", "chat_template")
    paths = {name: config.settings[name] for name in names}
    modules, prefixes = config.adapters.directories.items(), config.adapters.prefixes.items()
    return config.changed(
        prefix_path=tuple(
            f"{name}={os.path.abspath(path)}" if name else os.path.abspath(path)
            for name, path in prefixes
        ),
        lora_modules=tuple(f"{name}={os.path.abspath(path)}" for name, path in modules),
        **{n: os.path.abspath(path) for n, path in paths.items() if path and os.path.exists(path)},
    )


def failure_of(said: str, what: str) -> Exception:
    """What ended replicas, as this process would have raised it.

    said: by Ray; a traceback ends with it. what: has failed, for an error that is no UserError.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    name = f"{UserError.__module__}.{UserError.__name__}: "
    for line in reversed(lines):
        if name in line:
            return UserError(line.partition(name)[2])
    return EngineError(f"{what}: {lines[-1] if lines else 'Ray does not say why'}")


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Works in a folder: Ray's workers import from the one that their driver was in."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
