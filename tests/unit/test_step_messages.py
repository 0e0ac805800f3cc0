"""What leaders ask their ranks, word for word: other bookkeeping must not change a message."""

from __future__ import annotations

import hashlib
import random
import zlib

import numpy as np
import pytest

pytest.importorskip("torch")

from codesign.cli import build_parser
from codesign.engine.draft_worker import DraftWorker
from codesign.engine.gpu.group_drafter import GroupDrafter
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.paging import Paging
from codesign.engine.gpu.prompt_rows import COUNT_WORD, PROMPT_BUCKETS, bucket_for
from codesign.engine.gpu.request_rows import RequestRows, rows_to_expand, rows_to_verify
from codesign.engine.gpu.step_rows import (
    BUCKET,
    FOLLOWED,
    HEADER,
    KIND,
    PIECE,
    ROWS,
    STEP,
    crowd_of,
    pack_step,
)
from codesign.engine.pieces import PromptPiece
from codesign.engine.target import nothing
from codesign.errors import UsageError
from codesign.kernels.attention_shares import Crowd
from codesign.policy.messages import depths_of
from codesign.policy.protocol import Admission, ExpansionRows, Verdict, VerifyRows
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.step_time import BUCKETS
from codesign.policy.walk import Sampling
from codesign.profiler.draft_steps import DraftSteps, made_up_tokens
from codesign.profiler.steps import StepShape

VOCAB = 40


class Recorder:
    """A leader whose ranks answer by the message alone."""

    scratch_slot = 9

    def __init__(self, choices: int, log) -> None:
        self.choices, self.log, self.count, self.num_begun = choices, log, 0, 0

    def begin(self, message: np.ndarray) -> int:
        """These ranks never run ahead, whatever they are told."""
        if message[KIND] == STEP:
            message[FOLLOWED] = 0
            self.answer = self.ask(message)
        return int(message[KIND] == STEP)

    def take(self) -> np.ndarray:
        return self.answer

    def settle(self) -> None:
        pass

    def tell(self, message: np.ndarray) -> None:
        self.ask(message)

    def ask(self, message: np.ndarray, meanwhile=nothing) -> np.ndarray:
        meanwhile()
        recorded = message.copy()
        if message[KIND] == STEP:
            recorded[ROWS:HEADER] = 0  # newer than the recordings; how attention is shared out
        self.log.update(recorded.tobytes())
        self.count += 1
        drawn = np.random.default_rng(zlib.crc32(recorded.tobytes()))
        if message[KIND] != STEP:
            return drawn.integers(VOCAB, size=1, dtype=np.int32)
        rows = int(message[BUCKET])
        if not self.choices:  # a target: mostly what many drafts say first
            return drawn.integers(3, size=rows, dtype=np.int32)
        tokens = np.argsort(drawn.random((rows, VOCAB)) + np.arange(VOCAB) / 9)[:, : self.choices]
        chances = -np.sort(-drawn.random((rows, self.choices)).round(1)) - 1.01  # with ties
        words = tokens.astype(np.int32), chances.astype(np.float32).view(np.int32)
        return np.stack(words).ravel()


def messages(policy: str, batch: int, *, paging: Paging | None = None) -> tuple[str, int]:
    """A digest of all messages to both models of some requests, and how many there were."""
    log, speculation = hashlib.sha256(), build_speculation(parse_policy(policy))
    ask_target, ask_draft = Recorder(0, log), Recorder(speculation.fanout, log)
    target = GroupTarget(
        ask_target, num_slots=batch, sampling=Sampling(0.7, seed=3), smallest_bucket=16,
        paging=paging,
    )  # fmt: skip
    drafter = GroupDrafter(ask_draft, num_slots=batch, choices=speculation.fanout, paging=paging)
    draft, chance = DraftWorker(speculation, drafter), random.Random(batch)
    waiting = [
        Admission(n, tuple(chance.choices(range(VOCAB), k=chance.randrange(1, 300))), 30)
        for n in range(3 * batch)
    ]
    verdicts, number = [], 0
    while waiting or target.side.request_ids:
        joining = [
            waiting.pop() for _ in range(min(batch - len(target.side.request_ids), len(waiting)))
        ]
        for admission in joining:
            target.open_prompt(admission, ())
            first = target.run_pieces([PromptPiece(admission, 0, len(admission.tokens))])
            verdicts += first
        candidates, _ = draft.answer(Verdict(number, tuple(verdicts), tuple(joining)))
        trees = [(entry.tokens, entry.parents) for entry in candidates.requests]
        log.update(repr(trees).encode())
        verdicts = target.verify(candidates)[1]
        draft.overlap()
        number += 1
    return log.hexdigest()[:16], ask_target.count + ask_draft.count


# Policy, batch and whether slabs lie in pages: a digest of the messages, and how many there are.
RECORDED = {
    ("tree-8x4x4", 1, False): ("774ff5f9a06e8a3f", 232),
    ("tree-8x4x4", 5, True): ("a6d9a00a35035d5f", 394),
    ("async-tree-8x4x8", 1, False): ("44ad91e3e6b253ca", 408),
    ("async-tree-8x4x12", 3, False): ("eebd35b62418c3bd", 680),
    ("chain-3", 4, False): ("90587d4a94bd41ee", 298),
    ("ssd-4x3", 2, False): ("110d9a813f39e202", 478),
    ("pipeinfer-8x4x3", 2, False): ("a0dc718bcc909d06", 259),
    ("eagle-8x4x3", 2, False): ("13b6b6e8d9ca03ea", 214),
    ("tree-8x4x4", 40, False): ("67cc4fa988ecdecb", 715),
    ("inflight-tree-8x4x6", 2, False): ("3afedd3060d13c16", 322),
}


