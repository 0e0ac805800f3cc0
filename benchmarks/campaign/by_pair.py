"""What each pair of models reached, and what is behind it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.campaign.coverage_luck import usual_coverage
from benchmarks.campaign.goals import (
    ATTAINMENT,
    CORRELATION,
    COVERAGE,
    KNOWN,
    LENGTH,
    MEASURED,
    PREDICTED,
    REGRET,
    REPLAY,
    REPLAYED,
    SPAN,
    SPEED,
    STEPS,
    WORST_SPEED,
    Result,
    attainment_error,
    between,
    covered,
    errors,
    length_error,
    mean_error,
    mean_of,
    percent,
    replay_error,
    span_error,
    speeds,
    table,
    worst_error,
)
from codesign.records import SPANS


def by_pair(results: Sequence[Result]) -> str:
    """What each pair reached, and what is behind it."""
    heads = ["", "goal", *(result.name for result in results)]
    rows = [
        [
            "decode speed, one stream, mean error",
            _most(SPEED),
            *(percent(mean_error(r)) for r in results),
        ],
        ["the same, worst", _most(WORST_SPEED), *(percent(worst_error(r)) for r in results)],
        ["the same, acceptance known", "", *map(_known_error, results)],
        [
            "the same, rounds without prompts",
            "",
            *(_between(r, PREDICTED) for r in results),
        ],
        ["the same, acceptance known too", "", *(_between(r, KNOWN) for r in results)],
        ["acceptance length, mean error", _most(LENGTH), *map(_length_error, results)],
        ["round time, one stream, mean error", "", *(_round_error(r) for r in results)],
        *(
            [
                f"span: {span.replace('_', ' ')}, mean error",
                _most(SPAN),
                *(percent(span_error(r, span)) for r in results),
            ]
            for span in SPANS
        ),
        *(
            [
                f"replay: {name.replace('_', ' ').upper()}, worst error",
                _most(REPLAY),
                *(_worst_replay(r, name) for r in results),
            ]
            for name in REPLAYED
        ),
        [
            "replay: SLO attainment, worst, points",
            f"{100.0 * ATTAINMENT:g}",
            *(_attainment(r) for r in results),
        ],
        [
            "regret: latency of one stream",
            _most(REGRET),
            *(_plan(r, "stream", "regret") for r in results),
        ],
        ["regret, acceptance known", "", *(_plan(r, "stream", "regret_known") for r in results)],
        [
            "regret: throughput of a batch",
            _most(REGRET),
            *(_plan(r, "batch", "regret") for r in results),
        ],
        [
            "regret: goodput of a replay",
            _most(REGRET),
            *(_plan(r, "segment", "regret") for r in results),
        ],
        [
            "rank correlation, one stream",
            f"{CORRELATION:g}",
            *(_plan(r, "stream", "correlation") for r in results),
        ],
        *_redrawn(results),
        [
            "rank correlation, batch",
            f"{CORRELATION:g}",
            *(_plan(r, "batch", "correlation") for r in results),
        ],
        [
            "rank correlation, replay",
            f"{CORRELATION:g}",
            *(_plan(r, "segment", "correlation") for r in results),
        ],
        ["coverage of 80 % intervals", between(COVERAGE), *map(_coverage, results)],
        *_usual_coverage(results),
        *_known_intervals(results),
        ["runs", "", *(str(len(r.runs())) for r in results)],
    ]
    return "### By pair\n\n" + table(heads, rows)


def _most(share: float) -> str:
    return percent(share, 0)


def _known_error(result: Result) -> str:
    return percent(mean_of(speeds(result, KNOWN)))


def _between(result: Result, place: int) -> str:
    sizes = [abs(e) for e, _ in errors(result.runs("stream"), "decode_speed", place)]
    return f"{percent(mean_of(sizes))}, worst {percent(max(sizes, default=None))}"


def _length_error(result: Result) -> str:
    return _beside_known(length_error(result), length_error(result, KNOWN), percent)


def _round_error(result: Result) -> str:
    values = [r["rounds"]["seconds"] for r in result.runs("stream")]
    return percent(mean_of([abs(p / m - 1.0) for p, m in values if m]))


def _worst_replay(result: Result, name: str) -> str:
    found = replay_error(result, name), replay_error(result, name, KNOWN)
    return _beside_known(*found, percent)


def _beside_known(
    worst: float | None, known: float | None, shown: Callable[[float | None], str]
) -> str:
    """An error, and the same with the acceptance known, if it is."""
    return shown(worst) + ("" if known is None else f" ({shown(known)} known)")


def _attainment(result: Result) -> str:
    found = attainment_error(result), attainment_error(result, KNOWN)
    return _beside_known(*found, lambda error: "-" if error is None else f"{error * 100.0:.1f}")


def _plan(result: Result, workload: str, name: str) -> str:
    plans = [p for p in result.pair["plans"] if p["workload"] == workload]
    plans = [p for p in plans if p.get(name) is not None and p["num_runs"] > 1]
    values = [percent(p[name]) if name.startswith("regret") else f"{p[name]:.3f}" for p in plans]
    values = [f"{v} of {p['num_runs']}" for v, p in zip(values, plans, strict=True)]
    if len(plans) > 1:
        values = [f"{v} ({p['workers']} GPUs)" for v, p in zip(values, plans, strict=True)]
    return ", ".join(values) or "-"


def _redrawn(results: Sequence[Result]) -> list[list[str]]:
    """A row, if these results say how sure the measured order is."""
    values = [_plan(result, "stream", "redrawn") for result in results]
    label = "the same, measured order against itself, requests resampled"
    return [[label, "", *values]] if any(value != "-" for value in values) else []


def _coverage(result: Result) -> str:
    inside = covered(result)
    return percent(mean_of(inside), 0) + f" of {len(inside)}"


def _usual_coverage(results: Sequence[Result]) -> list[list[str]]:
    """A row, if these results say what intervals are made of: how much of it is chance."""
    found = [usual_coverage(result.runs()) for result in results]
    shares = ["-" if each is None else f"{each[0]:.0%} to {each[1]:.0%}" for each in found]
    label = "the same, of intervals that are right, 8 of 10 times"
    return [[label, "", *(share.replace("%", " %") for share in shares)]] if any(found) else []


def _known_intervals(results: Sequence[Result]) -> list[list[str]]:
    """A row, if these results say what intervals are made of: none of it is luck of prompts."""
    shares = [_steps_coverage(r) if "unsure" in r.pair else "-" for r in results]
    label = "of the steps' part alone, acceptance known"
    return [[label, "", *shares]] if any(share != "-" for share in shares) else []


def _steps_coverage(result: Result) -> str:
    """Of seconds a round in streams and batches; what queues make of a replay's is all in one."""
    inside = []
    for run in result.runs("stream", "batch"):
        tpot, length = (run["figures"].get(n, ()) for n in ("tpot_mean", "acceptance_length"))
        if len(tpot) > KNOWN and "tpot_mean" in run.get("parts", {}):
            tokens = length[KNOWN] / length[MEASURED] if len(length) > KNOWN else 1.0
            error = tokens * tpot[KNOWN] / tpot[MEASURED] - 1.0
            inside.append(float(abs(error) <= run["parts"]["tpot_mean"][STEPS]))
    return percent(mean_of(inside), 0) + f" of {len(inside)}" if inside else "-"
