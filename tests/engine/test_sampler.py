"""From logits to tokens: penalties, minimum length, seeds."""

import numpy as np
import pytest

from predict.device.library import import_paddle
from predict.engine.choices import Row, request_seed
from predict.engine.logits_processors import Adjustment
from predict.engine.request_state import Request
from predict.engine.runner.host_chooser import HostChooser
from predict.engine.sampler import Sampler
from predict.ops import plain as reference
from predict.request import SamplingParams

paddle = import_paddle()


def make(number: int = 0, **params: object) -> Request:
    return Request(number, [1, 2], SamplingParams(**params))  # type: ignore[arg-type]


def tokens(rows: list[list[float]], requests: list[Request], seed: int = 0) -> list[int]:
    choices = Sampler(seed, eos_token_ids=(0,)).choices([Row(request) for request in requests])
    logits = paddle.to_tensor(np.array(rows, np.float32))
    chosen = HostChooser(reference).tokens(logits, choices)
    return [token for token in chosen if isinstance(token, int)]


def test_greedy_takes_the_largest_logit() -> None:
    assert tokens([[0, 3, 1], [5, 1, 2]], [make(temperature=0), make(top_k=1)]) == [1, 0]


def test_minimum_length_suppresses_eos_and_stop_tokens() -> None:
    request = make(temperature=0, min_length=1, stop_token_ids=(1,))
    assert tokens([[9, 8, 1]], [request]) == [2]
    request.token_ids.append(2)
    assert tokens([[9, 8, 1]], [request]) == [0]


def test_stop_tokens_outside_of_the_vocabulary_change_nothing() -> None:
    request = make(temperature=0, min_length=1, stop_token_ids=(1, 3, 400))
    assert tokens([[9, 8, 1]], [request]) == [2]


def test_repetition_penalty_moves_seen_tokens_towards_less_likely() -> None:
    logits = np.array([1.0, 2.0, -2.0, 4.0], np.float32)
    Adjustment(repetition=2.0).apply(logits, [1, 2, 2], 1)
    assert logits.tolist() == [1.0, 1.0, -4.0, 4.0]


def test_presence_and_frequency_penalty_count_the_output() -> None:
    logits = np.array([1.0, 2.0, -2.0, 4.0], np.float32)
    Adjustment(presence=0.5, frequency=0.25).apply(logits, [0, 1, 1, 2], 1)
    assert logits.tolist() == [1.0, 1.0, -2.75, 4.0]


def test_min_p_leaves_out_what_is_much_less_likely_than_the_likeliest() -> None:
    row = np.log([0.5, 0.3, 0.19, 0.01]).tolist()
    drawn = {token for s in range(200) for token in tokens([row], [make(min_p=0.3, seed=s)])}
    assert drawn == {0, 1, 2}


def test_penalty_of_one_request_leaves_its_neighbour_alone() -> None:
    rows = [[0, 3, 2.9], [0, 3, 2.9]]
    assert tokens(rows, [make(temperature=0, repetition_penalty=2.0), make(temperature=0)])[1] == 1


def test_seeded_request_draws_the_same_alone_and_in_a_batch() -> None:
    row = np.linspace(0, 1, 50).tolist()
    alone = tokens([row], [make(7, seed=123)])
    batch = tokens([row] * 3, [make(1), make(7, seed=123), make(2)])
    assert batch[1] == alone[0]


def test_requests_without_a_seed_differ_by_number_and_engine_seed() -> None:
    seeds = {request_seed(engine, make(number)) for engine in (0, 1) for number in range(50)}
    assert len(seeds) == 100
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 2,
            (0xFFFFFFFF,) * 4,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, ...]
) -> None:
    """Of Random123, its authors' implementation: philox4x32, 10 rounds."""
    assert reference.philox4x32(key, counter) == words
