"""The page and the pictures of ``compare_policies.py``: docs/policy-comparison.md.

Figures 9 to 12 and Table 2 of the SpecServe paper, with our policies; the map of where which policy
wins; and what was asked of them, checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.policy_cases import (
    BATCHES,
    CHUNK,
    LENGTHS_POLICIES,
    NAMES,
    POLICIES,
    SCALES,
    SEGMENTS,
    SHORT_ANSWERS,
)
from benchmarks.policy_charts import bars, lines, over_time
from benchmarks.policy_ranks import rank_correlation, statements
from benchmarks.scenarios import markdown, reflow
from codesign.config import parse_deployment

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "policy-comparison.md"
SERIAL, ASYNC, SPECSERVE = "batch-tree-16x2x8", "async-batch-tree-16x2x8", "specserve-8"
FIXED = ("chain-1", "chain-3", "chain-5")
SHOWN = ("chain-3", "threshold-8@0.4", SPECSERVE, SERIAL)  # over time
Results = Mapping[str, Mapping[str, Any]]

_NUMBERS = {1: "one", 2: "two", 4: "four"}
_HEAD = """\
# Policies compared

Which policy is fastest depends on the machine, the load and the models. In short:

- The serial batch tree (`batch-tree`) is the safe choice: in simulation it is never slower than
  plain decoding by more than 2 %, and batch trees are never slower than SpecServe by more than 2 %.
  Measured with a 70B on two H200s it was level with SpecServe on one trace and 11 % slower on
  another (20 requests, mostly because prompts were longer by chance).
- The asynchronous batch tree (`async-batch-tree`) is fastest on eight GPUs while the load is at
  most half of what plain decoding can serve. At higher load, on fewer GPUs and with long prompts
  the GPU that it takes from the target costs more than it gains.
- On two H200s speculation gains little or nothing with a small target (8B), and in overload with a
  large draft (3B). The adaptive policies then mostly decode plainly; with the 8B a chain of one
  drops to 0.58 of plain decoding's speed. In overload a chain of one is up to 4 % faster than they
  are with 70B + 3B, and up to 2 % with 70B + 1B.

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
  messages: ten points of the map on four GPUs changed by at most 0.6 %."""


def write(results: Results) -> None:
    """Write the page and its pictures."""
    parts = [
        _HEAD,
        results.get("remark", {}).get("text", ""),
        _traces(results),
        _attainment(results),
        _batches(results),
        _over_time(results),
        _chunks(results),
        _lengths(results),
        _map(results),
        _goals(results),
        _price(results),
        _pairs(results),
        *[_ranks(results, key) for key in ("ranks", "ranks-8b", "ranks-8b-1")],
        _cpu(results),
        _HISTORY if _of(results, "pairs") else "",
    ]
    PAGE.write_text(reflow("\n\n".join(filter(None, parts))) + "\n", encoding="utf-8")
    print(PAGE)


def name_of(policy: str) -> str:
    """As the tables show it."""
    return NAMES.get(policy, policy)


def _of(results: Results, prefix: str) -> dict[str, Mapping[str, Any]]:
    """Results below a prefix, by what is left of the key."""
    return {
        key.removeprefix(f"{prefix}/"): value
        for key, value in results.items()
        if key.startswith(f"{prefix}/")
    }


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:,.3g}" if value < 1 else f"{1e3 * value:,.0f}"


def _traces(results: Results) -> str:
    rows, picture = [], []
    for segment in SEGMENTS:
        found = _of(results, f"traces/h100x8/{segment}")
        if "plain" not in found:
            continue
        plain = found["plain"]
        for policy in (p for p in POLICIES if p in found):
            f = found[policy]
            speedup = plain["latency_mean"] / f["latency_mean"]
            picture.append({"trace": segment, "policy": name_of(policy), "value": speedup})
            rows.append(
                (
                    segment,
                    name_of(policy),
                    f"{speedup:.2f}",
                    " / ".join(_ms(f[f"ttft_p{p}"]) for p in (50, 90, 99)),
                    " / ".join(_ms(f[f"tpot_p{p}"]) for p in (50, 90, 99)),
                    " / ".join(_ms(f[f"itl_p{p}"]) for p in (50, 90, 99)),
                    f"{f['attainment']['1.0']:.1%}",
                    f"{f['goodput']:.2f}",
                    f"{f['draft_tokens']:.2f}",
                    f"{f['accepted_tokens']:.2f}",
                    "-" if f["acceptance_rate"] is None else f"{f['acceptance_rate']:.2f}",
                    int(f["peak_batch"]),
                )
            )
    if not rows:
        return ""
    bars(picture, DOCS / "images" / "policies-speedup.png")
    head = ("trace", "policy", "speedup", "TTFT p50 / 90 / 99, ms", "TPOT, ms", "ITL, ms",
            "in SLO", "goodput", "drafted", "accepted", "rate", "peak batch")  # fmt: skip
    seconds = ", ".join(f"{s.name} {s.seconds:.0f} s" for s in SEGMENTS.values())
    return f"""\
