"""Speculative decoding: where drafts come from, and how they are verified."""

from __future__ import annotations

from dataclasses import dataclass

from predict.config.quantization import QUANT_TYPES, parse_quant_type
from predict.errors import UserError, one_of
from predict.system.options import Checked, option
from predict.system.ranges import LENGTH, Range

# Methods with weights of their own, and what folder each must be given; "": it may be left out.
FOLDERS = {
    "draft_model": "the directory of a smaller model with the same tokens",
    "eagle": "the folder of a head that was trained for this model",
    "medusa": "the folder of heads that were trained for this model",
    "mtp": "",
}


STATES = ("eagle", "mtp", "medusa")  # methods that read the model's hidden states


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Checked):
    """Where drafts come from and how they are verified. Raises UserError for other values."""

    # fmt: off
    speculate_method: str | None = option(None,
        "Where draft tokens come from.",
        group="Speculative decoding",
        choices=("inference_with_reference", "lookahead", "draft_model", "eagle", "mtp", "medusa"))
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
        "Directory, or GGUF file, of the draft model: a smaller checkpoint with the same tokens. "
        "For eagle and medusa the folder of the heads; for mtp the one of the layer that drafts, "
        "where the model's own checkpoint has none.",
        is_file=True)
    draft_model_quant_type: str | None = option(None,
        "Rounds the draft model's weights while they are read; --quant_type is the model's.",
        choices=QUANT_TYPES)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        drafts, method = self.speculate_method in FOLDERS, self.speculate_method
        if method is not None and FOLDERS.get(method) and self.draft_model_name_or_path is None:
            raise UserError(
                f"speculate_method {method} needs --draft_model_name_or_path: {FOLDERS[method]}"
            )
        for name in ("draft_model_name_or_path", "draft_model_quant_type"):
            if not drafts and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} {getattr(self, name)} is for --speculate_method "
                    f"{', '.join(FOLDERS)}, and "
                    f"speculate_method is {self.speculate_method}; leave one of the two out"
                )
        if self.draft_model_quant_type is not None:
            cache_type = parse_quant_type(self.draft_model_quant_type).cache_type
            if cache_type:
                raise UserError(
                    f"draft_model_quant_type {self.draft_model_quant_type} has a {cache_type} "
                    "cache; the draft model's cache is dense: use the type without c8"
                )
        for name in ("speculate_verify_window", "speculate_max_candidate_len"):
            if self.speculate_method is None and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} says how drafts are verified, and there are none; add "
                    "--speculate_method, or leave it out"
                )
            if method in STATES and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} is TopP + window verification, and speculate_method {method} has "
                    "exact verification alone; leave one of the two out"
                )
        if self.speculate_method is not None:
            check_method(self.speculate_method)

    @property
    def verifies_by_window(self) -> bool:
        """Whether drafts of sampled requests stand by TopP + window verification."""
        return (self.speculate_verify_window, self.speculate_max_candidate_len) != (None, None)


def known_methods() -> list[str]:
    """The speculate_methods: each has a module in predict.speculative. Imports none of them."""
    import importlib.util
    import pkgutil

    package = importlib.util.find_spec("predict.speculative")
    assert package is not None
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.submodule_search_locations)
        if not module.name.startswith("_")
    )


def check_method(name: str) -> None:
    """Raises UserError naming the known methods where `name` is none of them."""
    if name not in known_methods():
        raise one_of("speculate_method", name, known_methods())
