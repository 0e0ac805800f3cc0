"""About how long the parts of a campaign take.

Seconds are those of campaigns on H200s: prompts by the token of 2026-11-23, starts and what lies
between sessions of 2026-11-26, profiles of 2026-11-27; steps by a roofline of the engine on this
machine's GPU.
Imports no torch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmarks import eight_predictions
from benchmarks.campaign.questions import LONG_ANSWER, NUM_LONG, RECORDED_TOKENS
from benchmarks.campaign.units import Pair, Unit
from benchmarks.this_device import this_device
from codesign.config import parse_deployment
from codesign.fit.prompt_stairs import LONGEST
from codesign.fit.roofline import Forward, Software

# Seconds of a start: 9 s of 32 layers and 11 s of 80; 13 and 17 s where one group has all graphs.
START_FIXED, START_LAYER, START_GROUP = 7.5, 0.045, 5.0
BETWEEN = 5.0  # of a session beside its phases: a check, its fits, a look back and its end
COLD_START = 26.0  # more for the first session of a machine: it compiles what all of them run
_KERNELS = Path.home() / ".triton" / "cache"  # what has been compiled
PROFILE, SPLIT_PROFILE, PROFILE_STEPS = 4.1, 3.4, 4100  # so many seconds and steps of eight rows
# Of a prompt on one H200, a layer of 70B: what weights and rows do, and the host beyond graphs.
PROMPT_LAYER, ROW_LAYER, LONG_ROW_LAYER, HOST_LAYER = 150e-6, 3.7e-6, 2.55e-6, 400e-6
RANK = 0.01  # of a recorded request, for the draft's opinion of it
NUM_RECORDED = (108, 21_800)  # requests at least, and prompt tokens of all
RECORDING = 18.0  # seconds after which no more are begun, of
MOST_RECORDED, RECORDED_AT_ONCE = 396, 24
SERVED_PROMPT = 256  # rows of the graph of 140 tokens
TOKENS_A_ROUND = 2.1  # as served
CPU_START, CPU_STEP, CPU_PROFILE = 8.0, 0.01, 30.0  # of tiny models


@cache
def _software() -> Software:
    steps = eight_predictions.known_steps(
        sorted(eight_predictions.RESULTS.glob("engine_steps_*_h200.json"))
    )
    return eight_predictions.software_of(steps)


def _forward(name: str, gpus: int) -> Forward:
    return Forward(eight_predictions.model(name), this_device(), gpus, _software())


def _sides(label: str) -> tuple[int, int]:
    """GPUs of the target and of the draft."""
    deployment = parse_deployment(label)
    return deployment.target_workers, deployment.draft_workers or deployment.target_workers


def step_seconds(pair: Pair, label: str) -> tuple[float, float]:
    """About how long a step of eight rows takes, of target and draft."""
    if not pair.is_inflated:
        return CPU_STEP, CPU_STEP / 2.0
    target, draft = (
        _forward(name, gpus).delta
        for name, gpus in zip((pair.target, pair.draft), _sides(label), strict=True)
    )
    return target, draft


def prompt_seconds(pair: Pair, label: str, tokens: float) -> float:
    """Of a prompt of so many tokens, both models, where they take turns or not."""
    if not pair.is_inflated:
        return tokens * CPU_STEP / 50.0
    seconds = 0.0
    for name, gpus in zip((pair.target, pair.draft), _sides(label), strict=True):
        shape = eight_predictions.model(name).shape
        size = shape.hidden * shape.intermediate / (8192 * 28672) / gpus
        beyond = max(tokens - LONGEST, 0.0)
        layer = size * (PROMPT_LAYER + ROW_LAYER * min(tokens, LONGEST) + LONG_ROW_LAYER * beyond)
        seconds += shape.layers * (max(layer, HOST_LAYER) if beyond else layer)
    return seconds


def start_seconds(pair: Pair, label: str) -> float:
    """Until ranks are up and models are made, and what no phase counts."""
    if not pair.is_inflated:
        return CPU_START
    layers = eight_predictions.model(pair.target).shape.layers
    group = 0.0 if "+" in label else START_GROUP
    return BETWEEN + START_FIXED + START_LAYER * layers + group


def cold_seconds(device: str) -> float:
    """How much longer the first session of a call takes on "cuda" or "cpu-ranks"."""
    is_warm = device != "cuda" or (_KERNELS.is_dir() and any(_KERNELS.iterdir()))
    return 0.0 if is_warm else COLD_START


def profile_seconds(pair: Pair, label: str) -> float:
    """Of one deployment's part of a profile."""
    fixed = SPLIT_PROFILE if "+" in label else PROFILE
    if not pair.is_inflated:
        return CPU_PROFILE
    return fixed + PROFILE_STEPS * step_seconds(pair, label)[0]


def recording_seconds(pair: Pair, label: str) -> float:
    """Of recording acceptance."""
    fewest, prompt_tokens = NUM_RECORDED
    step = step_seconds(pair, label)[0] / 8.0  # of a request among eight
    one = step * RECORDED_TOKENS + RANK
    one += prompt_seconds(pair, label, prompt_tokens / fewest)
    least = fewest * one + NUM_LONG * RECORDED_AT_ONCE * step * (LONG_ANSWER - RECORDED_TOKENS)
    return min(max(least, RECORDING + RECORDED_AT_ONCE * one), MOST_RECORDED * one)


def unit_seconds(work: Unit, pair: Pair) -> float:
    """About how long a run takes."""
    label = work.candidate.deployment.label
    target, draft = step_seconds(pair, label)
    load, spec = work.workload, work.candidate.speculation
    if load.seconds:
        return load.seconds + 1.5
    rounds = work.requests * load.output_tokens / min(load.batch, work.requests)
    seconds = target
    if spec.kind != "plain":
        drafting = draft * max(spec.expansions, spec.max_depth)
        rounds /= TOKENS_A_ROUND
        if load.batch > 1:  # steps of many rows, and the last requests of a batch alone
            seconds *= 1.25 + 0.028 * spec.max_rows * min(load.batch, load.requests)
        seconds = max(seconds, drafting) if spec.is_async else seconds + drafting
    return rounds * seconds + work.requests * prompt_seconds(pair, label, SERVED_PROMPT)
