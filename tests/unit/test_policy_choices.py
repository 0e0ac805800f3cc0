"""What single policies choose on hand-made trees."""

from __future__ import annotations

import math

import pytest

from codesign.policy.adaserve import AdaServe
from codesign.policy.cost import StepTime
from codesign.policy.features import FeatureTree
from codesign.policy.interface import Progress
from codesign.policy.parallel import MicroBatchTree, OutcomeTree
from codesign.policy.protocol import Admission, DraftSide, RequestVerdict, Verdict
from codesign.policy.speculation import Goodput, build_speculation, parse_policy
from codesign.policy.tree import UNEXPANDED, DraftTree

TARGET = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.020)
DRAFT = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001)


def grow(tree: DraftTree, node: int, *chances: float) -> list[int]:
    """Run a node; its children carry tokens 0, 1, ... with these chances."""
    tree.expand([node])
    tree.add_children(node, list(range(len(chances))), [math.log(c) for c in chances])
    return list(tree.children[node])


def new_tree(kind: type[DraftTree] = DraftTree, **options) -> DraftTree:
    return kind(9, base_len=10, max_depth=50, **options)


# Below in-flight nodes first.


def test_places_where_the_verified_tree_may_be_left_are_run_before_deeper_ones():
    in_flight = build_speculation(parse_policy("inflight-tree-3x1x4"))
    best_first = build_speculation(parse_policy("async-tree-3x1x4"))
    tree = new_tree()
    likely, unlikely = grow(tree, 0, 0.6, 0.2)
    below, _ = grow(tree, likely, 0.9, 0.05)
    assert in_flight.select([tree]) == best_first.select([tree]) == [[0, likely, below]]
    assert in_flight.overlap_leaves([tree]) == [[below]]  # in flight itself
    (exit_below, _) = grow(tree, below, 0.9, 0.05)
    assert in_flight.overlap_leaves([tree]) == [[exit_below]]  # the likeliest next root
    (deeper, _) = grow(tree, exit_below, 0.9, 0.05)
    # Now 0.2 is the next root's chance there, and 0.44 that all four tokens above are right.
    assert in_flight.overlap_leaves([tree]) == [[unlikely]]
    assert best_first.overlap_leaves([tree]) == [[deeper]]


def test_every_exit_is_run_in_the_end_and_then_the_tree_goes_deeper():
    policy = build_speculation(parse_policy("inflight-tree-2x2x9"))
    tree = new_tree()
    grow(tree, 0, 0.5, 0.3)
    (sent,) = policy.select([tree])
    order = []
    for _ in range(4):
        (nodes,) = policy.overlap_leaves([tree])
        order += nodes
        for node in nodes:
            grow(tree, node, 0.5, 0.3)
    exits = {node for node in range(1, len(tree)) if tree.parents[node] in sent} - set(sent)
    assert exits <= set(order[: 1 + len(exits) + 1])
    assert any(tree.parents[node] not in sent for node in order)


# Rows for those who need them.


def adaserve(label: str, slo_tpot: float | None = 0.05) -> AdaServe:
    policy = build_speculation(
        parse_policy(label), goodput=Goodput(DRAFT, TARGET, slo_tpot=slo_tpot)
    )
    assert isinstance(policy, AdaServe)
    return policy


def draft(policy: AdaServe, trees: list[DraftTree], chances: list[list[float]], progress) -> None:
    policy.begin(trees, progress)
    done = 0
    while any(leaves := policy.leaves(trees, done)):
        for tree, nodes, own in zip(trees, leaves, chances, strict=True):
            for node in nodes:
                grow(tree, node, *own)
        done += 1


def test_a_request_behind_its_target_gets_rows_before_likelier_tokens_of_another():
    unlikely, likely = [0.3, 0.2], [0.9, 0.4]
    fair = [Progress(0.1, 10), Progress(0.1, 10)]  # 10 ms a token: far ahead of 50 ms
    behind = [Progress(0.5, 4), Progress(0.1, 10)]  # 125 ms a token
    rows = {}
    for name, progress in (("fair", fair), ("behind", behind)):
        policy, trees = adaserve("adaserve-4x2x6"), [new_tree(), new_tree()]
        draft(policy, trees, [unlikely, likely], progress)
        rows[name] = [len(nodes) for nodes in policy.select(trees)]
        assert sum(rows[name]) == 6
    assert rows == {"fair": [1, 5], "behind": [5, 1]}


