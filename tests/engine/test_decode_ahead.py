"""A target's ranks run plain decoding ahead of their host: whoever comes or goes, no token differs.

On a CPU a step is over when it has begun, so none would be run ahead: here all that may be are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.gpu import decode_ahead, next_steps, ranks, step_rows
from codesign.engine.gpu.decode_ahead import DecodeAhead
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.next_steps import next_message
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.partner import NoDraft
from codesign.engine.run import PolicySetup
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.policy.batching import BatchLimits
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.interface import Speculation
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.records import RunRecords


@dataclass
class Served:
    """A run, and the steps that were run ahead in it."""

    outputs: dict[int, list[int]]
    records: RunRecords
    num_ahead: int
    num_used: int


@pytest.fixture(autouse=True)
def padding_comes_last(monkeypatch) -> None:
    """Attention on GPUs counts what is no padding, and takes as many rows from the first on."""
    hidden = RankForward.hidden

    def checked(forward, rows, slabs, *arguments, **options):
        is_padding = (rows.slots_T == slabs.scratch_slot).int()
        assert is_padding.diff().ge(0).all(), "padding before a row"
        return hidden(forward, rows, slabs, *arguments, **options)

    monkeypatch.setattr(RankForward, "hidden", checked)


@pytest.fixture
def serve(pair, new_text, monkeypatch):
    """Serve requests on CPU ranks; ``ahead=False``: the host asks for every step."""

    def run(
        requests, policy="plain", *, ahead=True, num_ranks=1, max_batch=3, serving=None,
        limit=4096, max_waiting=None, inspect=None, notes=False, target=None, **options,
    ) -> Served:  # fmt: skip
        spec = parse_policy(policy)
        if target is not None:  # whose step times tell who takes part
            options["policy"] = PolicySetup(spec, RoundCost(*[target] * 4))
        candidate = Candidate(Deployment(num_ranks, 0), spec, max_batch)
        shares = {"serving": serving, "max_kv_tokens": limit}
        found, faults = [], []
        begin = DecodeAhead.__init__

        def look(rank) -> None:
            faults.extend(model.num_faults() for model in rank.models.values())
            if inspect is not None:
                inspect(rank)

        def noted(self, *arguments) -> None:
            begin(self, *arguments)
            found.append(self)

        with monkeypatch.context() as patch:
            patch.setattr(DecodeAhead, "__init__", noted)
            patch.setattr(GroupLeader, "answers_by", lambda *_: not ahead)
            setup = rank_setup(
                candidate, requests, target=pair.target_dir, draft=pair.draft_dir, device="cpu",
                dtype="float32", check=True, **shares, **options,
            )  # fmt: skip
            result = run_on_ranks(
                setup, candidate, requests, new_text=new_text, inspect=look,
                max_waiting=max_waiting, **shares,
            )  # fmt: skip
        assert not any(faults)
        assert notes or not result.records.notes
        return Served(result.outputs, result.records, found[0].num_ahead, found[0].num_used)

    return run


def of_lengths(requests, *lengths: int):
    """Requests that ask for so many tokens each."""
    return [replace(r, max_new_tokens=n) for r, n in zip(requests, lengths, strict=True)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nearly_all_steps_of_plain_decoding_are_run_ahead(
    serve, make_requests, num_ranks, temperature
):
    requests = of_lengths(make_requests(5), 20, 40, 30, 25, 35)
    options = {"sampling": Sampling(temperature, seed=3), "num_ranks": num_ranks}
    alone = serve(requests, ahead=False, **options)
    ours = serve(requests, **options)
    assert ours.outputs == alone.outputs
    assert alone.num_ahead == 0
    # None is run in vain, as it is known when each of these requests ends. Those that join cost a
    # step with a message, three together at first, one more tells how long a step takes, and two
    # that end when nobody waits stand before others.
    assert ours.num_used == ours.num_ahead
    num_rounds = len(ours.records.rounds)
    assert num_rounds == len(alone.records.rounds)
    assert ours.num_ahead == num_rounds - 3 - 1 - 2


def test_those_that_end_leave_without_a_message_if_nobody_is_behind_them(serve, make_requests):
    requests = of_lengths(make_requests(3), 60, 45, 30)
    ours = serve(requests)
    assert ours.outputs == serve(requests, ahead=False).outputs
    assert (ours.num_ahead, ours.num_used) == (58 - 1, 58 - 1)
    others = of_lengths(make_requests(3), 30, 45, 60)
    assert serve(others).num_used == 58 - 1 - 2


def test_a_stream_waits_for_its_host_once(serve, make_requests):
    (request,) = of_lengths(make_requests(1), 60)
    ours = serve([request], max_batch=1)
    # The first token comes with the prompt, and the first step tells how long one takes.
    assert (ours.num_ahead, ours.num_used) == (58 - 1, 58 - 1)
    assert ours.outputs == serve([request], ahead=False, max_batch=1).outputs


def test_requests_that_stop_sample_and_opt_out_each_in_their_way(
    serve, own_requests, plain_outputs
):
    """Some end before anybody knew: their rows are run once more, in nobody's way."""
    requests = [replace(r, max_new_tokens=40) for r in own_requests]
    ours = serve(requests, limit=1 << 16)
    assert ours.outputs == plain_outputs(requests)
    assert 0 < ours.num_used <= ours.num_ahead


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_shared_is_touched_by_steps_ahead(
    serve, own_requests, plain_outputs, serving, num_ranks
):
    way, limit = serving
    ours = serve(own_requests, serving=way, limit=limit, num_ranks=num_ranks, page_rows=16)
    assert ours.outputs == plain_outputs(own_requests)
    assert ours.num_used > 0


