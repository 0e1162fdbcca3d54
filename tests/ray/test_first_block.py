"""Which replica a prompt goes to."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install -e '.[ray]'", allow_module_level=True)

from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import PendingRequest, ReplicaID

from predict.scale_out.serving.first_block import FirstBlockRouter, key_of, preference

BLOCK = 4  # tokens
NAMES = [f"replica-{index}" for index in range(5)]


def keys(count: int) -> list[bytes]:
    return [key_of([index] * BLOCK, BLOCK) for index in range(count)]


def test_the_first_block_alone_makes_the_key() -> None:
    assert key_of([1, 2, 3, 4, 5], BLOCK) == key_of([1, 2, 3, 4, 9, 9], BLOCK)
    assert key_of([1, 2, 3, 4], BLOCK) != key_of([1, 2, 3, 5], BLOCK)
    assert key_of([1, 2], BLOCK) != key_of([1, 2, 0, 0], BLOCK)


def test_keys_spread_over_all_replicas() -> None:
    first = Counter(preference(key, NAMES)[0] for key in keys(1000))
    assert set(first) == set(range(len(NAMES)))
    assert min(first.values()) > 100


def test_the_order_of_the_replicas_does_not_matter() -> None:
    turned = NAMES[::-1]
    for key in keys(50):
        names = [NAMES[place] for place in preference(key, NAMES)]
        assert names == [turned[place] for place in preference(key, turned)]


def test_a_replica_that_goes_moves_its_own_keys_alone() -> None:
    gone, left = NAMES[2], [name for name in NAMES if name != NAMES[2]]
    for key in keys(200):
        before = [NAMES[place] for place in preference(key, NAMES)]
        after = [left[place] for place in preference(key, left)]
        assert after == [name for name in before if name != gone]


class FakeReplica:
    """As much of a RunningReplica as the router looks at."""

    max_ongoing_requests = 8

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("engines"))


@pytest.fixture
def replicas() -> list[Any]:
    return [FakeReplica(name) for name in NAMES]


@pytest.fixture
def router() -> FirstBlockRouter:
    found = FirstBlockRouter(DeploymentID("engines"), DeploymentHandleSource.REPLICA)
    found.initialize_state(room=2)
    return found


def choose(router: FirstBlockRouter, replicas: list[Any], *arguments: Any) -> list[list[Any]]:
    metadata: Any = None

    async def ask() -> list[list[Any]]:
        pending = PendingRequest(list(arguments), {}, metadata)
        return await router.choose_replicas(replicas, pending)

    return asyncio.run(ask())


def test_a_request_tries_the_replica_of_its_key_first(
    router: FirstBlockRouter, replicas: list[Any]
) -> None:
    for key in keys(20):
        ranks = choose(router, replicas, key, b"ask")
        home = replicas[preference(key, NAMES)[0]]
        assert ranks[0] == [home]
        assert ranks[-1] == replicas


def test_a_full_batch_is_passed_over(router: FirstBlockRouter, replicas: list[Any]) -> None:
    (key,) = keys(1)
    home, second = preference(key, NAMES)[:2]
    router.replica_queue_len_cache.update(replicas[home].replica_id, 1)
    assert choose(router, replicas, key, b"")[0] == [replicas[home]]
    router.replica_queue_len_cache.update(replicas[home].replica_id, 2)
    assert choose(router, replicas, key, b"")[0] == [replicas[second]]


def test_when_all_batches_are_full_any_replica_will_do(
    router: FirstBlockRouter, replicas: list[Any]
) -> None:
    for replica in replicas:
        router.replica_queue_len_cache.update(replica.replica_id, 2)
    assert choose(router, replicas, keys(1)[0], b"") == [replicas]


def test_a_call_without_a_key_goes_anywhere(router: FirstBlockRouter, replicas: list[Any]) -> None:
    assert choose(router, replicas) == [replicas]
