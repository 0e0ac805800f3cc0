from __future__ import annotations

import math

import pytest

from codesign.policy.rerun_tree import RerunTree
from codesign.policy.tree import NO_PARENT, UNEXPANDED, DraftTree


def small_tree() -> DraftTree:
    """Root 7 with children 1 (0.5), 2 (0.3); below 1: 3 (0.8), 4 (0.1); below 2: 5 (0.9)."""
    tree = DraftTree(7, base_len=10, max_depth=5)
    tree.expand([0])
    tree.add_children(0, [1, 2], [math.log(0.5), math.log(0.3)])
    tree.expand([1, 2])
    tree.add_children(1, [3, 4], [math.log(0.8), math.log(0.1)])
    tree.add_children(2, [5], [math.log(0.9)])
    return tree


def test_new_tree_is_an_unexpanded_root():
    tree = DraftTree(7, base_len=10, max_depth=5)
    assert len(tree) == 1
    assert tree.tokens == [7]
    assert tree.parents == [NO_PARENT]
    assert tree.slots == [UNEXPANDED]
    assert tree.num_expanded == 0
    assert tree.base_len - 1 + tree.depths[0] == 9
    assert tree.leaves(3) == [0]
    assert tree.best(3) == [0]


def test_children_follow_their_parent_in_position_weight_and_path():
    tree = small_tree()
    assert tree.parents == [-1, 0, 0, 1, 1, 2]
    assert tree.depths == [0, 1, 1, 2, 2, 2]
    assert [tree.base_len - 1 + tree.depths[n] for n in range(6)] == [9, 10, 10, 11, 11, 11]
    assert [math.exp(w) for w in tree.log_weights] == pytest.approx([1, 0.5, 0.3, 0.4, 0.05, 0.27])
    assert tree.path(3) == [0, 1, 3]
    assert list(map(list, tree.children)) == [[1, 2], [3, 4], [5], [], [], []]
    assert [tree.child(0, token) for token in (1, 2, 3)] == [1, 2, None]
    assert (tree.child(1, 4), tree.child(2, 4), tree.child(5, 5)) == (4, None, None)


def test_a_node_sees_its_expanded_path_and_itself_only():
    tree = small_tree()
    assert tree.slots == [0, 1, 2, UNEXPANDED, UNEXPANDED, UNEXPANDED]
    tree.expand([5, 3])
    assert tree.visible_slots(5) == (0, 2, 3)
    assert tree.visible_slots(3) == (0, 1, 4)


def test_leaves_are_the_heaviest_unexpanded_nodes():
    tree = small_tree()
    assert tree.leaves(2) == [3, 5]
    assert tree.leaves(9) == [3, 5, 4]
    tree.expand([3])
    assert tree.leaves(9) == [5, 4]


def test_leaves_at_the_request_s_end_do_not_grow():
    tree = DraftTree(7, base_len=10, max_depth=1)
    tree.expand(tree.leaves(1))
    tree.add_children(0, [1, 2], [-0.1, -3.0])
    assert tree.leaves(5) == []
    assert DraftTree(7, base_len=10, max_depth=0).leaves(5) == []


def test_best_nodes_by_path_weight_not_by_own_chance():
    # Token 5 is likelier than token 1 given its parent, but its path is not.
    assert [small_tree().best(rows) for rows in (1, 3, 4)] == [[0], [0, 1, 3], [0, 1, 2, 3]]


def test_equal_weights_keep_parents_before_children():
    tree = DraftTree(7, base_len=1, max_depth=9)
    node = 0
    for token in range(4):  # chances of one: every node weighs the same
        tree.expand([node])
        tree.add_children(node, [token, token + 10], [0.0, -1.0])
        node = tree.children[node][0]
    assert tree.best(3) == [0, 1, 3]
    assert tree.leaves(1) == [node]


def test_selection_renumbers_parents_within_itself():
    selection = small_tree().select([5, 0, 2, 4, 1])
    assert selection.nodes == (0, 1, 2, 4, 5)
    assert selection.tokens == (7, 1, 2, 4, 5)
    assert selection.parents == (-1, 0, 0, 1, 2)
    assert selection.chances == pytest.approx((1.0, 0.5, 0.3, 0.1, 0.9))
    assert small_tree().select([0]).chances == ()