def test_whoever_comes_joins_the_round_after_the_one_that_is_under_way(serve, make_requests):
    requests = [
        replace(r, arrival=0.02 * r.request_id, max_new_tokens=60) for r in make_requests(6)
    ]
    ours = serve(requests)
    assert ours.outputs == serve(requests, ahead=False).outputs
    assert ours.num_used == ours.num_ahead > 0
    starts = ours.records.rounds.column("start")
    for record in ours.records.requests[:3]:  # for whom there is room
        between = (starts >= record.arrival) & (starts < record.admitted)
        assert between.sum() <= 2, "kept waiting by steps ahead"  # its own round among them


def test_a_request_that_finds_the_queue_full_hears_of_it_in_the_next_round(serve, make_requests):
    arrivals = (0.0, 0.0, 0.05, 0.05, 0.05)
    requests = [
        replace(r, arrival=at, max_new_tokens=240)
        for r, at in zip(make_requests(5), arrivals, strict=True)
    ]
    ours, alone = (
        serve(requests, ahead=ahead, max_batch=2, max_waiting=1, notes=True)
        for ahead in (True, False)
    )
    assert set(ours.records.refused) == set(alone.records.refused) == {3, 4}
    assert ours.num_used > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_of_those_who_take_turns_are_asked_for(serve, make_requests, num_ranks):
    requests = of_lengths(make_requests(6), 60, 60, 60, 60, 20, 30)
    stairs = StepTime(alpha=0.0, rows=(1, 4, 5, 6), seconds=(1.0, 1.0, 2.0, 2.0))
    options = {"max_batch": 6, "num_ranks": num_ranks}
    alone = serve(requests, ahead=False, **options)
    ours = serve(requests, target=stairs, **options)
    assert ours.outputs == alone.outputs
    rounds = ours.records.rounds
    batches = rounds.column("batch").tolist()
    num_turns = sum(batches) - 4 * 58  # tokens that came while there were five or six
    assert max(batches) == 4
    assert ours.num_used == ours.num_ahead
    assert 0 < ours.num_ahead < len(batches) - num_turns / 4
    for request in ours.records.requests:
        assert request.num_rounds == request.output_tokens - 1


def test_requests_that_are_left_have_the_smaller_bucket_that_holds_them(serve, make_requests):
    requests = of_lengths(make_requests(9), 60, *[10] * 8)
    buckets = []

    def noted(message, contexts):
        buckets.append((message, len(contexts)))
        return next_message(message, contexts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_ahead, "next_message", noted)
        ours = serve(requests, max_batch=9)
    assert ours.outputs == serve(requests, ahead=False, max_batch=9).outputs
    assert {bucket for bucket, count in buckets if count == 1} == {8}
    assert {bucket for bucket, count in buckets if count == 9} == {16}


def test_a_run_that_ends_with_a_step_under_way_leaves_ranks_that_serve_again(
    serve, own_requests, plain_outputs, new_text
):
    requests = [r for r in own_requests if r.options.stop_tokens or r.options.stop_strings]
    again = []

    def serve_again(rank) -> None:
        setup, leader = rank.setup, rank.leaders[0]
        for _ in range(2):
            target = GroupTarget(
                leader, num_slots=setup.num_slots, sampling=setup.sampling, new_text=new_text,
                samples_by_row=bool(setup.samplings),
            )  # fmt: skip
            schedule = Schedule(requests, BatchLimits(3, 1 << 16), Serving(), round_rows=1)
            server = Server(target, NoDraft(), schedule, requests)
            server.run()
            again.append(server.outputs)

    ours = serve(requests, limit=1 << 16, inspect=serve_again)
    assert ours.outputs == plain_outputs(requests)
    assert again == [ours.outputs] * 2


