"""Which steps a profile times: shapes that are spread over batch, rows and context.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codesign.profiler.steps import Op, StepShape

CONTEXTS = (32, 128, 256, 512)
PROMPTS = (16, 64, 128, 256, 512)
MAX_REQUESTS = 8
# The first lies beyond one page of keys: within one, attention takes up to 10 % of a step less.
RANK_CONTEXTS = (160, 512, 1024, 2048)
# (requests, rows of each). Row counts lie on both sides of those where a forward gets dearer.
_TARGET = (
    *((1, n) for n in (1, 2, 4, 6, 8, 9, 12, 16, 24, 32)),
    *((2, n) for n in (1, 4, 8)),
    (3, 3),
    *((4, n) for n in (1, 2, 4, 8)),
    (6, 8),
    *((8, n) for n in (1, 2, 4, 8)),
)
_TARGET_BESIDE = frozenset({(1, 1), (1, 4), (1, 8), (2, 4), (4, 1), (4, 4), (4, 8)})
_DRAFT = (
    *((1, n) for n in (1, 2, 4, 8, 16)),
    *((2, n) for n in (1, 4)),
    *((4, n) for n in (1, 2, 4)),
    *((8, n) for n in (1, 2, 4)),
)
_DRAFT_ALONE = ((1, 1), (1, 4), (4, 4))
_ANSWERS = ((1, 8), (2, 8), (4, 8), (8, 8))
_RANK_ANSWERS = (*_ANSWERS, (1, 4), (8, 4), (1, 16), (8, 16))
_CHAINS = (2, 7)  # forwards of a draft in a row
# On ranks a forward gets dearer where the next bucket begins: 8, 16, 32, 64, 128 rows.
_RANK_TARGET = (
    *((1, n) for n in (1, 4, 8, 9, 16, 17, 32)),
    *((2, n) for n in (1, 4, 8)),
    (3, 11),
    *((4, n) for n in (1, 2, 4, 8)),
    (5, 13),
    *((8, n) for n in (1, 4, 8, 16, 2)),
)
_RANK_DRAFT = (
    *((1, n) for n in (1, 2, 4, 8, 9, 16)),
    *((2, n) for n in (1, 4)),
    *((3, n) for n in (6, 11)),
    *((4, n) for n in (1, 2, 4)),
    # Four rows, as most trees of a batch draft, at two contexts; 16 requests draft 128 rows with a
    # width of 8.
    *((8, n) for n in (1, 2, 4, 4, 8, 16)),
    (5, 13),
)
_RANK_WIDE = (8, 4)  # timed with twice the children, too


@dataclass(frozen=True, slots=True)
class Grid:
    """Batches and rows to time.

    Attributes:
        target: (requests, rows of each) of verifications.
        draft: The same of expansions.
        prompts: Lengths of prompts.
        joins_prompts: Prompts of several requests run in one forward.
        stream_rows: Rows of one request up to which its steps are timed at two contexts.
        answers: The same of re-roots and of choosing candidates.
        wide: Of ``draft``, what is timed with twice the children, too; None for nothing.
        times_reroots: Re-roots are timed by themselves, and not in rounds that are served.
    """

    target: tuple[tuple[int, int], ...]
    draft: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    joins_prompts: bool
    stream_rows: int = 1
    answers: tuple[tuple[int, int], ...] = _ANSWERS
    wide: tuple[int, int] | None = None
    times_reroots: bool = True


CPU_GRID = Grid(_TARGET, _DRAFT, PROMPTS, joins_prompts=True)
# Two in each bucket that prompts are filled up to, off its edges, as the draft's last token is run
# as a step. Whether those above 256 are filled up shows in whether the two take as long.
_RANK_PROMPTS = (
    *(9, 15, 20, 31, 40, 63, 80, 127, 143, 255),
    *(287, 511, 575, 767, 831, 1023, 1151, 1535, 1727, 2047),
)
RANK_GRID = Grid(
    _RANK_TARGET,
    _RANK_DRAFT,
    _RANK_PROMPTS,
    joins_prompts=False,
    stream_rows=8,
    answers=_RANK_ANSWERS,
    wide=_RANK_WIDE,
    times_reroots=False,
)


def contexts_within(
    max_positions: int, spare: int, contexts: Sequence[int] = CONTEXTS
) -> tuple[int, ...]:
    """Contexts to time on a model with so many positions; at least one."""
    return tuple(c for c in contexts if c + spare <= max_positions) or (max_positions // 2,)


def target_shapes(
    contexts: Sequence[int], *, beside: bool, lean: bool, grid: Grid = CPU_GRID
) -> tuple[StepShape, ...]:
    """Verifications, and prefills unless ``beside``."""
    verify = _spread("target", grid.target, contexts, grid.stream_rows, lean=lean)
    if beside:  # a choice of those that are timed alone, to be compared with them
        return tuple([s for s in verify if (s.requests, s.rows) in _TARGET_BESIDE])
    return (*verify, *_prefills("prefill", contexts, grid, lean=lean))


def draft_shapes(
    contexts: Sequence[int], *, few: bool, lean: bool, grid: Grid = CPU_GRID
) -> tuple[StepShape, ...]:
    """Expansions, prefills, re-rooting and choosing; or just a few expansions."""
    if few:
        return _spread("draft", _DRAFT_ALONE, contexts, 1, lean=True)
    context = _of_several(contexts)[:2][-1]
    answers: tuple[Op, ...] = ("reroot", "choice") if grid.times_reroots else ("choice",)
    drafts = _spread("draft", grid.draft, contexts, grid.stream_rows, lean=lean)
    return (
        *drafts,
        *[replace(s, op="wide") for s in drafts if (s.requests, s.rows) == grid.wide],
        *_prefills("draft_prefill", contexts, grid, lean=lean),
        *[
            StepShape(op, requests, rows, context)
            for op in answers
            for requests, rows in grid.answers
        ],
    )


def chain_shapes(contexts: Sequence[int]) -> tuple[StepShape, ...]:
    """Two rows of draft forwards: what the first forward of one takes more is told from both."""
    return tuple([StepShape("drafted", 1, count, contexts[0]) for count in _CHAINS])


def _spread(
    op: Op,
    pairs: Sequence[tuple[int, int]],
    contexts: Sequence[int],
    stream_rows: int,
    *,
    lean: bool,
) -> tuple[StepShape, ...]:
    """Each (requests, rows) at one context (lean) or two, a different one each time.

    One row of each of several, as in plain decoding, at the shortest and at the longest.
    """
    shapes, several = list[StepShape](), _of_several(contexts)
    for index, (requests, rows) in enumerate(pairs):
        means = contexts if requests == 1 else several
        one, other = index % len(means), (index + 2) % len(means)
        if rows == 1 < requests:
            picks = {0, len(means) - 1}
        elif lean and (requests > 1 or rows > stream_rows):
            picks = {one}
        else:
            picks = {one, other}
        shapes += [StepShape(op, requests, rows, means[i]) for i in sorted(picks)]
    return tuple(shapes)


def _of_several(contexts: Sequence[int]) -> Sequence[int]:
    """Mean contexts of several requests, the longest of which may have twice as many rows."""
    return [c for c in contexts if 2 * c <= contexts[-1]] or [contexts[-1] // 2]


def _prefills(op: Op, contexts: Sequence[int], grid: Grid, *, lean: bool) -> tuple[StepShape, ...]:
    lengths = [n for n in grid.prompts if n <= contexts[-1]]
    if not grid.joins_prompts:
        return tuple([StepShape(op, 1, n) for n in lengths])
    lengths = lengths[: 4 if lean else None]
    several = [StepShape(op, 4, 16), StepShape(op, 2, lengths[-1] // 2)]
    return (*[StepShape(op, 1, n) for n in lengths], *several)
