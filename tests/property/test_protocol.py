"""The whole protocol with a toy model, against plain decoding.

The toy model's logits are a hash of the (position, token) pairs of the KV rows that a row sees, so
a wrong mask, position, slot or KV move gives other logits. KV slabs are lists of such pairs, moved
by nothing but the protocol's messages, and compared after every step with what they should hold.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.policy import target_side
from codesign.policy.cost import Calibration, StepTime
from codesign.policy.drafted import Drafted
from codesign.policy.protocol import (
    Admission,
    Candidates,
    DraftSide,
    ExpansionRows,
    KVMove,
    RequestVerdict,
    TargetSide,
    Verdict,
    VerifyRows,
)
from codesign.policy.speculation import Goodput, build_speculation, parse_policy
from codesign.policy.tree import DraftTree
from codesign.policy.walk import Sampling, Walk, sample_token

VOCABULARY = 9
KVRow = tuple[int, int]  # position, token

POLICIES = (
    "plain",
    "chain-1",
    "chain-3",
    "chain-5",
    "threshold-4@0.3",
    "tree-2x1x1",
    "tree-8x4x2",
    "async-tree-8x4x2",
    "async-tree-5x3x3",
    "specserve-4",
    "specserve-4-no-drafter",
    "specserve-4-no-prior",
    "specserve-4-no-slo",
    "specserve-4-no-drafter-no-prior",
    "specserve-4-no-drafter-no-slo",
    "specserve-4-no-prior-no-slo",
    "specserve-4-no-drafter-no-prior-no-slo",
    "static-tree-3x2x1",
    "static-tree-1x1x1",
    "turbospec-4",
    "adaserve-3x2x12",
    "adaserve-4x3x40",
    "inflight-tree-8x4x2",
    "inflight-tree-5x2x3",
    "pearl-1",
    "pearl-4",
    "amusd-6",
    "pipeinfer-4x2x3",
    "pipeinfer-8x4x2",
    "ssd-1x1",
    "ssd-3x2",
    "ssd-4x3",
)


def hashed(tag: bytes, seen: tuple[KVRow, ...]) -> np.ndarray:
    digest = hashlib.blake2b(repr(seen).encode(), digest_size=4 * VOCABULARY, person=tag).digest()
    return np.frombuffer(digest, np.uint32) / 2.0**32


@dataclass(frozen=True)
class Toy:
    """A target, and a draft whose logits differ from the target's by ``disagreement``."""

    disagreement: float

    def logits(self, seen: tuple[KVRow, ...]) -> np.ndarray:
        return 6.0 * hashed(b"target", seen)

    def draft(self, seen: tuple[KVRow, ...], fanout: int) -> tuple[list[int], list[float]]:
        logits = self.logits(seen) + self.disagreement * hashed(b"draft", seen)
        log_probs = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-log_probs)[:fanout]
        return order.tolist(), log_probs[order].tolist()


@dataclass
class Setting:
    """One run's circumstances."""

    policy: str
    requests: list[Admission]
    stop_tokens: frozenset[int]
    sampling: Sampling
    toy: Toy
    is_serial: bool  # admissions travel with the prefill's token, not before it
    max_batch: int
    lost: float  # chance that a round's candidates are late, old or absent
    seed: int
    slo_tpot: float | None = None
    calibration: Calibration | None = None


