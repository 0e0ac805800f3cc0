"""The tree against a reference that stores paths, and against brute force."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.policy.tree import UNEXPANDED, DraftTree

VOCABULARY = 5


class PathTree:
    """The same tree as a dictionary from token paths to weights: nothing to renumber."""

    def __init__(self, base_len: int, max_depth: int) -> None:
        self.base_len, self.max_depth = base_len, max_depth
        self.weights: dict[tuple[int, ...], float] = {(): 0.0}
        self.ran: list[tuple[int, ...]] = []  # expanded paths in slot order

    def reroot(self, verified: tuple[int, ...]) -> tuple[bool, list[int], list[int]]:
        self.base_len += len(verified)
        self.max_depth = max(self.max_depth - len(verified), 0)
        walked = [verified[:n] for n in range(len(verified))]
        promoted = [self.ran.index(path) for path in walked if path in self.ran]
        if verified not in self.weights:
            self.weights, self.ran = {(): 0.0}, []
            return False, promoted, []
        kept = [i for i, path in enumerate(self.ran) if path[: len(verified)] == verified]
        weight = self.weights[verified]
        self.ran = [self.ran[i][len(verified) :] for i in kept]
        self.weights = {
            path[len(verified) :]: w - weight
            for path, w in self.weights.items()
            if path[: len(verified)] == verified
        }
        return True, promoted, kept


def token_path(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[n] for n in tree.path(node)[1:])


def grow(tree: DraftTree, rng: random.Random, width: int, paths: PathTree | None = None) -> None:
    """One draft forward with random choices; chances of exactly one make equal weights."""
    leaves = tree.leaves(width)
    if paths is not None:
        paths.ran += [token_path(tree, leaf) for leaf in leaves]
    tree.expand(leaves)
    for leaf in leaves:
        tokens = rng.sample(range(VOCABULARY), rng.randint(1, 3))
        log_probs = sorted(rng.choice([0.0, -0.5, -rng.random() * 4]) for _ in tokens)[::-1]
        path = token_path(tree, leaf)
        tree.add_children(leaf, tokens, log_probs)
        if paths is not None:
            for token, log_prob in zip(tokens, log_probs, strict=True):
                paths.weights[(*path, token)] = paths.weights[path] + log_prob


def random_tree(seed: int, nodes: int, max_depth: int = 6) -> DraftTree:
    rng = random.Random(seed)
    tree = DraftTree(0, base_len=rng.randint(1, 9), max_depth=max_depth)
    while len(tree) < nodes and tree.leaves(1):
        grow(tree, rng, rng.randint(1, 3))
    return tree


def assert_same(tree: DraftTree, paths: PathTree) -> None:
    found = {token_path(tree, n): tree.log_weights[n] for n in range(len(tree))}
    assert len(found) == len(tree), "two nodes on one path"
    assert list(found) == list(paths.weights), "not in creation order"
    assert found == pytest.approx(paths.weights, abs=1e-9)
    by_slot = {tree.slots[n]: token_path(tree, n) for n in range(len(tree)) if tree.slots[n] >= 0}
    assert [by_slot[slot] for slot in range(tree.num_expanded)] == paths.ran
    assert len(by_slot) == tree.num_expanded
    assert (tree.base_len, tree.max_depth) == (paths.base_len, paths.max_depth)


def assert_sound(tree: DraftTree) -> None:
    """What must hold of any tree at any time."""
    expanded = sorted(slot for slot in tree.slots if slot != UNEXPANDED)
    assert expanded == list(range(tree.num_expanded))
    assert tree.log_weights[0] == 0.0
    open_nodes = [n for n in range(len(tree)) if tree.slots[n] == UNEXPANDED]
    open_nodes = [n for n in open_nodes if tree.depths[n] < tree.max_depth]
    # As found anew, whatever is remembered of earlier looks: the heaviest first, then the older.
    assert tree.leaves(len(tree)) == sorted(open_nodes, key=lambda n: -tree.log_weights[n])
    for node in range(len(tree)):
        parent = tree.parents[node]
        if tree.slots[node] != UNEXPANDED:
            assert tree.visible_slots(node) == tuple(tree.slots[n] for n in tree.path(node))
        assert tree.depths[node] == len(token_path(tree, node))
        assert tree.depths[node] <= tree.max_depth
        assert list(tree.children[node]) == [c for c in range(len(tree)) if tree.parents[c] == node]
        if node == 0:
            continue
        assert parent < node
        assert tree.slots[parent] != UNEXPANDED, "a child below a node that never ran"
        assert tree.log_weights[node] <= tree.log_weights[parent]


@given(seed=st.integers(0, 2**32), rounds=st.integers(1, 6), max_depth=st.integers(0, 14))
def test_tree_stays_the_set_of_its_paths_through_growth_and_reroots(seed, rounds, max_depth):
    rng = random.Random(seed)
    tree = DraftTree(0, base_len=3, max_depth=max_depth)
    paths = PathTree(3, max_depth)
    for _ in range(rounds):
        for _ in range(rng.randint(0, 7)):
            grow(tree, rng, rng.randint(1, 4), paths)
            assert_same(tree, paths)
            assert_sound(tree)
        if tree.max_depth == 0:
            break
        near = [n for n in range(len(tree)) if tree.depths[n] == 1 and tree.children[n]]
        node = rng.choice(near) if near and rng.random() < 0.5 else rng.randrange(len(tree))
        verified = list(token_path(tree, node))
        if not verified or (rng.random() < 0.4 and len(verified) < tree.max_depth):
            verified.append(rng.randrange(VOCABULARY + 1))
        reroot = tree.reroot(verified)
        assert (reroot.is_hit, list(reroot.promoted), list(reroot.kept)) == paths.reroot(
            tuple(verified)
        )
        assert tree.tokens[0] == verified[-1]
        assert_same(tree, paths)
        assert_sound(tree)


@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 9), rows=st.integers(1, 10))
def test_best_is_connected_and_no_other_connected_set_weighs_more(seed, nodes, rows):
    tree = random_tree(seed, nodes)
    size = min(rows, len(tree))
    best = tree.best(rows)
    assert len(best) == len(set(best)) == size
    assert 0 in best
    assert all(tree.parents[n] in best for n in best if n != 0)

    def chance(nodes) -> float:
        return sum(math.exp(tree.log_weights[n]) for n in nodes)

    connected = (
        (0, *others)
        for others in itertools.combinations(range(1, len(tree)), size - 1)
        if all(tree.parents[n] in (0, *others) for n in others)
    )
    assert chance(best) == pytest.approx(max(chance(nodes) for nodes in connected))


@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 40), rows=st.integers(1, 40))
def test_selection_lists_parents_before_children(seed, nodes, rows):
    tree = random_tree(seed, nodes)
    chosen = tree.best(rows)
    selection = tree.select(random.Random(seed).sample(chosen, len(chosen)))
    assert sorted(selection.nodes) == sorted(chosen)
    assert selection.nodes[0] == 0
    assert selection.parents[0] == -1
    for row, (node, token, parent) in enumerate(
        zip(selection.nodes, selection.tokens, selection.parents, strict=True)
    ):
        assert tree.tokens[node] == token
        if row:
            assert 0 <= parent < row
            assert selection.nodes[parent] == tree.parents[node]
            assert tree.child(tree.parents[node], token) == node


@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 40), width=st.integers(1, 8))
def test_leaves_are_open_heaviest_first_and_never_at_the_end(seed, nodes, width):
    tree = random_tree(seed, nodes, max_depth=3)
    leaves = tree.leaves(width)
    unexpanded = [n for n in range(len(tree)) if tree.slots[n] == UNEXPANDED]
    can_grow = [n for n in unexpanded if tree.depths[n] < tree.max_depth]
    assert len(leaves) == min(width, len(can_grow))
    assert set(leaves) <= set(can_grow)
    weights = [tree.log_weights[n] for n in leaves]
    assert weights == sorted(weights, reverse=True)
    left_out = [tree.log_weights[n] for n in can_grow if n not in leaves]
    assert not left_out or max(left_out) <= min(weights)


@given(seed=st.integers(0, 2**32), width=st.integers(1, 4))
def test_leaves_never_depend_on_what_the_same_forward_runs(seed, width):
    # No leaf is another's ancestor, so one forward may run them side by side.
    tree = random_tree(seed, 30)
    leaves = tree.leaves(width)
    for leaf in leaves:
        assert not set(tree.path(leaf)[:-1]) & set(leaves)
