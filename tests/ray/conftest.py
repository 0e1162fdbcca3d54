"""Imports Ray where it is installed: its own modules warn of what they use when they are read."""

import importlib.util
import warnings

if importlib.util.find_spec("ray") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.data
        import ray.serve  # noqa: F401
