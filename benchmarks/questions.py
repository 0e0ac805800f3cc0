"""Open questions of the papers, answered by simulation.

    python -m benchmarks.questions eagle|batch|link|inflight   # one answer, to the terminal
    python -m benchmarks.questions all                         # all of them, as docs/questions.md

Each answer names its assumptions. Step times are the roofline's (codesign/fit/roofline.py), so that
an answer is worth what that is: 19 % for large models, 33 % for drafts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages import reflow
from benchmarks.papers.open_questions import batch, eagle, inflight, link

OUT = Path(__file__).parents[1] / "docs" / "questions.md"


@dataclass(frozen=True)
class Question:
    """A question, who leaves it open, and what was found on 2026-11-21."""

    title: str
    asked: str
    found: str
    answer: Callable[[], str]


QUESTIONS = {
    "eagle": Question(
        "Does asynchrony pay for drafts that need the target's features?",
        "SwiftSpec leaves EAGLE out (section 6).",
        "No: the asynchronous head is 19 to 36 % slower than the serial one on all GPUs, where an "
        "independent draft model gains 20 to 33 %. The forward that needs the target's features "
        "stays on the critical path, the target has fewer GPUs, and the forwards that are hidden "
        "are cheap for so small a head.",
        eagle,
    ),
    "batch": Question(
        "From which batch size on should the draft share the target's GPUs?",
        "SwiftSpec serves one request; SpecServe shares the target's GPUs.",
        "From about 8 running requests on. Up to 4 the split is faster by 2 to 11 %; at 8 drafting "
        "in turn on all GPUs is faster by 3 %; at 64 the split is no better than plain "
        "decoding, and at 128 two plain replicas are level with the best of drafting.",
        batch,
    ),
    "link": Question(
        "How fast a link does the split need?",
        'SwiftSpec: "NVLink/cross-network interconnect", with figures for NVLink only.',
        "Latency matters, bandwidth hardly does: token ids are small, and the split pays as long "
        "as a message takes less than about 1.4 ms one way. PCIe and data-centre networks are "
        "within 2 % of NVLink; a link to another building still gains a little, a wide-area link "
        "loses half. Sending whole distributions instead of token ids costs 14 % on 10 Gbit/s.",
        link,
    ),
    "inflight": Question(
        "Should a tree grow below the nodes in flight first?",
        "SwiftSpec grows the heaviest leaves, whether or not they are being verified.",
        "No, not as a strict priority: drafting below every possible next root first keeps the "
        "tree at two levels, so that it emits at most two tokens a round and longer "
        "drafting gains nothing. Best-first, which goes deeper below the likeliest root, is "
        "ahead by 13 to 51 % with four forwards and more, and equal with two.",
        inflight,
    ),
}


def main() -> None:
    """Print one answer, or write all of them."""
    parser = argparse.ArgumentParser(description="Open questions, answered by simulation.")
    parser.add_argument("question", choices=[*QUESTIONS, "all"])
    chosen = parser.parse_args().question
    if chosen != "all":
        print(reflow(QUESTIONS[chosen].answer()))
        return
    parts = [
        "# Open questions, answered by simulation\n\nFour questions that the SwiftSpec and "
        "SpecServe papers leave open. Every figure is a prediction; none was measured. Step times "
        "are the roofline's; acceptance is set to the stated rate and is correlated as in the "
        "shipped recordings. Differences below about 10 % are within the uncertainty about a real "
        "engine.\n\nWritten by `python -m benchmarks.questions all`."
    ]
    for name, question in QUESTIONS.items():
        print(name, file=sys.stderr)
        command = f"    python -m benchmarks.questions {name}"
        parts.append(f"## {question.title}\n\n{question.asked} {question.found}\n\n{command}")
        parts.append(question.answer())
    OUT.write_text(reflow("\n\n".join(parts)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
