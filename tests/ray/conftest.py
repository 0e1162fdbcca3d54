"""Imports Ray where it is installed: its own modules warn of what they use when they are read."""

import importlib.util
import os
import warnings

# Ray gives its proxy 5 s to begin, and kills it after three times: too few on a loaded machine.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")

if importlib.util.find_spec("ray") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.data
        import ray.serve  # noqa: F401
