"""Which replica a request goes to, as simulator and engine both decide it."""

from __future__ import annotations

import pytest

from codesign.policy.batching import Batcher, BatchLimits, QueuedRequest
from codesign.policy.kv_memory import PrefixCache
from codesign.policy.routing import Router


def replicas(count: int = 3) -> list[Batcher]:
    return [Batcher([], BatchLimits(4, 10_000), PrefixCache()) for _ in range(count)]


def fill(batcher: Batcher, count: int, blocks: tuple[int, ...] = ()) -> None:
    for number in range(count):
        batcher.add(QueuedRequest(number, 0.0, 512 * len(blocks), blocks))
    batcher.admit(0.0)


def test_turns_are_taken_whatever_the_load():
    loads = replicas()
    fill(loads[1], 9)
    router = Router(loads, "round-robin")
    assert [router.choose(()) for _ in range(4)] == [0, 1, 2, 0]


def test_the_fewest_requests_win_and_the_first_of_equals():
    loads = replicas()
    fill(loads[0], 2)
    router = Router(loads, "least-loaded")
    assert router.choose(()) == 1
    fill(loads[1], 1)
    assert router.choose(()) == 2


def test_of_two_replicas_too_the_one_with_fewer_requests_is_taken():
    loads = replicas(2)
    fill(loads[0], 1)
    router = Router(loads, "least-loaded")
    assert [router.choose(()) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(("load", "chosen"), [(2, 1), (3, 2)])
def test_the_longest_known_prefix_wins_while_its_replica_is_not_much_busier(load, chosen):
    loads = replicas()
    fill(loads[1], load, (7, 8))
    fill(loads[2], 1, (7,))
    assert Router(loads, "prefix-aware").choose((7, 8, 9)) == chosen


def test_an_unknown_prefix_goes_to_the_least_loaded():
    loads = replicas()
    fill(loads[0], 1, (7,))
    assert Router(loads, "prefix-aware").choose((5,)) == 1