def test_reroot_onto_a_node_keeps_its_subtree():
    tree = small_tree()
    tree.expand([5, 3])  # slots 3 and 4
    tree.add_children(3, [6], [math.log(0.5)])
    tree.add_children(5, [8], [math.log(0.5)])
    reroot = tree.reroot([1])
    assert (reroot.is_hit, reroot.promoted, reroot.kept) == (True, (0,), (1, 4))
    assert tree.tokens == [1, 3, 4, 6]
    assert tree.parents == [-1, 0, 0, 1]
    assert tree.depths == [0, 1, 1, 2]
    assert tree.slots == [0, 1, UNEXPANDED, UNEXPANDED]
    assert tree.num_expanded == 2
    assert [math.exp(w) for w in tree.log_weights] == pytest.approx([1, 0.8, 0.1, 0.4])
    assert (tree.base_len, tree.max_depth) == (11, 4)
    assert tree.base_len - 1 + tree.depths[3] == 12


def test_reroot_along_two_tokens_promotes_in_path_order():
    tree = small_tree()
    reroot = tree.reroot([2, 5])
    assert (reroot.is_hit, reroot.promoted, reroot.kept) == (True, (0, 2), ())
    assert tree.tokens == [5]
    assert tree.slots == [UNEXPANDED]
    assert (tree.base_len, tree.max_depth) == (12, 3)


def test_reroot_off_the_tree_promotes_what_was_walked_and_expanded():
    tree = small_tree()
    reroot = tree.reroot([1, 9])
    assert (reroot.is_hit, reroot.promoted, reroot.kept) == (False, (0, 1), ())
    assert tree.tokens == [9]
    assert len(tree) == 1
    assert tree.num_expanded == 0
    tree = small_tree()
    # Token 3 was walked but never run: it has no KV row to promote.
    assert tree.reroot([1, 3, 9]).promoted == (0, 1)
    assert (tree.base_len, tree.max_depth) == (13, 2)


def test_reroot_of_an_unexpanded_root_promotes_nothing():
    reroot = DraftTree(7, base_len=10, max_depth=5).reroot([4])
    assert (reroot.is_hit, reroot.promoted, reroot.kept) == (False, (), ())


def test_leaves_share_no_children_that_can_leak():
    tree, other = small_tree(), small_tree()
    tree.reroot([2])
    tree.expand(tree.leaves(1))
    tree.add_children(1, [8], [-0.5])
    assert list(other.children[3]) == []
    assert list(map(list, tree.children)) == [[1], [2], []]
    assert list(map(list, DraftTree(1, base_len=1, max_depth=1).children)) == [[]]


def test_tokens_and_log_probs_must_pair_up():
    tree = DraftTree(7, base_len=1, max_depth=2)
    tree.expand([0])
    with pytest.raises(AssertionError, match="one log probability per token"):
        tree.add_children(0, [1, 2], [-0.5])


def state(tree: DraftTree) -> dict[str, object]:
    return {name: getattr(tree, name) for name in DraftTree.__slots__}


def test_an_answer_is_added_as_its_nodes_one_by_one_would_be():
    whole, single = small_tree(), small_tree()
    tokens, log_probs = [[8, 9], [], [6]], [-0.5, -1.0, -2.0]
    for tree in (whole, single):
        tree.leaves(2)
        tree.expand([3, 5, 4])
    whole.add_answer([3, 5, 4], tokens, log_probs)
    single.add_children(3, tokens[0], log_probs[:2])
    single.add_children(5, [], [])
    single.add_children(4, tokens[2], log_probs[2:])
    assert state(whole) == state(single)
    with pytest.raises(AssertionError, match="one log probability per token"):
        small_tree().add_answer([3], [[8]], [-0.5, -1.0])


def test_rerun_trees_add_an_answer_to_what_they_know():
    tree = RerunTree(7, base_len=1, max_depth=9)
    tree.expand([0])
    tree.add_answer([0], [[1, 2]], [-0.5, -1.0])
    tree.add_answer([0], [[2, 3]], [-0.4, -2.0])
    assert (tree.tokens, tree.log_weights) == ([7, 1, 2, 3], [0.0, -0.5, -1.0, -2.0])


def test_a_leaf_as_the_new_root_leaves_a_tree_of_itself():
    tree = small_tree()
    reroot = tree.reroot([2, 5])
    assert (reroot.is_hit, reroot.promoted, reroot.kept) == (True, (0, 2), ())
    new = DraftTree(5, base_len=tree.base_len, max_depth=tree.max_depth)
    assert {**state(tree), "first_len": 0, "prefix_len": 0} == {**state(new), "first_len": 0}
    assert tree.prefix_len == 11  # 9 before the root, and 2


def test_a_node_that_was_run_keeps_its_slot_as_the_new_root_even_without_children():
    tree = small_tree()
    tree.expand([5])
    reroot = tree.reroot([2, 5])
    assert (reroot.promoted, reroot.kept, tree.slots) == ((0, 2), (3,), [0])
