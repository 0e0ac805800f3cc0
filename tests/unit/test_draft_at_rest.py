"""A draft whose policy rests: roots alone are verified, and it drafts on in step afterwards."""

from __future__ import annotations

import random

import pytest

from codesign.engine.draft_worker import DraftWorker
from codesign.policy.batch_round import RowPrices
from codesign.policy.batch_tree import BatchTree
from codesign.policy.cost import StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.protocol import Admission, TargetSide, Verdict
from codesign.policy.speculation import parse_policy

PROMPT, TOKENS, REQUESTS = 5, 40, 3
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


def serve(policy: BatchTree, drafter: Drafter, become_cheap: int):
    """All outputs, and rows verified by round; draft forwards are cheap from a round on."""
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
            policy._round.draft = RowPrices(CHEAP, 0.0)
        verdict = Verdict(number, tuple(verdicts), joining, now=0.01 * number)
        candidates, _ = worker.answer(verdict)
        rows = target.verify_rows(candidates)
        rows_by_round.append(sum(len(each.tokens) for each in rows))
        verdicts = []
        for each in rows:
            sample = {i: 7 if chance.random() < 0.8 else 9 for i in range(len(each.tokens))}
            verdicts.append(target.judge(each, sample.__getitem__)[0])
            outputs[each.request_id] += verdicts[-1].tokens
        worker.overlap()
        joining, number = (), number + 1
    return outputs, rows_by_round


def policy_of(draft: StepTime, look: float) -> BatchTree:
    goodput = Goodput(draft, TARGET, deciding=look)
    return BatchTree(parse_policy("batch-tree-4x2x3"), goodput)


@pytest.mark.parametrize("look", [9e-5, 5e-3])
def test_a_draft_at_rest_is_in_step_when_it_drafts_again(look):
    drafter = Drafter()
    outputs, rows = serve(policy_of(DEAR, look), drafter, become_cheap=20)
    assert all(len(tokens) == TOKENS for tokens in outputs.values())
    assert rows[:20] == [REQUESTS] * 20
    assert drafter.forwards
    assert max(rows) > REQUESTS
