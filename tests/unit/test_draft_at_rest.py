"""A draft whose policy rests: roots alone are verified, and it drafts on in step afterwards."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import pytest

from codesign.engine import draft_worker
from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import NgramDrafter
from codesign.engine.partner import LocalDraft
from codesign.policy.adaptive import SpecServe
from codesign.policy.batch_tree import BatchTree
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.host_cost import HostCost
from codesign.policy.interface import Progress
from codesign.policy.lately import Lately
from codesign.policy.online_calibration import OnlineCalibration
from codesign.policy.protocol import (
    Admission,
    DraftSide,
    RequestVerdict,
    TargetSide,
    Verdict,
)
from codesign.policy.resting import FIRST_SHARE, LONGEST_REST, LOOKING, Resting
from codesign.policy.row_prices import RowPrices
from codesign.policy.speculation import Speculation, build_speculation, parse_policy
from codesign.policy.turbospec import TurboSpec

PROMPT, TOKENS, REQUESTS = 5, 120, 3
DEAR = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.1)
CHEAP = StepTime.linear(alpha=0.0, gamma=0.0, delta=1e-4)
TARGET = StepTime.linear(alpha=0.0, gamma=1e-6, delta=0.01)


class Drafter:
    """Says 7 is likely; what it is told about rows must be in step with what was committed."""

    def __init__(self) -> None:
        self.num_rows: dict[int, int] = {}
        self.forwards = 0

    def forward(self, expansion, fanout):
        self.forwards += 1
        choices = []
        for rows in expansion:
            assert self.num_rows.get(rows.request_id, 0) == rows.context
            self.num_rows[rows.request_id] = rows.context + len(rows.tokens)
            choices.append(([[7, 8]] * len(rows.nodes), [[-0.1, -3.0]] * len(rows.nodes)))
        return choices

    def run_prompts(self, prompts):
        assert not prompts

    def move(self, moves):
        for move in moves:
            if move.request_id in self.num_rows:
                self.num_rows[move.request_id] = move.base + len(move.rows)

    def release(self, request_ids):
        for request_id in request_ids:
            self.num_rows.pop(request_id, None)


def serve(policy: Resting, drafter: Drafter, become_cheap: int, *, catches_up: bool = True):
    """All outputs, and rows verified by round; draft forwards are cheap from a round on.

    Unless the worker ``catches_up`` beside the target's step it does so with the next verdict.
    """
    worker, target, chance = DraftWorker(policy, drafter), TargetSide(), random.Random(3)
    admissions = [Admission(n, (n,) * PROMPT, TOKENS) for n in range(REQUESTS)]
    verdicts = []
    for admission in admissions:
        target.admit(admission)
        verdicts.append(target.commit_first(admission.request_id, 7))
    outputs = {n: [7] for n in range(REQUESTS)}
    joining, number, rows_by_round = tuple(admissions), 0, []
    while target.request_ids:
        if number == become_cheap:
            cheapen(policy)
        verdict = Verdict(number, tuple(verdicts), joining, now=0.01 * number)
        candidates, _ = worker.answer(verdict)
        if catches_up:
            worker.catch_up()
            for request_id in worker.side.request_ids:
                assert worker.side.committed(request_id)[PROMPT:] == tuple(outputs[request_id])
        rows = target.verify_rows(candidates)
        rows_by_round.append(sum(len(each.tokens) for each in rows))
        verdicts = []
        for each in rows:
            sample = {i: 7 if chance.random() < 0.8 else 9 for i in range(len(each.tokens))}
            verdicts.append(target.judge(each, sample.__getitem__)[0])
            outputs[each.request_id] += verdicts[-1].tokens
        if catches_up:
            worker.overlap()
        joining, number = (), number + 1
    return outputs, rows_by_round


def rests(looks: list[float], step: float) -> list[int]:
    """Rounds of rest after each of these looks, one after another, of so many seconds."""
    shares = [max(FIRST_SHARE / 2.0**number, LOOKING) for number in range(len(looks))]
    pairs = zip(looks, shares, strict=True)
    return [min(max(math.ceil(s / (share * step)), 1), LONGEST_REST) for s, share in pairs]


def cheapen(policy: Resting) -> None:
    if isinstance(policy, TurboSpec):
        policy._goodput.draft = CHEAP
    else:
        assert isinstance(policy, BatchTree | SpecServe)
        policy._round.draft = RowPrices(CHEAP)
        policy._saved_lately = Lately()  # or prompts would wait for what is saved to last


def policy_of(draft: StepTime, look: float, label: str = "batch-tree-4x2x3") -> Resting:
    goodput = Goodput(
        draft, TARGET, host=HostCost(deciding=look),
        draft_prompt_seconds=lambda rows: 0.5 * draft(rows),  # so that it pays in short answers
    )  # fmt: skip
    policy = build_speculation(parse_policy(label), goodput=goodput)
    assert isinstance(policy, Resting)
    return policy


@pytest.mark.parametrize("look", [9e-5, 5e-3])
@pytest.mark.parametrize("label", ["batch-tree-4x2x3", "specserve-3", "turbospec-3"])
def test_a_draft_at_rest_is_in_step_when_it_drafts_again(label, look):
    drafter = Drafter()
    outputs, rows = serve(policy_of(DEAR, look, label), drafter, become_cheap=20)
    assert all(len(tokens) == TOKENS for tokens in outputs.values())
    assert rows[:20] == [REQUESTS] * 20
    assert drafter.forwards
    assert max(rows) > REQUESTS


class GpuDrafter(Drafter):
    """Leaves the host time while a forward runs."""

    meanwhile = staticmethod(lambda: None)

    def forward(self, expansion, fanout):
        self.meanwhile()
        return super().forward(expansion, fanout)

    def expect(self, steps, *, width, fanout, grow):
        raise AssertionError("these policies foresee nothing")


@pytest.mark.parametrize("label", ["batch-tree-4x2x3", "specserve-3"])
def test_verdicts_teach_while_a_forward_runs_and_the_same_as_where_none_leaves_time(label):
    found, learned = [], []
    for drafter in (Drafter(), GpuDrafter()):
        policy = policy_of(CHEAP, 9e-5, label)
        if isinstance(policy, BatchTree):
            learn = policy.calibration.learn
            policy.calibration.learn = lambda judged, d=drafter, f=learn: (
                learned.append((type(d), d.forwards)),
                f(judged),
            )
        found.append(serve(policy, drafter, become_cheap=-1))
    assert found[0] == found[1]
    before = {number for kind, number in learned if kind is Drafter}  # its first forward is over
    within = {number for kind, number in learned if kind is GpuDrafter}
    assert bool(within) == label.startswith("batch-tree")
    assert before == {number + 1 for number in within}


@pytest.mark.parametrize("label", ["batch-tree-4x2x3", "specserve-3", "turbospec-3"])
@pytest.mark.parametrize("look", [9e-5, 0.0])
def test_looks_take_their_share_by_what_they_take_and_not_by_what_the_fit_says(
    monkeypatch, label, look
):
    clock = itertools.count()  # milliseconds: a look takes 2, beside a step 1; the fit says less
    monkeypatch.setattr(draft_worker, "perf_counter", lambda: 1e-3 * next(clock))
    policy = policy_of(DEAR, look, label)
    looks, begin = [], policy.begin
    monkeypatch.setattr(policy, "begin", lambda *of: (looks.append(policy.now), begin(*of)))
    _, rows = serve(policy, Drafter(), become_cheap=-1)
    assert rows[0] == REQUESTS
    lengths = rests([2e-3, *[1e-3] * 8], TARGET(REQUESTS))
    due = [0, *itertools.accumulate(n - 1 for n in lengths)]  # each in the round before it would be
    assert looks == pytest.approx([0.01 * number for number in due if number < len(rows)])
    assert lengths[-1] == 2 * lengths[2] == math.ceil(1e-3 / (LOOKING * TARGET(REQUESTS)))


@pytest.mark.parametrize("label", ["batch-tree-4x2x3", "specserve-3", "turbospec-3"])
@pytest.mark.parametrize(("look", "rounds"), [(0.0, 1), (9e-5, 2), (3e-4, 6), (9e-3, LONGEST_REST)])
def test_where_nothing_is_timed_looks_take_their_share_by_the_fit(label, look, rounds):
    policy, looks = policy_of(DEAR, look, label), []
    trees = [policy.tree_type(7, base_len=5, max_depth=400) for _ in range(2)]
    for number in range(4 * rounds + 1):
        if number == rounds // 2:  # changes nothing
            trees.append(policy.tree_type(7, base_len=5, max_depth=400))
        if policy.stays_at_rest():
            assert policy.rests
        else:
            looks.append(number)
            look_at(policy, trees)
        assert policy.reads_prompts == label.startswith("turbospec")
        for tree in trees:
            tree.reroot((9,))
    lengths = rests([look] * len(looks), TARGET(2))
    assert looks == [0, *itertools.accumulate(lengths[:-1])]
    assert lengths[-1] == rounds


def look_at(policy, trees) -> None:
    policy.begin(trees, [Progress()] * len(trees))
    assert not any(policy.leaves(trees, 0))
    assert policy.select(trees) == [[0]] * len(trees)
    policy.settle()


@pytest.mark.parametrize("label", ["batch-tree-4x2x3", "specserve-3", "turbospec-3"])
def test_the_first_rest_after_drafting_is_short_again(label):
    policy = policy_of(DEAR, 3e-4, label)
    trees = [policy.tree_type(7, base_len=5, max_depth=400) for _ in range(2)]
    first, *_, last = lengths = rests([3e-4] * 5, TARGET(2))
    for length in (*lengths, last):
        assert not policy.stays_at_rest()
        look_at(policy, trees)
        assert [policy.stays_at_rest() for _ in range(length - 1)] == [True] * (length - 1)
    for _ in range(3):
        assert not policy.stays_at_rest()  # these rounds draft, say
    look_at(policy, trees)
    assert [policy.stays_at_rest() for _ in range(first)] == [True] * (first - 1) + [False]
    assert first < last


@pytest.mark.parametrize("label", ["batch-tree-4x2x3", "specserve-3", "turbospec-3"])
def test_nothing_changes_if_verdicts_at_rest_are_taken_in_late(label):
    drafters, served = (Drafter(), Drafter()), []
    for drafter, catches_up in zip(drafters, (True, False), strict=True):
        policy = policy_of(DEAR, 9e-5, label)
        policy.looked = lambda seconds: None  # by the fit: a test's own looks take any time
        policy.looks_ahead = lambda: False  # beside a step, which late ones are not
        served.append(serve(policy, drafter, become_cheap=20, catches_up=catches_up))
    assert served[0] == served[1]
    assert drafters[0].forwards == drafters[1].forwards > 0


def test_at_rest_a_draft_in_turns_answers_as_nobody_would_and_catches_up_beside_the_step():
    policy = policy_of(DEAR, 9e-3)
    policy.looked = lambda seconds: None  # by the fit
    worker = DraftWorker(policy, Drafter())
    draft, prompt = LocalDraft(worker), (1,) * PROMPT
    for number in range(3):
        entries = (RequestVerdict(0, PROMPT + number, (7,)),)
        joining = (Admission(0, prompt, TOKENS),) if number == 0 else ()
        draft.send(Verdict(number, entries, joining))
        answer = draft.receive()
        assert (answer.candidates, answer.times) == (None, None) or number == 0
        assert worker.side.committed(0) == (*prompt, *(7,) * max(number, 1))
        draft.catch_up()
        assert worker.side.committed(0) == (*prompt, *(7,) * (number + 1))


@pytest.mark.parametrize("label", ["batch-tree-4x2x3", "specserve-3", "turbospec-3"])
def test_the_look_that_ends_a_rest_is_made_beside_the_step_before_and_drafts_nothing(
    monkeypatch, label
):
    policy, drafter = policy_of(DEAR, 9e-4, label), Drafter()
    worker, begin, looks, where = DraftWorker(policy, drafter), policy.begin, [], ""
    monkeypatch.setattr(policy, "looked", lambda seconds: None)
    monkeypatch.setattr(
        policy, "begin", lambda *of: (looks.append((policy.now, where)), begin(*of))
    )
    number = 0
    while not drafter.forwards:
        if number == 22:
            cheapen(policy)
        joining = [Admission(n, (n,) * PROMPT, TOKENS) for n in range(2) if not number]
        entries = [RequestVerdict(n, PROMPT + number, (7,)) for n in range(2)]
        where = "before"
        worker.answer(Verdict(number, tuple(entries), tuple(joining), now=number))
        where, forwards = "beside", drafter.forwards
        worker.catch_up()
        assert drafter.forwards == forwards
        number += 1
    due = itertools.accumulate(length - 1 for length in rests([9e-4] * 4, TARGET(2)))
    *_, (last, _) = beside = [(now, "beside") for now in due]
    assert last > 22
    assert looks == [(0, "before"), *beside, (last + 1, "before")]


def test_specserve_without_its_drafter_does_not_rest_where_its_target_forbids_to_draft():
    goodput = Goodput(DEAR, TARGET, slo_tpot=0.0101, host=HostCost(deciding=9e-3))
    policy = build_speculation(parse_policy("specserve-3-no-drafter"), goodput=goodput)
    tree = policy.tree_type(7, base_len=5, max_depth=200)
    for _ in range(3):
        assert not policy.stays_at_rest()
        policy.begin([tree], [Progress()])
        assert not any(policy.leaves([tree], 0))
        assert policy.select([tree]) == [[0]]
        policy.looked(9e-3)
        assert policy.rests


def test_a_rest_is_as_short_as_a_target_forbids_only_while_it_is_what_forbids():
    goodput = Goodput(DEAR, TARGET, slo_tpot=0.0101, host=HostCost(deciding=9e-3))
    goodput.draft_prompt_seconds = lambda rows: 1.0 * rows
    policy = build_speculation(parse_policy("specserve-3"), goodput=goodput)
    rests = []
    for prompt in (5, 5, 500, 5):  # the long one is not worth its seconds
        tree = policy.tree_type(7, base_len=prompt, max_depth=200)
        policy.begin([tree], [Progress()])
        assert not any(policy.leaves([tree], 0))
        policy.select([tree])
        rests.append(policy._rest)
    assert rests == [1, 2, LONGEST_REST, 1]


class Rests(Speculation):
    """Stays at rest in the rounds that are named; else it looks, and drafts nothing."""

    def __init__(self, resting: set[int]) -> None:
        super().__init__()
        self.calibration = OnlineCalibration()
        self.tree_type = partial(BudgetTree, calibration=self.calibration)
        self._rounds, self._resting = itertools.count(), resting

    def stays_at_rest(self) -> bool:
        return next(self._rounds) in self._resting


def told(resting: set[int]) -> list[tuple[int, object]]:
    """What is known of requests at each look: one comes at rest, one ends, one is dropped."""
    side, seen, committed = DraftSide(Rests(resting)), [], {}
    ended = {}
    for number in range(9):
        joining = [Admission(number, (1, 2), 40)] if number in (0, 1, 2, 5) else []
        committed |= {admission.request_id: 2 for admission in joining}
        ends, drops = {3: [0]}.get(number, []), {4: [1]}.get(number, [])
        ended |= {n: side._requests[n].tree for n in ends + drops}
        entries = [
            RequestVerdict(n, committed[n], (3, number), is_finished=n in ends) for n in committed
        ]
        committed = {n: c + 2 for n, c in committed.items() if n not in ends + drops}
        entries = [entry for entry in entries if entry.request_id not in drops]
        side.receive(
            Verdict(number, tuple(entries), tuple(joining), dropped=tuple(drops), now=number)
        )
        if side.begin():
            trees = {
                n: (request.tree.tokens, request.tree.base_len, request.tree.max_depth)
                for n, request in side._requests.items()
            }
            progress = [request.progress(side._now) for request in side._requests.values()]
            lengths = {n: tree.base_len for n, tree in ended.items()}
            seen.append((number, (trees, progress, lengths)))
    return seen


def test_a_tree_that_was_left_alone_at_rest_is_as_if_it_had_followed():
    always = told(set())
    resting = {1, 2, 3, 4, 6, 7}
    assert told(resting) == [each for each in always if each[0] not in resting]


@pytest.mark.parametrize("look", [0.0, 4e-5, 1e-3, 1.0])
def test_a_policy_knows_whether_the_next_round_is_at_rest(look):
    policy, rounds = Resting(None), 0
    for _ in range(3):
        policy.begin_rest(look, 1e-3)
        rests_on = True
        while rests_on:
            rests_on = policy.rests_on()
            assert policy.stays_at_rest() == rests_on
            rounds += 1
    assert rounds > 3 or not look


class LooksAhead(Speculation):
    """Expands roots, or rests and looks ahead."""

    rests_now = False

    def stays_at_rest(self):
        return self.rests_now

    def looks_ahead(self):
        return self.rests_now

    def leaves(self, trees, done):
        return [[0] if not (self.rests_now or done) and tree.slots[0] < 0 else [] for tree in trees]


def test_a_look_ahead_leaves_the_rows_of_a_request_that_sat_out():
    policy, drafter = LooksAhead(), NgramDrafter()
    side = DraftSide(policy)
    side.receive(Verdict(0, (RequestVerdict(0, 3, (9,)),), (Admission(0, (1, 2, 3), 50),)))
    assert side.begin()
    rows = side.next_expansion(0)
    ((tokens, log_probs),) = drafter.forward(rows, 1)
    side.expanded(rows[0], tokens, log_probs)
    policy.rests_now = True
    assert not side.receive(Verdict(1, ()))[0]  # the round went on without it
    drafter.move(side.look_ahead()[0])
    policy.rests_now = False
    moves, _ = side.receive(Verdict(2, (RequestVerdict(0, 4, (8,)),)))
    drafter.move(moves)  # its rows are still there
    assert [(move.base, move.rows) for move in moves] == [(3, (0,))]
