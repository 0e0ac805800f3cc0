"""Nouns of a deployment: the service-level objective and the split of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from codesign.errors import InputError


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
            if value is not None and value <= 0:
                raise InputError(f"SLO {name} must be above 0 seconds, got {value}")
        if not 0 < self.percentile <= 100:
            raise InputError(f"SLO percentile must be in (0, 100], got {self.percentile}")


@dataclass(frozen=True, slots=True)
class Deployment:
    """How the machine's workers (CPU threads, or GPUs) are split.

    Attributes:
        target_workers: Tensor parallel degree of the target; CPU threads on a CPU.
        draft_workers: The draft's own workers, in a process of its own; 0 when the draft model
            shares the target's workers and runs in turn with it (serial), or when there is no
            draft.
    """

    target_workers: int
    draft_workers: int = 0

    def __post_init__(self) -> None:
        if self.target_workers < 1 or self.draft_workers < 0:
            raise InputError(
                f"need at least 1 target worker and no fewer than 0 draft workers, got "
                f"{self.target_workers} and {self.draft_workers}"
            )

    @property
    def num_workers(self) -> int:
        """Workers in all."""
        return self.target_workers + self.draft_workers

    @property
    def label(self) -> str:
        """For example "2" (all for one process) or "1+1" (target + draft)."""
        if self.draft_workers == 0:
            return str(self.target_workers)
        return f"{self.target_workers}+{self.draft_workers}"
