"""The generated parts of docs/validation.md and validation-runs.md, from what ``join`` left.

Imports no torch.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.campaign.by_pair import by_pair
from benchmarks.campaign.goals import (
    KNOWN,
    WIDTH,
    Result,
    error_of,
    errors,
    machine,
    newest,
    signed,
    speed_error,
    table,
)
from benchmarks.campaign.plot import calibration_svg
from benchmarks.campaign.run_tables import (
    calibration_table,
    intervals_table,
    runs_table,
    spans_table,
)
from benchmarks.campaign.session_seconds import seconds_table
from benchmarks.campaign.together import together
from benchmarks.pages import write_between
from codesign.records import SPANS

DOCUMENT = Path(__file__).parents[2] / "docs" / "validation.md"
RUNS = DOCUMENT.with_name("validation-runs.md")
CALIBRATION = DOCUMENT.parent / "images" / "validation-calibration.svg"
BEGIN, END = "<!-- campaign -->", "<!-- end of campaign -->"
WORST = 3

INTRODUCTION = """\
## Predictions against the engine

Written by `python -m benchmarks.campaign --report FILE ...` from
{files}.
If several files have the same pair of models, the last one counts that ran on all that one before
it did. Every run, spans, the parts of the intervals and calibration:
[validation-runs.md](validation-runs.md).

A campaign profiles a pair of models on groups of GPUs ("2": draft and target share two; "1+1": one
each), fits the profile, predicts a grid of plans and then runs them. The fit sees nothing but the
profile, which serves a few made-up requests without a draft and with trees that are not in the
grid. The prompts that are served are not those on which acceptance was recorded, but ask the same
questions: a pair that serves 18 requests asks 18 of the 24, and its streams and batches are
predicted by these. Each run is predicted by {seeds} simulations.{replays}
"""

TERMS = """\
### How to read the tables

- *Requests.* A *stream* is one request after another. A *batch* is up to eight requests at once,
  all there from the start. A *replay* is a stretch of a trace such as `conv-twin`, at a share of
  the load that plain decoding can serve.
- *Errors* are (predicted - measured) / measured; mean errors are means of their absolute values.
  Decode speed is 1 / TPOT; where the draft shares the target's GPUs, with the draft's prompt.
- *Acceptance known* predicts the same run with each request's own acceptance: what is left is the
  error of step times.
- *Regret* is what is lost by taking the plan that is predicted best instead of the one that was
  measured best; it and the rank correlation are among as many plans as stated.
- *Intervals* are 80 % prediction intervals: {intervals}.
- *Spans* are the parts of a round, over rounds without prompts. In the other rounds, where the
  draft shares the target's GPUs, its prompt is in the draft's span.
"""

OF_LUCK = """\
the spread over the simulations, the held-out error of
  the steps, and the variation between prompts, both recorded and served"""
OF_PARTS = """\
parts that add up by their squares. The parts
  are the limited number of simulations; the variation of the served prompts (the spread of the
  simulations less what questions do to acceptance, as the recorded ones are asked again) and of
  the recorded ones; and the held-out errors of the steps. None is fitted to how many intervals
  cover. All plans of a pair share one draw of its recorded and served prompts"""
OF_POLICIES = """\
parts that add up by their squares. The parts
  are the limited number of simulations; the variation of the served and of the recorded prompts
  (how much other words around the same questions change the tokens per round of that very plan,
  as far as a figure depends on these); and the error of the steps, from the residuals of their
  fit, with those of one request apart{drift}. \
None is fitted to how many intervals cover. All plans of a
  pair share one draw of its recorded and served prompts"""
OF_DRIFT = """\
, and from
  how much a machine changes between its profile and its runs, as estimated from earlier campaigns
  ({parts})"""

NOT_CAPTURED = """\
### What the model does not capture

- *Other prompts.* Acceptance is recorded on {recorded} prompts, most with
  answers of 48 tokens. Longer answers, of which fewer are recorded, have wider intervals:
  docs/prediction-errors.md. What other prompts do to acceptance is in the
  interval, not in the prediction; "acceptance known" has the same predictions with each request's
  own acceptance.
- *Single requests.* A simulated request plays a stretch of another recorded request of its kind, so
  its acceptance is not that request's own. In a batch of 24 the last ones decide its length.
- *A changed machine.* Step times are medians of a profile. If the machine is busier in the run, or
  its clocks are lower, this is not in the prediction{drift}.
- *Long prompts.* Prompts that run as CUDA graphs (all of up to 256 tokens, and on most ranks up to
  2048) have the price of the next larger bucket. Longer ones are launched kernel by kernel, and
  whatever else keeps the host busy is in their time.
- *Chunked prompts* were not measured here: prompts and rounds share no step.
- *Networks.* All groups were on one host.
"""


def write_document(files: Sequence[Path]) -> None:
    """Rewrite both documents between their markers."""
    campaigns = read(files)
    CALIBRATION.write_text(calibration_svg(calibrations(campaigns)), encoding="utf-8")
    write_between(DOCUMENT, BEGIN, END, document(campaigns))
    write_between(RUNS, BEGIN, END, run_document(campaigns))


def read(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Campaigns by the name that the document has of their files."""
    texts = {f"{path.parent.name}/{path.name}": path.read_text(encoding="utf-8") for path in files}
    return {name: json.loads(text) for name, text in texts.items()}