def test_needed_rows_end_where_the_expected_tokens_reach_the_need():
    policy, trees = adaserve("adaserve-3x2x12"), [new_tree(), new_tree()]
    # Elapsed 60 ms and a step of 23 ms at 50 ms a token: 1.66 tokens are due, none is there yet.
    draft(policy, trees, [[0.5, 0.3], [0.5, 0.3]], [Progress(0.06, 0), Progress(0.0, 0)])
    assert policy._needs[0] == pytest.approx((0.06 + 0.023) / 0.05)
    assert policy._needs[1] == pytest.approx(0.023 / 0.05)
    nodes = [0]
    added = policy._serve(trees[0], policy._ranked(trees[0]), nodes, policy._needs[0], 10)
    assert added == 2  # 1 + 0.5 is not enough, 1 + 0.5 + 0.3 is
    assert policy._serve(trees[1], policy._ranked(trees[1]), [0], policy._needs[1], 10) == 0


def test_the_request_that_is_owed_most_is_served_first_when_rows_are_scarce():
    progress = [Progress(0.2, 2), Progress(0.9, 2), Progress(0.2, 2)]
    policy, trees = adaserve("adaserve-4x2x7"), [new_tree() for _ in range(3)]
    draft(policy, trees, [[0.3, 0.2]] * 3, progress)
    first, owed, last = (len(nodes) - 1 for nodes in policy.select(trees))
    assert (first, owed, last) == (2, 2, 0)  # all that its beam holds, then what is left


def test_turbospec_decodes_plainly_unless_a_tenth_is_gained():
    # At its start rate of 0.7 a token takes 1.7 times plain's tokens in 1 + draft / 20 ms.
    for draft_seconds, length in ((0.0124, 0), (0.0100, 1)):
        drafting = StepTime.linear(alpha=0.0, gamma=0.0, delta=draft_seconds)
        gain = 1.7 * 0.020 / (0.020 + draft_seconds)
        assert (gain > 1.1) == bool(length)
        assert gain > 1.0
        policy = build_speculation(parse_policy("turbospec-1"), goodput=Goodput(drafting, TARGET))
        tree = new_tree()
        policy.begin([tree])
        assert len(policy.leaves([tree], 0)[0]) == length


def test_without_a_target_rows_go_by_chance_alone():
    policy, trees = adaserve("adaserve-3x2x8", slo_tpot=None), [new_tree(), new_tree()]
    draft(policy, trees, [[0.3, 0.2], [0.9, 0.05]], [Progress(9.0, 1), Progress(0.0, 1)])
    chosen = policy.select(trees)
    taken = sorted((t.log_weights[n] for t, c in zip(trees, chosen, strict=True) for n in c[1:]))
    left = [
        tree.log_weights[node]
        for tree, nodes in zip(trees, chosen, strict=True)
        for level in policy._beam(tree)
        for node in level
        if node not in nodes
    ]
    assert max(left) <= taken[0]


def test_progress_counts_from_the_first_token_by_the_target_s_clock():
    side = DraftSide(adaserve("adaserve-3x2x8"))
    seen = []
    side.policy.begin = lambda trees, progress=(): seen.append(progress)  # type: ignore[method-assign]
    side.receive(Verdict(0, (), (Admission(3, (5, 6), 20, slo_tpot=0.1),), now=1.0))
    side.begin()
    side.receive(Verdict(1, (RequestVerdict(3, 2, (7,)),), now=1.5))
    side.begin()
    side.receive(Verdict(2, (RequestVerdict(3, 3, (8, 9, 4)),), now=1.75))
    side.begin()
    assert seen == [
        [Progress(0.0, 0, 0.1)],
        [Progress(0.0, 0, 0.1)],
        [Progress(0.25, 3, 0.1)],
    ]


# Trees that do not keep everything.


def test_an_outcome_s_chain_survives_a_verdict_but_its_kv_rows_do_not():
    tree = new_tree(OutcomeTree)
    drafted, outcome = grow(tree, 0, 0.6, 0.3)
    grow(tree, drafted, 0.6, 0.3)
    (ahead, _) = grow(tree, outcome, 0.6, 0.3)
    grow(tree, ahead, 0.6, 0.3)
    found = tree.reroot([1])  # the target takes the other token
    assert found.is_hit
    assert found.promoted == (0,)
    assert found.kept == ()
    assert set(tree.slots) == {UNEXPANDED}
    policy = build_speculation(parse_policy("ssd-2x1"))
    assert policy.leaves([tree], 0) == [[]]  # the chain is there: no wait
    (chain,) = policy.select([tree])
    assert len(chain) == 3
    assert policy.overlap_leaves([tree]) == [chain]  # the glue forward runs all of it again


