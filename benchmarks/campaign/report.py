"""The generated part of docs/validation.md, from the JSON files that ``join`` left.

Imports no torch.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.campaign.goals import (
    KNOWN,
    SPANS,
    Result,
    error_of,
    errors,
    goals,
    signed,
    speed_error,
    table,
)
from benchmarks.campaign.plot import calibration_svg
from benchmarks.campaign.run_tables import intervals_table, runs_table, spans_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "validation.md"
CALIBRATION = DOCUMENT.parent / "images" / "validation-calibration.svg"
BEGIN, END = "<!-- campaign -->", "<!-- end of campaign -->"
WORST = 3
WIDTH = 100

INTRODUCTION = """\
## Predictions against the engine

Written by `python -m benchmarks.campaign --report FILE ...` from
{files};
of a pair that several files have, the last one's runs.

A campaign profiles a pair of models on rank groups, and serves a grid of plans and a stretch of a
trace on them. The fit sees the profile alone, which serves a few made-up requests without a draft
and with trees that are not in the grid; the prompts served are others than those whose acceptance
was recorded. Each run is predicted by {seeds} simulations.{replays}
*One stream* is one request after another, *batch* up to eight at once that are all there from the
start, *replay* a stretch of a trace, as `conv-twin`, at a share of what plain decoding bears. A
decode speed is 1 / TPOT; where the draft shares the target's GPUs its prompt is in it, too. Errors
are (predicted - measured) / measured; the mean ones are of their sizes. Regret and correlation are
those among so many plans. Intervals are of 80 %: {intervals}
served. Spans are those of rounds without prompts: where the draft shares the target's GPUs, its
prompt is in the draft's span of the other ones.
"""

OF_LUCK = """\
spread over the simulations, held-out error of
the steps, and the luck of the prompts, both of those that were recorded and of those that were"""
OF_PARTS = """\
parts that add up by their squares. There
are only so many simulations; requests that are served have luck, which is the spread of the
simulations less what questions do to acceptance, as the recorded ones are asked again; so have
those that were recorded; and steps have held-out errors. None is fitted to how many intervals
hold: all plans of a pair share one draw of the luck of its prompts, both of recorded and of"""
OF_POLICIES = """\
parts that add up by their squares. There
are only so many simulations. Requests that are served have luck, and so have those that were
recorded: what other words around the same questions do to the tokens of a round of that very
plan, as far as a figure goes with these. Steps are off by the residuals of their fit, those of
one request by their own. None is fitted to how many intervals
hold: all plans of a pair share one draw of the luck of its prompts, both of recorded and of"""
OF_DRIFT = """\
parts that add up by their squares. There
are only so many simulations. Requests that are served have luck, and so have those that were
recorded: what other words around the same questions do to the tokens of a round of that very
plan, as far as a figure goes with these. Steps are off by the residuals of their fit, those of
one request by their own, and by what machines do between a profile and its runs: {host:.0f} us a
round, and {batch:.1f} % of a round of several requests, as earlier campaigns say. None is fitted
to how many intervals hold: all plans of a pair share one draw of the luck of its prompts, both of
recorded and of"""

NOT_CAPTURED = """\
### What the model does not capture

- Acceptance is recorded on {recorded} prompts of 48 tokens. What other prompts do to it is in the
  interval, not in the prediction; the column "acceptance known" has the same predictions with each
  request's own acceptance.
- A simulated request draws a stretch of another recorded one of its kind: the draft's luck of a
  request is not that request's. In a batch of 24 the last ones decide how long it takes.
- Step times are medians of a profile. A machine that is busier, or whose clocks are lower, than it
  was then is not in the prediction; the interval has what earlier campaigns say of it.
- Prompts that are graphs, all of up to 256 tokens and of most ranks up to 2048, have the price of
  the next bucket. Longer ones are launched kernel by kernel: whatever else keeps the host busy is
  in their time.
- Prompts and rounds share no step: chunks of prompts are not measured here.
- One host: no network between groups.
"""


def write_document(files: Sequence[Path]) -> None:
    """Rewrite the document between its markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    campaigns = read(files)
    CALIBRATION.write_text(calibration_svg(calibrations(campaigns)), encoding="utf-8")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{document(campaigns)}\n{END}{after}", encoding="utf-8")


