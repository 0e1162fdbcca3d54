"""The draft model of --draft_model_name_or_path: its settings, and whether it suits the target."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.models import spec_of
from predict.nn.cuts import local_spec
from predict.nn.hf_config import ConfigReader
from predict.nn.places import placing_of
from predict.nn.spec import DecoderSpec
from predict.text.tokenizer import Tokenizer


class DraftModel(NamedTuple):
    """A draft model that suits the target; nothing of its weights is read yet."""

    config: EngineConfig
    spec: DecoderSpec
    reader: ConfigReader


def read_draft(
    config: EngineConfig, target: DecoderSpec, tokenizer: Tokenizer | None
) -> DraftModel | None:
    """The draft model that `config`, the target's, names; None where it names none.

    Device, type and lengths are the target's; its weights are rounded by draft_model_quant_type
    alone, and its cache is dense. Of a rank's target it is that rank's part of the draft model, or
    all of it where ranks cannot share it out. Raises UserError where the two models do not fit
    together.
    """
    path = config.speculation.draft_model_name_or_path
    if path is None or config.speculation.speculate_method != "draft_model":
        return None
    reader = ConfigReader.from_dir(path)
    spec = spec_of(reader)
    if spec.vocab_size != target.vocab_size:
        raise UserError(
            f"draft model {path} has vocab_size {spec.vocab_size}, the model has "
            f"{target.vocab_size}; --draft_model_name_or_path takes a model with the same tokens"
        )
    if tokenizer is not None and Tokenizer.exists(path):
        _check_tokens(path, tokenizer, Tokenizer.from_dir(path, "none"))
    if config.max_length > spec.max_context:
        raise UserError(
            f"draft model {path} was made for {spec.max_context} positions, --max_length is "
            f"{config.max_length}; lower --max_length, or use another draft model"
        )
    if any(spec.states):
        raise UserError(
            f"draft model {path} is of model_type {spec.model_type}, which keeps a state of each "
            "request and does not draft yet; use another draft model"
        )
    if placing_of(spec, config.max_length) is not None:
        raise UserError(
            f"draft model {path} places tokens by the prompt that they follow, which drafts have "
            "not; use another draft model, or a --max_length of its training length"
        )
    settings = draft_settings(config, path)
    spec = spec.with_forms(config.model.latent_form)
    if target.share is not None:
        ranks = target.share.ranks
        with contextlib.suppress(UserError):
            spec = local_spec(spec, ranks.rank, ranks.size)
    return DraftModel(settings, spec, reader)


def draft_settings(config: EngineConfig, path: str) -> EngineConfig:
    """The settings of a drafter in `path`, from the target's."""
    return config.changed(
        model_name_or_path=path,
        mode="dynamic",
        model_type=None,
        lora_path=None,
        quant_type=config.speculation.draft_model_quant_type,
        moe_quant_type=None,
        weightonly_group_size=-1,
        weight_block_size=None,
        lm_head_quant_type=None,
        skip_list_names=(),
        weight_only_activations=None,
        cachekv_int8_type=None,
        speculate_method=None,
        speculate_verify_window=None,
        speculate_max_candidate_len=None,
        draft_model_name_or_path=None,
        draft_model_quant_type=None,
    )


def _check_tokens(path: str, target: Tokenizer, draft: Tokenizer) -> None:
    """Raises UserError naming a token that the two tokenizers number differently."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours == theirs:
        return
    token = min(
        (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)),
        key=lambda t: ours.get(t, theirs.get(t, 0)),
    )
    raise UserError(
        f"draft model {path} has another tokenizer: token {token!r} is {theirs.get(token)} there "
        f"and {ours.get(token)} in the model's; --draft_model_name_or_path takes a model with the "
        "same tokens"
    )
