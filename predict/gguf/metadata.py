"""Metadata of a GGUF file, read by key with errors that name it."""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from predict.errors import UserError, quoted
from predict.gguf.reader import GgufFile, GgufTensor
from predict.system.files import FLOAT32_MAX

# Keys of an architecture that change no result here, behind its name.
UNREAD = """
    attention.key_length attention.key_length_swa attention.value_length attention.value_length_swa
    attention.layer_norm_epsilon attention.layer_norm_rms_epsilon pooling_type tensor_data_layout
    rope.dimension_count_swa rope.dimension_sections rope.scaling.finetuned vocab_size"""
# Keys that say nothing by 1: factors, one group of experts, a softmax over them.
_ONE = re.compile(r".*(scale|factor|expert_gating_func|group_count|group_used_count)")


class GgufMetadata:
    """Typed getters; "{arch}" in a key stands for general.architecture.

    Each gives the default where the key is absent, and raises UserError for a value of another
    kind; without a default the key is needed.
    """

    def __init__(self, file: GgufFile):
        self.file = file
        self.read: set[str] = set()
        self.arch = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self.key(key) in self.file.metadata

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or any(not isinstance(v, str) for v in value):
            raise self._wrong(key, value, "a list of texts")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true, false")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; of a list with one for each layer, the one that all have."""
        value = self._get(key, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number, the same for all layers")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number: float32's, as JSON would write it."""
        value = self._get(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise self._wrong(key, value, "a number")
        return _shortest(float(value))

    def numbers(self, key: str) -> list[Any]:
        """A list of numbers or of truth values."""
        value = self._get(key, None)
        if not isinstance(value, (array, list)) or any(isinstance(v, str) for v in value):
            raise self._wrong(key, value, "a list of numbers")
        return list(value)

    def optional(self, key: str) -> int | None:
        return self.whole(key) if key in self else None

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def tensor(self, name: str) -> GgufTensor:
        """Where a tensor lies. Raises UserError where there is none."""
        if name not in self.file.tensors:
            raise UserError(f"{self.file.path} has no tensor {name}; convert the model again")
        return self.file.tensors[name]

    def must_be(self, key: str, allowed: Sequence[Any]) -> None:
        """Raises UserError where the key has another value than these."""
        value = self.file.metadata.get(self.key(key), allowed[0])
        if value not in allowed:
            raise self._wrong(key, value, ", ".join(map(repr, allowed)))

    def check_unread(self) -> None:
        """Raises UserError for a key of the architecture that says something, and was not read."""
        known = {*self.read, *(f"{self.arch}.{key}" for key in UNREAD.split())}
        for key, value in self.file.metadata.items():
            is_one = not isinstance(value, (bool, str)) and value == 1 and _ONE.fullmatch(key)
            if key.startswith(f"{self.arch}.") and key not in known and value and not is_one:
                raise self._wrong(
                    key, value, "none; it is not known here and may change results: use the "
                    "model's safetensors files, or a file without it if it changes nothing"
                )  # fmt: skip

    def key(self, key: str) -> str:
        whole = key.format(arch=self.arch) if "{arch}" in key else key
        self.read.add(whole)
        return whole

    def _get(self, key: str, default: Any) -> Any:
        value = self.file.metadata.get(self.key(key), default)
        if value is None:
            raise UserError(
                f"{self.file.path} has no {self.key(key)} in its metadata; convert the model again"
            )
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> UserError:
        shown = f"a list of {len(value)}" if isinstance(value, (list, array)) else quoted(value)
        return UserError(f"{self.file.path}: {self.key(key)} is {shown} (allowed: {allowed})")


def _shortest(value: float) -> float:
    """The number of fewest digits that is the same float32: 1e-05, not 9.999999747378752e-06."""
    if abs(value) > FLOAT32_MAX:
        return value
    stored = struct.pack("<f", value)
    tries = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in tries if struct.pack("<f", each) == stored), value)
