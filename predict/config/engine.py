"""What an engine is built from: frozen configs by topic, and the rules between them.

Imports no Paddle.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.config import ranks
from predict.config.adapters import ADAPTER_FILES, AdaptersConfig
from predict.config.cache import KV_FORMATS, CacheConfig
from predict.config.images import ImagesConfig
from predict.config.model import ModelConfig
from predict.config.quantization import QuantizationConfig
from predict.config.ranks import RanksConfig
from predict.config.scheduling import DEFAULT_MAX_LENGTH, SchedulingConfig
from predict.config.speculation import SpeculationConfig
from predict.errors import UserError
from predict.names import hint, nearest
from predict.request import SAMPLING_KEYS, SamplingParams
from predict.system.files import find_model_dir

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from predict.config.keywords import ChangedSettings, EngineSettings, Settings

TOPICS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduling": SchedulingConfig,
    "quantization": QuantizationConfig,
    "speculation": SpeculationConfig,
    "adapters": AdaptersConfig,
    "ranks": RanksConfig,
    "images": ImagesConfig,
}
# Settings that name a folder, which may be a hub name, and what it holds.
FOLDERS = {
    "model_name_or_path": "config.json",
    "draft_model_name_or_path": "config.json",
    "lora_path": ADAPTER_FILES,
}
# The topic of each setting; no two topics have one of the same name.
TOPIC_OF = {field.name: name for name, topic in TOPICS.items() for field in fields(topic)}


@dataclass(frozen=True, init=False, repr=False)
class EngineConfig:
    """What `LLM` is built from: settings by name, kept by topic.

    `EngineConfig(model_name_or_path="path", batch_size=8)`: each setting is a field of one topic.
    Raises UserError (a ValueError) for an unknown name, naming the nearest one, for a value outside
    its range, and for settings that do not go together.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduling: SchedulingConfig
    quantization: QuantizationConfig
    speculation: SpeculationConfig
    adapters: AdaptersConfig
    ranks: RanksConfig
    images: ImagesConfig

    def __init__(self, **settings: Unpack[EngineSettings]) -> None:
        for name in settings:
            if name not in TOPIC_OF:
                field = nearest(name, SAMPLING_KEYS, likeness=1.0)
                if field and not nearest(name, TOPIC_OF, likeness=1.0):
                    said = f"; it is of SamplingParams, as {field}, which generate takes"
                else:
                    said = hint(name, TOPIC_OF) or f" (known: {', '.join(TOPIC_OF)})"
                raise UserError(f"EngineConfig has no field {name!r}{said}")
        if "model_name_or_path" not in settings:
            raise UserError("EngineConfig needs model_name_or_path: the directory of a model")
        for name, topic in TOPICS.items():
            own: dict[str, Any] = {key: v for key, v in settings.items() if TOPIC_OF[key] == name}
            object.__setattr__(self, name, topic(**own))
        given, brought = self.cache.cachekv_int8_type, self.quantization.cache_type
        if brought and given not in (None, brought):
            raise UserError(
                f"quant_type {self.quantization.quant_type} has a {brought} cache, and "
                f"cachekv_int8_type is {given}; give one of the two"
            )
        _check_ranks(self)

    @classmethod
    def of(
        cls, model: EngineConfig | str | os.PathLike[str], **settings: Unpack[Settings]
    ) -> EngineConfig:
        """The config of a model's directory with these settings, or a config with them changed.

        Its folders are found. Raises UserError.
        """
        if isinstance(model, EngineConfig):
            return (model.changed(**settings) if settings else model).located()
        return cls(model_name_or_path=model, **settings).located()

    def located(self) -> EngineConfig:
        """The config, hub names in place of folders found on this machine. Raises UserError."""
        settings = self.settings
        given = {name: settings[name] for name in FOLDERS if settings[name] is not None}
        found = {name: find_model_dir(value, name, FOLDERS[name]) for name, value in given.items()}
        changed: Any = {
            name: str(path) for name, path in found.items() if path != Path(given[name])
        }
        return self.changed(**changed) if changed else self

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name: EngineConfig(**config.settings) == config."""
        return {name: getattr(getattr(self, topic), name) for name, topic in TOPIC_OF.items()}

    def changed(self, **settings: Unpack[ChangedSettings]) -> EngineConfig:
        """The config with other values for these settings. Raises UserError as the class does."""
        return EngineConfig(**{**self.settings, **settings})

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"EngineConfig({given})"

    @property
    def kv_format(self) -> str:
        """The row of predict.nn.cache_formats that the cache has."""
        return KV_FORMATS[self.cache.cachekv_int8_type or self.quantization.cache_type]

    @property
    def max_length(self) -> int:
        """Tokens of a sequence at most; the config of an LLM has what the model allows."""
        return self.scheduling.max_length or DEFAULT_MAX_LENGTH

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that a sequence of `max_length` tokens fills."""
        return -(-self.max_length // self.cache.block_size)

    @property
    def token_budget(self) -> int:
        """Tokens per step, see SchedulingConfig."""
        return self.scheduling.token_budget(self.model.device)


def _check_ranks(config: EngineConfig) -> None:
    """Raises UserError for what several ranks do not do yet."""
    from predict.device.devices import kind_of  # slow, and --help needs none

    degree = config.ranks.tensor_parallel_degree
    if degree == 1:
        return
    named = f"tensor_parallel_degree {degree}"
    kind = kind_of(config.model.device)
    if kind not in ranks.DEVICES:
        raise UserError(
            f"{named} with device {config.model.device}: CPU ranks run today; give --device cpu, "
            "or leave --tensor_parallel_degree out"
        )


def check_params(params: SamplingParams, config: EngineConfig) -> None:
    """Raises UserError where an engine of `config` cannot do what `params` ask for."""
    batch_size = config.scheduling.batch_size
    if params.num_beams > batch_size:
        raise UserError(
            f"num_beams {params.num_beams} is more than the batch holds (allowed: 1 to "
            f"{batch_size}, which is batch_size: each beam is a sequence of it); lower "
            "num_beams or raise batch_size"
        )
    if params.adapter is not None:
        config.adapters.check_name(params.adapter)
    method = config.speculation.speculate_method
    if method is not None and params.num_beams > 1:
        raise UserError(
            f"--speculate_method {method} does not go with beam search; leave out one of the two: "
            "num_beams (--decode_strategy beam_search), or drafts"
        )
