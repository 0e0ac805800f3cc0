"""What each pair of models reached, and what is behind it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.campaign import rows
from benchmarks.campaign.coverage_luck import usual_coverage
from benchmarks.campaign.goals import (
    ATTAINMENT,
    CORRELATION,
    KNOWN,
    MEASURED,
    PREDICTED,
    REGRET,
    REPLAYED,
    STEPS,
    Result,
    attainment_error,
    covered,
    errors,
    length_error,
    mean_error,
    mean_of,
    percent,
    replay_error,
    span_error,
    speeds,
    worst_error,
)
from benchmarks.campaign.rows import Row
from codesign.records import SPANS


def by_pair(results: Sequence[Result]) -> str:
    """What each pair reached, and what is behind it."""
    heads = ["", "goal", *(result.name for result in results)]
    return "### By pair\n\n" + rows.table_of(
        (*_errors(), *_choices(), *_intervals()), results, heads
    )


def _errors() -> list[Row]:
    return [
        Row(*rows.SPEED_HEAD, lambda r: percent(mean_error(r))),
        Row(*rows.WORST_HEAD, lambda r: percent(worst_error(r))),
        Row("the same, acceptance known", "", _known_error),
        Row("the same, rounds without prompts", "", partial(_between, place=PREDICTED)),
        Row("the same, acceptance known too", "", partial(_between, place=KNOWN)),
        Row(*rows.LENGTH_HEAD, _length_error),
        Row("round time, one stream, mean error", "", _round_error),
        *(
            Row(*rows.span_head(span), lambda r, span=span: percent(span_error(r, span)))
            for span in SPANS
        ),
        *(Row(*rows.replay_head(name), partial(_worst_replay, name=name)) for name in REPLAYED),
        Row("replay: SLO attainment, worst, points", f"{100.0 * ATTAINMENT:g}", _attainment),
    ]


def _choices() -> list[Row]:
    regret, order = percent(REGRET, 0), f"{CORRELATION:g}"
    resampled = "the same, measured order against itself, requests resampled"

    def row(label: str, goal: str, workload: str, name: str, *, is_optional: bool = False) -> Row:
        cell = partial(_plan, workload=workload, name=name)
        return Row(label, goal, cell, is_optional=is_optional)

    return [
        row("regret: latency of one stream", regret, "stream", "regret"),
        row("regret, acceptance known", "", "stream", "regret_known"),
        row("regret: throughput of a batch", regret, "batch", "regret"),
        row("regret: goodput of a replay", regret, "segment", "regret"),
        row("rank correlation, one stream", order, "stream", "correlation"),
        row(resampled, "", "stream", "redrawn", is_optional=True),
        row("rank correlation, batch", order, "batch", "correlation"),
        row("rank correlation, replay", order, "segment", "correlation"),
    ]


def _intervals() -> list[Row]:
    usual = "the same, of intervals that are right, 8 of 10 times"
    known = "of the steps' part alone, acceptance known"
    return [
        Row(*rows.COVERAGE_HEAD, _coverage),
        Row(usual, "", _usual_coverage, is_optional=True),
        Row(known, "", _steps_coverage, is_optional=True),
        Row("runs", "", lambda r: str(len(r.runs()))),
    ]


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


def _coverage(result: Result) -> str:
    inside = covered(result)
    return percent(mean_of(inside), 0) + f" of {len(inside)}"


def _usual_coverage(result: Result) -> str:
    """How much of the coverage is chance, if the result says what intervals are made of."""
    found = usual_coverage(result.runs())
    return "-" if found is None else f"{found[0]:.0%} to {found[1]:.0%}".replace("%", " %")


def _steps_coverage(result: Result) -> str:
    """Of seconds a round in streams and batches; what queues make of a replay's is all in one.

    None of it is luck of prompts; "-" if the result does not say what intervals are made of.
    """
    if "unsure" not in result.pair:
        return "-"
    inside = []
    for run in result.runs("stream", "batch"):
        tpot, length = (run["figures"].get(n, ()) for n in ("tpot_mean", "acceptance_length"))
        if len(tpot) > KNOWN and "tpot_mean" in run.get("parts", {}):
            tokens = length[KNOWN] / length[MEASURED] if len(length) > KNOWN else 1.0
            error = tokens * tpot[KNOWN] / tpot[MEASURED] - 1.0
            inside.append(float(abs(error) <= run["parts"]["tpot_mean"][STEPS]))
    return percent(mean_of(inside), 0) + f" of {len(inside)}" if inside else "-"
