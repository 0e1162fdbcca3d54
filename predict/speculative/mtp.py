"""Drafts of the layers behind the last one that a model was trained with (multi-token prediction).

DeepSeek-AI 2024. One layer makes all drafts, each of its own last output.
"""

from __future__ import annotations

from predict.engine.drafts import SpeculativeConfig, drafting_of
from predict.speculative._chain import ChainProposer


def make(config: SpeculativeConfig) -> ChainProposer:
    """The proposer of a config."""
    return ChainProposer(drafting_of(config))
