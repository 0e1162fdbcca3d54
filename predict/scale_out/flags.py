"""Rows of the flag table that only commands on Ray have."""

from __future__ import annotations

from predict.cli.flags import Flag
from predict.system.ranges import Range

_REPLICAS = "Replicas"

RAY_FLAGS = (
    Flag(_REPLICAS, "cpus_per_replica", "int", None,
         "CPUs that a replica reserves, and threads that its operators use; when not given, those "
         "of this machine are shared evenly.",
         allowed=Range(1, 1 << 12)),
    Flag(_REPLICAS, "ray_address", "str", None,
         "Run on this Ray cluster, whose machines have Regatta and the model at the same paths "
         "(auto: the cluster of this machine); when not given, one is started on this machine, for "
         "this command alone."),
)  # fmt: skip
