"""The rows that simulator and engine both write, so that validation is a join of two tables.

Times are seconds since the start of the run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        request_id: Its number in the trace.
        category: Kind of prompt, "" if unknown.
        arrival: When it came.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens emitted so far.
        admitted: When it joined the batch; None while it waits.
        first_token: When its first token was there.
        finish: When its last token was there; None if the run ended before.
        num_rounds: Rounds that it took part in.
        num_draft_tokens: Draft tokens verified, roots not counted.
        num_accepted_tokens: Draft tokens accepted, bonus tokens not counted.
    """

    request_id: int
    category: str
    arrival: float
    prompt_tokens: int
    output_tokens: int = 0
    admitted: float | None = None
    first_token: float | None = None
    finish: float | None = None
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of the batch. The five spans add up to its time on the critical path.

    Attributes:
        round: Number, from 0.
        start: When the target had emitted the round before (or had waited for work).
        batch: Requests in it.
        rows: Rows that the target verified, roots included.
        context: Sum of the requests' KV rows before the round.
        num_expansions: Draft forwards made for it, overlapped ones included.
        draft_rows: Rows of these forwards.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens accepted.
        num_emitted_tokens: Tokens emitted, bonus tokens included.
        prefill: Seconds of prefill between ``start`` and the round proper.
        prefill_tokens: Prompt tokens prefilled.
        target: Span: target forward, sampling and walk.
        link_there: Span: verdict on its way to the draft.
        link_back: Span: candidates on their way to the target.
        reroot: Span: re-rooting trees and moving KV rows, on the critical path.
        draft: Span: drafting that the target waits for: all of it when serial, what a re-root miss
            or a late overlapped forward exposes when asynchronous ("miss" in the papers).
    """

    round: int
    start: float
    batch: int
    rows: int
    context: int
    num_expansions: int
    draft_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    prefill: float
    prefill_tokens: int
    target: float
    link_there: float
    link_back: float
    reroot: float
    draft: float

    @property
    def seconds(self) -> float:
        """Duration of the round, prefill before it not counted."""
        return self.target + self.link_there + self.link_back + self.reroot + self.draft


SPANS = ("target", "draft", "reroot", "link_there", "link_back")


@dataclass(slots=True)
class RunRecords:
    """Everything that a run, simulated or measured, leaves behind.

    Attributes:
        requests: One row per request of the trace, finished or not.
        rounds: One row per round.
        seconds: Length of the run.
        notes: What a reader must know, for example that the draft process died.
    """

    requests: list[RequestRecord]
    rounds: list[RoundRecord]
    seconds: float
    notes: list[str]

    def request_table(self) -> pd.DataFrame:
        """One row per request; column per field of RequestRecord."""
        return _table(RequestRecord, self.requests)

    def round_table(self) -> pd.DataFrame:
        """One row per round; column per field of RoundRecord."""
        return _table(RoundRecord, self.rounds)


def _table(row_type: type, rows: list[Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in rows], columns=[f.name for f in fields(row_type)])