## Three traces (Figure 9 and Table 2)

Eight H100, each trace at its own rate ({seconds}; mooncake at a third of its rate). Serial policies
draft on all eight GPUs; asynchronous ones draft on one GPU, with the target on the other seven.
Speedup: mean latency of plain decoding divided by that of the policy. Drafted and accepted: tokens
per request and round. Goodput: requests per second within the SLO.

![Speedup by trace](images/policies-speedup.png)

{markdown(head, rows)}"""


def _attainment(results: Results) -> str:
    found = _of(results, "traces/h100x8/code")
    rows, picture = [], []
    for policy in (p for p in POLICIES if p in found):
        shares = []
        for scale in SCALES:
            own = results.get(f"slo/h100x8/code/{policy}/{scale}", found[policy])
            shares.append(own["attainment"][str(scale)])
            picture.append({"x": scale, "policy": name_of(policy), "value": shares[-1]})
        rows.append((name_of(policy), *(f"{share:.1%}" for share in shares)))
    if not rows:
        return ""
    _curves(picture, "attainment", x="SLO scale", y="requests within the SLO")
    return f"""\
## SLO attainment in the burst (Figure 10)

Trace "code", whose burst comes at 410 s. At scale 1 the TPOT target is SpecServe's 30 ms on eight
A800s, scaled by the ratio of a plain step on both machines, and the TTFT target is five times the
duration of a prompt of 2,048 tokens. Policies that use the targets ran once per scale. Most misses
are the burst's prompts, which wait for each other under every policy.

![Attainment by scale](images/policies-attainment.png)

{markdown(("policy", *(str(scale) for scale in SCALES)), rows)}"""


def _batches(results: Results) -> str:
    rows, picture = [], []
    for policy in POLICIES:
        row: list[object] = [name_of(policy)]
        for batch in BATCHES:
            found = _of(results, f"batches/h100x8/{batch}")
            if policy in found and "plain" in found:
                speedup = found["plain"]["latency_mean"] / found[policy]["latency_mean"]
                row.append(f"{speedup:.2f}")
                picture.append({"x": batch, "policy": name_of(policy), "value": speedup})
            else:
                row.append("-")
        rows.append(row)
    if not picture:
        return ""
    _curves(picture, "batches", x="batch size", y="speedup over plain decoding", is_log=True)
    return f"""\
## Batches of one size (Figure 11)

Prompts of 512 tokens and answers as in "conv" (32 to 256 tokens); three times as many requests as
the batch holds, all there from the start. Mean latency of plain decoding divided by the policy's.

![Speedup by batch size](images/policies-batches.png)

{markdown(("policy", *(str(batch) for batch in BATCHES)), rows)}"""


def _curves(picture: list[dict[str, Any]], name: str, **axes: Any) -> None:
    """A line per policy; those with a part switched off are left to the tables."""
    shown = [point for point in picture if "no-" not in point["policy"]]
    lines(shown, DOCS / "images" / f"policies-{name}.png", **axes)


def _over_time(results: Results) -> str:
    picture = []
    for segment in SEGMENTS:
        for policy in SHOWN:
            for second, batch, length in results.get(f"traces/h100x8/{segment}/{policy}", {}).get(
                "over_time", []
            ):
                for what, value in (("batch size", batch), ("draft tokens", length)):
                    picture.append(
                        {"trace": segment, "policy": name_of(policy), "second": second,
                         "what": what, "value": value}
                    )  # fmt: skip
    if not picture:
        return ""
    over_time(picture, DOCS / "images" / "policies-over-time.png")
    return """\
## Over time (Figure 12)

Mean batch size, and draft tokens verified per request and round, every five seconds.