@pytest.mark.parametrize(("policy", "batch", "is_paged"), RECORDED)
def test_messages_are_those_that_were_recorded(policy, batch, is_paged):
    paging = Paging(16, 400) if is_paged else None
    assert messages(policy, batch, paging=paging) == RECORDED[policy, batch, is_paged]


def test_the_command_pads_to_the_same_buckets():
    """It lists them itself, as its parser loads nothing."""
    for rows in (*BUCKETS, 2 * BUCKETS[-1]):
        words = ["run", "--plan", "plan.json", "--padded-rows", str(rows)]
        if rows in BUCKETS:
            assert build_parser("run").parse_args(words).padded_rows == rows
        else:
            with pytest.raises(UsageError, match="--padded-rows"):
                build_parser("run").parse_args(words)


def test_a_draft_runs_a_prompt_without_its_root_timed_as_served_so_256_tokens_and_a_root_fill_256():
    class Counting(Recorder):
        def ask(self, message: np.ndarray, meanwhile=nothing) -> np.ndarray:
            if message[KIND] == PIECE:
                counts.append(int(message[COUNT_WORD]))
            return super().ask(message, meanwhile)

    counts: list[int] = []
    speculation = build_speculation(parse_policy("tree-2x1x1"))
    leader = Counting(speculation.fanout, hashlib.sha256())
    drafter = GroupDrafter(leader, num_slots=2, choices=speculation.fanout)
    admission = Admission(0, made_up_tokens(0, 257, VOCAB), 30)  # the last is the root
    DraftWorker(speculation, drafter).answer(Verdict(0, (), (admission,)))
    assert DraftSteps(drafter, vocab=VOCAB, num_requests=1).seconds(
        StepShape("draft_prefill", 1, 257)
    )
    assert counts == [256, 256]
    assert bucket_for(PROMPT_BUCKETS, counts[0], 0) == 256


def test_a_step_says_how_many_attend_how_much():
    def request(context: int, rows: int) -> RequestRows:
        paths = [range(row + 1) for row in range(rows)]
        positions = range(context, context + rows)
        return RequestRows(0, positions, positions, context, (context,) * rows, paths, (-1,) * rows)

    requests = [request(0, 1), request(4095, 5), request(4096, 3), request(10_000, 1)]
    assert crowd_of(pack_step(requests, bucket=16, scratch_slot=9)) == Crowd(
        16, 10, 4, 1 + 1 + 2 + 3
    )
    assert crowd_of(pack_step((), bucket=8, scratch_slot=9)) == Crowd(8, 0, 0, 0)


@pytest.mark.parametrize("rows", [1, 8, 16, 17])
def test_paths_of_known_trees_are_the_words_of_their_rows(rows):
    parents = (-1, *[max(row // 2 - 1, 0) for row in range(1, rows)])
    depths = depths_of(parents)
    verified = VerifyRows(0, tuple(range(rows)), parents, tuple(9 + d for d in depths), 9)
    prefixes = (9,) * rows
    request = RequestRows(
        3, verified.tokens, verified.positions, 9, prefixes, verified.ancestors(), parents, 5
    )
    packed = pack_step([rows_to_verify(verified, 3, 5)] * 2, bucket=64, scratch_slot=9)
    assert packed.tolist() == pack_step([request] * 2, bucket=64, scratch_slot=9).tolist()


def test_leaves_of_a_draft_see_their_paths_and_no_others():
    visible = ((0, 2, 5), (0, 1, 6))
    rows = ExpansionRows(0, (7, 8), (14, 14), (1, 2), visible, 17)
    request = RequestRows(3, (7, 8), (14, 14), 17, (12, 12), visible, (-1, -1))
    packed = pack_step([rows_to_expand(rows, 3)], bucket=8, scratch_slot=9)
    assert packed.tolist() == pack_step([request], bucket=8, scratch_slot=9).tolist()
    with pytest.raises(AssertionError, match="a row at 15 sees 3 tree rows"):
        rows_to_expand(ExpansionRows(0, (7, 8), (14, 15), (1, 2), visible, 17), 3)


def test_no_step_runs_ahead_of_trees_however_their_rows_are_split():
    """The second of these two forwards has as many rows as there are requests."""
    leader = Recorder(0, hashlib.sha256())
    target = GroupTarget(leader, num_slots=16, sampling=Sampling(), smallest_bucket=16)
    target.ahead.run = None  # nobody may
    rows = []
    for number, count in enumerate((128, *[1] * 14, 2)):
        admission = Admission(number, (1, 2, 3), 30)
        target.open_prompt(admission, ())
        rows.append(
            VerifyRows(
                number, (1,) * count, tuple(range(-1, count - 1)), tuple(range(3, 3 + count)), 3
            )
        )
    assert len(target._sampled(rows, goes_on=lambda: True)) == 128 + 14 + 2
