"""The generated part of docs/validation.md, from the JSON files that ``join`` left.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaign.plot import calibration_svg

DOCUMENT = Path(__file__).parents[2] / "docs" / "validation.md"
CALIBRATION = DOCUMENT.parent / "images" / "validation-calibration.svg"
BEGIN, END = "<!-- campaign -->", "<!-- end of campaign -->"
SPANS = ("target", "draft", "reroot", "link_there", "link_back")
SMALL = 0.02  # share of a round below which a span's error is not counted
REPLAYED = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
PREDICTED, LOW, HIGH, MEASURED, KNOWN = range(5)  # places in a figure's list
WORST = 3
WIDTH = 100

INTRODUCTION = """\
## Predictions against the engine

Written by `python -m benchmarks.campaign --report` from {files}.

A campaign profiles a pair of models on rank groups, and serves a grid of plans and a stretch of a
trace on them. The fit sees the profile alone; no plan of the grid is in it, and the prompts served
are others than those whose acceptance was recorded. Each run is predicted by {seeds} simulations.
*One stream* is one request after another, *batch* up to eight at once that are all there from the
start, *replay* a stretch of `conv-twin` at a rate that loads plain decoding by half. A decode
speed is 1 / TPOT; where the draft shares the target's GPUs its prompt is in it, too. Errors are
(predicted - measured) / measured; the mean ones are of their sizes. Intervals are of 80 %: spread
over the simulations, held-out error of the steps, and the luck of the prompts, both of those that
were recorded and of those that were served. Spans are those of rounds without prompts: where the
draft shares the target's GPUs, its prompt is in the draft's span of the other ones.
"""

NOT_CAPTURED = """\
### What the model does not capture

- Acceptance is recorded on {recorded} prompts of 48 tokens. What other prompts do to it is in the
  interval, not in the prediction; the column "acceptance known" has the same predictions with each
  request's own acceptance.
- A simulated request draws a stretch of another recorded one of its kind: the draft's luck of a
  request is not that request's. In a batch of 24 the last ones decide how long it takes.
- Step times are medians of a profile. A machine that is busier, or whose clocks are lower, than it
  was then is not in them.
- Prompts are not captured in graphs: the host launches kernel by kernel, and whatever else keeps
  the host busy is in their time.
- Prompts and rounds share no step: chunks of prompts are not measured here.
- One host: no network between groups.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """A pair of a campaign.

    Attributes:
        machine: That it was measured on.
        pair: As in the file.
    """

    machine: str
    pair: dict[str, Any]

    @property
    def name(self) -> str:
        """Of a table's column."""
        return f"{self.pair['pair']}, {self.machine}"

    def runs(self, *workloads: str) -> list[dict[str, Any]]:
        """Runs of these workloads; of all without one."""
        return [r for r in self.pair["runs"] if not workloads or r["workload"] in workloads]


