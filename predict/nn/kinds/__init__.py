"""Kinds of blocks, one module each: the only place that knows a kind.

A module holds the record of its kind (a Block), which says its slots, names, cache rows, sizes and
costs, and its weights (BlockWeights), which run it as smaller operators. To add a kind, write a
module that is named as the kind, and its folder csrc/blocks/<kind>; nothing else changes.
"""

from __future__ import annotations

import importlib
import pkgutil

from predict.nn.blocks import Block


def known_kinds() -> dict[str, type[Block]]:
    """The records' classes by kind: every module here has one."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        values = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        found[module.name] = next(v for v in values if getattr(v, "kind", None) == module.name)
    return found
