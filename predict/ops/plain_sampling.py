"""From logits to tokens, and from step to step, in NumPy: the second half of `predict.ops.plain`.

What an operator changes in place is read to the host, changed there, and written back to where it
lies, views of other tensors included. Arguments and results are those of `predict.ops.compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import communicator
from predict.ops.columns import CHOICES, PENALTIES

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.inputs import StepInputs
    from predict.nn.spec import Share

__all__ = [
    "adjust_logits",
    "follow_drafts",
    "largest_step",
    "likeliest",
    "log_softmax",
    "logprobs",
    "mask_logits",
    "philox4x32",
    "resolve_tokens",
    "sample",
    "sample_step",
    "uniform",
    "verify_window",
]

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Four 32-bit words of Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers")."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK32, (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, offset: int) -> float:
    """A number in [0, 1) of 24 random bits, a pure function of the seed and the offset."""
    seed, offset = seed & (1 << 64) - 1, offset & (1 << 64) - 1
    words = philox4x32((seed & MASK32, seed >> 32), (offset & MASK32, offset >> 32, 0, 0))
    return (words[0] >> 8) * 2.0**-24


def _sample_row(
    logits: npt.NDArray[Any],
    temperature: float,
    top_k: int,
    top_p: float,
    u: float,
    min_p: float,
    typical_p: float,
) -> int:
    greedy, largest = temperature == 0 or top_k == 1, logits.max()
    if np.isnan(largest) or (not greedy and np.isinf(largest)):
        return -1
    if greedy:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    distance = scaled[order[0]] - scaled[order]
    weights = np.exp(-distance)
    kept = min(top_k, len(order)) if top_k > 0 else len(order)
    if top_p < 1:  # the smallest prefix that reaches it
        shares = np.cumsum(weights[:kept] / weights[:kept].sum())
        kept = min(int(np.searchsorted(shares, top_p)) + 1, kept)
    if min_p > 0:
        kept = max(int(np.count_nonzero(weights[:kept] >= min_p)), 1)
    if typical_p < 1:
        kept = int(np.searchsorted(distance, distance[kept - 1], side="right"))  # and its equals
        typical = np.flatnonzero(_typical(distance[:kept], weights[:kept], typical_p))
        order, weights = order[typical], weights[typical]
    else:
        order, weights = order[:kept], weights[:kept]
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(order[min(index, len(cumulative) - 1)])


def _typical(
    distance: npt.NDArray[Any], weights: npt.NDArray[Any], mass: float
) -> npt.NDArray[np.bool_]:
    """Which tokens are the most typical that together reach `mass` (Meister et al. 2022).

    distance: from the largest logit, which is -log p up to a constant; so -log p - H, with the
    entropy H, is the distance less its mean.
    """
    weights = weights / weights.sum()
    finite = np.where(weights > 0, distance, 0.0)
    surprise = np.abs(distance - np.sum(weights * finite))
    order = np.argsort(surprise, kind="stable")
    reached = int(np.searchsorted(np.cumsum(weights[order]), mass))
    typical: npt.NDArray[np.bool_] = surprise <= surprise[order[min(reached, len(order) - 1)]]
    return typical


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    offsets: Tensor,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
) -> Tensor:
    import paddle

    rows = logits.numpy()
    columns = [t.numpy().tolist() for t in (temperature, top_k, top_p, seeds, offsets)]
    columns += [
        [off] * len(rows) if t is None else t.numpy().tolist()
        for t, off in ((min_p, 0.0), (typical_p, 1.0))
    ]
    tokens = [
        _sample_row(row, t, k, p, uniform(seed, offset), least, mass)
        for row, t, k, p, seed, offset, least, mass in zip(rows, *columns, strict=True)
    ]
    return paddle.to_tensor(np.array(tokens, np.int32))


def mask_logits(logits: Tensor, masks: Tensor) -> Tensor:
    import paddle

    num_rows, vocab_size = logits.shape
    words = masks.numpy()[:num_rows].view(np.uint8)
    allowed = np.unpackbits(words, axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    banned = paddle.to_tensor(~allowed, place=logits.place)
    return paddle.assign(paddle.where(banned, paddle.full([], -np.inf), logits), logits)


def log_softmax(logits: Tensor, rows: Tensor) -> None:
    values = _copy_of(logits)
    for row in rows.numpy().tolist():
        if 0 <= row < len(values):
            values[row] = values[row] - _log_total(values[row])
    _write(logits, values)


def likeliest(logits: Tensor, rows: Tensor, count: int) -> Tensor:
    values, wanted = logits.numpy(), rows.numpy().tolist()
    found = np.empty((2, len(wanted), count), np.int32)
    token_ids, floats = found[0], found[1].view(np.float32)
    token_ids[:], floats[:] = -1, -np.inf
    for index, row in enumerate(wanted):
        if 0 <= row < len(values) and not np.isnan(values[row]).any():
            best = _best(values[row], count)
            token_ids[index, : len(best)], floats[index, : len(best)] = best, values[row][best]
    return _like(found, logits)


def resolve_tokens(token_ids: Tensor, last_tokens: Tensor) -> None:
    ids, last = _copy_of(token_ids), last_tokens.numpy()
    rows = -1 - ids.astype(np.int64)
    stand_ins = (rows >= 0) & (rows < len(last))
    ids[stand_ins] = last[rows[stand_ins]]
    _write(token_ids, ids)


def follow_drafts(
    inputs: StepInputs, choices: Tensor, plan: Tensor, tokens: Tensor, block_size: int
) -> None:
    changed = inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens, choices
    token_ids, positions, slots, context_lens, columns = map(_copy_of, changed)
    offsets = CHOICES.views(columns)["offset"]
    borders, tables = inputs.cu_seqlens_q.numpy().tolist(), inputs.block_tables.numpy()
    known = tokens.numpy()
    for index, (num_drafts, row, num_chosen, *places) in enumerate(plan.numpy().tolist()):
        if num_drafts < 0:
            continue
        chosen = known[row : row + num_drafts + 1]
        drafts = known[places[:num_drafts]]
        wrong = np.flatnonzero((drafts < 0) | (drafts != chosen[:num_drafts]))
        num_right = int(wrong[0]) if len(wrong) else num_drafts
        begin, end = borders[index : index + 2]
        if num_chosen == 2:
            if num_right > 0:
                token_ids[begin] = chosen[num_right - 1]
            token_ids[begin + 1] = chosen[num_right]
        back = num_drafts - num_right
        positions[begin:end] -= back
        at = positions[begin:end]
        slots[begin:end] = tables[index][at // block_size] * block_size + at % block_size
        context_lens[index] -= back
        offsets[index] -= back
    for tensor, values in zip(
        changed, (token_ids, positions, slots, context_lens, columns), strict=True
    ):
        _write(tensor, values)


def adjust_logits(
    logits: Tensor,
    penalties: Tensor,
    token_ids: Tensor,
    logit_indices: Tensor,
    history: Tensor,
    rules: Tensor,
    first_token: int = 0,
) -> None:
    values, past = _copy_of(logits), _copy_of(history)
    columns = [*PENALTIES.views(penalties.numpy()).values()]
    ids, table = token_ids.numpy(), rules.numpy()
    for row, (own, end) in enumerate(zip(values, logit_indices.numpy().tolist(), strict=True)):
        *amounts, slot, length, num_prompt, num_new, ngram_size = (each[row] for each in columns)
        if slot < 0:
            continue
        tokens = np.concatenate([past[slot, : length - num_new], ids[end + 1 - num_new : end + 1]])
        past[slot, length - 1] = tokens[-1]
        _apply_rules(own, table[slot], tokens, num_prompt, first_token)
        places = tokens - first_token  # those of no column change nothing
        penalize(own, places, num_prompt, *amounts)
        if ngram_size > 0:
            ban_repeats(own, places, ngram_size)
    _write(logits, values)
    _write(history, past)


def _apply_rules(
    logits: npt.NDArray[np.float32],
    words: npt.NDArray[np.int32],
    tokens: npt.NDArray[np.int32],
    num_prompt: int,
    first_token: int,
) -> None:
    """Adds the amounts of rules in `words` that hold behind `tokens` to logits, in place."""
    for head in words[1 : 1 + 4 * int(words[0])].reshape(-1, 4):
        start, size, _, until = head.tolist()
        *prefix, token = words[start : start + size].tolist()
        holds = tokens[len(tokens) - len(prefix) :].tolist() == prefix
        place = token - first_token
        if holds and len(tokens) - num_prompt < until and 0 <= place < len(logits):
            logits[place] += head[2:3].view(np.float32)[0]


def penalize(
    logits: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
    num_prompt: int,
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
) -> None:
    """Changes logits [V] of tokens that have occurred, in place.

    The repetition penalty counts prompt and output (Keskar et al. 2019, CTRL): it divides positive
    and multiplies negative logits. Presence and frequency penalty count the output's tokens only,
    as OpenAI's API has them.
    """
    known = (tokens >= 0) & (tokens < len(logits))
    if repetition != 1:
        seen = np.unique(tokens[known])
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        seen, counts = np.unique(tokens[num_prompt:][known[num_prompt:]], return_counts=True)
        logits[seen] -= presence + frequency * counts.astype(np.float32)


def ban_repeats(logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32], size: int) -> None:
    """Bans tokens that would repeat an n-gram of `size` among `tokens`, in logits [V], in place."""
    if len(tokens) >= size:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, size)
        newest = tokens[len(tokens) - (size - 1) :]
        banned = windows[(windows[:, : size - 1] == newest).all(axis=1), size - 1]
        logits[banned[(banned >= 0) & (banned < len(logits))]] = -np.inf


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    values = logits.numpy()
    found = np.empty((len(values), 2 + 2 * num_top), np.int32)
    floats = found.view(np.float32)
    found[:, 2 : 2 + num_top], floats[:, 2 + num_top :] = -1, -np.inf
    for row, (own, token) in enumerate(zip(values, token_ids.numpy().tolist(), strict=False)):
        chosen = own[token if 0 <= token < len(own) else 0]
        total, best = _log_total(own), _best(own, num_top)
        floats[row, 0], found[row, 1] = chosen - total, 1 + np.count_nonzero(own > chosen)
        found[row, 2 : 2 + len(best)] = best
        floats[row, 2 + num_top : 2 + num_top + len(best)] = own[best] - total
    return _like(found, logits)


def sample_step(logits: Tensor, choices: Tensor, last_tokens: Tensor) -> None:
    import paddle

    columns, tokens, num_rows = CHOICES.views(choices.numpy()), _copy_of(last_tokens), len(logits)
    names = "temperature", "top_k", "top_p", "seed", "offset", "min_p", "typical_p"
    inputs = [paddle.to_tensor(columns[name][:num_rows].copy()) for name in names]
    tokens[:num_rows] = sample(logits, *inputs).numpy()
    _write(last_tokens, tokens)


def largest_step(logits: Tensor, last_tokens: Tensor, share: Share) -> None:
    begin, end = share.tokens()
    tokens = _copy_of(last_tokens)
    tokens[: len(logits)] = largest_of_ranks(logits.numpy()[:, : end - begin], share)
    _write(last_tokens, tokens)


def largest_of_ranks(values: npt.NDArray[np.float32], share: Share) -> npt.NDArray[np.int64]:
    """The token [L] of the largest logit of each row, of which values [L, N] are a rank's.

    A value and an id of each row are all that ranks send. -1 where one is not a number.
    """
    rows, best = np.arange(len(values)), values.argmax(axis=1)  # of a NaN, where there is one
    own = np.stack([values[rows, best], best + share.tokens()[0]]).astype(np.float64)
    every = communicator.gather_ranks(own, share.ranks.size)
    largest, ids = every[:, 0], every[:, 1].astype(np.int64)
    ranks = largest.argmax(axis=0)  # the first of several, whose ids are the lowest
    return np.where(np.isnan(largest[ranks, rows]), -1, ids[ranks, rows])


def verify_window(
    logits: Tensor,
    choices: Tensor,
    token_ids: Tensor,
    logit_indices: Tensor,
    last_tokens: Tensor,
    window: int,
    max_candidate_len: int,
) -> None:
    values, tokens = logits.numpy(), _copy_of(last_tokens)
    ids, places, columns = token_ids.numpy(), logit_indices.numpy(), CHOICES.views(choices.numpy())
    num_drafts = columns["num_drafts"].tolist()
    row = 0
    while row < len(values):
        length = num_drafts[row]
        drafts = ids[places[row] + 1 : places[row] + 1 + length].tolist()
        ranks = []
        for at, draft in enumerate(drafts, row):
            names = "temperature", "top_p", "min_p", "top_k"
            temperature, top_p, min_p, top_k = (columns[name][at].item() for name in names)
            drawing = temperature, top_p, min_p, top_k
            ranks.append(rank_of_draft(values[at], draft, drawing, max_candidate_len))
        span = tokens[row : row + length + 1]
        if (span >= 0).all():
            accept_drafts(span, drafts, ranks, window)
        row += length + 1
    _write(last_tokens, tokens)


def rank_of_draft(
    logits: npt.NDArray[np.float32],
    draft: int,
    drawing: tuple[float, float, float, int],
    max_candidate_len: int,
) -> tuple[int, bool]:
    """How many tokens of a row [V] are likelier than a draft, and whether it is a candidate.

    The lower id counts as likelier on ties. (-1, False) for a banned draft. drawing: temperature,
    top_p, min_p and top_k of the row.
    """
    temperature, top_p, min_p, top_k = drawing
    if not 0 <= draft < len(logits) or not logits[draft] > -np.inf:
        return -1, False
    before = logits > logits[draft]
    before[:draft] |= logits[:draft] == logits[draft]
    rank, top_k = int(np.count_nonzero(before)), top_k if 0 < top_k < len(logits) else len(logits)
    if rank == 0:
        return 0, True
    if rank >= min(max_candidate_len, top_k):
        return rank, False
    weights = np.exp((logits - logits.max()) / np.float32(max(temperature, 1e-30)))
    if weights[draft] < min_p or top_p >= 1:
        return rank, bool(weights[draft] >= min_p)
    reached = weights[before].sum(dtype=np.float64)
    if top_k < len(weights):
        weights = np.partition(weights, len(weights) - top_k)[len(weights) - top_k :]
    return rank, bool(reached < top_p * weights.sum(dtype=np.float64))


def accept_drafts(
    drawn: npt.NDArray[np.int32],
    drafts: Sequence[int],
    ranks: Sequence[tuple[int, bool]],
    window: int,
) -> None:
    """Replaces drawn tokens [n + 1] of a span by its accepted drafts among n, in place.

    ranks: `rank_of_draft` of each draft. See predict.engine.window for the rule.
    """
    index = 0
    while index < len(drafts):
        rank, may_be_drawn = ranks[index]
        behind = [rank for rank, _ in ranks[index + 1 : index + 1 + window]]
        num_standing = 1 if may_be_drawn else 0
        if not may_be_drawn and rank == 1 and behind == [0] * window:
            num_standing = 1 + window
        drawn[index : index + num_standing] = drafts[index : index + num_standing]
        index += num_standing
        if may_be_drawn:
            continue
        # The token drawn here ends the span, unless it is the draft itself.
        if index < len(drafts) and drawn[index] != drafts[index]:
            return
        index += 1


def _best(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The `count` largest above -inf, the lower index first on ties."""
    order = np.argsort(-logits, kind="stable")[:count]
    return order[logits[order] > -np.inf]


def _log_total(logits: npt.NDArray[np.float32]) -> np.float64:
    """Log of the sum of exp(logits); NaN for a row of -inf alone."""
    with np.errstate(invalid="ignore"):
        exact = logits.astype(np.float64)
        largest = exact.max()
        total: np.float64 = largest + np.log(np.exp(exact - largest).sum())
    return total


def _copy_of(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor's values as a new array."""
    return np.array(tensor.numpy())


def _like(values: npt.NDArray[Any], tensor: Tensor) -> Tensor:
    """An array as a tensor at another tensor's place."""
    import paddle

    return paddle.to_tensor(values, place=tensor.place)


def _write(tensor: Tensor, values: npt.NDArray[Any]) -> None:
    """Puts values into a tensor's own memory, which may be a part of another tensor's."""
    tensor.copy_(_like(values, tensor), True)
