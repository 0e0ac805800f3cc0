"""The rows that simulator and engine both write, so that validation is a join of two tables.

Times are seconds since the start of the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

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
        replica: The replica that served it.
        cached_tokens: Prompt tokens whose KV rows another request had left behind.
        num_preemptions: Times that it lost its KV rows and was computed again.
        slo_tpot: Its own target of seconds per token; None for the run's.
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
    replica: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    slo_tpot: float | None = None


def own_targets(requests: pd.DataFrame) -> list[float | None]:
    """Seconds per token that each request of a trace asks for itself; None for the run's target."""
    if "slo_tpot" not in requests:
        return [None] * len(requests)
    return [None if seconds != seconds else seconds for seconds in requests["slo_tpot"].tolist()]


def has_own_targets(requests: pd.DataFrame) -> bool:
    """Whether some request of a trace asks for a time per token itself."""
    return any(own is not None for own in own_targets(requests))


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of the batch. The five spans add up to its time on the critical path.

    Attributes:
        round: Number, from 0, of its replica.
        start: When the target had emitted the round before (or had waited for work).
        batch: Requests that take part; 0 for a step that only runs prompts.
        rows: Rows that the target verified, roots included.
        context: Sum of the requests' KV rows before the round.
        num_expansions: Draft forwards made for it, overlapped ones included.
        draft_rows: Rows of these forwards.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens accepted.
        num_emitted_tokens: Tokens emitted, bonus tokens included.
        prefill: Seconds of prefill between ``start`` and the round proper; seconds that prompt
            rows add to the forward where they share it.
        prefill_tokens: Prompt tokens prefilled.
        target: Span: target forward, sampling and walk.
        link_there: Span: verdict on its way to the draft.
        link_back: Span: candidates on their way to the target.
        reroot: Span: re-rooting trees and moving KV rows, on the critical path.
        draft: Span: drafting that the target waits for: all of it when serial, what a re-root miss
            or a late overlapped forward exposes when asynchronous ("miss" in the papers).
        replica: The replica that ran it.
        running: Requests that decode, those that sit the round out among them; ``batch`` where
            nobody says, as in older files.
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
    replica: int = 0
    running: int = 0

    def __post_init__(self) -> None:
        if self.running < self.batch:
            object.__setattr__(self, "running", self.batch)

    @property
    def seconds(self) -> float:
        """Duration of the round, prefill before it not counted."""
        return self.target + self.link_there + self.link_back + self.reroot + self.draft


SPANS = ("target", "draft", "reroot", "link_there", "link_back")
_PAGE = 8192  # rounds that are packed at once


