"""Model families: one module per config.json `model_type`, each with `spec(config)`.

To add a family, write `predict/models/<model_type>.py`; nothing else changes. `WEIGHTS` has the
names of its tensors where they are not Llama's; a family whose names depend on config.json has a
function `weights(config)` instead. `UNREAD`, where there is one, has keys of its config.json that
change nothing; see predict.nn.config_keys.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Protocol, cast

from predict.errors import UserError
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

# Families by PaddleNLP's names for --model_type.
PADDLENLP = {"gpt-3": "gpt", "ernie-3.5-se": "ernie"}
_GEMMA4 = (
    "heads of two sizes, keys that are the values, layers that read another one's cache, and "
    "embeddings of each layer"
)
_INDEXED = "the index by which a token chooses those that it attends to (DSA)"
# Classes without a head that models of vectors name in config.json.
_HEADLESS = {f"{name}Model" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text")}
# What families need that nothing here does.
MISSING = {
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": "attention to compressed keys, hyper-connections, and experts by token ids",
    "glm_moe_dsa": _INDEXED,
    "internvl_chat": "its own layout (InternVL's checkpoints whose names end in -hf are read)",
    "kimi_linear": "a delta rule's state beside the cache (KDA), and latents without positions",
    "nemotron_h": "a state-space model's state beside the cache (Mamba 2)",
}


class Family(Protocol):
    """The interface of a module in this package."""

    def spec(self, config: ConfigReader) -> DecoderSpec:
        """Reads a checkpoint's config.json; raises UserError on what the family cannot run."""


def known_families() -> list[str]:
    """The model types that have a module here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def with_family(config: ConfigReader, name: str | None) -> ConfigReader:
    """The config, its model_type the family called `name` (PaddleNLP's way too) where it has none.

    Raises UserError where config.json names another one.
    """
    if name is None:
        return config
    model_type = PADDLENLP.get(name, name)
    if config.values.get("model_type") is None:
        return ConfigReader({**config.values, "model_type": model_type}, config.path)
    config.must_be("model_type", model_type)
    return config


def family_of(config: ConfigReader) -> Family:
    """The family module for config.json's model_type; raises UserError naming the known ones."""
    if config.values.get("model_type") is None:
        raise UserError(
            f"{config.path} lacks 'model_type'; if the model is one of these of PaddleNLP's, set "
            f"--model_type {' or '.join(PADDLENLP)}"
        )
    model_type = config.get_str("model_type").replace("-", "_")
    if model_type in MISSING:
        raise UserError(
            f"{config.path}: model_type {model_type!r} is not supported: {MISSING[model_type]} is "
            "missing here"
        )
    if model_type not in known_families():
        raise UserError(
            f"{config.path}: model_type {model_type!r} is not supported "
            f"(known: {', '.join(known_families())})"
        )
    return cast(Family, importlib.import_module(f"{__name__}.{model_type}"))


def weight_names(config: ConfigReader) -> WeightNames:
    """The names of tensors in the checkpoint's family."""
    family = family_of(config)
    choose = getattr(family, "weights", None)
    names: WeightNames = choose(config) if choose else getattr(family, "WEIGHTS", WeightNames())
    return names if _makes_text(config) else replace(names, ignored=(*names.ignored, "score."))


def _makes_text(config: ConfigReader) -> bool:
    """Whether the class that config.json names is not one for labels, or of no head at all."""
    named = config.values.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return not (name.endswith("ForSequenceClassification") or name in _HEADLESS)


def spec_of(config: ConfigReader) -> DecoderSpec:
    """The network that a config.json describes, every key of it read or known to change nothing.

    Raises UserError for what the family cannot run, and for a key that nobody reads and that may
    change results.
    """
    family = family_of(config)
    spec = family.spec(config)
    if not _makes_text(config):  # what it was trained for has another head than the next token's
        spec = replace(spec, tie_word_embeddings=True, makes_text=False)
    weight_names(config)  # which reads keys, too
    config.check_unread(getattr(family, "UNREAD", ()))
    return spec
