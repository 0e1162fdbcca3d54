"""Drafts of EAGLE heads: a layer of their own on the states that the model makes, with a cache.

EAGLE-1 and 2 (Li et al. 2024) read the final state, EAGLE-3 (2025) those of three layers. Which one
a head is, its file says: see predict.loading.drafters.
"""

from __future__ import annotations

from predict.engine.drafts import SpeculativeConfig, drafting_of
from predict.speculative._chain import ChainProposer


def make(config: SpeculativeConfig) -> ChainProposer:
    """The proposer of a config."""
    return ChainProposer(drafting_of(config))