![Batch size and draft tokens over time](images/policies-over-time.png)"""


def _chunks(results: Results) -> str:
    rows = []
    for segment in SEGMENTS:
        found = _of(results, f"chunks/h100x8/{segment}")
        if "plain" not in found:
            continue
        rows += [
            (
                segment,
                name_of(policy),
                f"{found['plain']['latency_mean'] / f['latency_mean']:.2f}",
                " / ".join(_ms(f[f"ttft_p{p}"]) for p in (50, 90)),
                " / ".join(_ms(f[f"tpot_p{p}"]) for p in (50, 90)),
                f"{f['slo_attainment']:.1%}",
                f"{f['goodput']:.2f}",
                f"{f['draft_tokens']:.2f}",
            )
            for policy, f in sorted(found.items(), key=lambda item: POLICIES.index(item[0]))
        ]
    if not rows:
        return ""
    head = ("trace", "policy", "speedup", "TTFT p50 / 90, ms", "TPOT, ms", "in SLO", "goodput",
            "drafted")  # fmt: skip
    return f"""\
## With chunked prefill

The same traces with prompts in chunks of {CHUNK} tokens that share the forwards of the rounds. Now
longer rounds delay the waiting prompts, and the draft has to read each chunk, too. On a busy server
fixed speculation therefore costs more than it gains.

{markdown(head, rows)}"""


def _lengths(results: Results) -> str:
    cases = dict.fromkeys(key.partition("/")[0] for key in _of(results, "lengths/h100x8"))
    rows = []
    for case in cases:
        found = _of(results, f"lengths/h100x8/{case}")
        if len(found) < len(LENGTHS_POLICIES):
            continue
        plain = found["plain"]["latency_mean"]
        cells = [
            f"{plain / found[p]['latency_mean']:.2f}, {found[p]['attainment']['1.0']:.1%}"
            for p in LENGTHS_POLICIES
        ]
        rows.append((case, int(found["plain"]["peak_batch"]), *cells))
    if not rows:
        return ""
    return f"""\
## With the paper's lengths

SpecServe's paper takes only the arrival times from the traces; prompts and answers are those of a
question benchmark. The same here: medians of 60 to 900 prompt tokens by category and of
{SHORT_ANSWERS} answer tokens, at the traces' own rate and at three times that rate. Each cell:
speedup in mean latency over plain decoding, and SLO attainment.

{markdown(("trace", "peak batch, plain", *map(name_of, LENGTHS_POLICIES)), rows)}

SpecServe is at least level with the best fixed length everywhere, as in the paper, with its SLO
rule and without. With the rule as the paper states it, that a whole round must fit the TPOT target
(commented out in its released code), it was not, and attained less, wherever plain steps come near
the target: 1.07 and 30.8 % on "code" at three times its rate, 1.22 and 80.6 % on "conv"."""


def _points(results: Results) -> dict[tuple[str, str, float], dict[str, Mapping[str, Any]]]:
    """Of the map: by machine, trace and load the figures of each "policy on deployment"."""
    points: dict[tuple[str, str, float], dict[str, Mapping[str, Any]]] = {}
    for key, value in _of(results, "map").items():
        machine, segment, load, way = key.split("/", 3)
        points.setdefault((machine, segment, float(load)), {})[way] = value
    return points


def _map(results: Results) -> str:
    rows = []
    for (machine, segment, load), ways in _points(results).items():
        plain = next((v for w, v in ways.items() if w.startswith("plain")), None)
        if plain is None:
            continue
        cells = []
        for start in ("chain-3", SPECSERVE, SERIAL, ASYNC):
            here = {w: v for w, v in ways.items() if w.startswith(f"{start} ")}
            best = min(here.items(), key=lambda item: item[1]["latency_mean"], default=None)
            cells.append("-" if best is None else _cell(plain, *best))
        rows.append((machine, segment, load, f"{plain['goodput']:.2f}", *cells, _winner(ways)))
    if not rows:
        return ""
    head = ("machine", "trace", "load", "plain: goodput", "chain-3", "specserve-8", "batch-tree",
            "async-batch-tree", "best latency")  # fmt: skip
    return f"""\
## Where which policy wins: load x machine and split

Load 1 is the number of requests per second that plain decoding on all GPUs finishes when all of
them are there from the start. Each cell: speedup in mean latency over plain decoding on all GPUs,
and goodput (requests per second within the SLO). Asynchronous: the better split, in brackets.

