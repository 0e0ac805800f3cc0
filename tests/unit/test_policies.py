"""Every policy, played with a synthetic draft model: what it costs, and what it must yield.

The draft model ranks the target's token r-th with a known chance, independently at every position,
so that acceptance has a closed form.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.policy.cost import StepTime
from codesign.policy.protocol import Admission, DraftSide, ExpansionRows, TargetSide, Verdict
from codesign.policy.speculation import (
    FAMILIES,
    MAX_TREE_ROWS,
    Goodput,
    SpeculationSpec,
    build_speculation,
    parse_policy,
)
from codesign.sim.acceptance import PROMPT_TOKEN, TRUE_TOKEN, SyntheticDrafter

TOP_K = 8
TARGET = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.020)
DRAFT = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.003)
ALPHA = 0.7
CHANCES = (ALPHA, 0.12, 0.06, 0.03)  # that the target's token is ranked 0, 1, 2, 3
LABELS = [
    "plain",
    "chain-3",
    "threshold-5@0.4",
    "turbospec-4",
    "specserve-4",
    "static-tree-3x2x1",
    "tree-8x4x2",
    "async-tree-8x4x2",
    "inflight-tree-8x4x3",
    "batch-tree-8x2x4",
    "async-batch-tree-8x2x4",
    "adaserve-4x2x24",
    "pearl-4",
    "amusd-8",
    "pipeinfer-4x2x3",
    "ssd-3x2",
    "eagle-8x4x3@0.9",
    "async-eagle-8x4x3@0.9",
]

COUPLED = {
    "turbospec-4",
    "specserve-4",
    "adaserve-4x2x24",
    "amusd-8",
    "batch-tree-8x2x4",
    "async-batch-tree-8x2x4",
}


@functools.lru_cache(maxsize=3)
def profile(chances: tuple[float, ...], seed: int, num_tokens: int) -> AcceptanceProfile:
    rng = np.random.default_rng(seed)
    missing = 1.0 - sum(chances)
    drawn = rng.choice(len(chances) + 1, size=num_tokens, p=[*chances, max(missing, 0.0)])
    ranks = np.where(drawn == len(chances), -1, drawn)
    shown = [max(chance, 1e-3) for chance in chances]
    shown += [1e-3 / 2**i for i in range(TOP_K - len(chances))]
    log_probs = np.tile(np.log(shown), (num_tokens, 1))
    return AcceptanceProfile({"chat": (Recording(0, ranks, log_probs),)})


@dataclass
class Round:
    """What one request's round took and gave."""

    rows: int
    drafting: list[int]
    overlapped: list[int] = field(default_factory=list)
    emitted: int = 0