def random_setting(policy: str, seed: int, *, lost: float | None = None) -> Setting:
    rng = random.Random(f"{policy} {seed}")
    requests = [
        Admission(
            10 + i,
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1, 2, 5, 9]))),
            rng.choice([1, 2, 3, 6, 12, 20, 40]),
        )
        for i in range(rng.randint(1, 6))
    ]
    return Setting(
        policy=policy,
        requests=requests,
        stop_tokens=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1]))),
        sampling=Sampling(
            temperature=rng.choice([0.0, 0.0, 0.3, 0.8, 1.5]),
            top_k=rng.choice([0, 0, 3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            seed=rng.randrange(2**40),
        ),
        toy=Toy(rng.choice([0.0, 1.0, 4.0])),
        is_serial=rng.random() < 0.5,
        max_batch=rng.randint(1, 5),
        lost=rng.choice([0.0, 0.0, 0.3]) if lost is None else lost,
        seed=rng.randrange(2**40),
        slo_tpot=rng.choice([None, 0.025, 0.05]),
        calibration=rng.choice([None, Calibration(slope=0.7, intercept=0.3)]),
    )


def plain_decoding(setting: Setting) -> dict[int, list[int]]:
    """One token after another, each request by itself."""
    outputs = {}
    for request in setting.requests:
        tokens = list(request.tokens)
        for _ in range(request.max_new_tokens):
            logits = setting.toy.logits(tuple(enumerate(tokens)))
            tokens.append(
                sample_token(
                    logits,
                    setting.sampling,
                    request_id=request.request_id,
                    position=len(tokens),
                )
            )
            if tokens[-1] in setting.stop_tokens:
                break
        outputs[request.request_id] = tokens[len(request.tokens) :]
    return outputs


def move_rows(slab: list[KVRow], move: KVMove) -> None:
    slab[move.base :] = [slab[move.base + row] for row in move.rows]


def has_path(tree: DraftTree, tokens: tuple[int, ...]) -> bool:
    node = 0
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            return False
        node = child
    return True


def seen_rows(slab: list[KVRow], rows: list[int]) -> tuple[KVRow, ...]:
    return tuple(sorted(slab[row] for row in rows))


@dataclass
class Run:
    """Drives both sides; ``check`` compares every KV slab and mask with what it should be."""

    setting: Setting
    check: bool = True
    outputs: dict[int, list[int]] = field(default_factory=dict)
    facts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        setting = self.setting
        self.rng = random.Random(setting.seed)
        self.spec = parse_policy(setting.policy)
        goodput = Goodput(
            StepTime.linear(alpha=1e-6, gamma=1e-4, delta=1e-3),
            StepTime.linear(alpha=1e-5, gamma=5e-4, delta=2e-2),
            slo_tpot=setting.slo_tpot,
        )
        policy = build_speculation(self.spec, goodput=goodput, calibration=setting.calibration)
        self.draft, self.target = DraftSide(policy), TargetSide()
        self.draft_kv: dict[int, list[KVRow]] = {}
        self.target_kv: dict[int, list[KVRow]] = {}
        self.lengths: dict[int, tuple[int, int]] = {}
        self.mail: list[Verdict] = []  # verdicts that the draft has not read yet
        self.sent: Candidates | None = None  # the draft's last answer
        self.waiting = list(setting.requests)

    def finish(self) -> dict[int, list[int]]:
        entries: list[RequestVerdict] = []
        round_number = 0
        while self.waiting or self.target.request_ids or entries:
            admitted = self.admit()
            first = self.prefill(admitted)
            if self.setting.is_serial:
                entries, first = entries + first, []
            self.mail.append(Verdict(round_number, tuple(entries), tuple(admitted)))
            candidates = self.exchange(round_number)
            entries = first + self.verify(candidates)
            round_number += 1
            assert round_number < 200, "no progress"
        return self.outputs

    def admit(self) -> list[Admission]:
        admitted = []
        while self.waiting and len(self.target.request_ids) < self.setting.max_batch:
            if self.target.request_ids and self.rng.random() < 0.5:
                break
            admitted.append(self.waiting.pop(0))
            self.target.admit(admitted[-1], self.setting.stop_tokens)
        return admitted

    def prefill(self, admitted: list[Admission]) -> list[RequestVerdict]:
        entries = []
        for request in admitted:
            rows = list(enumerate(request.tokens))
            self.target_kv[request.request_id] = rows
            token = self.sample(request.request_id, tuple(rows), len(rows))
            entries.append(self.target.commit_first(request.request_id, token))
            self.outputs[request.request_id] = [token]
        return entries

    def sample(self, request_id: int, seen: tuple[KVRow, ...], position: int) -> int:
        return sample_token(
            self.setting.toy.logits(seen),
            self.setting.sampling,
            request_id=request_id,
            position=position,
        )

    # The draft's half of a round.

    def exchange(self, round_number: int) -> Candidates | None:
        """What the target finds in its mailbox: this round's answer, an old one, part or none."""
        if self.rng.random() < self.setting.lost:
            return self.rng.choice([None, self.sent])
        for verdict in self.mail:
            self.receive(verdict)
        self.mail.clear()
        if not self.draft.begin():
            self.sent = Candidates(round_number)
            return self.sent
        done = 0
        while rows := self.draft.next_expansion(done):
            self.forward(rows)
            done += 1
        answer = self.draft.candidates(round_number)
        for entry in answer.requests:
            assert len(entry.tokens) <= self.spec.max_rows
            assert entry.base_len == len(self.draft.committed(entry.request_id))
        overlap = self.draft.policy.overlap
        for _ in range(self.rng.randint(0, 2 * overlap)):
            self.forward(self.draft.overlap_expansion())
        self.sent = answer
        if self.rng.random() < self.setting.lost:
            kept = [entry for entry in answer.requests if self.rng.random() < 0.5]
            return replace(answer, requests=tuple(kept))
        return answer

    def receive(self, verdict: Verdict) -> None:
        for entry in verdict.requests:
            if entry.request_id in self.draft.request_ids and not entry.is_finished:
                tree = self.draft.tree(entry.request_id)
                if tree.num_expanded:
                    self.facts["hit" if has_path(tree, entry.tokens) else "miss"] += 1
        moves, finished = self.draft.receive(verdict)
        for move in moves:
            move_rows(self.draft_kv.setdefault(move.request_id, []), move)
        for request_id in finished:
            self.draft_kv.pop(request_id, None)
        self.check_draft()

    def forward(self, expansion: list[ExpansionRows]) -> None:
        for rows in expansion:
            slab = self.draft_kv.setdefault(rows.request_id, [])
            assert len(slab) == rows.context
            slab += zip(rows.positions, rows.tokens, strict=True)
            prefix = self.draft.tree(rows.request_id).prefix_len
            choices = []
            for i in range(len(rows.tokens)):
                if rows.visible is None:
                    columns = list(range(rows.context + i + 1))
                else:
                    columns = [*range(prefix), *(prefix + s for s in rows.visible[i])]
                seen = seen_rows(slab, columns)
                node = i - (len(rows.tokens) - len(rows.nodes))
                if node >= 0:
                    if self.check:
                        assert seen == self.path_rows(rows.request_id, rows.nodes[node])
                    choices.append(self.setting.toy.draft(seen, VOCABULARY))
            self.draft.expanded(rows, [c[0] for c in choices], [c[1] for c in choices])
        self.check_draft()

    def path_rows(self, request_id: int, node: int) -> tuple[KVRow, ...]:
        """What a node must see: the committed tokens before the root, and its path."""
        tree = self.draft.tree(request_id)
        path = [tree.tokens[n] for n in tree.path(node)]
        return tuple(enumerate([*self.draft.committed(request_id)[:-1], *path]))

    def check_draft(self) -> None:
        if not self.check:
            return
        for request_id in self.draft.request_ids:
            tree, slab = self.draft.tree(request_id), self.draft_kv.get(request_id, [])
            committed = self.draft.committed(request_id)
            assert tree.tokens[0] == committed[-1]
            assert tree.base_len == len(committed)
            nodes = sorted((tree.slots[n], n) for n in range(len(tree)) if tree.slots[n] >= 0)
            prefix = self.draft.tree(request_id).prefix_len
            tree_rows = [(tree.base_len - 1 + tree.depths[n], tree.tokens[n]) for _, n in nodes]
            assert slab == [*list(enumerate(committed))[:prefix], *tree_rows]
            assert max(tree.depths) <= tree.max_depth

    # The target's half of a round.

    def verify(self, candidates: Candidates | None) -> list[RequestVerdict]:
        entries = []
        for rows in self.target.verify_rows(candidates):
            entries.append(self.judge(rows))
            if len(rows.tokens) == 1:
                self.facts["root only"] += 1
        return entries

    def judge(self, rows: VerifyRows) -> RequestVerdict:
        slab = self.target_kv[rows.request_id]
        assert len(slab) == rows.context
        slab += zip(rows.positions, rows.tokens, strict=True)
        ancestors = rows.ancestors()

        def sample(row: int) -> int:
            columns = [*range(rows.context), *(rows.context + a for a in ancestors[row])]
            seen = seen_rows(slab, columns)
            if self.check:
                assert [position for position, _ in seen] == list(range(len(seen)))
            return self.sample(rows.request_id, seen, rows.positions[row] + 1)

        verdict, move = self.target.judge(rows, sample)
        move_rows(slab, move)
        output = self.outputs[rows.request_id]
        output += verdict.tokens
        request = next(r for r in self.setting.requests if r.request_id == rows.request_id)
        if self.check:
            committed = [*request.tokens, *output]
            assert verdict.base_len == len(committed) - len(verdict.tokens)
            assert slab == list(enumerate(committed))[:-1]
        self.facts["accepted"] += len(verdict.tokens) - 1
        self.facts["stop inside a run"] += verdict.is_finished and len(verdict.tokens) > 1
        self.facts["finished"] += verdict.is_finished
        return verdict


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32))
def test_output_equals_plain_decoding_and_kv_rows_are_where_they_belong(policy, seed):
    setting = random_setting(policy, seed)
    assert Run(setting).finish() == plain_decoding(setting)