def test_a_policy_at_rest_lets_its_target_run_ahead(serve, make_requests, monkeypatch):
    rounds = itertools.count()
    state = {"now": 0}

    def stays_at_rest(_) -> bool:
        state["now"] = next(rounds)
        return state["now"] % 5 > 0

    requests = of_lengths(make_requests(4), 40, 50, 30, 45)
    monkeypatch.setattr(ranks, "next_buckets", lambda setup: [8])
    monkeypatch.setattr(Speculation, "stays_at_rest", stays_at_rest)
    monkeypatch.setattr(Speculation, "rests_on", lambda _: (state["now"] + 1) % 5 > 0)
    ours = serve(requests, "tree-8x4x4")
    assert ours.outputs == serve(requests, ahead=False).outputs
    assert ours.num_used == ours.num_ahead > 0
    drafted = [record.num_draft_tokens for record in ours.records.rounds]
    assert 0 < sum(map(bool, drafted)) < len(drafted)


def test_a_policy_that_drafts_although_it_was_to_rest_costs_a_step_alone(
    serve, make_requests, monkeypatch
):
    rounds = itertools.count()
    requests = of_lengths(make_requests(3), 40, 50, 30)
    monkeypatch.setattr(ranks, "next_buckets", lambda setup: [8])
    monkeypatch.setattr(Speculation, "stays_at_rest", lambda _: next(rounds) % 3 > 0)
    monkeypatch.setattr(Speculation, "rests_on", lambda _: True)
    ours = serve(requests, "tree-8x4x4")
    assert ours.outputs == serve(requests, ahead=False).outputs
    assert 0 < ours.num_used < ours.num_ahead


def test_steps_ahead_are_attended_in_pairs_where_their_contexts_ask_for_it(
    serve, make_requests, monkeypatch
):
    requests = of_lengths(make_requests(2), 70, 70)
    alone, long, span, ran = serve(requests, ahead=False), 48, 4, []
    hidden = RankForward.hidden

    def noted(forward, rows, slabs, scratch, *, in_pairs=False):
        is_real = rows.slots_T != slabs.scratch_slot
        ran.append((sum(rows.kv_rows_T[is_real].tolist()), int(is_real.sum()), in_pairs))
        return hidden(forward, rows, slabs, scratch, in_pairs=in_pairs)

    for module in (step_rows, next_steps):
        monkeypatch.setattr(module, "SPAN", span)
    monkeypatch.setattr(RankForward, "hidden", noted)
    monkeypatch.setattr(RankForward, "pairs_may_do_more", lambda *_: True)
    monkeypatch.setattr(
        RankForward, "pairs_do_more", lambda _, crowd: crowd.spans > crowd.requests * long // span
    )
    ours = serve(requests)
    assert ours.outputs == alone.outputs
    assert ours.num_used == ours.num_ahead > 60
    assert {in_pairs for context, count, in_pairs in ran if context > count * (long + span)} == {
        True
    }
    assert {in_pairs for context, count, in_pairs in ran if context < count * (long - span)} == {
        False
    }


def test_a_lone_forward_that_was_begun_by_somebody_else_is_not_taken_for_a_round(
    serve, make_requests, monkeypatch
):
    """Whoever asks the ranks for something in between has taken the answer that was under way."""
    requests = of_lengths(make_requests(3), 30, 40, 20)
    go_on, count = DecodeAhead.go_on, itertools.count()

    def interrupted(self, *arguments):
        answer = go_on(self, *arguments)
        if self.is_under_way and next(count) % 4 == 0:
            self._leader.settle()
            self._leader.num_begun += 1
        return answer

    monkeypatch.setattr(DecodeAhead, "go_on", interrupted)
    ours = serve(requests)
    assert ours.outputs == serve(requests, ahead=False).outputs
    assert 0 < ours.num_used < ours.num_ahead


def test_memory_that_runs_out_stops_what_runs_ahead_before_somebody_must_go(serve, make_requests):
    requests = [replace(r, max_new_tokens=60) for r in make_requests(4)]
    way, limit = Serving(preemption=True), 210
    ours = serve(requests, serving=way, limit=limit, page_rows=16, max_batch=4)
    alone = serve(requests, ahead=False, serving=way, limit=limit, page_rows=16, max_batch=4)
    assert ours.outputs == alone.outputs
    evictions = [record.num_preemptions for record in ours.records.requests]
    assert evictions == [record.num_preemptions for record in alone.records.requests]
    assert sum(evictions) > 0
    assert ours.num_used == ours.num_ahead > 0


def test_nobody_joins_a_step_that_is_under_way_and_memory_is_seen_to_all_the_same():
    room, server = [], Server.__new__(Server)
    server._worker = SimpleNamespace(is_ahead=True)
    server._log = SimpleNamespace(now=4.0)
    server._schedule = SimpleNamespace(
        make_room=lambda: room.append("idle blocks go") or [],
        batcher=SimpleNamespace(num_arrived=lambda now: 3 if now == 4.0 else 0),
    )
    assert server._admit() == []
    assert room == ["idle blocks go"]
    assert server._num_left == 3  # who has come by now has not come while prompts ran
