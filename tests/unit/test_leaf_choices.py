"""The device's choice of leaves: reference and kernel against the tree of the policy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from codesign.engine.gpu.growth import growth_words
from codesign.kernels import leaf_choices as ops
from codesign.kernels.step_rows import StepRows
from codesign.policy.cost import Calibration
from codesign.policy.protocol import Admission, DraftSide, RequestVerdict, Verdict
from codesign.policy.speculation import MAX_TREE_ROWS, build_speculation, parse_policy

VOCABULARY, LONGEST = 50, 136
CALIBRATIONS = (None, Calibration(0.85, 0.25), Calibration(1.7, -0.6))
MOST_CHECKED = 600  # choices of a policy
POLICIES = ("tree-8x4x4", "async-tree-8x4x8", "tree-4x2x3", "async-tree-6x1x5", "chain-6")


@pytest.fixture(params=["reference", "kernel"])
def choose(request):
    """``choose_leaves``, and how much to try it on: trees, and rounds of each.

    Triton's interpreter takes a hundred times as long as the reference.
    """
    if request.param == "reference":
        return ops.choose_leaves, 50, 8
    kernels = request.getfixturevalue("interpreted")("leaf_choices_triton")[0]
    return kernels.choose_leaves, 2, 4


class Device:
    """A step's rows and pool as a rank has them.

    Args:
        choose: The op.
        num_rows: Of a step.
        choices: Per row.
    """

    def __init__(self, choose, num_rows: int, choices: int) -> None:
        self._choose, self._choices = choose, choices
        self._buffer = torch.zeros(ops.POOL_WORDS, dtype=torch.int32)
        columns = torch.full((5, num_rows), 99, dtype=torch.int32)
        self.rows = StepRows(
            *columns, torch.full((num_rows, LONGEST), 77, dtype=torch.int32), scratch_slot=9
        )
        self.chosen = torch.full((ops.chosen_words(num_rows),), 55, dtype=torch.int32)

    def begin(self, growth, rows, first: int) -> None:
        """As after the message of an expansion."""
        self._buffer.copy_(torch.from_numpy(growth_words(growth, slab=3, first_row=first)))
        count = len(rows.tokens)
        self.rows.positions_T[:count] = torch.tensor(rows.positions, dtype=torch.int32)

    def go_on(self, tokens, log_probs) -> None:
        """Choose the rows that follow an answer of the real rows."""
        num_rows = self.rows.tokens_T.shape[0]
        words = np.zeros((2, num_rows, self._choices), np.int32)
        words[0, : len(tokens)] = tokens
        words[1, : len(tokens)] = np.array(log_probs, np.float32).view(np.int32)
        flat = torch.from_numpy(words.reshape(-1))
        self._choose(flat, ops.PoolWords.of(self._buffer), self.rows, self.chosen)


def answer(chance: random.Random, count: int, choices: int, *, ties: bool):
    """Choices of some rows, from few values where there shall be ties."""
    tokens = [chance.sample(range(VOCABULARY), choices) for _ in range(count)]
    draws = [[-chance.expovariate(1.0) for _ in range(choices)] for _ in range(count)]
    if ties:
        draws = [[round(x) / 2 - 0.5 for x in row] for row in draws]
    return tokens, [sorted(map(float, np.float32(row)), reverse=True) for row in draws]


def check_rows(device: Device, rows) -> None:
    """The device's rows are those of an expansion, word for word."""
    found, count = device.rows, len(rows.nodes)
    assert found.tokens_T[:count].tolist() == list(rows.tokens)
    assert found.positions_T[:count].tolist() == list(rows.positions)
    kv_rows = [rows.context + i for i in range(count)]
    assert found.kv_rows_T[:count].tolist() == kv_rows
    assert set(found.slots_T[:count].tolist()) <= {3}
    for i, path in enumerate(rows.visible):
        assert found.path_TQ[i, : len(path)].tolist() == list(path)
        assert found.prefixes_T[i] == rows.positions[i] + 1 - len(path)
    padding = list(range(count, found.tokens_T.shape[0]))
    assert found.slots_T[count:].tolist() == [9] * len(padding)
    assert found.kv_rows_T[count:].tolist() == found.path_TQ[count:, 0].tolist() == padding
    assert not found.tokens_T[count:].any()
    assert not found.positions_T[count:].any()
    assert not found.prefixes_T[count:].any()
    parents = [path[-2] for path in rows.visible]
    half = len(device.rows.tokens_T)
    assert device.chosen[:count].tolist() == list(rows.tokens)
    assert device.chosen[half : half + count].tolist() == parents
    assert device.chosen[-1] == count