{markdown(head, rows)}"""


def _cell(plain: Mapping[str, Any], way: str, figures: Mapping[str, Any]) -> str:
    speedup = plain["latency_mean"] / figures["latency_mean"]
    split = way.rpartition(" ")[2]
    return f"{speedup:.2f}x, {figures['goodput']:.2f}" + (f" ({split})" if "+" in split else "")


def _winner(ways: Mapping[str, Mapping[str, Any]]) -> str:
    best = min(ways, key=lambda way: ways[way]["latency_mean"])
    return best.replace("-16x2x8", "")


def _goals(results: Results) -> str:
    rows = [
        *_against("batch tree: at most 2 % slower than plain", results, ("plain",), (SERIAL,)),
        *_against(
            "the same, better of serial and asynchronous", results, ("plain",), (SERIAL, ASYNC)
        ),
        *_against("SpecServe: at most 2 % slower than plain", results, ("plain",), (SPECSERVE,)),
        *_against("SpecServe: not slower than the best fixed length", results, FIXED, (SPECSERVE,)),
        *_against(
            "batch trees: at most 2 % slower than SpecServe", results, (SPECSERVE,), (SERIAL, ASYNC)
        ),
        *_goodput(results),
    ]
    head = ("goal", "cases", "worst", "at", "best", "at")
    return f"""\
## Goals, and whether they are met

Mean latency of the policy compared with, divided by that of the policy itself, over all traces,
batches and points of the map above, without chunked prefill. Above 1 the policy is faster.

{markdown(head, rows)}

- **The serial batch tree** meets its goals with roofline step times. For measured step times see
  "Where a draft's prompt costs several steps". In the burst it attains more than every other policy
  at every scale: 300 requests at scale 0.8 (the next best, a tree: 281), 509 at 1.4 (497).
- **The asynchronous batch tree** is up to 15 % faster than the serial one on eight GPUs, while the
  load is at most half of what they can serve. Beyond that, on fewer GPUs and with long prompts, it
  loses; `codesign plan` chooses the split. What holds it back at the traces' own rate is
  the split, not the policy: the same seven GPUs without any draft have speedups of 0.68, 0.85
  and 0.48 on the three traces over plain decoding on eight (a prompt takes a fifth longer); the
  asynchronous tree reaches 0.78, 1.81 and 0.62.
- **SpecServe** reaches the best fixed length on all three traces: 1.10, 1.56 and 1.33 (best
  lengths: 1.08, 1.55, 1.33). Exactly as in the paper it had 1.03, 1.52 and 1.08;
  [policies.md](policies.md) says what differs. On "code" the goodput of a round has to count the
  prompts that wait behind it, and so has what drafting saves for a draft's prompt: without the
  latter 1.07. With two other acceptance seeds: 1.10 and 1.09 on "code" (best lengths 1.09 and
  1.09), 1.55 and 1.55 on "conv" (1.54 and 1.54), 1.273 and 1.279 on "mooncake" (1.279 and 1.287).
  In the burst it attains more than all fixed lengths at scales 1.0 to 1.4; at 0.8 two of 1,563
  requests fewer than chain-3, with five other seeds 4 to 11 more.
- **AdaServe**, which shares rows out by need, attains up to 0.9 points more than SpecServe."""


def _cases(results: Results) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Each trace and point: figures by policy, the better split of asynchronous ones."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for segment in SEGMENTS:
        if found := _of(results, f"traces/h100x8/{segment}"):
            cases[f"{segment}, own rate"] = found
    for batch in BATCHES:
        if found := _of(results, f"batches/h100x8/{batch}"):
            cases[f"batch of {batch}"] = found
    for (machine, segment, load), ways in _points(results).items():
        here = cases.setdefault(f"{machine} {segment} {load}", {})
        for way, figures in ways.items():
            policy = way.partition(" ")[0]
            old = here.get(policy)
            if old is None or figures["latency_mean"] < old["latency_mean"]:
                here[policy] = figures
    return cases


def _against(
    asked: str, results: Results, rivals: Iterable[str], ours: Iterable[str]
) -> list[tuple[object, ...]]:
    ratios = {}
    for case, found in _cases(results).items():
        theirs = [found[r]["latency_mean"] for r in rivals if r in found]
        own = [found[o]["latency_mean"] for o in ours if o in found]
        if theirs and own:
            ratios[case] = min(theirs) / min(own)
    return _row(asked, ratios)


def _goodput(results: Results) -> list[tuple[object, ...]]:
    """Goodput of the batch trees over SpecServe's, where anything is within the SLO."""
    ratios = {}
    for case, found in _cases(results).items():
        if SPECSERVE in found and SERIAL in found:
            own = max(found[o]["goodput"] for o in (SERIAL, ASYNC) if o in found)
            theirs = found[SPECSERVE]["goodput"]
            if not case.startswith("batch") and found[SPECSERVE]["slo_attainment"] >= 0.05:
                ratios[case] = own / theirs
    return _row("goodput of batch trees relative to SpecServe's", ratios)


