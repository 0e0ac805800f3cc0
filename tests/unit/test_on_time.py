"""Who joins the batch next, where requests are served by their targets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codesign.config import SLO, Serving
from codesign.errors import InputError, UsageError
from codesign.policy.batching import Batcher, BatchLimits, QueuedRequest
from codesign.policy.cost import RoundCost
from codesign.policy.on_time import AT_ONCE, PATIENCE, SPARED, TURN, OnTime, on_time_of
from codesign.policy.step_time import StepTime

TTFT, TPOT = 1.0, 0.02 / (1.0 - SPARED)  # it aims at 0.02


def on_time(ttft=TTFT, tpot=TPOT, *, answer=21.0, step=lambda running: 0.01) -> OnTime:
    """A prompt of n tokens takes n milliseconds; a round 10."""
    seconds = lambda rows, before: rows / 1000.0  # noqa: E731
    return OnTime(ttft, tpot, prompt_seconds=seconds, step=step, answer_tokens=answer)


def queued(number, arrival, prompt, **more) -> QueuedRequest:
    return QueuedRequest(number, arrival, prompt, prompt_tokens=prompt, **more)


def chosen(policy, waiting, now) -> list[int]:
    return [request.request_id for request in policy.choose(waiting, now, lambda request: 0)]


def decoding(policy, number, *, since, prompt=100) -> QueuedRequest:
    """A request that has its first token, in time."""
    request = queued(number, since - prompt / 1000.0, prompt)
    policy.joined(number)
    policy.began(request, since)
    return request


def test_who_can_be_in_time_goes_before_who_is_late():
    waiting = [queued(0, 0.0, 500), queued(1, 0.9, 500), queued(2, 1.0, 150)]
    assert chosen(on_time(), waiting, 1.2) == [1, 2]


def test_as_many_join_as_have_their_first_token_in_time_together():
    # All prompts of a step end together: 0.4 + 0.4 s fit the first one's second, 1.2 do not.
    waiting = [queued(number, 0.0, 400) for number in range(3)]
    assert chosen(on_time(), waiting, 0.0) == [0, 1]
    # A short one behind them still fits.
    assert chosen(on_time(), [*waiting, queued(3, 0.0, 150)], 0.0) == [0, 1, 3]


def test_a_request_is_late_from_the_moment_at_which_its_prompt_cannot_end_in_time():
    policy = on_time()
    fits = [queued(0, 0.0, 400), queued(1, 0.1, 400)]
    assert chosen(policy, fits, 0.6) == [0]  # together they would take 0.8
    assert chosen(policy, fits, 0.601) == [1]


def test_a_prompt_waits_where_it_would_cost_a_running_request_its_target():
    policy = on_time()
    decoding(policy, 0, since=0.0)
    # 20 more tokens at 10 ms, of 20 allowed: 0.2 s to spare, but for a round.
    assert chosen(policy, [queued(1, 0.0, 189)], 0.0) == [1]
    assert chosen(policy, [queued(2, 0.0, 191)], 0.0) == []
    # Ten rounds later, which took 0.1 s, as much is to spare; and after 0.1 s of waiting less.
    for _ in range(10):
        policy.round_over(0.01, 1, 1)
    assert chosen(policy, [queued(3, 0.1, 189)], 0.1) == [3]
    assert chosen(policy, [queued(3, 0.1, 189)], 0.2) == []


def test_it_waits_even_if_that_costs_its_own_target():
    policy = on_time()
    decoding(policy, 0, since=1.0)
    assert chosen(policy, [queued(1, 0.305, 300)], 1.0) == []  # must begin at 1.005
    assert chosen(policy, [queued(1, 0.305, 300), queued(2, 1.0, 150)], 1.0) == [2]


def test_requests_that_have_missed_a_target_hold_nobody_up():
    policy = on_time()
    late = queued(0, 0.0, 100)
    policy.joined(0)
    policy.began(late, 2.1)
    assert chosen(policy, [queued(1, 2.0, 900)], 2.1) == [1]
    policy = on_time()
    decoding(policy, 0, since=0.0)
    assert chosen(policy, [queued(1, 0.5, 201)], 0.5) == [1]  # 0.5 s without a token: lost


def test_its_own_target_counts():
    policy = on_time()
    request = queued(0, 0.0, 100, slo_tpot=0.05 / (1.0 - SPARED))
    policy.joined(0)
    policy.began(request, 0.1)
    assert chosen(policy, [queued(1, 0.1, 700)], 0.1) == [1]  # 20 x 40 ms to spare


def test_the_late_join_when_nobody_waits_who_can_be_in_time_a_few_at_once():
    policy, few = on_time(), int(AT_ONCE * 1000)
    late = [queued(number, 0.0, few // 2) for number in range(5)]
    assert chosen(policy, late, 5.0) == [0, 1]
    assert chosen(policy, [*late, queued(9, 5.0, 500)], 5.0) == [9]
    long = [queued(10, 0.0, 5 * few), late[0]]
    assert chosen(policy, long, 5.0) == [10]  # one that takes longer, alone
    decoding(policy, 8, since=5.0)
    assert chosen(policy, long, 5.0) == []


def test_who_has_waited_very_long_has_a_turn_now_and_then():
    policy = on_time()
    old = queued(0, 0.0, 300)
    now = PATIENCE * TTFT + 1.0
    joined = []
    for number in range(1, 3 * TURN):
        fresh = queued(number, now, 500)
        ids = chosen(policy, [old, fresh], now)
        for request in (old, fresh):
            if request.request_id in ids:
                policy.joined(request.request_id)
                policy.began(request, now + 2.0)  # late, so that nobody is held up
                policy.ended(request.request_id)
        joined.append(ids)
    assert [ids[0] for ids in joined].count(0) == 2
    assert joined[TURN][0] == 0


def full(running: int) -> OnTime:
    """So many decode, in rounds of 6 ms and 1 ms more for each, all behind their targets."""
    policy = on_time(step=lambda number: 0.006 + 0.001 * number)
    for number in range(running):
        decoding(policy, number, since=-10.0)
    for _ in range(200):
        policy.round_over(0.006 + 0.001 * running, running, running)
    return policy


def test_nobody_joins_a_batch_that_is_too_slow_for_the_target():
    policy = full(17)  # 23 ms a token, of 22
    assert chosen(policy, [queued(20, 0.0, 100)], 0.0) == []
    policy.ended(0)
    assert chosen(policy, [queued(20, 0.0, 100)], 0.0) == []  # with it there would be 17 again
    policy.ended(1)
    assert chosen(policy, [queued(20, 0.0, 100), queued(21, 0.0, 100)], 0.0) == [20]
    slack = [queued(22, 0.0, 100), queued(23, 0.0, 100, slo_tpot=0.03)]
    assert chosen(policy, slack, 0.0) == [22, 23]  # its own target


def test_late_ones_do_not_join_it_either_while_somebody_waits_for_a_smaller_one():
    policy = full(17)
    late, waits = queued(20, -1.0, 50), queued(21, 0.0, 100)
    assert chosen(policy, [late, waits], 0.0) == []
    assert chosen(policy, [late], 0.0) == [20]


def test_a_target_that_is_too_tight_for_any_batch_makes_nobody_wait():
    policy = on_time(tpot=0.005, step=lambda number: 0.006 + 0.001 * number)
    decoding(policy, 0, since=0.0)
    assert chosen(policy, [queued(1, 0.0, 100)], 0.0) == [1]


def test_without_a_target_of_a_kind_nobody_is_late_or_held_up():
    waiting = [queued(0, 0.0, 900), queued(1, 5.0, 900)]
    assert chosen(on_time(ttft=None), waiting, 50.0) == [0, 1]
    policy = on_time(tpot=None)
    decoding(policy, 7, since=0.0)
    assert chosen(policy, waiting, 5.0) == [1]


def answer_of(policy, tokens: int) -> None:
    decoding(policy, 0, since=0.0)
    for _ in range(tokens - 1):
        policy.round_over(0.01, 1, 1)
    policy.ended(0)


def test_who_decodes_can_spare_what_a_short_answer_can():
    policy = on_time(answer=100.0)
    for tokens in (5, 200, 300, 400, 500, 600, 700):
        answer_of(policy, tokens)
    decoding(policy, 1, since=1.0)
    assert chosen(policy, [queued(2, 1.0, 979)], 1.0) == [2]  # 98 x 10 ms until eight have ended
    policy.ended(1)  # of one token: no answer that goes on
    decoding(policy, 3, since=1.0)
    assert chosen(policy, [queued(4, 1.0, 31)], 1.0) == []  # 4 x 10 ms, but for a round
    assert chosen(policy, [queued(5, 1.0, 29)], 1.0) == [5]
    for _ in range(4):  # who goes on has 200 tokens at least
        policy.round_over(0.01, 1, 1)
    assert chosen(policy, [queued(6, 1.1, 901)], 1.1) == [6]


def test_one_answer_in_twenty_may_be_shorter():
    policy = on_time()
    for tokens in (3, *[40] * 20):
        answer_of(policy, tokens)
    decoding(policy, 1, since=1.0)
    assert chosen(policy, [queued(2, 1.0, 381)], 1.0) == []  # 38 x 10 ms
    assert chosen(policy, [queued(3, 1.0, 379)], 1.0) == [3]
    for _ in range(39):  # no answer was longer: it may end at any time
        policy.round_over(0.01, 1, 1)
    assert chosen(policy, [queued(4, 1.4, 369)], 1.4) == [4]
    assert chosen(policy, [queued(5, 1.4, 371)], 1.4) == []


def test_old_answers_are_forgotten():
    policy = on_time()
    for tokens in (*[3] * 20, *[11] * 128):
        answer_of(policy, tokens)
    decoding(policy, 1, since=1.0)
    assert chosen(policy, [queued(2, 1.0, 91)], 1.0) == []
    assert chosen(policy, [queued(3, 1.0, 89)], 1.0) == [3]


def test_an_evicted_request_keeps_its_tokens_and_its_target_and_is_no_answer():
    policy = on_time(answer=100.0)
    request = decoding(policy, 0, since=0.0)
    for _ in range(9):
        policy.round_over(0.01, 1, 1)
    policy.evicted(0)
    for _ in range(50):
        policy.round_over(0.01, 1, 1)
    # Ten tokens after 0.6 s, and 89 more at 10 ms: 1.98 s are allowed for all.
    waiting = [queued(0, request.arrival, 110)]
    assert policy.choose([], 0.59, lambda request: 0, waiting) == waiting
    policy.joined(0)
    policy.began(request, 0.7)
    assert chosen(policy, [queued(2, 0.7, 369)], 0.7) == [2]
    assert chosen(policy, [queued(3, 0.7, 371)], 0.7) == []


def test_what_the_evicted_take_is_counted_before_others_join():
    policy = on_time()
    back, fresh = queued(0, 0.0, 700), queued(1, 5.0, 400)
    assert policy.choose([fresh], 5.0, lambda request: 0, [back]) == [back]
    assert policy.choose([fresh], 5.0, lambda request: 0) == [fresh]


def test_a_cached_prefix_takes_no_time():
    policy = on_time()
    waiting = [queued(0, 0.0, 1500)]
    assert policy.choose(waiting, 0.0, lambda request: 1024) == waiting
    assert chosen(on_time(), [*waiting, queued(1, 0.0, 100)], 0.0) == [1]


def test_it_needs_a_target_and_step_times():
    cost = RoundCost(*[StepTime(0.0, (1,), (0.01,))] * 4)
    by_slo = Serving(scheduling="slo")
    assert on_time_of(Serving(), SLO(), None) is None
    with pytest.raises(UsageError, match="needs a target"):
        on_time_of(by_slo, SLO(), cost)
    with pytest.raises(InputError, match="needs step times"):
        on_time_of(by_slo, SLO(ttft=1.0), None)
    with pytest.raises(InputError, match="unknown scheduling 'edf'; one of fcfs, slo"):
        Serving(scheduling="edf")  # type: ignore[arg-type]
    assert on_time_of(by_slo, SLO(ttft=1.0), cost) is not None


REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.integers(1, 2000), st.integers(1, 40)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(1, 6), st.integers(2100, 6000))
def test_everybody_is_served_once_and_memory_is_never_overdrawn(requests, max_batch, kv_tokens):
    """A server with one token a round; nobody waits while nobody runs."""
    policy = on_time()
    queue = [
        QueuedRequest(number, at, prompt + answer, prompt_tokens=prompt)
        for number, (at, prompt, answer) in enumerate(requests)
    ]
    batcher = Batcher(queue, BatchLimits(max_batch, kv_tokens), on_time=policy)
    left: dict[int, int] = {}
    served, now = [], 0.0
    while not batcher.is_done:
        if not left:
            now = max(now, batcher.next_arrival or 0.0)
        expects = batcher.admits(now)
        joined = batcher.admit(now)
        assert bool(joined) == expects
        assert joined or left
        now += sum(requests[number][1] for number in joined) / 1000.0
        for number in joined:
            left[number] = requests[number][2]
            batcher.began(number, now)
        assert len(left) <= max_batch
        used = sum(requests[number][1] + requests[number][2] for number in left)
        assert used <= kv_tokens or len(left) == 1
        now += 0.01
        batcher.round_over(0.01, len(left), len(left))
        for number in [*left]:
            left[number] -= 1
            if not left[number]:
                del left[number]
                batcher.finish(number)
                served.append(number)
    assert sorted(served) == list(range(len(requests)))


def test_a_load_that_no_batch_serves_within_the_target_is_served_all_the_same():
    """One request alone keeps 7.5 ms a token, two do not; ten a second need a batch of many."""
    step = lambda number: 0.006 + 0.001 * number  # noqa: E731
    policy = on_time(tpot=0.0075, answer=20.0, step=step)
    requests = [queued(number, 0.1 * number, 1) for number in range(2000)]
    batcher = Batcher(requests, BatchLimits(24, 1 << 20), on_time=policy)
    left, joined_at, now = {}, {}, 0.0
    while now < requests[-1].arrival:
        if not left:
            now = max(now, batcher.next_arrival)
        for number in batcher.admit(now):
            joined_at[number], left[number] = now, 3000 if number == 0 else 20  # one long answer
            batcher.began(number, now)
        seconds = step(len(left))
        now += seconds
        batcher.round_over(seconds, len(left), len(left))
        for number in list(left):
            left[number] -= 1
            if not left[number]:
                del left[number]
                batcher.finish(number)
    longest = max(now - requests[n].arrival for n in range(2000) if n not in joined_at)
    waited = [at - requests[number].arrival for number, at in joined_at.items()]
    assert max(*waited, longest) < 3 * PATIENCE
    assert sum(seconds < TTFT for seconds in waited) > 200


def test_nobody_starves_in_an_overload_without_end():
    """Requests of half a second come two and a half times a second; the late ones still join."""
    policy = on_time(tpot=None)
    requests = [queued(number, 0.4 * number, 500) for number in range(3000)]
    batcher = Batcher(requests, BatchLimits(4, 1 << 20), on_time=policy)
    now, waited = 0.0, {}
    while now < requests[-1].arrival:
        joined = batcher.admit(now)
        for number in joined:
            waited[number] = now - requests[number].arrival
        now += 0.5 * len(joined) + 0.01
        for number in joined:
            batcher.began(number, now)
            batcher.finish(number)
    early = range(300)
    assert all(number in waited for number in early)
    in_time = sum(seconds <= TTFT - 0.5 for seconds in waited.values())
    assert in_time > 0.75 * len(waited)  # first come, first served: almost none
