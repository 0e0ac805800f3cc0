"""One self-contained HTML file: prediction against measurement, in tables and charts.

Nothing is loaded from elsewhere; the page follows the reader's light or dark setting. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from codesign import __version__
from codesign.errors import counted
from codesign.validate import charts
from codesign.validate.words import (
    SHOWN,
    error_text,
    figure_text,
    figure_title,
    ranking_text,
    shown_comparisons,
    verdict,
)

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.plan import Plan
    from codesign.validate.comparison import Comparison, RunComparison, Validation
    from codesign.validate.ranking import Ranking

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60666d; --line: #d9dde2;
  --page: #ffffff; --card: #f6f7f9; --good: #1a7f4b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa1a9; --line: #343a41;
  --page: #14171a; --card: #1c2024; --good: #5cc28b; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p { margin: .35rem 0; } .soft { color: var(--soft); }
.verdict { font-size: 1.05rem; margin: 1rem 0; padding: .7rem 1rem; background: var(--card);
  border-left: 4px solid var(--good); } .verdict.bad { border-color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .28rem .8rem .28rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--soft); } th:first-child, td:first-child { text-align: left; }
.bad td.error, td.bad { color: var(--bad); font-weight: 600; } td.good { color: var(--good); }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: .5rem 0; }
figcaption { color: var(--soft); font-size: .85rem; max-width: 44rem; }
svg { max-width: 100%; height: auto; } details { margin: .6rem 0; }
summary { cursor: pointer; font-weight: 500; } ul { margin: .3rem 0; padding-left: 1.2rem; }
"""


