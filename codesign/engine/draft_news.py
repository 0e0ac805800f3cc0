"""What the draft is told of a round: it never hears of requests that nobody drafts for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codesign.engine.pieces import PromptPiece
from codesign.policy.protocol import Admission, PromptRows, RequestVerdict, Verdict
from codesign.prompts import BoundRequest


class DraftNews:
    """Makes verdicts for the draft, and knows which requests it has rows of.

    Args:
        requests: All of the run.

    Attributes:
        quiet: Numbers of requests that are not drafted for.
    """

    def __init__(self, requests: Sequence[BoundRequest]) -> None:
        self.quiet = {r.request_id for r in requests if not r.options.speculates}
        self._told: set[int] = set()
        self._dropped: list[int] = []

    def drop(self, request_ids: Iterable[int]) -> None:
        """Requests go, of which the draft may have rows: it is told with the next verdict."""
        self._dropped += request_ids

    def verdict(
        self,
        number: int,
        judged: Sequence[RequestVerdict],
        joining: Sequence[Admission],
        pieces: Sequence[PromptPiece],
        *,
        now: float,
        beside: tuple[int, int],
        sharing: tuple[int, int],
    ) -> Verdict:
        """The message with which a round starts.

        Args:
            number: Of the round.
            judged: What the last one has decided.
            joining: Requests that join.
            pieces: Parts of prompts that run within the round.
            now: See ``Verdict``, as for those that follow.
            beside: Requests that decode beside those that are drafted for, and their KV rows.
            sharing: Prompt rows in the round, and requests that wait.
        """
        told = self._told
        joining = [admission for admission in joining if admission.is_drafted_for]
        prompts = []
        for piece in pieces:
            if piece.admission.is_drafted_for:
                tokens = () if piece.request_id in told else piece.admission.tokens
                prompts.append(PromptRows(piece.request_id, tokens, piece.end))
                told.add(piece.request_id)
        told |= {admission.request_id for admission in joining}
        dropped, self._dropped = [n for n in self._dropped if n in told], []
        told.difference_update(dropped)
        requests = [entry for entry in judged if entry.request_id in told]
        told -= {entry.request_id for entry in requests if entry.is_finished}
        return Verdict(
            number,
            tuple(requests),
            tuple(joining),
            prompts=tuple(prompts),
            dropped=tuple(dropped),
            now=now,
            beside=beside,
            sharing=sharing,
        )