def read(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Campaigns by the name that the document has of their files."""
    texts = {f"{path.parent.name}/{path.name}": path.read_text(encoding="utf-8") for path in files}
    return {name: json.loads(text) for name, text in texts.items()}


def calibrations(campaigns: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What ``calibration_svg`` draws."""
    return {result.name: result.pair["calibration"] for result in newest(campaigns.values())}


def newest(payloads: Iterable[dict[str, Any]]) -> list[Result]:
    """Each pair of each machine once: of the last file that has it."""
    results = [Result(machine(p), pair) for p in payloads for pair in p["pairs"]]
    return list({result.name: result for result in results}.values())


def document(campaigns: Mapping[str, dict[str, Any]]) -> str:
    """The generated part."""
    payloads = list(campaigns.values())
    results = newest(payloads)
    measured = [result for result in results if result.runs()]
    parts = [
        INTRODUCTION.format(
            files=",\n".join(f"`{name}`" for name in campaigns),
            seeds=payloads[0]["num_seeds"],
            replays=_replays(payloads),
            intervals=_intervals(results),
        ),
        remarks(payloads),
        blindness(results),
        goals(measured),
        worst(measured),
        *(runs_table(result) for result in measured),
        spans_table(measured),
        intervals_table(measured),
        calibration_table(results),
        seconds_table(results),
        NOT_CAPTURED.format(recorded=_recorded(results)),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts if part).rstrip()


def _replays(payloads: Sequence[dict[str, Any]]) -> str:
    draws = payloads[0].get("num_draws")
    if draws is None:
        return ""
    return (
        f" A replay is\nthe mean of {draws} whose steps are as unsure as the fit's: its tails "
        "turn on fractions of a\nmillisecond."
    )


def _intervals(results: Sequence[Result]) -> str:
    if drifts := [result.pair["drift"] for result in results if "drift" in result.pair]:
        return OF_DRIFT.format(host=drifts[-1]["host"] * 1e6, batch=drifts[-1]["batch"] * 1e2)
    if any("unsure" in result.pair for result in results):
        return OF_POLICIES
    has_parts = any("parts" in run for result in results for run in result.runs())
    return OF_PARTS if has_parts else OF_LUCK


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


def blindness(results: Sequence[Result]) -> str:
    """Whether what predicts is what was written on the machine before the first run."""
    found = [each for r in results for each in r.pair.get("blind", {}).values()]
    if not found:
        return ""
    same = sum(each["is_same"] for each in found)
    text = (
        f"- Each deployment's fit was written and hashed on the machine before its first run: "
        f"{same} of {len(found)} are the ones that predict here."
    )
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def machine(payload: dict[str, Any]) -> str:
    """The GPU, or the CPU, in a few words."""
    found = payload["hardware"]
    if found.get("gpus"):
        return found["gpus"][0]["name"].split()[-1]
    return f"{found['cores']} CPU cores"


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
    text += f"; most of the round's in its {span.replace('_', ' ')} ({_us(gaps[span])} us)"
    predicted, measured = run["rounds"].get("prefill", (0.0, 0.0))
    if abs(predicted - measured) > abs(gaps[span]):
        text += f"; prompts {_us(predicted - measured)} us a round"
    return text


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:+.0f}"


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
    text = f"A pair without its grid, that is all but its runs: {', '.join(needed)}."
    text = f"{text}{_changes(results)}"
    return f"### Seconds on the machine\n\n{table(heads, rows)}\n{textwrap.fill(text, WIDTH)}\n"


def _changes(results: Sequence[Result]) -> str:
    """How the host's pace was after the runs, where it was looked at."""
    found = [
        f"{signed(each['changed'])} of {result.name} on {each['label']}"
        for result in results
        for each in result.pair["sessions"]
        if each.get("changed") is not None
    ]
    if not found:
        return ""
    return (
        f" After the runs small steps took more, or less, than in the profile: {', '.join(found)}."
    )


def _to_profile(result: Result) -> float:
    phases = [name for name in _PHASES if name != "runs"]
    first = [each for each in result.pair["sessions"] if each.get("profile")]  # others serve more
    return sum(each.get(name) or 0.0 for each in first for name in phases)


_PHASES = ("start", "profile", "acceptance", "check", "runs")


def _seconds(value: float | None) -> str:
    return f"{value:.1f}" if value else ""
