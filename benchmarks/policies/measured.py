"""Sections of the page of policies: deciding, pairs by measured step times, and a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.pages import markdown
from benchmarks.policies.figures import MOST_DECIDING, SMALL, Results, below, in_ms


def price_section(results: Results) -> str:
    """CPU time of decisions, and its share of a round."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for key, f in below(results, "price").items():
        machine, way, batch = key.split("/")
        found.setdefault((machine, way), {})[batch] = f
    if not found:
        return ""
    sizes = sorted({int(batch) for ways in found.values() for batch in ways})
    rows = []
    for (machine, way), ways in found.items():
        at = [ways.get(str(size)) for size in sizes]
        before = [f"{1e6 * f['before']:.0f} ({f['share']:.2%})" if f else "" for f in at]
        rows.append((machine, way, *before))
        if any(f["beside"] for f in ways.values()):
            beside = [f"{1e6 * f['beside']:.0f}" if f else "" for f in at]
            rows.append((machine, "the same, during verification", *beside))
    head = ("machine", "policy", *(f"batch {size}" for size in sizes))
    return f"""\
## The price of deciding

CPU time that the policy's own decisions take per round while no forward runs, us (mean), and in
brackets its share of the mean simulated round. Measured on one core of the host of four H100s, an
Intel Xeon, beside the GPU tests (the CPU engine's rows too); each round is the fastest of several
repetitions. What an asynchronous policy decides during the verification delays no round, nor does
what is settled while a forward runs: learning from verdicts, and whether looks gain.

{markdown(head, rows)}

{_elsewhere(results)}
The CPU engine has no such time; its rows leave out 23 to 99 us of it on the EPYC. Reading the clock
is part of each call, five or more a round (1 us there). Evaluations left out are not counted."""


def _elsewhere(results: Results) -> str:
    """What the same takes on a slow core."""
    shares = {key: f["share"] for key, f in below(results, "price, slow core").items()}
    if not shares:
        return ""

    def worst(keys: Iterable[str]) -> str:
        key = max(keys, key=shares.__getitem__)
        _, way, batch = key.split("/")
        return f"{shares[key]:.2%} ({way} for {batch} requests)"

    above = sum(share > MOST_DECIDING for share in shares.values())
    return f"""\
The goal, at most 2 % of a round, depends on the core. On the EPYC of two cores that most of this
page was made on, a slow one, the same code takes 1.1 to 1.6 times as long: up to
{worst(key for key in shares if SMALL not in key)} with a 70B, and
{worst(key for key in shares if SMALL in key)} with an 8B;
{above} of {len(shares)} are above 2 %. Two runs of one code are up to 0.3 points apart there."""


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
    loads = list(dict.fromkeys(load for _, _, load in speedups))
    rows = [
        (
            pair.replace("-int4", ""),
            trace,
            *(" / ".join(f"{x:.2f}" for x in speedups[pair, trace, load]) for load in loads),
        )
        for pair, trace in dict.fromkeys(case[:2] for case in speedups)
    ]
    worst = [min(column) for column in zip(*speedups.values(), strict=True)]
    least = ", ".join(f"{p} {x:.3f}" for p, x in zip(policies, worst, strict=True))
    head = ("pair, int4", "trace", *(f"load {load}" for load in loads))
    return f"""\
## Where a draft's prompt costs several steps

Simulated with the shipped fits' steps of two H200s: 600 requests of each trace and five acceptance
seeds, prompts of 48 to 512 tokens, answers of up to 96, at most eight at once. Speedup in mean
latency over plain decoding, by share of the load that it can serve, of {" / ".join(policies)}.
Lowest: {least}.

{markdown(head, rows)}

- **When the draft reads a prompt** is decided here: a request is decoded plainly until drafting is
  expected to save on its remaining tokens one to two times what reading its prompt costs. On "code"
  answers have 17 to 25 tokens on average. Policies are told the mean of these requests, as by a
  plan; how unequal answers are they learn as they go, which costs up to 2 % of so short a run.
- **Overload.** At load 1.2 with a 70B a chain of one is the best fixed length, as it drafts from
  the first token on and evaluates nothing. With 70B + 3B and 70B + 1B on "conv" and "mooncake",
  three acceptance seeds and two sets of requests (24 runs by the steps of 23 November), the batch
  tree had 0.999 to 1.020 of its speed, SpecServe 0.991 to 1.013.
- **Known weakness:** drafting may stop for seconds. If one long prompt does not pay, and drafting
  does not pay for the others without it, all decode plainly; a batch of eight then has to read
  eight prompts at once to begin again. With 70B + 3B at load 1.0 on "mooncake" this happened in one
  of 18 runs of SpecServe (0.973 of a chain of one) and in none of the batch tree."""


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

Made with this machine's own fit, of minutes before (`codesign profile`, then `compare_policies cpu
--fit`). The host has other guests: visits of one profile differ by 8 to 17 % (the standard error of
one more visit), in slow phases of 4 to 16 s. Three profiles that visit "2" and "1+1" in turns and
three that measured each at a stretch, made alternately, had 127 and 122 of 150 pairs in the order
of two comparisons of that hour, and rank correlations of 0.54 to 0.75 and of 0.33 to 0.87: turns
hardly help against phases so short. And six requests accept more than recorded answers: 2.22
tokens of chain-5's rounds for 1.99, 2.49 of tree-8x4x4's for 2.19.

{markdown(head, rows)}"""
