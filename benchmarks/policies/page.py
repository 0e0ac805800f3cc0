"""The page and the pictures of ``compare_policies.py``: docs/policy-comparison.md.

The summary; the sections of ``simulated``, ``goals`` and ``measured``; how earlier
results changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.policies import goals, measured, simulated
from benchmarks.policies.figures import DOCS, Results, below
from benchmarks.scenarios import reflow

PAGE = DOCS / "policy-comparison.md"

_HEAD = """\
# Policies compared

Which policy is fastest depends on the machine, the load and the models. In short:

- The serial batch tree (`batch-tree`) is the safe choice: in simulation it is never slower than
  plain decoding by more than 2 % (2.01 % in one of 144 further runs), and batch trees are never
  slower than SpecServe by more than 2 %. Measured on one H200, from a fifth to twice of what plain
  decoding bears, it has 1.00 to 2.10 of plain decoding's speed with a 70B and 0.98 to 1.19 with an
  8B, whose single runs are known to 5 %. With a 70B on two H200s it was first level with SpecServe
  on one trace and 11 % slower on another (20 requests, mostly because prompts were longer by
  chance); with newer kernels it was 6 % faster, and 3 % in overload.
- The asynchronous batch tree (`async-batch-tree`) is fastest on eight GPUs while the load is at
  most half of what plain decoding can serve. At higher load, on fewer GPUs and with long prompts
  the GPU that it takes from the target costs more than it gains.
- On two H200s speculation gains next to nothing with a small target (8B): the adaptive policies
  mostly decode plainly, and a chain of one drops to 0.61 of plain decoding's speed. In overload
  with a large draft (3B) it gains at most 7 %. In simulated overload with a 70B the batch tree is
  level with a chain of one, and SpecServe up to 1 % slower (in the middle 0.2 %); measured on one
  H200 the batch tree is 3 to 5 % faster than it, and SpecServe 1 to 3 %.

Written by `python -m benchmarks.compare_policies report` from `benchmarks/results/policies.json`;
`--help` lists the commands that make it. Everything is simulated, except for "The price of
deciding" and the sections that begin with "Measured". Unless stated otherwise: roofline step times,
llama-3.1-70b:int4 with llama-3.2-1b:int4, acceptance as recorded for the small pair, six kinds of
prompt in equal shares, whole prompts between rounds, prefix cache and preemption (as in the
SpecServe paper). Differences below about 10 % are within the uncertainty about a real engine;
differences between policies on the same machine are better known than that. What each policy does:
[policies.md](policies.md)."""
_HISTORY = """\
## How earlier results changed

