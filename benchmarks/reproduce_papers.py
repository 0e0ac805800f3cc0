"""Compare the simulator with what the SwiftSpec and SpecServe papers print.

    python -m benchmarks.reproduce_papers                 # everything, as docs/papers.md
    python -m benchmarks.reproduce_papers --check table6  # one section, to the terminal

Only numbers that the papers print are compared. Each section says what was taken from the paper as
an input, what was fitted to the paper, and what is a prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.pages import reflow, write_between
from benchmarks.papers.specserve import table_2
from benchmarks.papers.swiftspec import figure_9, table_1, table_6

OUT = Path(__file__).parents[1] / "docs" / "papers.md"
BEGIN, END = "<!-- papers -->", "<!-- end of papers -->"  # what this script writes of it
SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "table1": ("SwiftSpec, Table 1: step times", table_1),
    "table6": ("SwiftSpec, Table 6: 275 against 200 tokens/s", table_6),
    "figure9": ("SwiftSpec, Figure 9: best splits", figure_9),
    "table2": ("SpecServe, Table 2: order of the methods, and length against batch", table_2),
}
INTRODUCTION = """\
How close does the simulator come to the published results, with the papers' own models and
machines? Only numbers printed in SwiftSpec (arXiv:2506.11309) and SpecServe (arXiv:2503.05096) are
compared, not values that appear only in figures, and not numbers that are missing in our copy of
the text: the average speedups of SwiftSpec's abstract and of its Figures 7 and 8, the curves of its
Figure 2, SpecServe's Figures 9 to 12.

Written by `python -m benchmarks.reproduce_papers`; one section with `--check NAME`."""


def main() -> None:
    """Write the document, or print one section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", choices=SECTIONS, help="print this section alone")
    arguments = parser.parse_args()
    if arguments.check:
        print(reflow(SECTIONS[arguments.check][1]()))
        return
    parts = [INTRODUCTION]
    for name, (title, section) in SECTIONS.items():
        print(name, file=sys.stderr)
        parts.append(f"## {title}\n\n{section()}")
    write_between(OUT, BEGIN, END, reflow("\n\n".join(parts)))


if __name__ == "__main__":
    main()