def test_a_tree_knows_which_committed_tokens_have_no_kv_row():
    for make, dropped in ((OutcomeTree, 2), (FeatureTree, 2), (DraftTree, 0)):
        tree = new_tree(make)
        (one, _) = grow(tree, 0, 0.6, 0.3)
        (two, _) = grow(tree, one, 0.6, 0.3)
        grow(tree, two, 0.6, 0.3)
        assert tree.missing == 0
        found = tree.reroot([0])
        assert (tree.missing, found.promoted) == (0, (0,))
        tree.reroot([0, 0])
        assert tree.missing == dropped


def test_a_micro_batch_behind_a_wrong_turn_is_dropped():
    for verified, is_kept in (([0, 0], True), ([0, 1], False), ([1], False), ([0], True)):
        tree = new_tree(MicroBatchTree)
        likely, other = grow(tree, 0, 0.6, 0.3)
        (tip, _) = grow(tree, likely, 0.6, 0.3)
        grow(tree, other, 0.6, 0.3)
        grow(tree, tip, 0.6, 0.3)
        tree.tip = tip
        found = tree.reroot(verified)
        assert found.is_hit == is_kept, verified
        assert (len(tree) > 1) == is_kept
        assert tree.base_len == 10 + len(verified)


# Heads that read target features.


def test_a_row_trusts_its_features_less_the_more_of_them_are_the_head_s_own():
    tree = new_tree(FeatureTree, decay=0.5)
    (one, _) = grow(tree, 0, 0.6, 0.3)
    (two, _) = grow(tree, one, 0.6, 0.3)
    grow(tree, two, 0.6, 0.3)
    assert tree.trust([0, one, two]) == (1.0, 0.5, 0.25)
    tree.reroot([0])  # the target confirms the first
    grow(tree, 0, 0.6, 0.3)
    known, fresh = tree.children[0]
    assert tree.trust([known]) == (0.25,)  # run before the verdict, two features from the target's
    (below,) = tree.children[known][:1]
    grow(tree, below, 0.6, 0.3)
    assert tree.trust([below]) == (0.125,)  # its features stand on that one's
    grow(tree, fresh, 0.6, 0.3)
    assert tree.trust([fresh]) == (0.5,)


def test_the_root_s_second_run_replaces_its_choices_and_keeps_what_is_below():
    tree = new_tree(FeatureTree, decay=0.9)
    (root, _) = grow(tree, 0, 0.6, 0.3)
    kept, dropped = grow(tree, root, 0.6, 0.3)
    grow(tree, kept, 0.8, 0.1)
    found = tree.reroot([0])
    assert found.is_hit
    assert found.promoted == (0,)  # the old root's row alone was made with a true feature
    assert tree.slots[0] == UNEXPANDED
    assert tree.num_expanded == len(found.kept) == 1
    tree.expand([0])
    tree.add_children(0, [0, 7], [math.log(0.5), math.log(0.4)])  # 1 is not named again, 7 is new
    kept, dropped, new = tree.children[0]
    assert math.exp(tree.log_weights[kept]) == pytest.approx(0.5)
    below = tree.children[kept][0]
    assert math.exp(tree.log_weights[below]) == pytest.approx(0.5 * 0.8)
    assert math.exp(tree.log_weights[new]) == pytest.approx(0.4)
    assert dropped not in tree.best(5)
    assert new in tree.best(5)


def test_an_asynchronous_head_sends_nothing_before_its_root_has_run():
    policy = build_speculation(parse_policy("async-eagle-3x2x2"))
    tree = policy.tree_type(9, base_len=10, max_depth=50)
    assert policy.leaves([tree], 0) == [[0]]
    first, _ = grow(tree, 0, 0.6, 0.3)
    grow(tree, first, 0.6, 0.3)
    assert policy.leaves([tree], 1) == [[]]
    tree.reroot([0])
    assert len(tree) >= 3  # enough rows, and yet
    assert policy.leaves([tree], 0) == [[0]]


# Labels.


@pytest.mark.parametrize(
    ("short", "label"),
    [
        ("amusd", "amusd-16"),
        ("eagle-8x4x2", "eagle-8x4x2@0.96"),
        ("async-eagle-8x4x2@1", "async-eagle-8x4x2@1.0"),
        ("threshold-5", "threshold-5@0.4"),
    ],
)
def test_a_label_without_its_last_number_takes_the_default(short, label):
    assert parse_policy(short).label == label