def run_ahead(side: DraftSide, device: Device, chance: random.Random, *, overlaps: bool, ties):
    """Expansions until the policy has enough; how many of them were chosen on the device, too."""
    policy, done, left, num_checked = side.policy, 0, 0, 0
    choices = policy.fanout + 2  # ranks may answer more than is wanted
    while not overlaps or done < policy.overlap:
        expansion = side.overlap_expansion() if overlaps else side.next_expansion(done)
        if left:
            left -= 1
            num_checked += 1
            if not expansion:
                assert device.chosen[-1] == 0
                break
            check_rows(device, expansion[0])
        if not expansion:
            break
        rows = expansion[0]
        first = len(rows.tokens) - len(rows.nodes)
        if not left:
            steps = side.following(expansion, done, overlaps=overlaps)
            steps = min(steps, chance.randrange(1, 9)) if steps else 0
            growth = side.growth(rows, steps) if steps else None
            left = growth.steps if growth else 0
            if growth:
                assert growth.prefix == rows.context + len(rows.tokens) - len(growth.slot_parents)
                device.begin(growth, rows, first)
        tokens, log_probs = answer(chance, len(rows.tokens), choices, ties=ties)
        if left:
            device.go_on(tokens, log_probs)
        side.expanded(rows, tokens[first:], log_probs[first:])
        done += 1
    return num_checked


def verdict(side: DraftSide, number: int, chance: random.Random) -> Verdict:
    """What a target may say: along the tree as a rule, sometimes beside it."""
    tree, tokens, node = side.tree(0), [], 0
    while chance.random() < 0.7 and (children := tree.children[node]):
        node = chance.choice(children[:3])
        tokens.append(tree.tokens[node])
    children = [tree.tokens[child] for child in tree.children[node]]
    token = chance.choice(children) if children and chance.random() < 0.8 else VOCABULARY
    base = len(side.committed(0))
    tokens = [*tokens, token][: max(tree.max_depth, 1)]
    return Verdict(number, (RequestVerdict(0, base, tuple(tokens)),))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_host_and_device_choose_the_same_leaves_of_trees_that_live_on(choose, policy, ties):
    op, count, num_rounds = choose
    num_checked = 0
    for seed in range(count):
        if num_checked > MOST_CHECKED:  # long trees have four times as many choices as the others
            break
        chance = random.Random(f"{policy} {seed}")
        calibration = CALIBRATIONS[0 if ties else seed % len(CALIBRATIONS)]
        side = DraftSide(build_speculation(parse_policy(policy), calibration=calibration))
        device = Device(op, 8, side.policy.fanout + 2)
        prompt = tuple(chance.choices(range(VOCABULARY), k=chance.randrange(1, 6)))
        side.admit(Admission(0, prompt, chance.randrange(2, 40)))
        for number in range(num_rounds):
            assert side.begin()
            num_checked += run_ahead(side, device, chance, overlaps=False, ties=ties)
            side.candidates(number)
            num_checked += run_ahead(side, device, chance, overlaps=True, ties=ties)
            if side.tree(0).max_depth == 0:
                break
            side.receive(verdict(side, number, chance))
    assert num_checked > 4 * count


def test_a_tree_that_is_full_takes_no_more_rows(choose):
    op = choose[0]
    policy = build_speculation(parse_policy("async-tree-8x8x20"))
    side, chance = DraftSide(policy), random.Random(3)
    side.admit(Admission(0, (1, 2), 1000))
    device = Device(op, 8, policy.fanout + 2)
    while expansion := side.overlap_expansion():
        rows = expansion[0]
        first = len(rows.tokens) - len(rows.nodes)
        tokens, log_probs = answer(chance, len(rows.tokens), policy.fanout + 2, ties=False)
        if side.tree(0).num_expanded == MAX_TREE_ROWS:
            device.begin(side.growth(rows, 1), rows, first)
            device.go_on(tokens, log_probs)
        side.expanded(rows, tokens[first:], log_probs[first:])
    assert side.tree(0).num_expanded == MAX_TREE_ROWS
    assert device.chosen[-1] == 0
    assert device.rows.slots_T.tolist() == [9] * 8


def test_a_buffer_of_zeros_makes_padding_alone(choose):
    device = Device(choose[0], 8, 4)
    device.go_on([[1, 2, 3, 4]], [[-0.1, -0.2, -0.3, -0.4]])
    assert device.rows.slots_T.tolist() == [9] * 8
    assert device.rows.kv_rows_T.tolist() == device.rows.path_TQ[:, 0].tolist() == [*range(8)]
    assert device.chosen.tolist() == [0] * 17


def test_a_chance_of_nothing_comes_last_but_comes(choose):
    policy = build_speculation(parse_policy("async-tree-4x4x3"))
    side = DraftSide(policy)
    side.admit(Admission(0, (1, 2), 100))
    rows = side.overlap_expansion()[0]
    device = Device(choose[0], 8, policy.fanout)
    device.begin(side.growth(rows, 1), rows, 1)
    lone = [[-0.5] * 4, [-0.1, -float("inf"), -float("inf"), -float("inf")]]
    device.go_on([[1, 2, 3, 4], [5, 6, 7, 8]], lone)
    assert device.chosen[:4].tolist() == [5, 6, 7, 8]


def test_wider_steps_and_more_choices_fit_up_to_a_limit():
    assert ops.fits(8, 7)
    assert ops.fits(32, 32)
    assert not ops.fits(64, 1)
    assert not ops.fits(32, 33)
