"""Sections of the page of policies: what is measured, and simulated with measured step times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.policies.cases import SCALES
from benchmarks.policies.figures import Results, below, in_ms
from benchmarks.policies.ranks import rank_correlation, statements
from benchmarks.scenarios import markdown
from codesign.config import parse_deployment

_MOST_TABLES = 3  # of a section; one of speedups alone where there are more segments
_NUMBERS = {1: "one", 2: "two", 4: "four"}


def price_section(results: Results) -> str:
    """CPU time of decisions, and its share of a round."""
    rows = []
    for key, f in below(results, "price").items():
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
each round is the fastest of several repetitions. The goal, at most 2 % of a round, is met here. Old
and new code in turns on a busier machine took, at 64 and 128 requests: SpecServe 2.10 and 2.25 %
before its chains were kept from step to step, 1.11 and 1.24 % since; the serial batch tree 2.05 and
2.28 % before its trees were visited less often, 1.82 and 2.18 % since. Evaluations that are left
out are not counted: in simulations by measured fits deciding takes about 0.5 % of the time.

{markdown(head, rows)}"""


def pairs_section(results: Results) -> str:
    """Pairs of models, simulated with step times measured on two H200s."""
    found: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for key, figures in below(results, "pairs").items():
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
  have 17 to 25 tokens on average. Policies are told the mean of these requests, as by a plan; how
  unequal answers are they learn as they go. That first second costs up to 2 % of so short a run.
- **Evaluating the batch** costs what the fits measured for a batch tree. On a CPU an evaluation of
  SpecServe takes 0.7 to 0.8 of that.
- **Overload.** At load 1.2 with a 70B a chain of one is the best fixed length, as it drafts from
  the first token on and evaluates nothing. With 70B + 3B and 70B + 1B on "conv" and "mooncake",
  three acceptance seeds and two sets of requests (24 runs), the batch tree has 0.999 to 1.020 of
  its speed, SpecServe 0.991 to 1.013, in the middle 0.998. What SpecServe still loses is mostly
  evaluations.
- **Known weakness:** drafting may stop for seconds. With 70B + 3B it saves little more than a
  draft's prompt costs. If one long prompt does not pay, and drafting does not pay for the others
  without it, all decode plainly; a batch of eight then has to read eight prompts at once to begin
  again. At load 1.0 on "mooncake" this happened in one of 18 runs of SpecServe (0.973 of a chain of
  one) and in none of the batch tree. Two remedies were not kept. Starting again where the requests
  that follow repay these prompts cost up to 2.5 % with the 8B below saturation. Going on as long as
  drafting repays half of an average prompt, not 80 %, ended it, but cost the 8B up to 0.14 % on
  average, and single runs of "code" up to 1 %."""


def ranks_section(results: Results, key: str) -> str:
    """All policies on the ranks of a pair of models; "" if ``key`` has no results."""
    about = results.get(f"{key}/about")
    if about is None:
        return ""
    segments = dict.fromkeys(name.split("/")[1] for name in results if name.startswith(f"{key}/"))
    found = {name: below(results, f"{key}/{name}") for name in segments if name != "about"}
    parts = [_ranks_head(about, found)]
    if len(found) > _MOST_TABLES:
        parts.append(_loads_table(found))
    else:
        parts += [_ranks_table(name, ways) for name, ways in found.items()]
    parts += [_scales_table(found["code"])] if about.get("ships") and "code" in found else []
    parts.append(about.get("remark", ""))
    return "\n\n".join(filter(None, parts))


def _ranks_head(about: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> str:
    """What was served where, and how to read the tables."""
    ways = [way for figures in found.values() for way in figures]
    again = "; plain decoding ran twice" if any(map(_is_again, ways)) else ""
    workers = max(parse_deployment(_split(way)).num_workers for way in ways)
    target, day = about["target"].removeprefix("inflated-"), about["created"][:10]
    draft = about["draft"].removeprefix("inflated-draft-")
    few = len(found) <= _MOST_TABLES
    what = about.get("title") or (f"up to {about['batch']} requests at once" if few else "loads")
    title = f"Measured on {_NUMBERS[workers]} {about['machine']}: {target} + {draft}, {day}"
    title += f", {what}" if about.get("ships") else ""
    fit = (
        "ships, of another machine"
        if about.get("ships")
        else "was made on the same machine minutes before"
    )
    columns = """The last four columns explain the
