"""What SpecServe keeps of its chains from step to step is what the trees themselves say."""

from __future__ import annotations

from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.policy import adaptive
from codesign.policy.adaptive import SpecServe
from codesign.policy.batch_round import FEW
from codesign.policy.cost import StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.interface import Progress, chain_end
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.tree import DraftTree

DRAFT = StepTime.linear(alpha=0.0, gamma=2e-5, delta=5e-4)
# Beyond some numbers of rows a step is dear, so that of equal tokens not all are verified.
STAIRS = StepTime(
    alpha=0.0, rows=(1, 8, 9, 16, 17, 32), seconds=(0.007, 0.007, 0.012, 0.012, 0.03, 0.03)
)
FLAT = StepTime.linear(alpha=0.0, gamma=2e-4, delta=1e-2)
CHANCES = (0.05, 0.3, 0.5, 0.8, 1.0)  # few, so that many tokens are worth the same


def chosen_one_by_one(trees: list[DraftTree], rows: int) -> list[list[int]]:
    """The likeliest tokens of all chains; of equal ones the least deep, then the first."""
    ranked = sorted(
        (-tree.log_weights[node], tree.depths[node], i, node)
        for i, tree in enumerate(trees)
        for node in range(1, len(tree))
    )
    chosen = [[0] for _ in trees]
    for _, _, i, node in ranked[:rows]:
        chosen[i].append(node)
    return chosen


@given(
    st.sampled_from(["specserve-4", "specserve-4-no-drafter", "specserve-4-no-prior"]),
    st.integers(1, 12),
    st.sampled_from([FLAT, STAIRS]),
    st.sampled_from([FEW, 4]),
    st.integers(0, 1 << 30),
)
def test_tokens_kept_from_step_to_step_are_those_of_the_trees(label, batch, target, few, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "FEW", few)
        play(label, batch, target, seed)


def play(label: str, batch: int, target: StepTime, seed: int) -> None:
    policy = build_speculation(parse_policy(label), goodput=Goodput(DRAFT, target, slo_tpot=0.05))
    assert isinstance(policy, SpecServe)
    random = Random(seed)
    deepest = [random.choice((0, 2, 50)) for _ in range(batch)]
    trees = [DraftTree(0, base_len=10, max_depth=most) for most in deepest]
    for _ in range(5):
        policy.begin(trees, [Progress(random.uniform(0.0, 0.5), 5) for _ in trees])
        done = 0
        while any(leaves := policy.leaves(trees, done)):
            for tree, nodes in zip(trees, leaves, strict=True):
                assert nodes in ([], chain_end(tree))
                tree.expand(nodes)
                for node in nodes if random.random() < 0.9 else []:  # a look-up may find nothing
                    tree.add_children(node, [7], [log(random.choice(CHANCES))])
            done += 1
        chosen = policy.select(trees)
        weights = [weight for tree in trees for weight in tree.log_weights[1:]]
        assert sorted(policy._chances) == sorted(map(exp, weights))
        assert policy._ends == [exp(tree.log_weights[-1]) for tree in trees]
        assert policy.rests == (not weights and not done)
        rows = sum(map(len, chosen)) - batch
        assert chosen == chosen_one_by_one(trees, rows)
        if rows:  # the drafter's last prediction is of what is verified
            this, best = policy._round, sorted(map(exp, weights))[-rows:]
            value = this.value(this.roots + sum(best), this.target.at(rows) + this.fixed)
            assert policy._best == pytest.approx(value)
        for tree, nodes in zip(trees, chosen, strict=True):
            accepted = random.randint(0, len(nodes) - 1)
            # The target's own token may be the next one of the chain, too.
            tree.reroot([7] * accepted + [random.choice((7, 9))])


def test_a_forward_is_made_if_some_of_its_tokens_pay():
    goodput = Goodput(DRAFT, STAIRS)
    for label, forwards, rows in (("specserve-4", 2, 8), ("specserve-4-no-prior", 1, 6)):
        policy = build_speculation(parse_policy(label), goodput=goodput, confidence=0.6)
        trees = [DraftTree(0, base_len=1, max_depth=50) for _ in range(3)]
        policy.begin(trees)
        done = 0
        while any(leaves := policy.leaves(trees, done)):
            for tree, nodes in zip(trees, leaves, strict=True):
                tree.expand(nodes)
                for node in nodes:
                    tree.add_children(node, [7], [log(0.9)])
            done += 1
        # With the second tokens of all three a step would have nine rows, and be dear.
        assert done == forwards
        assert sum(map(len, policy.select(trees))) == rows


def test_what_drafting_saves_does_not_depend_on_what_has_been_drafted():
    policy = build_speculation(parse_policy("specserve-4"), goodput=Goodput(DRAFT, FLAT))
    assert isinstance(policy, SpecServe)
    trees = [DraftTree(0, base_len=1, max_depth=50) for _ in range(3)]
    policy.begin(trees)
    seen, saved = (policy._sum_confidence, policy._num_confidence), policy._saved(3)
    for tree, nodes in zip(trees, policy.leaves(trees, 0), strict=True):
        tree.expand(nodes)
        tree.add_children(nodes[0], [7], [log(0.9)])
    policy.leaves(trees, 1)
    policy._sum_confidence, policy._num_confidence = seen
    assert policy._saved(3) == saved > 0.0
