from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.policy.batching import Batcher, BatchLimits, QueuedRequest
from codesign.policy.kv_memory import PrefixCache


def batcher(*requests: tuple[int, float, int], max_batch=4, max_kv_tokens=100) -> Batcher:
    queue = [QueuedRequest(i, arrival, kv_tokens) for i, arrival, kv_tokens in requests]
    return Batcher(queue, BatchLimits(max_batch=max_batch, max_kv_tokens=max_kv_tokens))


def test_requests_join_in_order_of_arrival_then_number():
    queue = batcher((3, 0.5, 1), (2, 0.1, 1), (1, 0.5, 1))
    assert queue.next_arrival == 0.1
    assert queue.admit(1.0) == [2, 1, 3]
    assert queue.num_running == 3
    assert queue.next_arrival is None


def test_nobody_joins_before_arrival():
    queue = batcher((1, 1.0, 1), (2, 2.0, 1))
    assert queue.admit(0.999) == []
    assert queue.admit(1.0) == [1]
    assert queue.admit(1.5) == []
    assert queue.admit(2.0) == [2]


def test_batch_limit_holds_until_someone_finishes():
    queue = batcher((1, 0.0, 1), (2, 0.0, 1), (3, 0.0, 1), max_batch=2)
    assert queue.admit(0.0) == [1, 2]
    assert queue.admit(0.0) == []
    queue.finish(1)
    assert queue.admit(0.0) == [3]


def test_kv_limit_is_met_exactly_and_not_exceeded():
    queue = batcher((1, 0.0, 60), (2, 0.0, 40), (3, 0.0, 1))
    assert queue.admit(0.0) == [1, 2]
    assert queue.admit(0.0) == []
    queue.finish(2)
    assert queue.admit(0.0) == [3]


@pytest.mark.parametrize("cache", [None, PrefixCache()])
def test_the_last_kv_row_may_be_in_use_and_not_one_more(cache):
    queue = Batcher([], BatchLimits(max_batch=4, max_kv_tokens=100), cache)
    assert not queue.is_over(100)
    assert queue.is_over(101)


def test_small_request_does_not_overtake_a_large_one():
    queue = batcher((1, 0.0, 60), (2, 0.1, 50), (3, 0.2, 1))
    assert queue.admit(1.0) == [1]
    queue.finish(1)
    assert queue.admit(1.0) == [2, 3]


def test_request_beyond_the_limit_runs_alone():
    queue = batcher((1, 0.0, 5), (2, 0.0, 500), (3, 0.0, 5))
    assert queue.admit(0.0) == [1]
    queue.finish(1)
    assert queue.admit(0.0) == [2]
    assert queue.admit(0.0) == []
    queue.finish(2)
    assert queue.admit(0.0) == [3]


def test_done_when_nothing_waits_and_nothing_runs():
    queue = batcher((1, 0.0, 5))
    assert not queue.is_done
    queue.admit(0.0)
    assert not queue.is_done
    queue.finish(1)
    assert queue.is_done
    assert batcher().is_done


def test_finishing_who_does_not_run_is_our_bug():
    queue = batcher((1, 0.0, 5))
    with pytest.raises(KeyError):
        queue.finish(1)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5, 4.0]), st.integers(1, 40)), max_size=14),
    st.integers(1, 4),
    st.integers(5, 60),
    st.randoms(use_true_random=False),
)
def test_limits_hold_order_holds_and_nobody_is_lost(requests, max_batch, max_kv_tokens, rng):
    rows = [(i, arrival, kv_tokens) for i, (arrival, kv_tokens) in enumerate(requests)]
    queue = batcher(*rows, max_batch=max_batch, max_kv_tokens=max_kv_tokens)
    running: set[int] = set()
    served: list[int] = []
    now = 0.0
    while not queue.is_done:
        admitted = queue.admit(now)
        running |= set(admitted)
        served += admitted
        assert all(rows[i][1] <= now for i in admitted)
        assert len(running) == queue.num_running <= max_batch
        assert len(running) <= 1 or sum(rows[i][2] for i in running) <= max_kv_tokens
        waiting = sorted((row[1], row[0]) for row in rows if row[0] not in served)
        assert queue.next_arrival == (waiting[0][0] if waiting else None)
        if waiting and waiting[0][0] <= now:  # who waits in front has a reason to
            used = sum(rows[i][2] for i in running)
            assert len(running) == max_batch or used + rows[waiting[0][1]][2] > max_kv_tokens
            assert running
        for request_id in sorted(running):
            if rng.random() < 0.5:
                running.discard(request_id)
                queue.finish(request_id)
        now += rng.choice([0.0, 1.0])
    assert served == [i for _, i in sorted((row[1], row[0]) for row in rows)]


def test_asking_whether_rows_would_run_out_lets_no_idle_block_go():
    cache = PrefixCache()
    cache.hold((7, 8))
    cache.release((7, 8), num_computed=2)  # nobody uses them, and they stay
    idle = cache.idle_tokens
    queue = Batcher([], BatchLimits(max_batch=4, max_kv_tokens=idle + 10), cache)
    for in_use in (0, 10, 11, idle + 10, idle + 11):
        assert queue.would_be_over(in_use) == (in_use > idle + 10)
        assert cache.idle_tokens == idle
    assert queue.is_over(idle + 11)
    assert cache.idle_tokens < idle
