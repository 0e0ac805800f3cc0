"""Seconds until the dashboard's first page is there, and until a change has its answer.

    python -m benchmarks.bench_dashboard [--changes N] [--starts N] [--trace NAME] [--json FILE]

A visitor's view, in a headless Chromium: the clock starts when the server's process does, or when
a key moves a slider, and stops when the page shows it. Needs Chromium (tests/browser/harness.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from codesign.artifacts import header

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))
from harness import DESKTOP, opened_browser, served, settle

ANSWER = "[data-testid=stMain] strong"  # the plan that the answer is about, in bold
SAYS = "text => document.querySelector('%s')?.innerText.startsWith(text)" % ANSWER  # noqa: UP031
SLIDER = "Rows verified per request"
FIRST_ROWS = 8


def first_page(browser: Browser, trace: str) -> dict[str, float]:
    """From the server's start to the title, and to the first answer."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with served(Path(folder)) as address:
            page = browser.new_page(viewport=DESKTOP)
            page.goto(f"{address}/?trace={trace}")
            page.get_by_role("heading", name="What if").wait_for()
            title = time.perf_counter() - start
            page.wait_for_function(SAYS, arg="tree-")
            answer = time.perf_counter() - start
            page.close()
    return {"title": title, "answer": answer}


def changes(page: Page, number: int) -> list[dict[str, float]]:
    """Each from a key on a slider to the answer for the new policy, and to the refined one."""
    found = []
    for rows in range(FIRST_ROWS + 1, FIRST_ROWS + 1 + number):
        slider = page.get_by_role("slider", name=SLIDER)
        start = time.perf_counter()
        slider.press("ArrowRight")
        page.wait_for_function(SAYS, arg=f"tree-{rows}x")
        answer = time.perf_counter() - start
        settle(page)
        found.append({"answer": answer, "refined": time.perf_counter() - start - 0.25})
    return found


def summary(values: list[float]) -> dict[str, float]:
    """Median and extremes."""
    rounded = [round(value, 3) for value in (statistics.median(values), min(values), max(values))]
    return dict(zip(("median", "least", "most"), rounded, strict=True))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All timings, in seconds."""
    with opened_browser() as browser:
        starts = [first_page(browser, args.trace) for _ in range(args.starts)]
        with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as address:
            page = browser.new_page(viewport=DESKTOP)
            page.goto(f"{address}/?trace={args.trace}")
            page.wait_for_function(SAYS, arg=f"tree-{FIRST_ROWS}x")
            settle(page)
            moved = changes(page, args.changes)
    return {
        "trace": args.trace,
        "first_page": {key: summary([each[key] for each in starts]) for key in starts[0]},
        "change": {key: summary([each[key] for each in moved]) for key in moved[0]},
        "num_starts": args.starts,
        "num_changes": args.changes,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", default="conv-twin", help="a bundled trace (conv-twin)")
    parser.add_argument("--starts", type=int, default=3, help="starts of the server (3)")
    parser.add_argument("--changes", type=int, default=8, help="moves of the slider (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    args = parser.parse_args()
    result = measure(args)
    print(json.dumps(result, indent=1))
    if args.json is not None:
        body = {**header("report", seed=None), **result}
        args.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
