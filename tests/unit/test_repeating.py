"""Rounds that draft without a look at the batch; what looks and rows of a round are priced at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.policy.adaptive import SpecServe
from codesign.policy.batch_tree import BatchTree
from codesign.policy.budget_tree import BudgetTree
from codesign.policy.cost import StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.host_cost import HostCost
from codesign.policy.interface import Progress
from codesign.policy.repeating import Repeating, needed_return
from codesign.policy.resting import LEARNED, LONGEST_REST, LOOKING
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.traffic import COLD, rows_behind
from codesign.policy.tree import DraftTree
from codesign.sim import simulate

DRAFT = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001)
TARGET = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.010)
LOOK = 2e-4
LABELS = ["batch-tree-4x1x3", "specserve-3"]


def policy_of(
    label: str, *, look: float = LOOK, draft: StepTime = DRAFT, target: StepTime = TARGET
) -> Repeating:
    """One whose confidences are learned."""
    goodput = Goodput(draft, target, host=HostCost(deciding=look))
    policy = build_speculation(parse_policy(label), goodput=goodput, confidence=0.6)
    assert isinstance(policy, Repeating)
    return policy


def trees_of(policy: Repeating, count: int, *, missing: int = 0) -> list[DraftTree]:
    trees = [policy.tree_type(9, base_len=1, max_depth=900) for _ in range(count)]
    for tree in trees:
        tree.expand([0])
        tree.reroot((9,) * (missing + 1))
    return trees


def play(
    policy: Repeating, trees: Sequence[DraftTree], chance: float, progress: Progress | None = None
) -> tuple[int, int]:
    """A round in which every forward finds one token; forwards, and nodes beside the roots."""
    policy.begin(trees, [progress or Progress()] * len(trees))
    done = 0
    while any(leaves := policy.leaves(trees, done)):
        for tree, nodes in zip(trees, leaves, strict=True):
            tree.expand(nodes)
            for node in nodes:
                tree.add_children(node, (7,), (math.log(chance),))
        done += 1
    chosen = policy.select(trees)
    policy.settle()
    for tree in trees:
        tree.reroot((9,))
    return done, sum(map(len, chosen)) - len(trees)


def stairs(rows: int) -> StepTime:
    """A target for which so many rows are dear."""
    return StepTime(0.0, (rows - 1, rows), (0.010, 0.020))


@pytest.mark.parametrize("label", LABELS)
def test_a_round_whose_looks_found_nothing_is_repeated_until_they_are_their_share(label):
    policy = policy_of(label, target=stairs(5))
    trees = trees_of(policy, 2)
    assert play(policy, trees, 0.6) == (1, 2)
    assert not policy.repeats
    share = math.ceil(2 * LOOK / (LOOKING * 0.011))
    for rounds in (share, 2 * share, 3 * share):  # as each further look finds the same
        for _ in range(rounds - 1):
            assert play(policy, trees, 0.6) == (1, 2)
            assert policy.repeats
            assert not policy.rests
        assert play(policy, trees, 0.6) == (1, 2)
        assert not policy.repeats


def test_specserve_forbids_nothing_where_no_progress_is_known():
    policy = policy_of("specserve-8", target=stairs(5))
    trees = trees_of(policy, 2)
    policy.begin(trees)
    assert any(policy.leaves(trees, 0))


@pytest.mark.parametrize("label", LABELS)
def test_no_more_rounds_are_repeated_than_a_pause_has(label):
    policy = policy_of(label, target=stairs(5))
    trees = trees_of(policy, 2)
    repeated = [play(policy, trees, 0.6) == (1, 2) and policy.repeats for _ in range(600)]
    looks = [number for number, repeats in enumerate(repeated) if not repeats]
    assert max(np.diff(looks)) == LONGEST_REST


def test_no_round_is_repeated_whose_further_draft_tokens_have_dear_rows():
    # Repeated, it would draft for all four: a look gives the one cheap row to the surest.
    for dear, repeats in ((6, False), (9, True)):
        policy = policy_of("batch-tree-4x1x1", target=stairs(dear))
        trees = trees_of(policy, 4)
        for tree, confidence in zip(trees, (0.9, 0.6, 0.6, 0.6), strict=True):
            assert isinstance(tree, BudgetTree)
            tree.confidence = confidence
        assert play(policy, trees, 0.9) == (1, 4 if repeats else 1)
        play(policy, trees, 0.9)
        assert policy.repeats == repeats


@pytest.mark.parametrize("label", LABELS)
def test_no_round_is_repeated_where_plain_decoding_is_usually_better(label, monkeypatch):
    policy = policy_of(label, target=stairs(5))
    trees, saved = trees_of(policy, 2), policy._saved_blindly
    for is_better in (True, False):
        monkeypatch.setattr(
            policy, "_saved_blindly", lambda num, better=is_better: -1e-3 if better else saved(num)
        )
        play(policy, trees, 0.6)
        play(policy, trees, 0.6)
        assert policy.repeats != is_better


def test_of_what_drafting_saves_as_much_counts_for_a_prompt_as_it_saved_lately():
    policy = policy_of("batch-tree-4x1x3")
    play(policy, trees_of(policy, 1), 0.6)
    answer = policy.traffic.left_at_first * 0.010  # seconds of plain rounds
    assert policy._lasting(0.002) == 1.0
    policy.now = 10 * answer
    assert policy._lasting(-0.001) == 1.0  # there is nothing to count
    policy.now += 0.1 * answer
    first = policy._lasting(0.004)
    policy.now += 0.4 * answer
    assert 0.0 < first < policy._lasting(0.004) < 1.0
    policy.now += 10 * answer
    assert policy._lasting(0.004) == pytest.approx(1.0, abs=1e-4)
    policy.now += answer
    assert policy._lasting(0.001) == 1.0  # no more than now


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("what", ["a larger batch", "a new batch", "beside them", "a prompt"])
def test_what_is_new_is_looked_at_at_once(label, what):
    policy = policy_of(label, target=stairs(5))
    trees = trees_of(policy, 2)
    play(policy, trees, 0.6)
    play(policy, trees, 0.6)
    assert policy.repeats
    if what == "a larger batch":  # for which drafting may not pay
        policy._gains[3] = -0.01
        trees += trees_of(policy, 1)
    elif what == "a new batch":  # for which looks may pay
        trees.pop()
    elif what == "beside them":
        policy.beside = (1, 20)
    else:
        policy.sharing = (64, 1)
    play(policy, trees, 0.6)
    assert not policy.repeats


@pytest.mark.parametrize("label", LABELS)
def test_requests_come_and_go_while_rounds_are_repeated(label):
    policy = policy_of(label, target=StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.010))
    policy._gains = {1: -0.01, 2: -0.01, 3: -0.01}  # looks at so many have found nothing
    trees = trees_of(policy, 2)
    play(policy, [*trees, *trees_of(policy, 1)], 0.6)
    policy._left = 9
    policy._newcomer_saves = needed_return(3) * 1e-3  # seconds a token: a prompt of 96 rows pays
    for others in (trees[:1], [*trees, *trees_of(policy, 1)]):
        play(policy, others, 0.6)
        assert policy.repeats
    for prompt, is_read in ((90, True), (110, False)):
        goodput = policy._goodput
        goodput.draft_prompt_seconds = lambda rows: 1e-3 * rows
        newcomer = policy.tree_type(9, base_len=prompt + 1, max_depth=900)
        policy.begin([*trees, newcomer], [Progress()] * 3)
        assert policy.repeats
        assert [bool(nodes) for nodes in policy.leaves([*trees, newcomer], 0)] == [
            True,
            True,
            is_read,
        ]


@pytest.mark.parametrize("num", [1, 2, 3, 24])
def test_a_prompt_must_save_those_who_pay_it_what_it_takes(num):
    lengths = np.random.default_rng(0).geometric(1e-3, (20_000, num))  # of answers
    saved_meanwhile = np.minimum(lengths, lengths[:, :1]).sum(1).mean()  # of the first one's prompt
    takes_all = num * lengths[:, 0].mean()
    assert needed_return(num) == pytest.approx(takes_all / saved_meanwhile, rel=0.02)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("who", ["nobody", "here", "beside them", "waiting"])
def test_others_who_pay_a_prompt_keep_the_draft_from_it(label, who):
    policy = policy_of(label)
    policy._goodput.draft_prompt_seconds = lambda rows: 1e-3 * rows
    trees = trees_of(policy, 1, missing=90)
    if who == "here":
        trees += trees_of(policy, 2)
    elif who == "beside them":
        policy.beside = (2, 20)
    elif who == "waiting":
        policy.sharing = (0, 2)
    seconds = 1e-3 * trees[0].missing
    saved = 1.2 * seconds / policy.traffic.expected_left(trees[0].emitted)
    assert policy._costly(trees, [0], saved) == ([] if who == "nobody" else [0])
    assert policy._costly(trees, [0], 1.3 * saved) == []  # 1.5 times in all


def test_what_a_newcomer_adds_counts_while_an_average_request_repays_its_prompt():
    policy = policy_of("specserve-3", target=stairs(5))
    trees = trees_of(policy, 4)
    play(policy, trees, 0.6)
    for draft_prompt, saved in ((0.09, 3e-3), (0.2, 1e-3)):
        policy.traffic.draft_prompt = draft_prompt  # of 96 tokens each saves 0.096 s by its share
        assert policy._saved_by_newcomer(4e-3, 1e-3) == pytest.approx(saved)
    policy.traffic.draft_prompt = 0.09
    assert policy._saved_by_newcomer(4e-3, -1e-3) == 4e-3  # without it nobody would be drafted for


def test_no_round_is_repeated_that_is_longer_than_a_target_allows():
    policy = policy_of("specserve-3", target=stairs(5))
    trees = trees_of(policy, 2)
    play(policy, trees, 0.6)
    play(policy, trees, 0.6)
    assert policy.repeats
    assert isinstance(policy, SpecServe)
    more, target = float(policy.traffic.expected_left(np.array([1]))[0]), 0.011
    plain = 0.010 / (1.0 - policy.traffic.share)
    spent = target * (2 + more) - plain * more - 0.0107  # 10.7 ms are left for the next token
    late = Progress(elapsed=spent, tokens=1, slo_tpot=target)
    assert play(policy, trees, 0.6, late)[0] == 1  # a draft forward and a step take 11
    assert policy.repeats  # with a token more a request gains 6 of 10
    for progress, repeats in ((None, True), (late, False)):
        unread = policy.tree_type(9, base_len=COLD + 1, max_depth=900)
        play(policy, [trees[0], unread], 0.6, progress)
        assert policy.repeats == repeats


def test_what_is_allowed_is_known_at_once_where_targets_are_kept(monkeypatch):
    policy = policy_of("specserve-3", target=stairs(5))
    trees = trees_of(policy, 2)
    play(policy, trees, 0.6)
    assert isinstance(policy, SpecServe)
    rooms, room_of = [], policy._room_of
    monkeypatch.setattr(policy, "_room_of", lambda *of: rooms.append(room_of(*of)) or rooms[-1])
    drawn, found = np.random.default_rng(0), set()
    for _ in range(500):
        counts, paces = drawn.integers(0, 60, 2), drawn.uniform(5e-3, 0.03, 2)
        progress = [
            Progress(tokens * pace, tokens, drawn.choice([None, 0.009, 0.012, 0.02]))
            for tokens, pace in zip(counts, paces, strict=True)
        ]
        seconds = float(drawn.uniform(0.010, 0.03))
        allows = policy._allows(seconds, trees, progress)
        found.add((allows, "longest" in vars(rooms[-1])))
        assert allows == (seconds <= rooms[-1].longest)
    assert found == {(True, False), (True, True), (False, True)}


@pytest.mark.parametrize("label", LABELS)
def test_looks_that_gain_or_that_nobody_has_timed_are_made_in_every_round(label):
    gaining, free = policy_of(label), policy_of(label, look=0.0, target=stairs(5))
    trees, others = trees_of(gaining, 1), trees_of(free, 2)
    for _ in range(9):
        assert play(gaining, trees, 0.9)[0] == 3  # further forwards pay, and looks find them
        assert play(free, others, 0.6) == (1, 2)
        assert not gaining.repeats
        assert not free.repeats


def test_a_look_that_is_not_made_is_not_charged():
    fit = Fit.load(DEFAULT_FIT)
    cost = replace(fit.costs["2"], target=stairs(7), draft=DRAFT, deciding=LOOK, deciding_each=0.0)
    requests = pd.DataFrame({"arrival": [0.0] * 3, "prompt_tokens": 20, "output_tokens": 250})
    candidate = Candidate(parse_deployment("2"), parse_policy("specserve-1"), 3)
    known = replace(fit, costs={"2": cost})
    run = simulate(requests, candidate, known, serving=Serving(max_kv_tokens=4096), seed=1)
    rounds = run.rounds
    full = (rounds.column("batch") == 3) & (rounds.column("num_expansions") == 1)
    seconds = rounds.column("draft")[full][1:]  # the first has the prompts
    bare = 0.001 + cost.choices(3, 6)
    looked = seconds > bare + LOOK
    assert seconds[looked] == pytest.approx(bare + 2 * LOOK)
    assert seconds[~looked] == pytest.approx(bare)
    assert 0 < looked.sum() < (~looked).sum()


@pytest.mark.parametrize("label", LABELS)
def test_where_chains_were_accepted_to_the_end_a_forward_has_their_last_tokens_rows(label):
    draft = StepTime(0.0, (2, 3), (0.001, 0.012))  # two rows are cheap, more are not
    for missing, forwards in ((0, True), (1, False)):
        policy = policy_of(label, draft=draft, look=0.0)
        trees = trees_of(policy, 2, missing=missing)
        assert bool(play(policy, trees, 0.6)[0]) == forwards


def test_what_plain_rounds_left_is_no_price_of_drafting_on():
    found = rows_behind([0, 1, 5, COLD])
    assert found == [0, 1, 1, 0]


@pytest.mark.parametrize("label", ["batch-tree-2x1x1", "specserve-1"])
def test_looks_count_for_what_is_made_of_them(label):
    goodput = Goodput(DRAFT, TARGET, host=HostCost(deciding=9e-3))
    changed = build_speculation(parse_policy(label), goodput=goodput)
    assert isinstance(changed, Repeating)
    kept, drafted = policy_of(label), 0
    trees, others = trees_of(kept, 1), trees_of(changed, 1)
    for number in range(2 * LEARNED):
        assert play(kept, trees, 0.6)[0]
        changed.beside = (number % 2, 0)  # so that no round repeats the last one
        drafted += bool(play(changed, others, 0.6)[0])
    assert kept.looking < 0.5
    assert changed.looking == 1.0
    assert LEARNED <= drafted <= LEARNED + 2  # before that confidences are learned


@pytest.mark.parametrize("label", ["batch-tree-4x1x1", "specserve-1"])
@pytest.mark.parametrize(("known", "least", "most"), [(None, 0.29, 0.48), (0.6, 0.51, 0.59)])
def test_what_a_fit_knows_of_confidences_is_not_forgotten_in_the_first_rounds(
    label, known, least, most
):
    # 64 tokens of a chance of 0.3: of a guess nothing is left, of what 256 tokens said the most.
    policy = build_speculation(
        parse_policy(label), goodput=Goodput(DRAFT, TARGET), confidence=known
    )
    assert isinstance(policy, BatchTree | SpecServe)
    for _ in range(4):
        trees = trees_of(policy, 2)
        for _ in range(8):
            assert play(policy, trees, 0.3)[0]
    assert least < policy.mean_confidence < most


@pytest.mark.parametrize("label", ["batch-tree-4x1x1", "specserve-1"])
def test_a_fit_whose_draft_is_never_right_is_believed(label):
    policy = build_speculation(parse_policy(label), goodput=Goodput(DRAFT, TARGET), confidence=0.0)
    assert isinstance(policy, BatchTree | SpecServe)
    assert policy.mean_confidence == 0.0
    assert play(policy, trees_of(policy, 2), 0.3) == (0, 0)