class Player:
    """Both sides in lockstep for one batch, with every rule of a policy checked on the way."""

    def __init__(
        self,
        spec: SpeculationSpec,
        chances: Sequence[float],
        *,
        outputs: Sequence[int],
        goodput: Goodput | None = None,
        seed: int = 0,
    ) -> None:
        self.spec = spec
        goodput = goodput or Goodput(DRAFT, TARGET)
        self.policy = build_speculation(spec, goodput=goodput)
        self.side, self.target = DraftSide(self.policy), TargetSide()
        recorded = profile(tuple(chances), seed, 20 * max(outputs))
        most = max(outputs)
        self.model = SyntheticDrafter(
            recorded, seed, lambda i, length, _: list(range(i * most, i * most + length))
        )
        self.rounds: list[Round] = []
        admitted = [Admission(i, (PROMPT_TOKEN,), n) for i, n in enumerate(outputs)]
        for i, admission in enumerate(admitted):
            self.target.admit(admission)
            self.model.admit(i, category="chat", prompt_tokens=1, output_tokens=outputs[i])
        news = [self.target.commit_first(i, TRUE_TOKEN) for i in range(len(outputs))]
        self.verdict = Verdict(0, tuple(news), tuple(admitted))

    def play(self) -> list[Round]:
        while self.target.request_ids:
            self.play_round()
        return self.rounds

    def play_round(self) -> Round:
        _, finished = self.side.receive(self.verdict)
        for request_id in finished:
            self.model.finish(request_id)
        self.side.begin()
        this = Round(0, [])
        while rows := self.side.next_expansion(len(this.drafting)):
            this.drafting.append(self.forward(rows))
            assert len(this.drafting) < 50, "drafting never ends"
        candidates = self.side.candidates(len(self.rounds))
        assert self.policy.overlap <= self.spec.max_overlap
        for _ in range(self.policy.overlap):
            if rows := self.side.overlap_expansion():
                this.overlapped.append(self.forward(rows))
        verify = self.target.verify_rows(candidates)
        for entry in verify:
            self.check_rows(entry.tokens, entry.parents)
        verdicts = [self.target.judge(entry, lambda row: TRUE_TOKEN)[0] for entry in verify]
        this.rows = sum(len(entry.tokens) for entry in verify)
        this.emitted = sum(len(verdict.tokens) for verdict in verdicts)
        self.rounds.append(this)
        self.verdict = Verdict(len(self.rounds), tuple(verdicts))
        return this

    def check_rows(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        assert 1 <= len(tokens) <= self.spec.max_rows
        assert parents[0] == -1
        assert all(0 <= parent < row for row, parent in enumerate(parents[1:], start=1))
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "equal siblings"

    def forward(self, expansion: list[ExpansionRows]) -> int:
        for rows in expansion:
            tree = self.side.tree(rows.request_id)
            assert tree.num_expanded <= MAX_TREE_ROWS
            assert len(set(rows.nodes)) == len(rows.nodes)
            assert all(tree.depths[node] < tree.max_depth for node in rows.nodes)
            if 0 in rows.nodes:  # then each row sees the one before it
                parents = [tree.parents[node] for node in rows.nodes]
                assert parents == [-1, *rows.nodes[:-1]]
            tokens, log_probs = self.model.answer(rows)
            self.side.expanded(rows, tokens, log_probs)
        return sum(len(rows.tokens) for rows in expansion)


def play(label: str, *, chances=CHANCES, num_tokens: int = 3000, **options) -> list[Round]:
    return Player(parse_policy(label), chances, outputs=[num_tokens], **options).play()


def mean_emitted(rounds: list[Round]) -> float:
    return sum(r.emitted for r in rounds[:-1]) / (len(rounds) - 1)


def chain_tokens(alpha: float, length: int) -> float:
    """Tokens of a round that verifies ``length`` draft tokens."""
    return sum(alpha**j for j in range(length + 1))


# What holds for all.


def test_every_family_is_played_here():
    assert {parse_policy(label).family for label in LABELS} == {f.spec.family for f in FAMILIES}


@pytest.mark.parametrize("label", LABELS)
@settings(max_examples=5)
@given(
    seed=st.integers(0, 2**32),
    chances=st.lists(st.floats(0.0, 0.25), min_size=1, max_size=4),
    outputs=st.lists(st.integers(2, 40), min_size=1, max_size=5),
)
def test_rules_hold_and_no_accepted_token_was_drafted_for_free(label, seed, chances, outputs):
    player = Player(parse_policy(label), chances, outputs=outputs, seed=seed)
    rounds = player.play()
    # No token is lost. A draft token that is accepted is the child of a row that was run.
    assert sum(r.emitted for r in rounds) == sum(outputs) - len(outputs)
    run = sum(sum(r.drafting) + sum(r.overlapped) for r in rounds)
    width = player.policy.fanout
    assert run * width >= sum(r.rows for r in rounds) - sum(outputs)
    assert run >= sum(r.emitted for r in rounds) - len(rounds) * len(outputs)


@pytest.mark.parametrize("label", LABELS)
def test_a_draft_model_that_is_never_right_yields_one_token_a_round(label):
    rounds = play(label, chances=(0.0,), num_tokens=60)
    assert [r.emitted for r in rounds] == [1] * 59


@pytest.mark.parametrize("label", LABELS)
def test_the_same_draws_give_the_same_rounds(label):
    assert play(label, num_tokens=200) == play(label, num_tokens=200)


def test_overlapped_forwards_are_the_asynchronous_policies_alone():
    for label in LABELS:
        rounds, spec = play(label, num_tokens=200), parse_policy(label)
        assert any(r.overlapped for r in rounds) == spec.is_async


def test_policies_that_look_at_the_batch_or_the_clock_say_so():
    goodput = Goodput(DRAFT, TARGET)
    built = {label: build_speculation(parse_policy(label), goodput=goodput) for label in LABELS}
    assert {label for label, policy in built.items() if policy.is_batch_coupled} == COUPLED


@pytest.mark.parametrize("label", sorted(set(LABELS) - COUPLED))
def test_an_uncoupled_request_is_served_the_same_whoever_shares_the_batch(label):
    spec = parse_policy(label)
    alone = Player(spec, CHANCES, outputs=[60]).play()
    both = Player(spec, CHANCES, outputs=[60, 60])
    shared = []
    while 0 in both.target.request_ids:
        before = len(both.target.output(0))
        both.play_round()
        after = len(both.target.output(0)) if 0 in both.target.request_ids else 60
        shared.append(after - before)
    assert shared == [r.emitted for r in alone]


# Chains and trees of a fixed shape.


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_chain_at_constant_acceptance_emits_the_geometric_sum(length):
    rounds = play(f"chain-{length}")
    assert mean_emitted(rounds) == pytest.approx(chain_tokens(ALPHA, length), rel=0.03)
    assert all(len(r.drafting) == length for r in rounds[:-5])


def test_a_static_tree_of_width_one_is_a_chain():
    assert play("static-tree-1x1x1", num_tokens=500) == play("chain-3", num_tokens=500)


def test_a_static_tree_accepts_its_widths_level_by_level():
    rounds = play("static-tree-4x2x1")
    first, second, third = sum(CHANCES), sum(CHANCES[:2]), CHANCES[0]
    expected = 1 + first * (1 + second * (1 + third))
    assert mean_emitted(rounds) == pytest.approx(expected, rel=0.03)
    whole = [r for r in rounds[2:-3] if len(r.drafting) == 3]
    assert len(whole) > 500
    assert (
        {r.rows for r in whole} == {1 + 4 + 8 + 8} == {parse_policy("static-tree-4x2x1").max_rows}
    )
    assert {tuple(r.drafting[1:]) for r in whole} == {(4, 8)}


# Chains beside the verification.


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_pearl_alternates_between_pre_and_post_verification(length):
    rounds = play(f"pearl-{length}", num_tokens=6000)
    # Pre-verify emits 1 token and leads to post-verify if the first drafted token was right;
    # post-verify emits a geometric sum and stays if all ``length`` tokens were.
    stay = ALPHA**length
    post = ALPHA / (1 - stay + ALPHA)
    expected = (1 - post) + post * chain_tokens(ALPHA, length - 1)
    assert mean_emitted(rounds) == pytest.approx(expected, rel=0.03)
    assert all(not r.drafting for r in rounds)
    assert {r.rows for r in rounds[:-length]} == {1, length}
    if length > 1:
        share = sum(r.rows == length for r in rounds) / len(rounds)
        assert share == pytest.approx(post, rel=0.05)


def test_a_free_chain_makes_as_many_forwards_as_fit_beside_the_verification():
    rounds = play("amusd-16", chances=(1.0,), num_tokens=600)
    assert {len(r.overlapped) for r in rounds[:-3]} == {6}  # 20 ms over 3 ms
    assert {r.emitted for r in rounds[2:-3]} == {6}
    slow = Goodput(StepTime.linear(alpha=0.0, gamma=0.0, delta=0.05), TARGET)
    rounds = play("amusd-16", chances=(1.0,), num_tokens=60, goodput=slow)
    assert {len(r.overlapped) for r in rounds[:-3]} == {1}


def test_a_free_chain_waits_for_one_forward_after_a_miss_and_for_none_after_a_hit():
    rounds = play("amusd-8", num_tokens=2000)
    assert {len(r.drafting) for r in rounds} == {0, 1}
    assert all((len(r.drafting) == 1) == (r.rows == 2) for r in rounds[:-3] if r.rows <= 2)
    assert max(r.rows for r in rounds) <= 9


# Outcomes drafted beforehand.


@pytest.mark.parametrize(("length", "outcomes"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_ssd_s_hit_rate_is_the_chance_of_the_enumerated_outcomes(length, outcomes):
    rounds = play(f"ssd-{length}x{outcomes}", num_tokens=5000)
    beside = sum(CHANCES[1 : 1 + outcomes])  # the target leaves the chain for one of these
    behind = sum(CHANCES[:outcomes])  # or accepts it whole and goes on with one of these
    expected = sum(ALPHA**j * beside for j in range(length)) + ALPHA**length * behind
    hits = [not r.drafting for r in rounds[1:-5]]
    assert sum(hits) / len(hits) == pytest.approx(expected, abs=0.03)
    assert mean_emitted(rounds) == pytest.approx(chain_tokens(ALPHA, length), rel=0.03)


def test_ssd_pays_for_the_glue_and_every_branch():
    rounds = play("ssd-3x2", num_tokens=2000)
    for before, after in itertools.pairwise(rounds[1:-3]):
        glue, *branches = after.overlapped
        assert branches == [(3 + 1) * 2] * 3
        if not after.drafting:  # sent from the cache: all of it is run once more
            assert glue == after.rows == 4
        else:  # just in time, after tokens that have no KV row yet
            assert len(after.drafting) == 3
            assert 1 <= after.drafting[0] <= 1 + before.emitted
            assert glue == 1


# Small trees in a row.


def test_pipeinfer_drops_what_does_not_continue_the_likeliest_path():
    player = Player(parse_policy("pipeinfer-4x2x3"), CHANCES, outputs=[3000])
    reached, num_kept, num_dropped = 1, 0, 0
    while player.target.request_ids:
        before = player.rounds[-1].emitted if player.rounds else 1
        this = player.play_round()
        assert not this.drafting  # never waits: the root goes alone
        if this.rows > 1:
            assert before == reached  # all of the likeliest path, and a token drafted below it
        num_kept += this.rows > 1
        num_dropped += this.rows == 1
        tree = player.side.tree(0)
        reached = tree.depths[tree.tip] + 1
    assert min(num_kept, num_dropped) > 300
    trees = play("async-tree-4x2x3", num_tokens=3000)
    assert mean_emitted(player.rounds) < mean_emitted(trees)


def test_pipeinfer_keeps_its_pipeline_full_while_the_draft_model_is_right():
    rounds = play("pipeinfer-3x1x3", chances=(1.0,), num_tokens=300)
    assert {r.rows for r in rounds[2:-3]} == {3}
    assert {r.emitted for r in rounds[2:-3]} == {3}


# Heads that read target features.


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5, 0.0])
def test_a_serial_head_loses_acceptance_with_every_feature_of_its_own(decay):
    rounds = play(f"eagle-4x1x3@{decay}", chances=(ALPHA,))
    expected, reached = 1.0, 1.0
    for own in range(3):
        reached *= ALPHA * decay**own
        expected += reached
    assert mean_emitted(rounds) == pytest.approx(expected, rel=0.03)


def test_a_serial_head_runs_every_verified_token_with_its_true_feature():
    rounds = play("eagle-4x1x3@0.9", num_tokens=500)
    for before, after in itertools.pairwise(rounds[:-3]):
        assert after.drafting == [before.emitted, 1, 1]


def test_an_asynchronous_head_makes_one_forward_with_true_features_in_every_round():
    rounds = play("async-eagle-6x2x3@1.0", num_tokens=800)
    for before, after in itertools.pairwise(rounds[1:-3]):
        assert after.drafting[0] == before.emitted
        assert len(after.drafting) <= 2
    assert sum(len(r.drafting) for r in rounds) < 1.5 * len(rounds)


def test_an_asynchronous_head_that_suffers_from_its_own_features_accepts_less():
    found = [mean_emitted(play(f"async-eagle-8x4x3@{decay}")) for decay in (1.0, 0.9, 0.6)]
    assert found[0] > found[1] > found[2]
    # Its tree is as deep as the serial one's, but stands on features of older tokens.
    serial = mean_emitted(play("eagle-8x4x3@0.6"))
    assert found[2] < serial
    # Without decay it is the asynchronous tree of an ordinary draft model, or nearly.
    tree = mean_emitted(play("async-tree-8x4x3"))
    assert found[0] == pytest.approx(tree, rel=0.1)


# Step lengths and budgets.


def test_turbospec_learns_the_acceptance_rate_and_takes_the_length_of_most_goodput():
    spec = parse_policy("turbospec-8")
    for alpha in (0.4, 0.6, 0.9):
        player = Player(spec, (alpha,), outputs=[4000])
        rounds = player.play()
        assert player.policy.acceptance_rate == pytest.approx(alpha, abs=0.12)
        goodputs = [
            chain_tokens(alpha, k) / (0.020 + 0.003 * k) * (1.1 if k == 0 else 1.0)
            for k in range(9)
        ]
        best = max(range(9), key=goodputs.__getitem__)
        lengths = [r.rows - 1 for r in rounds[-300:-10]]
        assert abs(math.fsum(lengths) / len(lengths) - best) < 1.0


def test_turbospec_decodes_plainly_when_drafting_cannot_pay():
    dear = Goodput(StepTime.linear(alpha=0.0, gamma=0.0, delta=0.05), TARGET)
    rounds = play("turbospec-4", num_tokens=50, goodput=dear)
    assert {r.rows for r in rounds} == {1}
    assert not any(r.drafting for r in rounds)


def test_adaserve_spends_its_budget_of_rows_and_no_more():
    player = Player(parse_policy("adaserve-4x2x24"), CHANCES, outputs=[80] * 4)
    rounds = player.play()
    assert max(r.rows for r in rounds) == 24
    assert {r.rows for r in rounds[:10]} == {24}
    alone = play("adaserve-4x2x24", num_tokens=100)
    assert {r.rows for r in alone[:-5]} == {1 + 4 * 2}  # the whole beam, which is less
    crowded = Player(parse_policy("adaserve-4x2x24"), CHANCES, outputs=[9] * 16).play()
    assert crowded[0].rows == 16  # the budget leaves no row for a draft token each
