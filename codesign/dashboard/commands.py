"""What a visitor chose, as the command line that does the same."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from codesign.dashboard.choices import SYNTHETIC, length_factors
from codesign.dashboard.planning import request_limit

if TYPE_CHECKING:
    from codesign.config import SLO, Serving
    from codesign.dashboard.choices import Machine, Traffic
    from codesign.dashboard.planning import PlanAsked
    from codesign.dashboard.what_if import Asked

_SYNTHETIC_FILE = "synthetic.parquet"
_WIDTH = 96


def simulate_command(asked: Asked) -> str:
    """``codesign simulate`` of what is shown."""
    words = [
        *_words(asked.traffic, asked.machine, asked.slo, asked.serving),
        *("--policy", asked.policy, "--deployment", asked.split),
        *("--max-batch", str(asked.max_batch)),
    ]
    return _command(asked.traffic, "simulate", words)


def plan_command(asked: PlanAsked) -> str:
    """``codesign plan`` of the same question."""
    words = _words(asked.traffic, asked.machine, asked.slo, asked.serving)
    if asked.slo.percentile != 90:
        words += ["--slo-percentile", f"{asked.slo.percentile:g}"]
    words += ["--objective", asked.objective]
    if (limit := request_limit(asked)) is not None:
        words += ["--max-requests", str(limit)]
    if asked.policies:
        words += ["--policies", ",".join(asked.policies)]
    words += ["--runnable"] if asked.runnable else []
    return _command(asked.traffic, "plan", words)


def _command(traffic: Traffic, verb: str, words: list[str]) -> str:
    lines = []
    if traffic.source == SYNTHETIC:
        made = ["codesign", "trace", "synth", traffic.preset, "--rate", f"{traffic.rate:g}"]
        made += [] if traffic.cv is None else ["--cv", f"{traffic.cv:g}"]
        made += ["--duration", f"{traffic.seconds:g}", "--out", _SYNTHETIC_FILE]
        lines.append(shlex.join(made))
    return "\n".join([*lines, _broken(["codesign", verb, *words])])


def _words(traffic: Traffic, machine: Machine, slo: SLO, serving: Serving) -> list[str]:
    source = _SYNTHETIC_FILE if traffic.source == SYNTHETIC else traffic.source
    words = ["--trace", source]
    if traffic.source == SYNTHETIC:
        prompt, output = length_factors(traffic)
        words += ["--length-scale", f"{prompt:.4g}:{output:.4g}"]
    if traffic.rate_scale != 1.0:
        words += ["--rate-scale", f"{traffic.rate_scale:g}"]
    for name in ("max_prompt", "max_output"):
        if (value := getattr(traffic, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += _machine_words(machine)
    for name in ("ttft", "tpot"):
        if (target := getattr(slo, name)) is not None:
            words += [f"--slo-{name}-ms", f"{1000 * target:g}"]
    return words + _serving_words(serving)


def _serving_words(serving: Serving) -> list[str]:
    words = []
    for name in ("max_kv_tokens", "prefill_chunk"):
        if (value := getattr(serving, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += [f"--{n.replace('_', '-')}" for n in ("prefix_cache", "preemption")
              if getattr(serving, n)]  # fmt: skip
    if serving.routing != "round-robin":
        words += ["--routing", serving.routing]
    if serving.scheduling != "fcfs":
        words += ["--scheduling", serving.scheduling]
    return words


def _machine_words(machine: Machine) -> list[str]:
    if machine.fit:
        return ["--fit", machine.fit]
    words = ["--device", machine.device, "--gpus", str(machine.gpus)]
    words += ["--target", machine.target, "--draft", machine.draft]
    if machine.acceptance is not None:
        words += ["--acceptance", f"{machine.acceptance:g}"]
    return words


def _broken(words: list[str]) -> str:
    """Words as lines that a shell takes as one, each of them starting with a flag."""
    lines = [""]
    for word in map(shlex.quote, words):
        starts = word.startswith("--")
        if starts and len(lines[-1]) + len(word) > _WIDTH - 24:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