def html_report(
    validation: Validation, plan: Plan, *, tolerance: float, fit: Fit | None, cause: str = ""
) -> str:
    """The report as one HTML page.

    Args:
        validation: Runs against their predictions.
        plan: What they were predicted with.
        tolerance: Largest relative error of the checked figures.
        fit: For the chart of the calibration; None to leave it out.
        cause: Why times are off, if that is known, see ``words.cause``.
    """
    runs = validation.runs
    is_good, sentence = verdict(validation, tolerance)
    sections = [
        _heading(validation, plan),
        f'<p class="verdict{"" if is_good else " bad"}">{escape(sentence)}</p>',
        f"<p>Cause: {escape(cause)}</p>" if cause else "",
        "<h2>Figures</h2>",
        _overview(runs, tolerance),
        '<p class="soft">Predicted, measured, error relative to the measurement. Red: outside the '
        f"tolerance of {tolerance:.0%}. Predictions are means over {validation.num_seeds} "
        "simulations of the same requests.</p>",
        *_chart_sections(runs, fit),
        "<h2>Ranking</h2>",
        *(_ranking(ranking) for ranking in validation.rankings),
        "" if validation.rankings else '<p class="soft">Needs runs of two candidates or more.</p>',
        "<h2>Run by run</h2>",
        *(_details(run, tolerance) for run in runs),
        _notes("Notes of the plan", plan.notes),
        f'<p class="soft">codesign {__version__}</p>',
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>codesign: prediction against measurement</title>\n<style>{_STYLE}</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _heading(validation: Validation, plan: Plan) -> str:
    targets = [
        f"{name} p{plan.slo.percentile:g} at most {1000 * target:g} ms"
        for name, target in (("TTFT", plan.slo.ttft), ("TPOT", plan.slo.tpot))
        if target is not None
    ]
    return (
        "<h1>Prediction against measurement</h1>\n"
        f'<p class="soft">{escape(plan.target)} with {escape(plan.draft or "no draft")}, '
        f"{counted(plan.num_requests, 'request')}, temperature {plan.sampling.temperature:g}; "
        f"{'; '.join(targets) or 'no SLO'}. Chosen: {escape(validation.chosen)}.</p>"
    )


def _overview(runs: Sequence[RunComparison], tolerance: float) -> str:
    names = [
        n for n in ("tpot_mean", "throughput", "acceptance_length", "ttft_p50") if _has(runs, n)
    ]
    head = "".join(f'<th colspan="3">{figure_title(name)}</th>' for name in names)
    rows = []
    for run in runs:
        cells = [f"<td>{escape(run.label)}</td>"]
        for name in names:
            cells.append(_cells(run.figure(name), tolerance))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _table(f"<th>run</th>{head}", rows)


def _has(runs: Sequence[RunComparison], name: str) -> bool:
    return any(run.figure(name) is not None for run in runs)


def _cells(comparison: Comparison | None, tolerance: float) -> str:
    if comparison is None:
        return "<td>-</td>" * 3
    is_bad, name = comparison.is_too_far(tolerance), comparison.name
    return (
        f"<td>{figure_text(name, comparison.predicted.value)}</td>"
        f"<td>{figure_text(name, comparison.measured)}</td>"
        f'<td class="{"bad" if is_bad else ""}">{error_text(comparison)}</td>'
    )


def _table(head: str, rows: Sequence[str]) -> str:
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _chart_sections(runs: Sequence[RunComparison], fit: Fit | None) -> list[str]:
    if not charts.available():
        return [
            '<p class="soft">For charts: pip install "codesign[report]", then validate again.</p>'
        ]
    scatters = [
        (
            charts.predicted_against_measured(
                runs, name, title=figure_title(name), factor=SHOWN[name][2]
            ),
            "",
        )
        for name in ("tpot_mean", "throughput", "acceptance_length")
        if _has(runs, name)
    ]
    each = [
        (
            charts.requests_against_measured(
                runs, name, title=f"{title} of each request, ms", factor=1e3
            ),
            "",
        )
        for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"))
        if any(run.request_error(name) is not None for run in runs)
    ]
    parts = [
        "<h2>Predicted against measured</h2>",
        _figures(scatters),
        '<p class="soft">On the dashed line both are equal. Horizontal bars are predicted '
        "intervals.</p>",
        _figures(each),
        "<h2>Where a round's time goes</h2>",
        _figures([(charts.spans_side_by_side(runs), "")]) if any(r.spans for r in runs) else "",
    ]
    if fit is not None:
        caption = (
            "How often the target agreed with the draft model's first choice, by the draft model's "
            "confidence, on the recorded prompts; the size of a dot is its number of tokens."
        )
        chart = charts.calibration(fit.acceptance, fit.calibration)
        parts += ["<h2>Calibration of the draft model</h2>", _figures([(chart, caption)])]
    return parts


def _figures(shown: Sequence[tuple[Any, str]]) -> str:
    if not shown:
        return ""
    figures = [
        f"<figure>{charts.svg(chart)}"
        + (f"<figcaption>{escape(caption)}</figcaption>" if caption else "")
        + "</figure>"
        for chart, caption in shown
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def _ranking(ranking: Ranking) -> str:
    title = figure_title(ranking.figure)
    rows = [
        f"<tr><td>{place}</td><td>{escape(predicted)}</td><td>{escape(measured)}</td></tr>"
        for place, (predicted, measured) in enumerate(
            zip(ranking.predicted, ranking.measured, strict=True), start=1
        )
    ]
    head = f"<th>by {title}</th><th>predicted</th><th>measured</th>"
    return _table(head, rows) + f"<p>{ranking_text(ranking)}</p>"


def _details(run: RunComparison, tolerance: float) -> str:
    rows = []
    for comparison in (*shown_comparisons(run), *run.rounds):
        interval, name = comparison.predicted, comparison.name
        inside = "inside" if comparison.is_inside else "outside"
        rows.append(
            f"<tr><td>{figure_title(name)}</td>{_cells(comparison, tolerance)}"
            f"<td>{figure_text(name, interval.low)} to {figure_text(name, interval.high)}</td>"
            f'<td class="{"good" if comparison.is_inside else ""}">{inside}</td></tr>'
        )
    head = "<th>figure</th><th>predicted</th><th>measured</th><th>error</th>"
    head += "<th>interval</th><th>measured is</th>"
    each = [
        f"{name.upper()} of single requests: median error {error:.1%}"
        for name in ("ttft", "tpot")
        if (error := run.request_error(name)) is not None
    ]
    return (
        f"<details><summary>{escape(run.label)}</summary>\n"
        f'<p class="soft">{escape(str(run.path))}, {run.origin}. {"; ".join(each)}.</p>\n'
        f"{_table(head, rows)}{_notes('', run.notes)}</details>"
    )


def _notes(title: str, notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (f"<h2>{title}</h2>" if title else "") + f"<ul>{items}</ul>"