def write_document(files: Sequence[Path]) -> None:
    """Rewrite the document between its markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    CALIBRATION.write_text(calibration_svg(calibrations(files)), encoding="utf-8")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{document(files)}\n{END}{after}", encoding="utf-8")


def calibrations(files: Sequence[Path]) -> dict[str, Any]:
    """What ``calibration_svg`` draws."""
    payloads = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    results = [Result(machine(p), pair) for p in payloads for pair in p["pairs"]]
    return {result.name: result.pair["calibration"] for result in results}


def document(files: Sequence[Path]) -> str:
    """The generated part."""
    payloads = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    results = [Result(machine(p), pair) for p in payloads for pair in p["pairs"]]
    measured = [result for result in results if result.runs()]
    names = ", ".join(f"`{path.parent.name}/{path.name}`" for path in files)
    parts = [
        INTRODUCTION.format(files=names, seeds=payloads[0]["num_seeds"]),
        remarks(payloads),
        goals(measured),
        worst(measured),
        *(runs_table(result) for result in measured),
        spans_table(measured),
        calibration_table(results),
        seconds_table(results),
        NOT_CAPTURED.format(recorded=_recorded(results)),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts if part).rstrip()


def _recorded(results: Sequence[Result]) -> str:
    counts = sorted({r.pair["recorded"] for r in results if "recorded" in r.pair})
    return " or ".join(map(str, counts)) or "some"


def remarks(payloads: Sequence[dict[str, Any]]) -> str:
    """What is to be known of each campaign."""
    lines = [
        f"- {machine(payload)}, {payload['created'][:10]}: {remark}"
        for payload in payloads
        for remark in payload.get("remarks", ())
    ]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def machine(payload: dict[str, Any]) -> str:
    """The GPU, or the CPU, in a few words."""
    found = payload["hardware"]
    if found.get("gpus"):
        return found["gpus"][0]["name"].split()[-1]
    return f"{found['cores']} CPU cores"


def goals(results: Sequence[Result]) -> str:
    """Every goal, and what each pair reached."""
    heads = ["", "goal", *(result.name for result in results)]
    rows = [
        ["decode speed, one stream, mean error", "3 %", *_each(results, _mean_error, "tpot_mean")],
        ["the same, worst", "8 %", *_each(results, _worst_error, "tpot_mean")],
        ["the same, acceptance known", "", *_each(results, _known_error, "tpot_mean")],
        [
            "in rounds without prompts",
            "",
            *(_between(r, PREDICTED) for r in results),
        ],
        ["in these, acceptance known", "", *(_between(r, KNOWN) for r in results)],
        ["acceptance length, mean error", "3 %", *_each(results, _length_error, MEASURED)],
        ["round time, one stream, mean error", "", *(_round_error(r) for r in results)],
        *(
            [f"span: {span.replace('_', ' ')}, mean error", "10 %", *_spans(results, span)]
            for span in SPANS
        ),
        *(
            [
                f"replay: {name.replace('_', ' ').upper()}, worst error",
                "10 %",
                *_replay(results, name),
            ]
            for name in REPLAYED
        ),
        ["replay: SLO attainment, worst, points", "3", *(_attainment(r) for r in results)],
        ["regret: latency of one stream", "2 %", *(_plan(r, "stream", "regret") for r in results)],
        ["regret, acceptance known", "", *(_plan(r, "stream", "regret_known") for r in results)],
        ["regret: throughput of a batch", "2 %", *(_plan(r, "batch", "regret") for r in results)],
        [
            "rank correlation, one stream",
            "0.95",
            *(_plan(r, "stream", "correlation") for r in results),
        ],
        ["rank correlation, batch", "0.95", *(_plan(r, "batch", "correlation") for r in results)],
        ["80 % intervals that hold", "70 to 90 %", *(_coverage(r) for r in results)],
        ["runs", "", *(str(len(r.runs())) for r in results)],
    ]
    return "### Goals\n\n" + table(heads, rows)


def _each(results: Sequence[Result], function: Any, argument: Any) -> list[str]:
    return [function(result, argument) for result in results]


def error_of(figure: Sequence[float], place: int = PREDICTED) -> float | None:
    """Relative error of a figure; None without the prediction or a measurement."""
    if len(figure) <= place or not figure[MEASURED]:
        return None
    return figure[place] / figure[MEASURED] - 1.0


def errors(
    runs: Iterable[dict[str, Any]], name: str, place: int = PREDICTED
) -> list[tuple[float, dict[str, Any]]]:
    """Errors of one figure with their runs."""
    found = []
    for run in runs:
        error = error_of(run["figures"].get(name, ()), place)
        if error is not None:
            found.append((error, run))
    return found


def speed_error(error: float) -> float:
    """Error of 1 / TPOT."""
    return 1.0 / (1.0 + error) - 1.0


def _speeds(result: Result, place: int = PREDICTED) -> list[float]:
    return [abs(speed_error(e)) for e, _ in errors(result.runs("stream"), "tpot_mean", place)]


def _mean_error(result: Result, _: str) -> str:
    return percent(_mean(_speeds(result)))


def _worst_error(result: Result, _: str) -> str:
    return percent(max(_speeds(result), default=None))


def _known_error(result: Result, _: str) -> str:
    return percent(_mean(_speeds(result, KNOWN)))


def _between(result: Result, place: int) -> str:
    sizes = [abs(e) for e, _ in errors(result.runs("stream"), "decode_speed", place)]
    return f"{percent(_mean(sizes))}, worst {percent(max(sizes, default=None))}"


def _length_error(result: Result, _: int) -> str:
    runs = [r for r in result.runs("stream", "batch") if not r["label"].startswith("plain")]
    sizes, known = (
        _mean([abs(e) for e, _ in errors(runs, "acceptance_length", place)])
        for place in (PREDICTED, KNOWN)
    )
    return percent(sizes) + ("" if known is None else f" ({percent(known)} known)")


def _round_error(result: Result) -> str:
    values = [r["rounds"]["seconds"] for r in result.runs("stream")]
    return percent(_mean([abs(p / m - 1.0) for p, m in values if m]))


def span_errors(result: Result, span: str, *workloads: str) -> list[float]:
    """Sizes of the errors of a span, where it is more than ``SMALL`` of the round."""
    found = []
    for run in result.runs(*workloads):
        predicted, measured = run["rounds"][span]
        if measured > SMALL * run["rounds"]["seconds"][1]:
            found.append(abs(predicted / measured - 1.0))
    return found


def _spans(results: Sequence[Result], span: str) -> list[str]:
    return [percent(_mean(span_errors(r, span, "stream", "batch"))) for r in results]


def _replay(results: Sequence[Result], name: str) -> list[str]:
    return [
        percent(max((abs(e) for e, _ in errors(r.runs("segment"), name)), default=None))
        for r in results
    ]


def _attainment(result: Result) -> str:
    points = [
        abs(figure[PREDICTED] - figure[MEASURED]) * 100.0
        for run in result.runs("segment")
        if (figure := run["figures"].get("slo_attainment"))
    ]
    return f"{max(points):.1f}" if points else "-"


def _plan(result: Result, workload: str, name: str) -> str:
    plans = [p for p in result.pair["plans"] if p["workload"] == workload]
    plans = [p for p in plans if p.get(name) is not None]
    values = [percent(p[name]) if name.startswith("regret") else f"{p[name]:.3f}" for p in plans]
    if len(plans) > 1:
        values = [f"{v} ({p['workers']} GPUs)" for v, p in zip(values, plans, strict=True)]
    return ", ".join(values) or "-"


def _coverage(result: Result) -> str:
    inside = [is_inside(figure) for figure in judged(result)]
    return percent(_mean([float(i) for i in inside]), 0) + f" of {len(inside)}"


def judged(result: Result) -> Iterator[list[float]]:
    """Figures whose intervals are counted: speed, throughput and acceptance of every run."""
    for run in result.runs():
        names = ["tpot_mean", "throughput"]
        if not run["label"].startswith("plain"):
            names.append("acceptance_length")
        yield from (run["figures"][name] for name in names if name in run["figures"])


def is_inside(figure: Sequence[float]) -> bool:
    """Whether a measurement lies in the interval."""
    return figure[LOW] <= figure[MEASURED] <= figure[HIGH]


def worst(results: Sequence[Result]) -> str:
    """The worst predictions of decode speed and why they are off."""
    found = [
        (speed_error(error), run, result)
        for result in results
        for error, run in errors(result.runs("stream", "batch"), "tpot_mean")
    ]
    found.sort(key=lambda each: -abs(each[0]))
    rows = [
        [run["label"], run["workload"], result.name, signed(error), cause(run)]
        for error, run, result in found[:WORST]
    ]
    heads = ["plan", "requests", "pair", "speed", "cause"]
    return "### The worst predictions of decode speed\n\n" + table(heads, rows)


def cause(run: dict[str, Any]) -> str:
    """Which factor of a speed is off: tokens of a round, its seconds, or its prompts."""
    length = error_of(run["figures"].get("acceptance_length", ())) or 0.0
    predicted, measured = run["rounds"]["seconds"]
    seconds = predicted / measured - 1.0
    text = f"tokens a round {signed(length)}, round {signed(seconds)}"
    known = error_of(run["figures"]["tpot_mean"], KNOWN)
    if known is not None:
        text += f"; with the acceptance known {signed(speed_error(known))}"
    gaps = {s: run["rounds"][s][0] - run["rounds"][s][1] for s in SPANS}
    span = max(gaps, key=lambda name: abs(gaps[name]))
    return f"{text}; most of the round's in its {span.replace('_', ' ')} ({_us(gaps[span])} us)"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:+.0f}"


def runs_table(result: Result) -> str:
    """Every run of a pair."""
    rows = []
    for run in sorted(result.runs("stream"), key=lambda r: r["figures"]["tpot_mean"][MEASURED]):
        tpot, length = run["figures"]["tpot_mean"], run["figures"].get("acceptance_length")
        speed = [1.0 / max(tpot[place], 1e-9) for place in (PREDICTED, HIGH, LOW, MEASURED)]
        batch = next((r for r in result.runs("batch") if _twin(r, run)), None)
        rows.append(
            [
                run["label"].removesuffix(", batch 1"),
                f"{speed[0]:.0f} [{speed[1]:.0f}, {speed[2]:.0f}]",
                f"{speed[3]:.0f}",
                signed(speed_error(error_of(tpot) or 0.0)),
                _known_speed(tpot),
                "" if length is None else f"{length[PREDICTED]:.2f} / {length[MEASURED]:.2f}",
                *_throughput(batch),
            ]
        )
    replayed = [
        [
            run["label"],
            *(
                f"{figure[PREDICTED] * 1e3:.1f} / {figure[MEASURED] * 1e3:.1f}"
                for name in REPLAYED
                if (figure := run["figures"].get(name))
            ),
        ]
        for run in result.runs("segment")
    ]
    heads = ["plan", "tokens/s predicted", "measured", "error", "acceptance known",
             "tokens a round", "batch: tokens/s", "error"]  # fmt: skip
    text = f"### {result.name}\n\n{table(heads, rows)}"
    if replayed:
        heads = [
            "replay, ms predicted / measured",
            *(n.replace("_", " ").upper() for n in REPLAYED),
        ]
        text += "\n" + table(heads, replayed)
    return text


def _twin(run: dict[str, Any], other: dict[str, Any]) -> bool:
    return run["label"].rpartition(",")[0] == other["label"].rpartition(",")[0]


def _known_speed(tpot: Sequence[float]) -> str:
    error = error_of(tpot, KNOWN)
    return "" if error is None else signed(speed_error(error))


def _throughput(run: dict[str, Any] | None) -> list[str]:
    if run is None:
        return ["", ""]
    figure = run["figures"]["throughput"]
    shown = f"{figure[PREDICTED]:.0f} / {figure[MEASURED]:.0f}"
    return [shown, signed(error_of(figure) or 0.0)]


def spans_table(results: Sequence[Result]) -> str:
    """Mean spans of a round of one stream by pair and deployment."""
    rows = []
    for result in results:
        groups: dict[str, list[dict[str, Any]]] = {}
        for run in result.runs("stream"):
            groups.setdefault(run["label"].split(" on ")[1].split(",")[0], []).append(run)
        for label, runs in groups.items():
            means = {
                span: [statistics.fmean(r["rounds"][span][side] for r in runs) for side in (0, 1)]
                for span in (*SPANS, "seconds")
            }
            rows.append(
                [f"{result.name}, {label}"]
                + [f"{p * 1e3:.3f} / {m * 1e3:.3f}" if p or m else "" for p, m in means.values()]
            )
    heads = ["predicted / measured, ms", *(s.replace("_", " ") for s in SPANS), "round"]
    return "### Spans of a round, one stream, mean over the plans\n\n" + table(heads, rows)


def calibration_table(results: Sequence[Result]) -> str:
    """Confidence against acceptance: the errors by kind of prompt, and where the picture is."""
    kinds = list(dict.fromkeys(kind for r in results for kind in r.pair["calibration"]))
    rows = [
        [r.name, *(_gap(r.pair["calibration"].get(kind, ())) for kind in kinds)] for r in results
    ]
    return (
        "### Confidence against acceptance\n\n"
        f"![confidence against acceptance]({CALIBRATION.parent.name}/{CALIBRATION.name})\n\n"
        "Chance of the draft's likeliest token after calibration (across) and the share that the\n"
        "target chose (up), by tenths; each request's calibration was fitted to others. Expected\n"
        f"calibration error by kind of prompt:\n\n{table(['pair', *kinds], rows)}"
    )


def _gap(bins: Sequence[Sequence[float]]) -> str:
    total = sum(count for *_, count in bins)
    gap = sum(abs(chance - share) * count for chance, share, count in bins)
    return f"{gap / total:.3f}" if total else ""


def seconds_table(results: Sequence[Result]) -> str:
    """What each session took."""
    rows = [
        [result.name, each["label"], *(_seconds(each.get(name)) for name in _PHASES),
         str(each["served"])]
        for result in results
        for each in result.pair["sessions"]
    ]  # fmt: skip
    if not rows:
        return ""
    heads = ["pair", "GPUs", *_PHASES, "number of runs"]
    needed = [f"{_to_profile(r):.0f} s of {r.name}" for r in results if r.pair["sessions"]]
    text = f"A pair without its grid, that is start, profile and acceptance: {', '.join(needed)}."
    return f"### Seconds on the machine\n\n{table(heads, rows)}\n{textwrap.fill(text, WIDTH)}\n"


def _to_profile(result: Result) -> float:
    phases = [name for name in _PHASES if name != "runs"]
    return sum(each.get(name) or 0.0 for each in result.pair["sessions"] for name in phases)


_PHASES = ("start", "profile", "acceptance", "runs")


def _seconds(value: float | None) -> str:
    return f"{value:.1f}" if value else ""


def percent(value: float | None, digits: int = 1) -> str:
    """A share as percent."""
    return "-" if value is None or math.isnan(value) else f"{value * 100:.{digits}f} %"


def signed(value: float) -> str:
    """An error as percent."""
    return f"{value * 100:+.1f} %"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
