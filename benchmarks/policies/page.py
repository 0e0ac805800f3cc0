"""The pages and the pictures of ``compare_policies.py``.

docs/policy-comparison.md: the summary, the goals, how to read the rest, and what is simulated (the
sections of ``simulated``, ``load_map``, ``measured`` and ``crowds``).
docs/policy-splits.md: whether a draft gets GPUs of its own, by measured steps (``splits``,
``eight``).
docs/policy-measurements.md: what engines measured (``gpu_runs``, ``targets_measured``, and
``measured`` on a CPU).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.pages import reflow
from benchmarks.policies import (
    by_targets,
    crowds,
    eight,
    goals,
    gpu_runs,
    load_map,
    measured,
    simulated,
    splits,
)
from benchmarks.policies.figures import DOCS, Results
from benchmarks.policies.targets_measured import targets_measured_section

PAGE = DOCS / "policy-comparison.md"
MEASUREMENTS, SPLITS = DOCS / "policy-measurements.md", DOCS / "policy-splits.md"

_HEAD = """\
# Policies compared

Which policy is fastest depends on the machine, the load and the models. In short:

- The serial batch tree (`batch-tree`) is the safe choice: simulated with eight at once it is never
  slower than plain decoding by more than 2 % (2.01 % in one of 144 further runs), and batch trees
  are never slower than SpecServe by more than 2 %. {crowds} Measured from a fifth to twice of
  what plain decoding bears, it has 1.00 to 2.29 of plain decoding's speed with a 70B on one H200,
  1.04 to 2.04 on two and 1.11 to 1.80 on two H100s; with an 8B 0.99 to 1.14 on one H200, 0.99 to
  1.00 on two and 0.98 to 1.00 on two H100s. With a 70B it was up to 11 % faster than SpecServe;
  since that predicts what is verified, it is 1 % behind to 8 % ahead in nine rows. With an 8B
  at a fifth of the load it is 5 and 4 % faster on "conv" and "mooncake" on one H200 (3 to 8 on an
  H100), else within 2 % on H200s, about what its runs are known to.
- The asynchronous batch tree (`async-batch-tree`) is fastest on eight GPUs while the load is at
  most half of what plain decoding can serve, with short prompts ("conv"); by steps of our own
  engine, [extrapolated to eight
  H200s](policy-splits.md#eight-gpus-by-extrapolated-steps), at 0.1 and 0.3 with a small draft, up
  to 8 % ahead of the serial batch tree and 2 to 17 of SpecServe. At higher load, on fewer GPUs and
  with long prompts the GPU that it takes from the target costs more than it gains:
  with an 8B on four it is 9 % faster at a load of 0.1 and level at 0.3 by the steps of 27
  November, with int8 heads (simulated), and loses from 0.7 on; on H100s with bf16 heads two runs
  gained 0.5 and 7 % at 0.1 and lost 12 and 10 at 0.3 (measured). On one and the same split it is
  nowhere more than 2 % slower than SpecServe in 48 cases (0.980 at least, of the 72B), nor
  2 % behind in goodput (simulated).
- On two H200s speculation gains next to nothing with a small target (8B): the adaptive policies
  mostly decode plainly, and a chain of one drops to 0.39 of plain decoding's speed. In overload
  with a large draft (3B) it gains 10 to 11 % but for "code". In simulated overload with a 70B the
  batch tree has 0.99 to 1.01 of a chain of one's speed, and SpecServe as much (both 8 % faster on
  "code" with a 3B); measured in overload the batch tree is 2 to 13 % faster than it with a 70B,
  and SpecServe as fast or up to 9 % faster.
