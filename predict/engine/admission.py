"""Which requests a scheduler takes, and the limits that they get. Imports no Paddle."""

from __future__ import annotations

from predict.engine.request_state import Request
from predict.engine.resources import CacheBlocks
from predict.engine.searches import Searches
from predict.engine.stopping import max_total_tokens
from predict.errors import UserError


class Limits:
    """Limits of requests by those of the scheduler."""

    def __init__(self, blocks: CacheBlocks, searches: Searches) -> None:
        self._config, self._blocks, self._searches = blocks.config, blocks, searches

    def set(self, request: Request) -> None:
        """Sets max_num_tokens, max_num_blocks and places of a request; see Scheduler.add."""
        num_beams, config = request.sampling_params.num_beams, self._config
        max_num_tokens = self._max_num_tokens(request)
        if num_beams > config.max_num_seqs:
            raise UserError(
                f"request {request.request_id}: num_beams {num_beams} is more than the batch holds "
                f"(allowed: 1 to {config.max_num_seqs}); lower num_beams or raise batch_size"
            )
        max_num_blocks = self._blocks.needed(request, max_num_tokens)
        if num_beams > 1:
            max_num_blocks = self._searches.max_num_blocks(request, max_num_blocks)
        num_own = max_num_blocks - len(request.prefix.block_ids)
        num_free = self._blocks.num_unpinned
        if num_own > num_free:
            of_beams = f" of {num_beams} beams" if num_beams > 1 else ""
            raise UserError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and up "
                f"to {max_num_tokens - request.num_prompt_tokens} output tokens{of_beams} need "
                f"{num_own} cache blocks of {config.block_size} tokens, the cache has "
                f"{num_free} (allowed: {num_free * config.block_size} tokens in "
                "all); lower max_length or max_new_tokens, or give the cache more blocks"
            )
        if config.pictures is not None:
            config.pictures.check_fits(request)
            self._check_uncut(request)
        if config.placing is not None:
            places = config.placing.of(request.prompt_token_ids, request.prefix.num_tokens)
            if places.runs_whole:
                self._check_whole(request)
            request.places = places
        request.max_num_tokens, request.max_num_blocks = max_num_tokens, max_num_blocks

    def _max_num_tokens(self, request: Request) -> int:
        prefix, longest = request.prefix, self._config.max_length
        try:
            return max_total_tokens(
                request.num_prompt_tokens, request.sampling_params, longest - prefix.num_tokens
            )
        except UserError as error:
            less = f" ({longest} less {prefix.num_tokens} of its prefix)"
            why = f"{error}{less if prefix.num_tokens else ''}"
            raise UserError(f"request {request.request_id}: {why}") from None

    def _check_uncut(self, request: Request) -> None:
        """Raises UserError where a picture that is read in one step might have no room in any."""
        config, pictures = self._config, request.pictures
        if pictures is None or config.pictures is None or not config.pictures.whole:
            return
        longest = max(each.picture.num_tokens for each in pictures.placed)
        budget = config.max_num_batched_tokens - (config.max_num_seqs - 1)
        if config.chunked_prefill and longest > budget:
            raise UserError(
                f"request {request.request_id}: a picture of {longest} tokens is read in one step, "
                f"and that takes {config.max_num_batched_tokens}, of which other requests may have "
                f"{config.max_num_seqs - 1} (allowed: {budget}); raise max_num_batched_tokens"
            )
        if request.wants_prompt_logits:
            raise UserError(
                f"request {request.request_id}: tokens of this model's pictures see each other, so "
                "that prompts with pictures have no logprobs; leave prompt_logprobs out"
            )

    def _check_whole(self, request: Request) -> None:
        """Raises UserError where a bidirectional prompt cannot run in one span."""
        budget = self._config.max_num_batched_tokens
        if self._config.chunked_prefill and request.num_prompt_tokens > budget:
            raise UserError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens are more "
                f"than a step takes (allowed: 1 to {budget}), and this model's prompts see "
                "themselves both ways: they run in one step; shorten the prompt, or raise "
                "max_num_batched_tokens"
            )
        if request.wants_prompt_logits:
            raise UserError(
                f"request {request.request_id}: this model's prompts see themselves both ways, so "
                "that their tokens have no logprobs; leave prompt_logprobs out"
            )
