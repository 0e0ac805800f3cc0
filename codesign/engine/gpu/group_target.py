"""The target on a rank group, as ``TargetWorker`` is the target on a CPU.

The loop (serve.py) and the policy do not know the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from codesign.engine.gpu.decode_ahead import DecodeAhead
from codesign.engine.gpu.paging import PageTable, Paging
from codesign.engine.gpu.prompt_rows import prompt_message
from codesign.engine.gpu.rank_group import GroupLeader, see_to_pages
from codesign.engine.gpu.request_rows import rows_to_verify, split_steps
from codesign.engine.gpu.slot_messages import sampling_message
from codesign.engine.gpu.step_rows import bucket_of, pack_step
from codesign.engine.pieces import PromptPiece
from codesign.engine.target import Target, never, nothing
from codesign.policy.protocol import (
    Admission,
    Candidates,
    RequestVerdict,
    TargetSide,
    VerifyRows,
)
from codesign.policy.step_time import BUCKETS
from codesign.policy.stop_text import Push
from codesign.policy.turns import Turns
from codesign.policy.walk import Sampling, request_key


class GroupTarget(Target):
    """Drives ``TargetSide`` with the target model on a rank group.

    Args:
        leader: Of the target's group.
        num_slots: Requests that fit at once.
        sampling: Its seed keys the noise; the ranks sample with the same.
        stop_tokens: Tokens that end a request.
        new_text: Makes what turns tokens into text, for requests with stop strings.
        smallest_bucket: Fewest rows of a forward, padding included. Plain decoding and speculation
            round alike when both run at the same number of rows.
        paging: Pages of the ranks' slabs; None for whole slabs.
        samples_by_row: The ranks have ``RowTargetHead``.
        turns: Who takes part in rounds of plain decoding; None if all do.

    Attributes:
        ahead: Steps of plain decoding that ranks run ahead of the host.
    """

    def __init__(
        self,
        leader: GroupLeader,
        *,
        num_slots: int,
        sampling: Sampling,
        stop_tokens: frozenset[int] = frozenset(),
        new_text: Callable[[], Push] | None = None,
        smallest_bucket: int = BUCKETS[0],
        paging: Paging | None = None,
        samples_by_row: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self.side = TargetSide(new_text, turns)
        self._leader = leader
        self._slots = PageTable(num_slots, paging)
        self.ahead = DecodeAhead(leader, self._slots, smallest_bucket)
        self._keys: dict[int, int] = {}
        self._done: dict[int, int] = {}  # rows of prompts that have been run
        self._sampling = sampling
        self._samples_by_row = samples_by_row
        self._stop_tokens = stop_tokens
        self._smallest_bucket = smallest_bucket

    def open_prompt(self, admission: Admission, blocks: Sequence[int]) -> int:
        """See ``Target.open_prompt``."""
        request_id = admission.request_id
        self._leader.settle()  # a step under way may have a row in the slot that it gets
        num_cached = self._slots.take(request_id, blocks)
        sampling = admission.options.sampling or self._sampling
        self._keys[request_id] = request_key(sampling.seed, request_id)
        self._done[request_id] = num_cached
        if self._samples_by_row:
            self._leader.tell(sampling_message(self._slots[request_id], sampling))
        return num_cached

    def run_pieces(self, pieces: Sequence[PromptPiece]) -> list[RequestVerdict]:
        """Run each piece by itself, and commit the token after each prompt that is complete."""
        verdicts = []
        for piece in pieces:
            token = self._run_emitted(piece) if piece.is_emitted else self._run_piece(piece)
            self._done[piece.request_id] = piece.end
            if piece.is_last:
                self.side.admit(piece.admission, self._stop_tokens)
                verdicts.append(self.side.commit_first(piece.request_id, token))
        self.free_finished(verdicts)
        return verdicts

    def _run_piece(self, piece: PromptPiece) -> int:
        """The token after a piece of a prompt; 0 if more of it follows."""
        request_id = piece.request_id
        see_to_pages(self._leader, self._slots, {request_id: piece.end})
        message = prompt_message(
            piece.tokens,
            self._slots[request_id],
            self._keys[request_id],
            start=piece.start,
            first_written=self._slots.shared_rows(request_id),
            is_last=piece.is_last,
        )
        answer = self._leader.ask(message)
        return int(answer[0]) if piece.is_last else 0

    def _run_emitted(self, piece: PromptPiece) -> int:
        """The token after tokens that were emitted before: run as a chain, as they were decoded."""
        rows = VerifyRows(
            piece.request_id,
            piece.tokens,
            tuple(range(-1, piece.count - 1)),
            tuple(range(piece.start, piece.end)),
            piece.start,
        )
        return self._sampled([rows])[-1]

    @property
    def is_ahead(self) -> bool:
        """See ``Target.is_ahead``."""
        return self.ahead.is_under_way

    def verify(
        self,
        candidates: Candidates | None,
        meanwhile: Callable[[], None] = nothing,
        goes_on: Callable[[], bool] = never,
    ) -> tuple[list[VerifyRows], list[RequestVerdict]]:
        """See ``Target.verify``.

        The ranks walk, too, to move their accepted rows: both walks see the same samples.
        """
        rows = self.side.verify_rows(candidates)
        if goes_on is not never:
            goes_on = partial(self._all_go_on, goes_on)
        places = self.ahead.places(rows)
        if places is None:
            sampled = self._sampled(rows, meanwhile, goes_on)
        else:
            answer = self.ahead.go_on(places, rows, meanwhile, goes_on, self.side.is_last)
            sampled = answer[places].tolist()
        verdicts = []
        first = 0
        for request in rows:
            tokens = sampled[first : first + len(request.tokens)]
            verdicts.append(self.side.judge(request, tokens.__getitem__)[0])
            first += len(request.tokens)
        self.free_finished(verdicts)
        return rows, verdicts

    def _all_go_on(self, goes_on: Callable[[], bool]) -> bool:
        """Whether a step of those who go on is the next one: not where they take turns."""
        return self.side.all_go_on() and goes_on()

    def _sampled(
        self,
        rows: Sequence[VerifyRows],
        meanwhile: Callable[[], None] = nothing,
        goes_on: Callable[[], bool] = never,
    ) -> list[int]:
        """The token that the target emits after each row, request after request."""
        needed = {r.request_id: r.context + len(r.tokens) for r in rows}
        see_to_pages(self._leader, self._slots, needed)
        requests = [
            rows_to_verify(r, self._slots[r.request_id], self._keys[r.request_id]) for r in rows
        ]
        sampled: list[int] = []
        parts = split_steps(requests)
        for part in parts:
            num_rows = sum(len(r.tokens) for r in part)
            bucket = bucket_of(num_rows, self._smallest_bucket)
            message = pack_step(part, bucket=bucket, scratch_slot=self._leader.scratch_slot)
            if goes_on is not never and len(parts) == 1 and num_rows == len(rows):
                answer = self.ahead.run(message, rows, meanwhile, goes_on, self.side.is_last)
            else:
                answer = self._leader.ask(message, meanwhile)
            sampled += answer[:num_rows].tolist()
        return sampled

    def free(self, request_id: int) -> None:
        """See ``Target.free``."""
        self.ahead.leave(request_id)
        self._slots.free(request_id, self._done.pop(request_id, None))
        self._keys.pop(request_id, None)