class RoundLog(Sequence[RoundRecord]):
    """Rounds in the order in which they were written, kept as columns: an hour has 100,000s.

    The last rounds are one flat array, earlier ones pages of columns, each as small as its values
    allow: a single value if all are equal.

    Attributes:
        most_draft_rows: Rows of the largest draft forward without the prompts and missed tokens
            that it reads, which a round's ``draft_rows`` includes. 0 unless simulated.
    """

    _NAMES = tuple(field.name for field in fields(RoundRecord))
    _IS_COUNT = tuple(field.type == "int" for field in fields(RoundRecord))

    def __init__(self, rounds: Iterable[RoundRecord] = ()) -> None:
        self._pages: list[list[NDArray[np.generic]]] = []
        self._last = array("d")
        self.most_draft_rows = 0
        for record in rounds:
            self.append(record)

    def append(self, record: RoundRecord) -> None:
        """Add a round."""
        self.append_values([getattr(record, name) for name in self._NAMES])

    def append_values(self, values: Sequence[float]) -> None:
        """Add a round by the values of RoundRecord's fields, in their order."""
        self._last.extend(values)
        self._pack_if_full()

    def append_rows(self, rows: NDArray[np.float64]) -> None:
        """Add rounds, one per row of (N, fields) values in the order of RoundRecord's fields."""
        width = len(self._NAMES)
        while len(rows):
            room = _PAGE - len(self._last) // width
            self._last.frombytes(rows[:room].tobytes())
            self._pack_if_full()
            rows = rows[room:]

    def _pack_if_full(self) -> None:
        if len(self._last) == _PAGE * len(self._NAMES):
            matrix = np.array(self._last).reshape(_PAGE, len(self._NAMES))
            self._pages.append(list(map(_packed, matrix.T, self._IS_COUNT)))
            self._last = array("d")

    @classmethod
    def from_table(cls, table: pd.DataFrame) -> RoundLog:
        """The rounds in a table with a column per field.

        Raises:
            KeyError: If a column is missing.
        """
        log = cls()
        columns = [table[name].to_numpy(np.float64).tolist() for name in cls._NAMES]
        for values in zip(*columns, strict=True):
            log.append_values(values)
        return log

    @classmethod
    def merged(cls, logs: Iterable[RoundLog]) -> RoundLog:
        """The rounds of several logs, in order of their start."""
        logs = list(logs)
        rows = [np.stack([log.column(name) for name in cls._NAMES], axis=1) for log in logs]
        every = np.concatenate([np.zeros((0, len(cls._NAMES))), *rows])
        merged = cls()
        merged.append_rows(every[np.argsort(every[:, cls._NAMES.index("start")], kind="stable")])
        merged.most_draft_rows = max([log.most_draft_rows for log in logs], default=0)
        return merged

    def column(self, name: str) -> NDArray[np.float64]:
        """(rounds,) values of one field or of ``seconds``, counts as well; a copy."""
        if name == "seconds":
            return sum([self.column(span) for span in SPANS], np.zeros(len(self)))
        at, width = self._NAMES.index(name), len(self._NAMES)
        pages = [np.broadcast_to(page[at], _PAGE) for page in self._pages]
        return np.concatenate([*pages, np.array(self._last[at::width])], dtype=np.float64)

    def to_table(self) -> pd.DataFrame:
        """One row per round; column per field of RoundRecord."""
        import pandas as pd

        return pd.DataFrame(
            {
                name: self.column(name).astype(np.int64 if is_count else np.float64)
                for name, is_count in zip(self._NAMES, self._IS_COUNT, strict=True)
            }
        )

    def __len__(self) -> int:
        return _PAGE * len(self._pages) + len(self._last) // len(self._NAMES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoundLog) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # rounds are still added

    def __iter__(self) -> Iterator[RoundRecord]:
        columns = [self.column(name) for name in self._NAMES]
        lists = [
            (c.astype(np.int64) if is_count else c).tolist()
            for c, is_count in zip(columns, self._IS_COUNT, strict=True)
        ]
        return (RoundRecord(*values) for values in zip(*lists, strict=True))

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[RoundRecord]: ...
    def __getitem__(self, index: int | slice) -> RoundRecord | list[RoundRecord]:
        return list(self)[index]


def _packed(column: NDArray[np.float64], is_count: bool) -> NDArray[np.generic]:
    """A copy of a page's column, in few bytes."""
    if (column == column[0]).all():
        return column[:1].copy()
    return column.astype(np.int32 if is_count and column.max() < 2**31 else np.float64)


@dataclass(slots=True)
class RunRecords:
    """Everything that a run, simulated or measured, leaves behind.

    Attributes:
        requests: One row per request of the trace, finished or not.
        rounds: One row per round.
        seconds: Length of the run.
        notes: What a reader must know, for example that the draft process died.
        calibration: As Metrics.calibration_error; empty for none.
        refused: Why requests were not served, by number; the engine's runs only.
        queued: Seconds that requests waited while nothing was done for them, by number: also behind
            a pool for prompts and after evictions. Simulations only, and not in their files.
    """

    requests: list[RequestRecord]
    rounds: RoundLog
    seconds: float
    notes: list[str]
    refused: dict[int, str] = field(default_factory=dict)
    calibration: dict[str, float] = field(default_factory=dict)
    queued: dict[int, float] = field(default_factory=dict)

    def request_table(self) -> pd.DataFrame:
        """One row per request; column per field of RequestRecord."""
        import pandas as pd

        names = [field.name for field in fields(RequestRecord)]
        return pd.DataFrame([asdict(request) for request in self.requests], columns=names)

    def round_table(self) -> pd.DataFrame:
        """One row per round; column per field of RoundRecord."""
        return self.rounds.to_table()
