"""Typed reading of a checkpoint's config.json, as transformers 4 and transformers 5 spell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.files import read_json_object
from predict.nn.rope import METHODS
from predict.nn.spec import DecoderSpec, RopeSpec

# What the field's tools wrote before "rope_type" had settled names.
ROPE_METHOD_ALIASES = {"ntk": "dynamic", "dynamic_ntk": "dynamic"}


class ConfigReader:
    """A config.json with typed getters; every error names the file, the key and what is allowed."""

    def __init__(self, values: Mapping[str, Any], path: Path):
        self.values = values
        self.path = path

    @classmethod
    def from_dir(cls, directory: str | Path) -> ConfigReader:
        """Reads a directory's config.json; raises UserError where it is missing or broken."""
        path = Path(directory) / "config.json"
        if not path.exists():
            raise UserError(
                f"{path} does not exist; --model_name_or_path must be a checkpoint directory with "
                "config.json, safetensors and tokenizer files"
            )
        # NaN and Infinity are read, so that the message can name the field that has them.
        return cls(read_json_object(path, constants=True), path)

    def _get(self, key: str, kinds: tuple[type, ...], default: Any, required: bool) -> Any:
        value = self.values.get(key)
        if value is None:
            if required:
                raise UserError(f"{self.path} lacks {key!r}")
            return default
        # bool is an int in Python, but never a size in a config.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{self.path}: {key!r} is {value!r}; it must be {names}")
        return value

    def get_int(self, key: str, default: int | None = None) -> int:
        """A positive integer; required when no default is given."""
        value = self._get(key, (int,), default, default is None)
        if value <= 0:
            raise UserError(f"{self.path}: {key!r} is {value}; it must be positive")
        return int(value)

    def get_float(self, key: str, default: float | None = None) -> float:
        """A number; required when no default is given."""
        return float(self._get(key, (int, float), default, default is None))

    def get_bool(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._get(key, (bool,), default, False))

    def get_str(self, key: str, default: str | None = None) -> str:
        """A text; required when no default is given."""
        return str(self._get(key, (str,), default, default is None))

    def optional_int(self, key: str) -> int | None:
        """An integer, or None when absent or null."""
        value = self._get(key, (int,), None, False)
        return None if value is None else int(value)

    def get_ints(self, key: str) -> tuple[int, ...]:
        """An integer or a list of integers, as a tuple; empty when absent."""
        value = self._get(key, (int, list), [], False)
        return (value,) if isinstance(value, int) else tuple(int(v) for v in value)

    def dtype(self) -> str | None:
        """The checkpoint's own dtype ("dtype" in transformers 5, "torch_dtype" before)."""
        value = self.values.get("dtype") or self.values.get("torch_dtype")
        return None if value is None else str(value).removeprefix("torch.")

    def rope(self) -> RopeSpec:
        """The rotary embedding from rope_parameters, or from rope_theta and rope_scaling."""
        block = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(block, dict):
            raise UserError(f"{self.path}: the rope scaling is {block!r}; it must be an object")
        nested = ConfigReader(block, self.path)
        method = block.get("rope_type", block.get("type", "default"))
        method = ROPE_METHOD_ALIASES.get(str(method), str(method))
        if method not in METHODS:
            raise UserError(
                f"{self.path}: rope type {method!r} is not supported (known: {', '.join(METHODS)})"
            )
        head_dim = self.optional_int("head_dim")
        partial = nested.get_float(
            "partial_rotary_factor", self.get_float("partial_rotary_factor", 1.0)
        )
        if head_dim is None and partial != 1.0:
            head_dim = self.get_int("hidden_size") // self.get_int("num_attention_heads")
        numbers = {
            f.name: float(block[f.name])
            for f in fields(RopeSpec)
            if f.name not in ("theta", "method", "rotary_dim", "original_max_position", "truncate")
            and isinstance(block.get(f.name), (int, float))
        }
        return RopeSpec(
            theta=nested.get_float("rope_theta", self.get_float("rope_theta", 10000.0)),
            method=method,
            rotary_dim=None if partial == 1.0 else int((head_dim or 0) * partial),
            original_max_position=nested.optional_int("original_max_position_embeddings"),
            truncate=nested.get_bool("truncate", True),
            **numbers,
        )


def llama_like(config: ConfigReader, **changes: Any) -> DecoderSpec:
    """DecoderSpec of a Llama-shaped config.json; `changes` are the family's own fields."""
    hidden_size = config.get_int("hidden_size")
    num_heads = config.get_int("num_attention_heads")
    activation = config.get_str("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"{config.path}: hidden_act {activation!r} is not supported (known: silu)")
    if hidden_size % num_heads and config.optional_int("head_dim") is None:
        raise UserError(
            f"{config.path}: hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}, and head_dim is not given"
        )
    values: dict[str, Any] = {
        "model_type": config.get_str("model_type"),
        "vocab_size": config.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.get_int("intermediate_size"),
        "num_layers": config.get_int("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": config.get_int("num_key_value_heads", num_heads),
        "head_dim": config.get_int("head_dim", hidden_size // num_heads),
        "max_position": config.get_int("max_position_embeddings", 2048),
        "norm_eps": config.get_float("rms_norm_eps", 1e-6),
        "rope": config.rope(),
        "tie_word_embeddings": config.get_bool("tie_word_embeddings", False),
        "eos_token_ids": config.get_ints("eos_token_id"),
    }
    try:
        return DecoderSpec(**{**values, **changes})
    except ValueError as error:
        raise UserError(f"{config.path}: {error}") from None