def _row(asked: str, ratios: Mapping[str, float]) -> list[tuple[object, ...]]:
    if not ratios:
        return []
    worst, best = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return [(asked, len(ratios), f"{ratios[worst]:.3f}", worst, f"{ratios[best]:.3f}", best)]


def _price(results: Results) -> str:
    rows = []
    for key, f in _of(results, "price").items():
        machine, way, batch = key.split("/")
        rows.append(
            (
                machine,
                way,
                batch,
                f"{1e3 * f['round']:.1f}",
                f"{1e6 * f['before']:.0f}",
                f"{f['share']:.2%}",
                f"{1e6 * f['beside']:.0f}" if f["beside"] else "-",
            )
        )
    if not rows:
        return ""
    head = ("machine", "policy", "batch", "round, ms", "deciding, us", "of the round",
            "during verification, us")  # fmt: skip
    return f"""\
## The price of deciding

CPU time that the policy's own decisions take per round (median; learning from verdicts included),
and its share of the mean simulated round. Measured on one core of the machine that wrote this page;
each round is the fastest of several repetitions. The goal is at most 2 % of a round. It is met up
to 32 requests; at 64 and 128 the serial policies take 2.1 to 2.4 % (the code before the last change
of pricing, in the same hour: 2.0 to 2.3 %). Evaluations that are left out are not counted: in
simulations by measured fits deciding takes about 0.5 % of the time.

{markdown(head, rows)}"""


def _pairs(results: Results) -> str:
    found: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for key, figures in _of(results, "pairs").items():
        *case, policy = key.split("/")
        found.setdefault(tuple(case), {})[policy] = figures
    if not found:
        return ""
    policies = [policy for policy in next(iter(found.values())) if policy != "plain"]
    speedups = {
        case: [ways["plain"]["latency_mean"] / ways[policy]["latency_mean"] for policy in policies]
        for case, ways in found.items()
    }
    rows = [(*case, *[f"{x:.2f}" for x in speedup]) for case, speedup in speedups.items()]
    worst = [min(column) for column in zip(*speedups.values(), strict=True)]
    least = ", ".join(f"{p} {x:.3f}" for p, x in zip(policies, worst, strict=True))
    behind = min(speedup[0] / speedup[1] for speedup in speedups.values())
    return f"""\
## Where a draft's prompt costs several steps

Simulated with step times that were measured on two H200s (the shipped fits): 120 requests of each
trace, prompts of 48 to 512 tokens, answers of up to 96, at most eight at once, load as a share of
what plain decoding can serve. The table shows the speedup in mean latency over plain decoding.
Lowest: {least}. The batch tree has at least {behind:.3f} of SpecServe's speed.

{markdown(("pair", "trace", "load", *policies), rows)}

- **When the draft reads a prompt** is decided here: a request is decoded plainly until drafting is
  expected to save more on its remaining tokens than reading its prompt costs. On "code" answers
  have 17 tokens on average, but 96 are expected until some requests have finished; that first
  second costs 1 to 2 % of so short a run.
- **Evaluating the batch** costs what the fits measured for a batch tree. On a CPU an evaluation of
  SpecServe takes 0.7 to 0.8 of that.
- **Known weakness:** at load 1.2 with 70B + 3B or 70B + 1B a chain of one is faster. With the 3B
  the batch tree has 0.969 and 0.973 of its speed on "conv" and "mooncake", SpecServe 0.963 and
  0.973; with the 1B the batch tree has 0.986 and 1.004, SpecServe 0.981 and 0.990. With the 3B
  drafting saves about as much there as a draft's prompt costs (by the batch tree's estimate 5 ms
  per request, against 5.5 ms for 200 tokens). If the batch tree ran every prompt at once it would
  have 1.015 to 1.028 of plain decoding's speed on these two (now 1.003 to 1.006), but 0.912 to
  0.975 on "code" (two seeds)."""