def calibrations(campaigns: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What ``calibration_svg`` draws."""
    return {result.name: result.pair["calibration"] for result in newest(campaigns.values())}


def document(campaigns: Mapping[str, dict[str, Any]]) -> str:
    """The generated part of DOCUMENT: what was found."""
    payloads = list(campaigns.values())
    results = newest(payloads)
    measured = [result for result in results if result.runs()]
    parts = [
        INTRODUCTION.format(
            files=",\n".join(f"`{name}`" for name in campaigns),
            seeds=payloads[0]["num_seeds"],
            replays=_replays(payloads),
        ),
        remarks(payloads),
        blindness(results),
        draws(results),
        together(measured),
        by_pair(measured),
        TERMS.format(intervals=_intervals(results)),
        worst(measured),
        NOT_CAPTURED.format(recorded=_recorded(results), drift=_drift(results)),
    ]
    return _joined(parts)


def run_document(campaigns: Mapping[str, dict[str, Any]]) -> str:
    """The generated part of RUNS: every run, and what it was predicted from."""
    results = newest(campaigns.values())
    measured = [result for result in results if result.runs()]
    parts = [
        *(runs_table(result) for result in measured),
        spans_table(measured),
        intervals_table(measured),
        calibration_table(results, f"{CALIBRATION.parent.name}/{CALIBRATION.name}"),
        seconds_table(results),
    ]
    return _joined(parts)


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(part.rstrip() + "\n" for part in parts if part).rstrip()


def _replays(payloads: Sequence[dict[str, Any]]) -> str:
    draws = payloads[0].get("num_draws")
    if draws is None:
        return ""
    return (
        f" A replay is predicted by the mean of {draws}\nsimulations whose step times vary by the "
        "error of the fit, because its tail latencies depend on\nfractions of a millisecond."
    )


def _intervals(results: Sequence[Result]) -> str:
    if any("unsure" in result.pair for result in results):
        drifts = dict.fromkeys(_drift_parts(drift) for drift in _drifts(results))
        known = OF_DRIFT.format(parts="; of the later campaign ".join(drifts)) if drifts else ""
        return OF_POLICIES.format(drift=known)
    has_parts = any("parts" in run for result in results for run in result.runs())
    return OF_PARTS if has_parts else OF_LUCK


def _drift_parts(drift: dict[str, Any]) -> str:
    share = f"{drift['share']:.1%} of its time, ".replace("%", " %") if "share" in drift else ""
    fixed, batch = f"{drift['host'] * 1e6:.0f} us per round, ", f"{drift['batch'] * 1e2:.1f} %"
    return f"{fixed}{share}and {batch} of a round of several requests"


def _drifts(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [result.pair["drift"] for result in results if "drift" in result.pair]


def _drift(results: Sequence[Result]) -> str:
    if _drifts(results):
        return "; the interval includes what earlier\n  campaigns say of it"
    return ", and not in the interval"


def _recorded(results: Sequence[Result]) -> str:
    counts = [*map(str, sorted({r.pair["recorded"] for r in results if "recorded" in r.pair}))]
    return " or ".join(filter(None, (", ".join(counts[:-1]), *counts[-1:]))) or "some"


def remarks(payloads: Sequence[dict[str, Any]]) -> str:
    """Remarks on each campaign."""
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
        f"- *Blind.* Each deployment's fit was written and hashed on the machine before its first "
        f"run: {same} of {len(found)} are the fits used here."
    )
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def draws(results: Sequence[Result]) -> str:
    """Which requests the pairs served, where they are other ones than in most campaigns."""
    seeds = {r.name: r.pair.get("requests_seed", 0) for r in results}
    if not any(seeds.values()):
        return ""
    found = ", ".join(f"{seed} ({name})" for name, seed in seeds.items())
    text = f"- *Requests served*: the questions are the same; seeds of what precedes them: {found}."
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def worst(results: Sequence[Result]) -> str:
    """The worst predictions of decode speed and their causes."""
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
    text = f"tokens per round {signed(length)}, round time {signed(seconds)}"
    known = error_of(run["figures"]["tpot_mean"], KNOWN)
    if known is not None:
        text += f"; with acceptance known {signed(speed_error(known))}"
    gaps = {s: run["rounds"][s][0] - run["rounds"][s][1] for s in SPANS}
    span = max(gaps, key=lambda name: abs(gaps[name]))
    text += f"; largest part of the round: {span.replace('_', ' ')} ({_us(gaps[span])} us)"
    predicted, measured = run["rounds"].get("prefill", (0.0, 0.0))
    if abs(predicted - measured) > abs(gaps[span]):
        text += f"; prompts {_us(predicted - measured)} us per round"
    return text


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:+.0f}"