def test_the_random_runs_reach_what_they_are_meant_to():
    facts: Counter[str] = Counter()
    for policy in ("chain-3", "tree-8x4x2", "async-tree-8x4x2", "specserve-4"):
        for seed in range(40):
            run = Run(random_setting(policy, seed))
            run.finish()
            facts += run.facts
    for fact in ("hit", "miss", "root only", "accepted", "stop inside a run", "finished"):
        assert facts[fact] > 30, (fact, facts)


def perfect_setting(policy: str, **changes) -> Setting:
    """A draft that is always right, at temperature 0: everything sent is accepted."""
    setting = Setting(
        policy=policy,
        requests=[Admission(1, (3, 1, 4), 24), Admission(2, (2,), 24)],
        stop_tokens=frozenset(),
        sampling=Sampling(),
        toy=Toy(0.0),
        is_serial=True,
        max_batch=5,
        lost=0.0,
        seed=1,
    )
    return replace(setting, **changes)


@pytest.mark.parametrize("is_serial", [True, False])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_perfect_chain_is_accepted_whole(depth, is_serial):
    run = Run(perfect_setting(f"chain-{depth}", is_serial=is_serial))
    run.finish()
    # Each request emits 23 tokens after its first, depth + 1 a round; a root-only round when the
    # admission went ahead of the prefill, since the candidates then lack the first token.
    assert run.facts["root only"] == 2 * (not is_serial) + 2 * (
        (23 - (not is_serial)) % (depth + 1) == 1
    )
    num_rounds = -(-(23 - (not is_serial)) // (depth + 1)) + (not is_serial)
    assert run.facts["accepted"] == 2 * (23 - num_rounds)


def test_growing_during_verification_puts_the_bonus_token_in_the_tree():
    hits = {}
    for policy in ("tree-8x4x2", "async-tree-8x4x2"):
        run = Run(perfect_setting(policy, requests=[Admission(1, (3, 1, 4), 200)]))
        run.finish()
        hits[policy] = run.facts["hit"] / (run.facts["hit"] + run.facts["miss"])
    # The serial tree ends in the leaves that were accepted; the other one has grown below them.
    assert hits["tree-8x4x2"] == 0.0
    assert hits["async-tree-8x4x2"] > 0.6


def test_losing_every_answer_is_plain_decoding():
    for policy in ("chain-3", "async-tree-8x4x2"):
        setting = random_setting(policy, 3, lost=1.0)
        run = Run(setting)
        assert run.finish() == plain_decoding(setting)
        assert run.facts["accepted"] == 0


# Each mutation below must be noticed: by the KV comparison, or by another output than plain's.


def wrong_commit_rows(monkeypatch):
    true = TargetSide.judge

    def judge(self, rows, sample):
        verdict, move = true(self, rows, sample)
        return verdict, replace(move, rows=tuple(range(len(move.rows))))

    monkeypatch.setattr(TargetSide, "judge", judge)


def wrong_promote_order(monkeypatch):
    true = DraftTree.reroot

    def reroot(self, verified):
        result = true(self, verified)
        return replace(result, promoted=result.promoted[::-1])

    monkeypatch.setattr(DraftTree, "reroot", reroot)


def wrong_kept_order(monkeypatch):
    true = DraftTree.reroot

    def reroot(self, verified):
        result = true(self, verified)
        return replace(result, kept=result.kept[::-1])

    monkeypatch.setattr(DraftTree, "reroot", reroot)


def promoted_rows_forgotten(monkeypatch):
    true = DraftTree.reroot

    def reroot(self, verified):
        result = true(self, verified)
        return replace(result, promoted=result.promoted[:1])

    monkeypatch.setattr(DraftTree, "reroot", reroot)


def wrong_base_len_after_reroot(monkeypatch):
    true = DraftTree.reroot

    def reroot(self, verified):
        result = true(self, verified)
        self.base_len -= 1
        return result

    monkeypatch.setattr(DraftTree, "reroot", reroot)


def draft_mask_shows_all(monkeypatch):
    monkeypatch.setattr(
        DraftTree, "visible_slots", lambda self, node: tuple(range(self.slots[node] + 1))
    )


def draft_mask_lacks_the_root(monkeypatch):
    true = DraftTree.visible_slots
    monkeypatch.setattr(DraftTree, "visible_slots", lambda self, node: true(self, node)[1:])


def target_mask_shows_all(monkeypatch):
    monkeypatch.setattr(
        VerifyRows, "ancestors", lambda self: [list(range(n + 1)) for n in range(len(self.tokens))]
    )


def wrong_noise_position(monkeypatch):
    true = TargetSide.verify_rows

    def verify_rows(self, candidates):
        # Every row but the root's keys its noise one position late.
        return [
            replace(rows, positions=(rows.positions[0], *(p + 1 for p in rows.positions[1:])))
            for rows in true(self, candidates)
        ]

    monkeypatch.setattr(TargetSide, "verify_rows", verify_rows)


def stale_candidates_taken(monkeypatch):
    true = TargetSide.verify_rows

    def verify_rows(self, candidates):
        if candidates is not None:
            entries = [
                replace(entry, base_len=len(self._requests[entry.request_id].committed))
                for entry in candidates.requests
                if entry.request_id in self._requests
            ]
            candidates = replace(candidates, requests=tuple(entries))
        return true(self, candidates)

    monkeypatch.setattr(TargetSide, "verify_rows", verify_rows)


def catching_up_forgets_a_token(monkeypatch):
    true = Drafted.expand

    def rows(self, request_id, nodes):
        result = true(self, request_id, nodes)
        if len(result.tokens) > len(result.nodes):
            result = replace(result, tokens=result.tokens[1:], positions=result.positions[1:])
        return result

    monkeypatch.setattr(Drafted, "expand", rows)


def walk_that(change: Callable[[Walk, frozenset[int], int], Walk]) -> Callable:
    true = target_side.walk

    def mutated(monkeypatch):
        def walk(tokens, parents, sample, *, stop_tokens, limit):
            return change(
                true(tokens, parents, sample, stop_tokens=(), limit=10**6), stop_tokens, limit
            )

        monkeypatch.setattr(target_side, "walk", walk)

    return mutated


def stop_inside_a_run_ignored(walked: Walk, stop_tokens: frozenset[int], limit: int) -> Walk:
    tokens, accepted = walked.tokens[:limit], walked.accepted[:limit]
    is_stopped = tokens[-1] in stop_tokens or len(tokens) == limit
    return Walk(tokens, accepted, is_stopped=is_stopped)


def limit_inside_a_run_ignored(walked: Walk, stop_tokens: frozenset[int], limit: int) -> Walk:
    for i, token in enumerate(walked.tokens):
        if token in stop_tokens:
            return Walk(walked.tokens[: i + 1], walked.accepted[: i + 1], is_stopped=True)
    return replace(walked, is_stopped=len(walked.tokens) >= limit)


def drafts_past_the_limit(monkeypatch):
    true = DraftSide.admit

    def admit(self, admission):
        true(self, replace(admission, max_new_tokens=admission.max_new_tokens + 50))

    monkeypatch.setattr(DraftSide, "admit", admit)


def limit_ignored_with_deep_trees(monkeypatch):
    walk_that(limit_inside_a_run_ignored)(monkeypatch)
    drafts_past_the_limit(monkeypatch)


def outcome(setting: Setting, *, check: bool) -> bool:
    """Whether a run goes wrong in a way that a test sees."""
    try:
        return Run(setting, check=check).finish() != plain_decoding(setting)
    except (AssertionError, IndexError):
        return True


MUTATIONS = {  # mutation -> whether the output alone shows it
    wrong_commit_rows: True,
    wrong_promote_order: False,
    wrong_kept_order: False,
    promoted_rows_forgotten: False,
    wrong_base_len_after_reroot: False,
    draft_mask_shows_all: False,
    draft_mask_lacks_the_root: False,
    target_mask_shows_all: True,
    wrong_noise_position: True,
    stale_candidates_taken: False,
    catching_up_forgets_a_token: False,
    walk_that(stop_inside_a_run_ignored): True,
    limit_ignored_with_deep_trees: True,
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: getattr(m, "__name__", "walk"))
def test_every_mutation_is_noticed(mutate, monkeypatch):
    runs = [random_setting("async-tree-8x4x2", seed) for seed in range(25)]
    assert not any(outcome(setting, check=True) for setting in runs)
    mutate(monkeypatch)
    assert any(outcome(setting, check=True) for setting in runs)
    if MUTATIONS[mutate]:
        assert any(outcome(setting, check=False) for setting in runs)