def _ranks(results: Results, key: str) -> str:
    """Section of a pair of models."""
    about = results.get(f"{key}/about")
    if about is None:
        return ""
    twice = any("/plain again" in name for name in _of(results, key))
    again = "; plain decoding ran twice" if twice else ""
    splits = {_split(way) for way in _of(results, key) if way != "about"}
    workers = max(parse_deployment(split).num_workers for split in splits)
    parts = [
        f"""\
## Measured on {_NUMBERS[workers]} {about["machine"]}: {about["target"].removeprefix("inflated-")}

{about["target"]} with {about["draft"]}, all policies of a split served by the same processes, on
the first seconds of a trace with shortened prompts and answers, at {about["load"]:.0%} of the load
that plain decoding can serve by the fit ("@1.2": at 120 %), at most {about["batch"]} requests at
once (`python -m benchmarks.policy_ranks`). The fit was made on the same machine minutes
before{again}.

In brackets: simulated for the same requests on that day. The last four columns explain the
differences: time of prompts and of the target's steps relative to the fit; what drafting takes
per round beyond the draft's steps (deciding included); and the latency simulated with the prompt
times of this run."""
    ]
    segments = dict.fromkeys(name.split("/")[1] for name in results if name.startswith(f"{key}/"))
    for segment in (name for name in segments if name != "about"):
        parts.append(_ranks_table(segment, _of(results, f"{key}/{segment}")))
    parts.append(about.get("remark", ""))
    return "\n\n".join(filter(None, parts))


def _ranks_table(segment: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    base = found[next(way for way in found if way.startswith("plain on"))]
    simulated = base["simulated"]["latency_mean"]
    rows = []
    for way, f in sorted(found.items(), key=lambda pair: pair[1]["latency_mean"]):
        s, beside = f["simulated"], f.get("beyond_draft_steps")
        speedups = base["latency_mean"] / f["latency_mean"], simulated / s["latency_mean"]
        rows.append(
            (
                way,
                f"{speedups[0]:.2f} ({speedups[1]:.2f})",
                f"{_ms(f['latency_mean'])} ({_ms(s['latency_mean'])})",
                f"{1e3 * f['tpot_mean']:.1f} ({1e3 * s['tpot_mean']:.1f})",
                f"{f['slo_attainment']:.0%} ({s['slo_attainment']:.0%})",
                f"{f['acceptance_length']:.2f} ({s['acceptance_length']:.2f})",
                f"{f['prompts']:.2f}",
                f"{f['target_steps']:.2f}",
                "-" if beside is None else f"{1e3 * beside:.2f}",
                _ms(f["prompts_known"]["latency_mean"]),
            )
        )
    head = ("policy", "speedup", "latency, ms", "TPOT, ms", "in SLO", "tokens per round",
            "prompts", "target steps", "beyond steps, ms", "latency, own prompts")  # fmt: skip
    holds = [
        f"{asked}: {value:.2f}, {'met' if is_so else 'missed'}"
        for asked, (value, is_so) in statements(found).items()
        if not math.isnan(value)  # no such policy was run
    ]
    ranks = rank_correlation(found), rank_correlation(found, "prompts_known")
    return f"""\
**{segment}**, {base["num_requests"]} requests. Outputs equal to plain decoding's: {_same(found)}.
Rank correlation of measured and simulated latencies: {ranks[0]:.2f}; with each run's own prompt
times {ranks[1]:.2f}. Goals: {"; ".join(holds)}.

{markdown(head, rows)}"""


def _split(way: str) -> str:
    """How the GPUs are split, of "POLICY on SPLIT"."""
    return way.rpartition(" on ")[2]


def _same(found: Mapping[str, Mapping[str, Any]]) -> str:
    """How many outputs are plain decoding's, by split."""
    splits: dict[str, int] = {}
    for way, f in found.items():
        split = _split(way)
        splits[split] = min(splits.get(split, f["same_outputs"]), f["same_outputs"])
    return ", ".join(f"{count} on {split}" for split, count in splits.items())


def _cpu(results: Results) -> str:
    found = _of(results, "cpu")
    if not found:
        return ""
    rows = [
        (
            way,
            f"{found['plain on 2']['latency_mean'] / f['latency_mean']:.2f}",
            f"{f['predicted_speedup']:.2f}",
            _ms(f["tpot_p50"]),
            f"{f['draft_tokens']:.2f}",
            f"{f['accepted_tokens']:.2f}",
            f"{f['peak_batch']:.0f}",
            "-" if not f["calibration_error"] else f"{f['calibration_error']['all']:.3f}",
        )
        for way, f in found.items()
        if way != "about"
    ]
    head = ("policy", "speedup, measured", "simulated", "TPOT p50, ms", "drafted", "accepted",
            "peak batch", "calibration error")  # fmt: skip
    about = found.get("about", {}).get("text", "")
    return f"""\
## Measured on a CPU

{about}

{markdown(head, rows)}"""
