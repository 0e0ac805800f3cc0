"""What ``compare_policies.py`` compares: machines, traces, policies, loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from codesign.config import SLO, Serving
from codesign.errors import InputError
from codesign.fit import Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import parse_model
from codesign.fit.roofline import Forward, roofline_fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.policy.speculation import parse_policy
from codesign.prompts import CATEGORIES
from codesign.traces import load_trace
from codesign.traces.catalog import find_published

POLICIES = (
    "plain",
    "chain-1",
    "chain-3",
    "chain-5",
    "threshold-8@0.4",
    "static-tree-1x1x1x1x1x1x1x1",
    "turbospec-8",
    "specserve-8",
    "specserve-8-no-drafter",
    "specserve-8-no-prior",
    "specserve-8-no-slo",
    "adaserve-4x2x64",
    "tree-8x4x4",
    "async-tree-8x4x6",
    "batch-tree-16x2x8",
    "async-batch-tree-16x2x8",
)
NAMES = {"static-tree-1x1x1x1x1x1x1x1": "SpecInfer*"}
MAP_POLICIES = ("plain", "chain-3", "specserve-8", "batch-tree-16x2x8", "async-batch-tree-16x2x8")
CHUNK = 512  # prompt tokens
CHUNK_POLICIES = ("plain", "chain-3", "specserve-8", "tree-8x4x4", "batch-tree-16x2x8")
LENGTHS_POLICIES = (
    "plain",
    "chain-1",
    "chain-3",
    "chain-5",
    "specserve-8",
    "specserve-8-no-slo",
    "batch-tree-16x2x8",
)
LENGTHS_RATES = (1.0, 3.0)  # times a trace's own
# Median prompt tokens of questions as short as Spec-Bench's, by category, and of their answers.
SHORT_PROMPTS = {
    "chat": 120, "code": 200, "mathematics": 120, "translation": 60, "summary": 900,
    "retrieval": 800,
}  # fmt: skip
SHORT_ANSWERS = 220
LOADS = (0.05, 0.25, 0.5, 1.0, 2.0)  # of what plain decoding can bear
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SCALES = (0.8, 1.0, 1.2, 1.4)
SERVING = Serving(prefix_cache=True, preemption=True)
TARGET, DRAFT = "llama-3.1-70b:int4", "llama-3.2-1b:int4"
PAPER_TPOT = 0.030  # on 8 x A800


@dataclass(frozen=True)
class Machine:
    """So many GPUs of a kind.

    Attributes:
        max_prompt: Longest prompt that its memory takes beside others; longer ones are cut.
    """

    device: str
    gpus: int
    max_prompt: int = 131_072

    @property
    def name(self) -> str:
        """Such as "h100x8"."""
        return f"{self.device}x{self.gpus}"

    def fit(self) -> Fit:
        """Its roofline with recorded acceptance, and what the recordings say of confidences."""
        return _fit(self)

    def cut(self, requests: pd.DataFrame) -> pd.DataFrame:
        """The requests, long prompts cut."""
        if int(np.max(requests["prompt_tokens"])) <= self.max_prompt:
            return requests
        cut = requests.assign(prompt_tokens=requests["prompt_tokens"].clip(upper=self.max_prompt))
        return cut.drop(columns="hash_ids", errors="ignore")

    def ways(self, policies: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """(policy, deployment) of each policy on each split that the memory holds."""
        for policy in policies:
            if not parse_policy(policy).is_async:
                yield policy, str(self.gpus)
                continue
            for draft in (1, 2):
                split = f"{self.gpus - draft}+{draft}"
                if (
                    draft < self.gpus
                    and split in self.fit().costs
                    and (draft == 1 or self.gpus > 4)
                ):
                    yield policy, split


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h100", 1, max_prompt=8192),
        Machine("h100", 2, max_prompt=8192),
        Machine("h100", 4),
        Machine("h100", 8),
        Machine("h200", 1, max_prompt=32_768),
        Machine("h200", 2, max_prompt=32_768),
        Machine("h200", 4),
        Machine("h200", 8),
    )
}


def find_machine(name: str) -> Machine:
    """The machine of this name.

    Raises:
        InputError: If there is none.
    """
    if name not in MACHINES:
        raise InputError(f"unknown machine {name!r}; write some of {', '.join(MACHINES)}")
    return MACHINES[name]


@cache
def _fit(machine: Machine) -> Fit:
    recorded = Fit.load(DEFAULT_FIT)
    fit = roofline_fit(
        load_device(machine.device),
        machine.gpus,
        parse_model(TARGET),
        parse_model(DRAFT),
        recorded.acceptance,
        acceptance_error=0.0,
        acceptance_origin="recorded for another pair",
    )
    return replace(fit, calibration=recorded.calibration)


@cache
def paper_slo(machine: Machine) -> SLO:
    """SpecServe's 30 ms a token on 8 x A800, scaled by a plain step at batch 1 of either machine.

    Its 200 ms to the first token were for prompts of a few hundred tokens; here prompts are as long
    as the traces say, and the target is that of a prompt of 2,048 tokens that waits for four more.
    """
    paper = Forward(parse_model("llama-3.1-70b"), load_device("a800"), 8).decode(1, 1000)
    cost = machine.fit().costs[str(machine.gpus)]
    return SLO(ttft=5.0 * cost.prefill(2048), tpot=PAPER_TPOT * cost.target(1, 1000) / paper)


def scaled(slo: SLO, factor: float) -> SLO:
    """Both targets times a factor."""
    assert slo.ttft is not None
    assert slo.tpot is not None
    return SLO(ttft=slo.ttft * factor, tpot=slo.tpot * factor)


def split_of(policy: str, gpus: int) -> str:
    """One GPU for an asynchronous draft, or all for both models in turn."""
    return f"{gpus - 1}+1" if parse_policy(policy).is_async else str(gpus)


@dataclass(frozen=True)
class Segment:
    """Ten minutes of a trace, or the first of them.

    Attributes:
        name: Of the segment.
        published: Name of the trace, as ``codesign trace fetch`` takes it.
        start: Seconds; the burst of "code" then comes at 410 s, as in the paper.
        rate: Factor of the request rate.
        seconds: How long; less than the paper's ten minutes where answers are long, as every round
            of the policies that look at the batch is played.
        map_requests: Requests of it that a point of the map serves.
    """

    name: str
    published: str
    start: float
    rate: float = 1.0
    seconds: float = 600.0
    map_requests: int = 80

    def load(self, folder: Path | None, *, seed: int) -> pd.DataFrame:
        """Its requests; each category as often as another.

        Args:
            folder: Of the published file, whatever is in front of its name; None: the user's cache.
            seed: Of the categories, and of arrivals within the file's resolution.

        Raises:
            InputError: If the file is not there.
        """
        trace = load_trace(self.published if folder is None else self._file(folder))
        trace = trace.spread_ticks(seed).scale_rate(self.rate).slice(self.start, self.seconds)
        return trace.with_categories(CATEGORIES, [1.0] * len(CATEGORIES), seed).requests

    def _file(self, folder: Path) -> Path:
        known = find_published(self.published)
        assert known is not None, self.published
        found = next(folder.glob(f"*{known.filename}"), None)
        if found is None:
            raise InputError(
                f"{folder} has no {known.filename}. Fix: codesign trace fetch {self.published}, "
                "and no --traces"
            )
        return found


def with_short_lengths(requests: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """The arrivals of a trace with prompts and answers as a benchmark of questions has them."""
    rng = np.random.default_rng(seed)
    prompts = np.array([SHORT_PROMPTS[category] for category in requests["category"]])
    prompts = prompts * rng.lognormal(0.0, 0.5, len(requests))
    answers = SHORT_ANSWERS * rng.lognormal(0.0, 0.6, len(requests))
    return requests.drop(columns="hash_ids", errors="ignore").assign(
        prompt_tokens=np.maximum(prompts.astype(int), 8),
        output_tokens=np.clip(answers.astype(int), 16, 1024),
    )


SEGMENTS = {
    segment.name: segment
    for segment in (
        Segment("code", "azure-code", 1880.0, map_requests=200),
        Segment("conv", "azure-conv", 300.0, seconds=150.0),
        Segment("mooncake", "mooncake-conversation", 0.0, rate=1.0 / 3.0, seconds=300.0),
    )
}


def find_segment(name: str) -> Segment:
    """The segment of this name.

    Raises:
        InputError: If there is none.
    """
    if name not in SEGMENTS:
        raise InputError(f"unknown segment {name!r}; write some of {', '.join(SEGMENTS)}")
    return SEGMENTS[name]
