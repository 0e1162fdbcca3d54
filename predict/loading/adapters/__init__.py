"""LoRA adapters: read from PaddleNLP's folders and PEFT's, fitted to a checkpoint, merged into it.

`read_adapter(directory)` gives the record of an adapter, `fitted(adapter, ...)` the same under a
checkpoint's names with every shape checked, `MergedCheckpoint` the checkpoint with it merged.
"""

from predict.loading.adapters.base import Base
from predict.loading.adapters.fit import fitted
from predict.loading.adapters.merge import MergedCheckpoint
from predict.loading.adapters.read import read_adapter
from predict.loading.adapters.record import Adapter, AdapterConfig, LowRank
from predict.loading.adapters.values import Values

__all__ = [
    "Adapter",
    "AdapterConfig",
    "Base",
    "LowRank",
    "MergedCheckpoint",
    "Values",
    "fitted",
    "read_adapter",
]