differences: time of prompts and of the target's steps relative to the fit; what drafting takes
per round beyond the draft's steps (deciding included); and the latency simulated with the prompt
times of this run."""
    return f"""\
## {title}

{about["target"]} with {about["draft"]}, all policies of a split served by the same processes, on
the first seconds of a trace with shortened prompts and answers, at {about["load"]:.0%} of the load
that plain decoding can serve by the fit ("@1.2": at 120 %), at most {about["batch"]} requests at
once (`python -m benchmarks.policy_ranks`). The fit {fit}{again}.

In brackets: simulated for the same requests on that day.
{columns if few else ""}"""


def _loads_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Speedups alone, of many segments."""
    ways = list(dict.fromkeys(way for figures in found.values() for way in figures))
    plain = next(way for way in ways if way.startswith("plain on"))
    ways = [way for way in ways if way != plain]
    rows = []
    for name, figures in found.items():
        base = figures[plain]
        row: list[object] = [name, base["num_requests"], in_ms(base["latency_mean"])]
        for way in ways:
            if f := figures.get(way):
                simulated = base["simulated"]["latency_mean"] / f["simulated"]["latency_mean"]
                row.append(f"{base['latency_mean'] / f['latency_mean']:.3f} ({simulated:.3f})")
            else:
                row.append("")
        rows.append(row)
    same = {
        _same(figures) == f"{figures[plain]['num_requests']} on {_split(plain)}"
        for figures in found.values()
    }
    outputs = "All outputs are plain decoding's." if same == {True} else "Some outputs differ."
    names = [way.rpartition(" on ")[0] for way in ways]
    head = ("trace", "requests", "plain, ms", *names)
    return f"""\
Mean latency of plain decoding divided by the policy's. {outputs}

{markdown(head, rows)}"""


def _scales_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """SLO attainment by scale, of policies that were told the targets at scale 1."""
    rows = []
    for way, f in sorted(found.items(), key=lambda pair: -sum(pair[1]["attainment"].values())):
        said = f["simulated"]["attainment"]
        shares = [f"{f['attainment'][s]:.1%} ({said[s]:.1%})" for s in map(str, SCALES)]
        rows.append((way.rpartition(" on ")[0], *shares, f"{f['peak_batch']:.0f}"))
    return f"""\
SLO attainment at scales of both targets; policies were told those of scale 1:

{markdown(("policy", *map(str, SCALES), "largest batch"), rows)}"""


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
                f"{in_ms(f['latency_mean'])} ({in_ms(s['latency_mean'])})",
                f"{1e3 * f['tpot_mean']:.1f} ({1e3 * s['tpot_mean']:.1f})",
                f"{f['slo_attainment']:.0%} ({s['slo_attainment']:.0%})",
                f"{f['acceptance_length']:.2f} ({s['acceptance_length']:.2f})",
                f"{f['prompts']:.2f}",
                f"{f['target_steps']:.2f}",
                "-" if beside is None else f"{1e3 * beside:.2f}",
                in_ms(f["prompts_known"]["latency_mean"]),
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


def _is_again(way: str) -> bool:
    return way.startswith("plain again")


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


def cpu_section(results: Results) -> str:
    """The small pair on a CPU."""
    found = below(results, "cpu")
    if not found:
        return ""
    rows = [
        (
            way,
            f"{found['plain on 2']['latency_mean'] / f['latency_mean']:.2f}",
            f"{f['predicted_speedup']:.2f}",
            in_ms(f["tpot_p50"]),
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

Made with this machine's own fit (`codesign profile`, then `compare_policies cpu --fit`). The host
has other guests: a run ten minutes before, with the same tokens, had 1.64 instead of 1.17 for
SpecServe, 1.67 instead of 1.46 for chain-5 and 1.99 instead of 1.75 for the asynchronous batch
tree, which was the fastest in both. So only policies that are far apart can be ranked here. With
the fit that ships the ranks agreed less (0.24): it is of a processor on which steps take half as
long, and eight rows 1.6 times as long as one, here 1.5. On that processor the rank correlation
with its own fit was 0.92 (21 November).

{markdown(head, rows)}"""