- In a burst it matters more who joins the batch next than how it decodes: [by their
  targets](#served-by-their-targets) 2.4 to 4.2 times as many requests are in time with any
  policy, in overload up to two fifths instead of none (simulated)."""
_HOW = """\
## How to read this page

Everything here is simulated, except for "The price of deciding". What engines measured is on
[a page of its own](policy-measurements.md). Unless stated otherwise: roofline step times,
llama-3.1-70b:int4 with llama-3.2-1b:int4,
acceptance as recorded for the small pair, six kinds of prompt in equal shares, whole prompts
between rounds, prefix cache and preemption (as in the SpecServe paper). Measured steps are those of
the shipped fits: on one group of H200s ranks decode plainly ahead of their host, which makes plain
rounds 2 to 13 % shorter than those of most [measured runs](policy-measurements.md). "code" is
bursty and has
answers of about 20 tokens; "conv" has longer answers, "mooncake" the longest prompts. What each
policy does: [policies.md](policies.md).

Differences below about 10 % are within the uncertainty about a real engine; those between policies
on one machine are better known. In "Where a draft's prompt costs several
steps", the section after it and on [the page of splits](policy-splits.md) policies are
told the mean answer of the trace, as by a plan; elsewhere they expect 96 tokens until some have
finished. The price of deciding is of the policies before the evening of 26 November.

Written by `python -m benchmarks.compare_policies report` from `benchmarks/results/policies.json`;
`--help` lists the commands that make it."""

_SPLITS = """\
# One group of GPUs, or a draft with its own

Where an asynchronous draft earns the GPUs that it takes from the target, by the step times of our
own engine. All here is simulated, with eight requests at once; how to read it, and other machines
by data sheets: [policy-comparison.md](policy-comparison.md). What was measured:
[policy-measurements.md](policy-measurements.md).

Written by `python -m benchmarks.compare_policies report`, too."""

_MEASURED = """\
# Policies measured

The same policies on engines: GPUs, and the small pair on a CPU. What they were to reach, and what
is simulated of more machines and loads: [policy-comparison.md](policy-comparison.md).

Rows of 27 and 28 November are of an engine that decodes plainly ahead of its host (2 to 13 % less
time: [table](engine-performance.md#decoding-ahead)) and of requests that [take
turns](policies.md#turns). Those of 10:08 UTC and later ("mixed") are of attention that shares out
mixed contexts, and of SpecServe whose drafter predicts [what is
verified](policies.md#policies-from-papers), too. Until the evening of 26 November the draft
read a prompt once that was expected to save 1.5 times what it takes, until 13:00 of the 27th twice
that, and since then [less where few pay](policies.md#when-the-draft-reads-a-prompt). On 24 November
policies expected answers of 96 tokens until some had finished.

Written by `python -m benchmarks.compare_policies report`, too."""


def contents(sections: Sequence[str]) -> str:
    """Links to the sections that there are, in their order."""
    heads = [head for text in sections for head in re.findall(r"^## (.*)$", text, re.MULTILINE)]
    anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
    pairs = zip(heads, anchors, strict=True)
    return "\n".join(f"- [{head}](#{anchor})" for head, anchor in pairs)


def text_of(results: Results) -> str:
    """The page; draws its pictures."""
    sections = [
        simulated.traces_section(results),
        simulated.attainment_section(results),
        by_targets.by_targets_section(results),
        simulated.batches_section(results),
        simulated.over_time_section(results),
        simulated.chunks_section(results),
        simulated.lengths_section(results),
        load_map.map_section(results),
        measured.price_section(results),
        measured.pairs_section(results),
        crowds.crowds_section(results),
    ]
    head = [
        _HEAD.format(crowds=crowds.lowest(results)),
        results.get("remark", {}).get("text", ""),
        goals.goals_section(results),
        _HOW,
    ]
    parts = [*head, contents(sections), *sections]
    return reflow("\n\n".join(filter(None, parts))) + "\n"


def splits_of(results: Results) -> str:
    """The page of splits."""
    sections = [splits.splits_section(results), eight.eight_section(results)]
    return reflow("\n\n".join(filter(None, [_SPLITS, contents(sections), *sections]))) + "\n"


def measurements_of(results: Results) -> str:
    """The page of what was measured."""
    sections = [
        gpu_runs.runs_section(results),
        targets_measured_section(results),
        measured.cpu_section(results),
    ]
    return reflow("\n\n".join(filter(None, [_MEASURED, contents(sections), *sections]))) + "\n"


def write(results: Results) -> None:
    """Write the pages and their pictures."""
    for page, text_from in ((PAGE, text_of), (MEASUREMENTS, measurements_of), (SPLITS, splits_of)):
        page.write_text(text_from(results), encoding="utf-8")
        print(page)
