"""TopP + window verification against a plain reading of PaddleNLP's algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predict import SamplingParams
from predict.config.engine import EngineConfig
from predict.engine.choices import GREEDY, Choice, Row
from predict.engine.drafts import accepted_tokens
from predict.engine.request_state import Request
from predict.engine.window import WindowDrafts, loose_drafts, verified
from predict.errors import UserError
from predict.ops.plain_sampling import rank_of_draft

VOCABULARY = 12


def plain(
    probabilities: list[list[float]],
    drafts: list[int],
    drawn: list[int],
    top_p: float,
    window: int,
    max_candidate_len: int,
) -> list[int]:
    """The tokens of a span; see predict.engine.window for where it differs from PaddleNLP."""

    def ranked(place: int) -> list[int]:
        return sorted(range(VOCABULARY), key=lambda token: (-probabilities[place][token], token))

    def nucleus(place: int) -> list[int]:
        total, tokens = 0.0, []
        for token in ranked(place):
            tokens.append(token)
            total += probabilities[place][token]
            if total >= top_p:
                break
        return tokens[:max_candidate_len]

    accepted: list[int] = []
    while len(accepted) < len(drafts):
        place = len(accepted)
        draft = drafts[place]
        if draft in nucleus(place):
            accepted.append(draft)
            continue
        if draft == ranked(place)[1]:
            behind = drafts[place + 1 : place + 1 + window]
            best = [ranked(place + 1 + i)[0] for i in range(len(behind))]
            if len(behind) == window and behind == best:
                accepted += [draft, *behind]
        place = len(accepted)
        accepted.append(drawn[place])
        if place == len(drafts) or drawn[place] != drafts[place]:
            return accepted
    return [*accepted, drawn[len(drafts)]]


def test_random_spans_are_verified_as_the_algorithm_says() -> None:
    random = np.random.default_rng(0)
    num_windows = 0
    for trial in range(3000):
        top_p = float(random.choice([0.3, 0.6, 0.9]))
        window, most = int(random.integers(1, 4)), int(random.integers(2, 6))
        requests, rows, choices, logits, drawn, wanted = [], [], [], [], [], []
        for number in range(2):
            num_drafts = int(random.integers(0, 7))
            own = random.normal(0, 2, (num_drafts + 1, VOCABULARY)).astype(np.float32)
            order = np.argsort(-own, axis=1)
            # Drafts among the likeliest, or the case of windows would hardly occur.
            ranks = random.choice([0, 0, 0, 1, 1, 2, 6], num_drafts)
            drafts = [int(order[i, rank]) for i, rank in enumerate(ranks)]
            draws = [int(order[i, random.choice([0, 1, 3])]) for i in range(num_drafts + 1)]
            request = Request(number, [1], SamplingParams(temperature=0.5, top_p=top_p))
            requests.append(request)
            rows += [Row(request, drafts[:i]) for i in range(num_drafts + 1)]
            choices += [Choice(0.5, 0, top_p, 0, i) for i in range(num_drafts + 1)]
            logits.append(own)
            drawn += draws
            weights = np.exp(2.0 * (own - own.max(axis=1, keepdims=True)).astype(np.float64))
            shares = (weights / weights.sum(axis=1, keepdims=True)).tolist()
            wanted.append((drafts, plain(shares, drafts, draws, top_p, window, most)))
        loose = WindowDrafts(window, most, loose_drafts(rows, choices))
        result = verified(drawn, np.concatenate(logits), loose, choices)
        for drafts, tokens in wanted:
            chosen, result = result[: len(drafts) + 1], result[len(drafts) + 1 :]
            assert accepted_tokens(drafts, chosen) == tokens, trial
            num_windows += len(tokens) > window + 1
    assert num_windows > 500


def test_greedy_requests_keep_their_tokens() -> None:
    request = Request(0, [1], SamplingParams(temperature=0.0))
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
    best = logits.argmax(axis=1).tolist()
    drafts = [int(np.argsort(-logits[0])[1]), best[1]]
    rows = [Row(request, drafts[:i]) for i in range(3)]
    loose = WindowDrafts(1, 5, loose_drafts(rows, [GREEDY] * 3))
    assert verified(best, logits, loose, [GREEDY] * 3) == best


def test_a_banned_token_is_no_second_likeliest() -> None:
    logits = np.full((2, VOCABULARY), -np.inf, np.float32)
    logits[:, 7] = 0
    request = Request(0, [1], SamplingParams(temperature=1.0))
    rows = [Row(request, [3, 7][:i]) for i in range(3)]
    choices = [Choice(1.0, 0, 1.0, 0, i) for i in range(3)]
    loose = WindowDrafts(1, 5, loose_drafts(rows, choices))
    assert verified([7, 7, 7], logits[[0, 1, 1]], loose, choices) == [7, 7, 7]


def test_candidates_are_tokens_that_the_request_may_draw() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.3, 0.15, 0.1], np.float32))

    def allowed(max_candidate_len: int = 5, **changes: Any) -> list[int]:
        choice = Choice(1.0, 0, 1.0, 0, 0)._replace(**changes)
        drawing = choice.temperature, choice.top_p, choice.min_p, choice.top_k
        ranks = [rank_of_draft(logits, token, drawing, max_candidate_len) for token in range(5)]
        allowed = [token for token, (_, is_candidate) in enumerate(ranks) if is_candidate]
        return sorted(allowed, key=lambda token: ranks[token][0])

    assert allowed() == [1, 2, 3, 4, 0]
    assert allowed(3) == [1, 2, 3]
    assert allowed(top_p=0.69) == [1, 2]
    assert allowed(top_p=0.71) == [1, 2, 3]
    assert allowed(top_k=2) == [1, 2]
    assert allowed(top_k=3, top_p=0.8) == [1, 2]
    assert allowed(min_p=0.3) == [1, 2, 3]
    assert allowed(top_p=0.1) == [1]
    logits[[2, 3]] = -np.inf
    assert allowed() == [1, 4, 0]
    logits[:] = 0
    assert allowed(2) == [0, 1]


def test_flags_are_checked() -> None:
    def config(**changes: Any) -> EngineConfig:
        return EngineConfig(model_name_or_path="x", **changes)

    assert not config(speculate_method="lookahead").speculation.verifies_by_window
    assert config(
        speculate_method="lookahead", speculate_verify_window=2
    ).speculation.verifies_by_window
    with pytest.raises(UserError, match="add --speculate_method"):
        config(speculate_verify_window=2)
    with pytest.raises(UserError, match=r"speculate_max_candidate_len 11 .* from 2 to 10"):
        config(speculate_method="lookahead", speculate_max_candidate_len=11)
