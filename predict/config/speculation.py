"""Speculative decoding: where drafts come from, and what they go together with.

The table of what they go together with is also what the tests run, pair by pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from predict.config.quantization import QUANT_TYPES, parse_quant_type
from predict.config.schemes import SCHEMES, find
from predict.errors import UserError, one_of
from predict.request import SamplingParams
from predict.system.flag import not_yet
from predict.system.options import Checked, option
from predict.system.ranges import LENGTH, Range


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Checked):
    """Where drafts come from and how they are verified. Raises UserError for other values."""

    # fmt: off
    speculate_method: str | None = option(None,
        "Where draft tokens come from.",
        group="Speculative decoding",
        choices=("inference_with_reference", "lookahead", "draft_model", "eagle", "mtp"),
        availability=not_yet(
            "inference_with_reference, lookahead and draft_model work.", "eagle", "mtp"))
    speculate_max_draft_token_num: int = option(1,
        "Draft tokens per sequence and step, 1 to 15.",
        allowed=Range(1, 15))  # of predict.engine.drafts.MAX_DRAFT_TOKENS
    speculate_max_ngram_size: int = option(1,
        "Longest n-gram that is looked up in prompt and output.", allowed=LENGTH)
    speculate_verify_window: int | None = option(None,
        "PaddleNLP's TopP + window verification: a second-best draft stands when this many behind "
        "it are the likeliest; 2 when only the next flag is given. Text that is sampled is not "
        "exact then.",
        allowed=Range(1, 14))
    speculate_max_candidate_len: int | None = option(None,
        "The same: a draft stands when it is among this many likeliest tokens within top_p, 2 to "
        "10; 5 when only the flag above is given.",
        allowed=Range(2, 10))
    draft_model_name_or_path: str | None = option(None,
        "Directory, or GGUF file, of the draft model: a smaller checkpoint with the same tokens.",
        is_file=True)
    draft_model_quant_type: str | None = option(None,
        "Rounds the draft model's weights while they are read; --quant_type is the model's.",
        choices=QUANT_TYPES)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        drafts = self.speculate_method == "draft_model"
        if drafts and self.draft_model_name_or_path is None:
            raise UserError(
                "speculate_method draft_model needs --draft_model_name_or_path: the directory of a "
                "smaller model with the same tokens"
            )
        for name in ("draft_model_name_or_path", "draft_model_quant_type"):
            if not drafts and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} {getattr(self, name)} is for --speculate_method draft_model, and "
                    f"speculate_method is {self.speculate_method}; leave one of the two out"
                )
        if self.draft_model_quant_type is not None:
            brings = parse_quant_type(self.draft_model_quant_type).cache_type
            if brings:
                raise UserError(
                    f"draft_model_quant_type {self.draft_model_quant_type} has a {brings} cache; "
                    "the draft model's cache is dense: use the type without c8"
                )
        for name in ("speculate_verify_window", "speculate_max_candidate_len"):
            if self.speculate_method is None and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} says how drafts are verified, and there are none; add "
                    "--speculate_method, or leave it out"
                )
        if self.speculate_method is not None:
            check_method(self.speculate_method)

    @property
    def verifies_by_window(self) -> bool:
        """Whether drafts of sampled requests stand by TopP + window verification."""
        return (self.speculate_verify_window, self.speculate_max_candidate_len) != (None, None)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something to combine drafts with, and whether that works.

    settings: fields of EngineConfig that ask for it. params: fields of SamplingParams. instead:
    empty where it works, with every method; else what to do.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    instead: str = ""


FEATURES: tuple[Feature, ...] = (
    Feature(name="plain operators", settings={"inference_model": False}),
    Feature(name="reserved cache", settings={"attention": "reserved"}),
    Feature(name="--block_attn", settings={"attention": "block"}),
    Feature(name="--append_attn", settings={"attention": "append"}),
    Feature(name="no prefix cache", settings={"prefix_caching": False}),
    Feature(name="whole prompts", settings={"chunked_prefill": False}),
    Feature(name="short steps", settings={"max_num_batched_tokens": 16}),
    Feature(name="static mode", settings={"mode": "static"}),
    Feature(name="bfloat16", settings={"dtype": "bfloat16"}),
    Feature(name="float16", settings={"dtype": "float16"}),
    *(
        Feature(name=f"quant_type {row.name}", settings={"quant_type": row.name})
        for row in SCHEMES.values()
        if row.support.cpu
    ),
    # Of the CPU's operators plain Paddle alone has the others.
    *(
        Feature(
            name=f"quant_type {row.name}",
            settings={"quant_type": row.name, "inference_model": False},
        )
        for row in SCHEMES.values()
        if not row.support.cpu
    ),
    Feature(name="quantized LM head", settings={"lm_head_quant_type": find("int8").name}),
    *(
        Feature(name=f"cachekv_int8_type {name}", settings={"cachekv_int8_type": name})
        for name in ("dynamic", "static", "fp8", "int4")
    ),
    Feature(name="sampling", params={"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3}),
    Feature(name="min_p", params={"temperature": 1.0, "min_p": 0.1, "seed": 4}),
    Feature(name="typical_p", params={"temperature": 1.0, "typical_p": 0.8, "seed": 5}),
    Feature(name="repetition_penalty", params={"repetition_penalty": 1.3}),
    Feature(
        name="presence and frequency penalty",
        params={"presence_penalty": 0.5, "frequency_penalty": 0.2},
    ),
    Feature(name="no_repeat_ngram_size", params={"no_repeat_ngram_size": 3}),
    Feature(name="min_length", params={"min_length": 12, "stop_token_ids": (200, 202, 204)}),
    Feature(name="logit_bias", params={"logit_bias": {200: 4.0, 202: -4.0}}),
    Feature(name="bad words", params={"bad_words": ((200,), (202, 203))}),
    Feature(name="stop strings", params={"stop": ("\n\n", "return x")}),
    Feature(name="n", params={"n": 3, "temperature": 0.9, "seed": 6}),
    Feature(name="best_of", params={"n": 1, "best_of": 3, "temperature": 0.9, "seed": 7}),
    Feature(name="logprobs", params={"logprobs": 3}),
    Feature(name="prompt_logprobs", params={"prompt_logprobs": 1}),
    Feature(
        name="beam search",
        params={"num_beams": 2},
        instead="leave out one of the two: num_beams (--decode_strategy beam_search), or drafts",
    ),
)


def known_methods() -> list[str]:
    """The speculate_methods: each has a module in predict.speculative. Imports none of them."""
    import importlib.util
    import pkgutil

    package = importlib.util.find_spec("predict.speculative")
    assert package is not None
    return sorted(
        module.name for module in pkgutil.iter_modules(package.submodule_search_locations)
    )


def check_method(name: str) -> None:
    """Raises UserError naming the known methods where `name` is none of them."""
    if name not in known_methods():
        raise one_of("speculate_method", name, known_methods())


def check_features(
    method: str, settings: Mapping[str, Any], params: SamplingParams | None = None
) -> None:
    """Raises UserError naming what is combined with the drafts of `method` and does not go so.

    settings: the fields of the EngineConfig. params: of a request; None before there is one.
    """
    for feature in FEATURES:
        if feature.params and (params is None or not _wants(params, feature)):
            continue
        if feature.instead and all(
            settings[name] == value for name, value in feature.settings.items()
        ):
            raise UserError(
                f"--speculate_method {method} does not go with {feature.name}; {feature.instead}"
            )


def _wants(params: SamplingParams, feature: Feature) -> bool:
    if "num_beams" in feature.params:
        return params.num_beams > 1
    return all(getattr(params, name) == value for name, value in feature.params.items())
