"""The one port of Ray that no setting of its own keeps off the network."""

from __future__ import annotations

from typing import Any

ALL, OWN = "[::]", "127.0.0.1"


def listen_on_loopback() -> None:
    """Has this process, a replica of Ray Serve, take calls of other replicas on loopback alone.

    To be called in the constructor of a deployment: Ray Serve opens the port behind it, for every
    interface, and unpickles what comes there (with Ray's token, where the cluster has one). A Ray
    that opens it elsewhere is left as it is; tests/ray/test_serve.py finds ports that are open.
    """
    from ray.serve._private import replica

    module: Any = replica
    bind = getattr(module, "add_port_to_grpc_server", None)
    if bind is None:
        return

    def bind_own(server: Any, address: str, *more: Any, **named: Any) -> Any:
        return bind(server, address.replace(ALL, OWN), *more, **named)

    module.add_port_to_grpc_server = bind_own
