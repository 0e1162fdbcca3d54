"""no_doubles: tokens that do not come twice in a row."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from predict import SamplingParams
from predict.engine.logits_processors import Rule
from predict.system.options import option


@dataclass(frozen=True, kw_only=True)
class Params(SamplingParams):
    """SamplingParams of predict/request.py with the new field, and its name in BANS."""

    BANS = (*SamplingParams.BANS, "no_doubles")

    no_doubles: tuple[int, ...] = option((), "Token ids that do not come twice in a row.")


def no_doubles(params: Params, eos_token_ids: Collection[int]) -> Iterator[Rule]:
    """The row of RULES: the logit of such a token is -inf where it is the newest."""
    for token in params.no_doubles:
        yield Rule(token, -np.inf, prefix=(token,))