Steps on the way to the results above. None is needed to read them. What the terms mean (evaluation,
pause, a draft's prompt) is explained in [policies.md](policies.md#batch-trees).

- **A draft's prompt as a decision.** The batch tree used to price a draft's prompt as rows of a
  draft forward, a fifth to a half of its true cost, and prompts of other requests that stalled a
  round counted in its favour. With 8B + 1B and the slow prompts of that time (8 ms for 148 tokens,
  where steps take 1.8) it reached 0.50 to 0.76 of plain decoding, and 0.99 to 1.00 afterwards on
  the same step times (60 to 120 requests).
- **Prompts that share a forward** pay its fixed cost once. Priced one by one, 128 prompts of the
  draft were predicted at 268 ms instead of 73; SpecServe then decoded half of a batch of 128
  plainly and had 0.991 of the best fixed length, now 1.010. Other batch means changed by at most
  0.6 %, except for the batch tree on one GPU at twice the load of "code": there one request may be
  evicted and a prompt of 1.5 s run again. With six acceptance seeds one has an eviction, and the
  batch tree has 0.986 to 1.005 of SpecServe.
- **Last tokens of accepted chains** are now priced as rows of the next draft forward. Here that
  is within the variation between seeds: batch means are 0.997 to 1.002 of before for SpecServe,
  0.993 to 1.016 for the batch tree, 1.000 on average for both (points of eight H200s are from
  before). A roofline does not know what an evaluation costs, so every round has one.
- **A burst's stall** also counts in what drafting saves for a draft's prompt. Without that, batch
  trees gained 1.12 on "code" on eight GPUs, and SpecServe was up to 4 % ahead in bursts;
  "mooncake" gained 1 to 2 % more with each of three acceptance seeds, "code" on one GPU up to 5 %.
- **Not kept:** weighting a draft's prompt by the share of time that prompts take gave 1.18 on
  "code", but 0.91 of plain decoding with eight places and short answers.
- **Cost of evaluations.** With evaluations in 1 % of the time and not counted in what drafting
  promises, the lowest speedups were 0.975 and 0.913 (batch tree and SpecServe, both 70B + 3B on
  "conv" at load 1.2); counted, 0.976 and 0.971; with half as many, 0.981 and 0.980 with the fits of
  that time and 0.985 and 0.984 with those of 22 November.
- **Evaluations during the target's step.** The evaluation that ends a pause now runs while the
  target computes, and costs nothing here if the pause goes on: 0.994 and 0.993 with the fits of 22
  November, 0.990 and 0.979 with those that ship since (70B + 3B on "conv" at load 1.2). With the
  former and three acceptance seeds (the table has one) that is 0.3 % of speed on average. The
  lowest on "conv" and "mooncake" rose from 0.986 and 0.983 to 0.997 and 0.993, on "code" from
  0.984 and 0.984 to 0.986 and 0.985. A run of "code" lasts seconds, and one prompt that the draft
  reads just before the queue fills up decides: 8B + 1B at load 0.7 lost 1.3 % with one seed.
  Results with rooflines did not change, as no policy pauses there.
- **Not kept:** evaluating at once when the batch has shrunk, by half or at all, within the same
  share of the time: 0.0 % on average for the batch tree, 0.1 % if evaluations take four times as
  long.
- **Rounds repeated without evaluation.** In overload a chain of one was ahead of both adaptive
  policies: it evaluates nothing (0.2 ms of a round of 9.6 at 8 requests), and they underestimated
  drafting, as the last tokens of accepted chains are rows of the next forward, too (13 instead of
  8). Now rounds are repeated without evaluation where evaluating gains nothing, and those rows are
  priced. Small batches, where evaluations gain, still have one in every round. With six seeds at
  load 1.2, speed relative to a chain of one (before in brackets): batch tree 0.996 with 70B + 1B
  on "conv" (0.966), 1.003 on "mooncake" (0.981), 0.985 with 70B + 3B on "conv" (0.978); SpecServe
  0.987, 0.993 and 0.988 (0.951, 0.960, 0.958). The lowest speedups over plain decoding in 177 runs
  (three or six acceptance seeds, all pairs) are 0.988 for the batch tree and 0.980 for SpecServe,
  both with 70B + 3B on "code" at 0.7 (before: 0.985 and 0.962, the latter with 70B + 3B on "conv"
  at 1.2); means are 0.3 and 0.7 % higher than before, and the batch tree has at least 0.981 of
  SpecServe. All this is with the earlier fits.
- **Rounds priced as they are simulated.** Policies took a step of several requests for one of a
  single request, and left out a round's messages and part of the host's time: with the 8B, 84 us of
  a round of one stream. A test now compares price and simulation term by term. With three seeds the
  mean speed over plain decoding is 1.117 for the batch tree, before and after; SpecServe's rose
  from 1.0908 to 1.0912. No case changed by more than 0.6 % (batch tree) or 1.2 % (SpecServe, 8B).
  Of the rooflines' results only those of asynchronous batch trees depend on it, through the
  messages: ten points of the map on four GPUs changed by at most 0.6 %.
- **A newcomer's draft prompt** was read if the newcomer's share of what drafting saves was more. On
  a batch near break-even one long prompt was not, and without that request drafting did not pay for
  the others. Now it counts what it adds to drafting for most others, as long as an average prompt
  repays by shares. With six acceptance seeds, 70B + 3B gains 1.6 and 1.0 % at load 1.2 on "conv"
  and "mooncake", 1.0 and 1.4 % at 0.7; nothing else with a 70B or 72B changed by more than 0.12 %
  at these loads, and no run of the table lost more than 0.23 %. Of the map two points on four GPUs
  changed, by 0.1 %; the other sections with rooflines are from before.
- **Evaluations and first confidences in overload.** With 70B + 3B on "conv" at load 1.2 the batch
  tree took 86 ms longer than a chain of one for 15 s of work. 99 ms were evaluations, half of them
  as a request had come; in a busy period each delay adds to the latency of all that wait, so that
  0.6 % of throughput were 2.7 % of latency. Rounds are now repeated while requests come and go, and
  longer each time that an evaluation finds the same: 24 ms. In other runs both policies stopped
  drafting after the first twenty rounds, at a mean confidence of 0.57 to 0.63 where the recordings
  have 0.69; so they begin with that of the fit. SpecServe reads a newcomer's prompt by what it
  adds, and pauses for one round where a target forbids drafting. Over the 36 cases the mean speed
  over plain decoding rose from 1.117 to 1.122 (batch tree) and from 1.093 to 1.099, the lowest from
  0.981 to 0.990 and from 0.981 to 0.988. With rooflines SpecServe has 0.994 to 1.005 of its speed
  before in all sections, batch trees 0.992 to 1.014.
- **What a target forbids SpecServe.** No round was longer than every request could afford with one
  token from it. With a 70B in overload this forbade 6 to 22 of 800 rounds to draft, and evaluations
  followed each of them. But a round of more tokens per second is also better for a request that
  gets its mean share of them. So each now counts on one more token with the mean chance, if the
  draft has read its prompt. In 24 runs (70B, load 1.2, as under "Overload") SpecServe had 0.979 to
  1.013 of the speed of a chain of one, in the middle 0.993; now 0.991 to 1.013, in the middle
  0.998. As many requests meet their targets: TPOT with a 70B on "conv" and "mooncake" at load 1.2
  1,416 of 2,400 (1,407 before), the SLO in the burst of "code" at four scales with three seeds
  4,604 of 18,756 (4,597).
- **Answers that still run.** How long answers are was learned from those that had finished; the
  first to finish are the short ones. After a first answer of one token 48 were expected, where the
  mean is 85. So drafting stopped for seconds with 70B + 3B on "mooncake": the batch tree's in one
  of the 24 runs (0.966 of a chain of one, now 1.004) and in one of 18 at load 1.0 (0.978; now in
  none), SpecServe's in four of these 18 (0.964 to 0.977; now in one, 0.973). Now those that still
  run count, too, until 128 have finished. On "code" (70B, loads 0.7 and 1.2, six or nine sets of
  requests each) this changed the speed by -0.2 to 0.3 % on average, that of single runs by up to
  1.5 %; the means over the 36 cases did not change. With rooflines nothing changed by more than
  0.7 %.
- **Fits with a price for each doubling of a batch.** Plain steps of several requests are longer in
  these fits (`doubling` in [file-formats.md](file-formats.md)), so that drafting gains more: over
  the 36 cases the means are 1.129 (batch tree, before 1.123) and 1.105 (SpecServe, 1.099), the
  lowest 0.991 (0.992) and 0.985 (0.988). The table in "Where a draft's prompt costs several steps"
  is with them; the runs in the paragraphs below it are with the fits before.
- **What policies are told.** Simulator and engine told policies different clocks behind
  prompts, and other prompts that wait. They tell the same now. All that is simulated of
  SpecServe, TurboSpec, AdaServe and the batch tree was simulated again; chain-3 and the
  asynchronous batch tree came out as before on the three traces. Mean latencies changed by up to
  0.5 % on the traces, 1.4 % on the map (one GPU at twice the load) and 1.3 % in the 36 cases of
  fits, whose means did not change. SpecServe was level with the best fixed length on "mooncake"
  and is 0.2 % slower.
- **Short rests at first.** After a look that found plain decoding best, policies rested until the
  look was 0.5 % of the time: 10 rounds by the 8B's fit, but 25 to 64 on GPUs, where looks take 0.2
  to 0.6 ms. The first rest now lasts until it is 4 %, and each that follows twice as long, down to
  0.5 %. With rooflines looks take nothing, so that nothing changes.
- **Answers that the plan expects.** 96 tokens were expected until some requests had finished, while
  answers of "code" have 20 to 25. With 70B + 3B on its later stretches the batch tree had 0.956 to
  0.977 of plain decoding's speed in 7 of 144 further runs (three pairs, three traces, three loads,
  up to three sets of requests, two seeds): what drafting costs at first delays a queue. A plan
  knows the mean of its trace, and policies now begin with it: one of the 144 is below 0.98
  (0.9799), and the mean rose from 1.163 to 1.165. SpecServe's lowest are 0.977 and 0.9797 (before
  0.978), its mean is 1.135. Expecting 32 everywhere was not kept: drafting then begins too late on
  "conv" and "mooncake" (up to 7 % slower).
