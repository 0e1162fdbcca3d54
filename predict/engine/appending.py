"""How the tokens that a step yields become a request's, and whether they end it. No Paddle."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from predict.engine.request_state import Request
from predict.engine.stats import EngineStats
from predict.engine.stopping import finish_reason
from predict.request import FinishReason


def append_tokens(
    request: Request,
    token_ids: Sequence[int],
    now: float,
    eos_token_ids: Collection[int],
    stats: EngineStats,
) -> FinishReason | None:
    """Adds tokens, in the place of placeholders where there are some, up to one that ends it.

    Returns why the request ends.
    """
    for token_id in token_ids:
        if request.num_placeholders:
            request.token_ids[-request.num_placeholders] = token_id
            request.num_placeholders -= 1
        else:
            request.token_ids.append(token_id)
        request.token_times.append(now)
        stats.num_output_tokens += 1
        num_tokens = request.num_known_tokens
        num_output_tokens = num_tokens - len(request.prompt_token_ids)
        reason = finish_reason(
            token_id,
            num_output_tokens,
            num_tokens,
            request.max_num_tokens,
            request.sampling_params,
            eos_token_ids,
        )
        params = request.sampling_params
        if request.guide is not None and params.guide is not None and params.bans:
            request.guide.check(token_id, params.guide.kind, params.bans)
        if request.guide is not None and reason != "stop" and request.guide.accept(token_id):
            reason = "stop"  # nothing but an end may follow
        if request.answer is not None:
            may_stop = num_output_tokens > request.sampling_params.min_length
            if request.answer.append(token_id, may_stop, reason is not None):
                reason = "stop"
        if reason is not None:
            return reason
    return None


def num_rejected(accepted: Sequence[int], drafts: Sequence[int], request: Request) -> int:
    """Drafts of a span that `accepted`, the leading drafts and one more token, leaves out.

    Raises ValueError for anything else: the cache would hold other tokens than the request. Drafts
    below 0 are placeholders: the caller alone knows what they stand for.
    """
    num_kept = len(accepted) - 1
    if not 0 <= num_kept <= len(drafts) or any(
        0 <= draft != token for token, draft in zip(accepted, drafts[:num_kept], strict=False)
    ):
        raise ValueError(
            f"request {request.request_id}: sampled {list(accepted)} for drafts {list(drafts)} "
            "(allowed: leading drafts followed by one more token)"
        )
    return len(drafts) - num_kept
