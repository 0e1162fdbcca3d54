"""A pytest plugin: the tests' engines run on the fake GPU where they do not name a device.

`pytest -p tests.fake_gpu.everywhere`, with REGATTA_FAKE_GPU and csrc/ on PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from predict import EngineConfig
from predict.device import devices
from tests.fake_gpu import libraries

libraries.select(Path(os.environ[libraries.ENVIRONMENT]))
devices.set_environment(devices.choose("gpu"))
_init = EngineConfig.__init__


def _on_gpu(config: EngineConfig, *arguments: Any, **values: Any) -> None:
    if values.get("inference_model", True):  # the plain operators are the CPU's alone
        values = {"device": "gpu", "inference_model": True, **values}
    _init(config, *arguments, **values)


EngineConfig.__init__ = _on_gpu  # type: ignore[assignment, method-assign]
