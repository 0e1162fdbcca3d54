"""When a request ends: pure functions over its parameters and counts."""

from __future__ import annotations

from collections.abc import Collection

from predict.errors import UserError
from predict.request import FinishReason, SamplingParams


def max_total_tokens(num_prompt_tokens: int, params: SamplingParams, max_length: int) -> int:
    """Prompt + output tokens at which a request ends by length, at least one of them output.

    The tightest of `params.max_new_tokens`, `params.max_length` and the engine's `max_length`
    (all in tokens). Raises UserError when the prompt leaves no room for one output token.
    """
    limit, name = max_length, "the engine's max_length"
    if params.max_length is not None and params.max_length < limit:
        limit, name = params.max_length, "max_length"
    if num_prompt_tokens >= limit:
        raise UserError(
            f"the prompt has {num_prompt_tokens} tokens, {name} is {limit} tokens for prompt and "
            f"output together (allowed: prompts of at most {limit - 1} tokens); "
            f"shorten the prompt or raise max_length"
        )
    if params.max_new_tokens is not None:
        limit = min(limit, num_prompt_tokens + params.max_new_tokens)
    return limit


def finish_reason(
    token_id: int,
    num_output_tokens: int,
    num_tokens: int,
    max_num_tokens: int,
    params: SamplingParams,
    eos_token_ids: Collection[int],
) -> FinishReason | None:
    """Why the request ends with `token_id`, which is already counted; None: it goes on.

    An eos token (unless `ignore_eos`) or one of `stop_token_ids` ends it as "stop" from the
    `min_length`-th generated token on; `max_num_tokens` tokens in all end it as "length". A stop
    token in the last allowed place is a "stop".
    """
    if num_output_tokens > params.min_length and (
        token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
    ):
        return "stop"
    return "length" if num_tokens >= max_num_tokens else None


def suppressed_token_ids(
    num_output_tokens: int, params: SamplingParams, eos_token_ids: Collection[int]
) -> tuple[int, ...]:
    """Token ids that the sampler must not pick next: those that would end it below `min_length`.

    `num_output_tokens` counts the tokens generated before this one. Empty at and above
    `min_length`, so the usual request costs nothing.
    """
    if num_output_tokens >= params.min_length:
        return ()
    eos = () if params.ignore_eos else tuple(eos_token_ids)
    return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