- Both together in the 36 cases with fits, which alone were simulated again: means rose from 1.129
  to 1.130 (batch tree) and from 1.105 to 1.106 (SpecServe); the lowest went from 0.991 to 0.986 and
  from 0.985 to 0.980, both with 70B + 3B on "code" at 0.7. Other sections, measured ones too, have
  policies that are not told how long answers are."""


def contents(sections: Sequence[str]) -> str:
    """Links to the sections that there are, in their order."""
    heads = [head for text in sections for head in re.findall(r"^## (.*)$", text, re.MULTILINE)]
    anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
    pairs = zip(heads, anchors, strict=True)
    return "\n".join(f"- [{head}](#{anchor})" for head, anchor in pairs)


def write(results: Results) -> None:
    """Write the page and its pictures."""
    sections = [
        simulated.traces_section(results),
        simulated.attainment_section(results),
        simulated.batches_section(results),
        simulated.over_time_section(results),
        simulated.chunks_section(results),
        simulated.lengths_section(results),
        goals.map_section(results),
        goals.goals_section(results),
        measured.price_section(results),
        measured.pairs_section(results),
        *[
            measured.ranks_section(results, key)
            for key in (
                "ranks-70b-burst",
                "ranks-70b-loads",
                "ranks-8b-loads-told",
                "ranks-8b-loads",
                "ranks-8b-loads-before",
                "ranks-70b",
                "ranks-70b-1",
                "ranks-70b-3b-1",
                "ranks",
                "ranks-8b",
                "ranks-8b-1",
            )
        ],
        measured.cpu_section(results),
        _HISTORY if below(results, "pairs") else "",
    ]
    parts = [_HEAD, results.get("remark", {}).get("text", ""), contents(sections), *sections]
    PAGE.write_text(reflow("\n\n".join(filter(None, parts))) + "\n", encoding="utf-8")
    print(PAGE)
