"""Nouns of a deployment: latency targets, the split of the machine, and how it is shared."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from codesign.errors import InputError

Routing = Literal["round-robin", "least-loaded", "prefix-aware"]
ROUTINGS: tuple[Routing, ...] = ("round-robin", "least-loaded", "prefix-aware")
Scheduling = Literal["fcfs", "slo"]
SCHEDULINGS: tuple[Scheduling, ...] = ("fcfs", "slo")


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency targets.

    Attributes:
        ttft: Seconds to the first token; None for no target.
        tpot: Seconds per later token; None for no target.
        percentile: Share of requests, in percent, that must meet a target.
    """

    ttft: float | None = None
    tpot: float | None = None
    percentile: float = 90.0

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft), ("tpot", self.tpot)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"SLO {name} must be a number of seconds above 0, got {value}")
        if not 0 < self.percentile <= 100:
            raise InputError(f"SLO percentile must be in (0, 100], got {self.percentile}")

    @property
    def is_set(self) -> bool:
        """Whether there is a target: without one every request is within the SLO."""
        return self.ttft is not None or self.tpot is not None


@dataclass(frozen=True, slots=True)
class Deployment:
    """How the machine's workers (CPU threads, or GPUs) are split.

    Attributes:
        target_workers: Tensor parallel degree of the target; CPU threads on a CPU.
        draft_workers: The draft's own workers, in a process of its own; 0 when the draft model
            shares the target's workers and runs in turn with it (serial), or when there is no
            draft.
        replicas: Copies of the above, each with requests of its own.
        prefill_workers: Workers that only run prompts, for all replicas; 0 when prompts run where
            their answers are decoded.
    """

    target_workers: int
    draft_workers: int = 0
    replicas: int = 1
    prefill_workers: int = 0

    def __post_init__(self) -> None:
        if self.target_workers < 1 or self.draft_workers < 0:
            raise InputError(
                f"need at least 1 target worker and no fewer than 0 draft workers, got "
                f"{self.target_workers} and {self.draft_workers}"
            )
        if self.replicas < 1 or self.prefill_workers < 0:
            raise InputError(
                f"need at least 1 replica and no fewer than 0 prefill workers, got "
                f"{self.replicas} and {self.prefill_workers}"
            )

    @property
    def num_workers(self) -> int:
        """Workers in all."""
        return self.replicas * (self.target_workers + self.draft_workers) + self.prefill_workers

    @property
    def num_groups(self) -> int:
        """Groups of workers that run a model, or both in turn."""
        return self.replicas * (2 if self.draft_workers else 1) + (self.prefill_workers > 0)

    @property
    def unit(self) -> Deployment:
        """One replica without the prefill workers: what step times are known for."""
        return replace(self, replicas=1, prefill_workers=0)

    @property
    def label(self) -> str:
        """For example "2" (all for one process), "3+1" (target + draft), "2x3+1/p2".

        The last is two replicas of three and one, and two workers for prompts.
        """
        split = f"{self.target_workers}+{self.draft_workers}" if self.draft_workers else None
        times = f"{self.replicas}x" if self.replicas > 1 else ""
        prompts = f"/p{self.prefill_workers}" if self.prefill_workers else ""
        return f"{times}{split or self.target_workers}{prompts}"


def parse_deployment(label: str) -> Deployment:
    """The deployment that a label such as "2", "3+1", "2x4" or "2x3+1/p2" names.

    Raises:
        InputError: If it is not such a label.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)(?:\+(\d+))?(?:/p(\d+))?", label)
    if match is None:
        raise InputError(
            f"unknown split {label!r}; write 4 (one group), 3+1 (target + draft), 2x4 or 2x3+1 "
            "(replicas), 2x3+1/p2 (and 2 workers for prompts)"
        )
    replicas, target, draft, prefill = match.groups()
    return Deployment(int(target), int(draft or 0), int(replicas or 1), int(prefill or 0))


@dataclass(frozen=True, slots=True)
class Serving:
    """How a replica shares its memory and its steps between requests.

    Attributes:
        max_kv_tokens: KV rows of one replica; None for what the fit says its memory holds.
        prefill_chunk: Most prompt tokens that share a step with decoding; None to run whole
            prompts between rounds.
        prefix_cache: Keep the KV rows of prompts for later requests with the same prefix blocks.
        preemption: Take KV rows as requests grow, and evict the youngest request when they run
            out; otherwise the rows of the whole answer are reserved when a request is admitted.
        routing: Which replica a request goes to.
        scheduling: Who joins the batch next: "fcfs", first come, first served, or "slo", so that as
            many as possible keep their targets.
        answer_tokens: Mean of the trace, that policies expect until they have seen enough answers;
            None if nobody knows.
    """

    max_kv_tokens: int | None = None
    prefill_chunk: int | None = None
    prefix_cache: bool = False
    preemption: bool = False
    routing: Routing = "round-robin"
    scheduling: Scheduling = "fcfs"
    answer_tokens: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_kv_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name.replace('_', ' ')} must be at least 1, got {value}")
        if self.routing not in ROUTINGS:
            raise InputError(f"unknown routing {self.routing!r}; one of {', '.join(ROUTINGS)}")
        if self.scheduling not in SCHEDULINGS:
            known = ", ".join(SCHEDULINGS)
            raise InputError(f"unknown scheduling {self.scheduling!r}; one of {known}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a plan file."""
        return asdict(self)
