"""One way to serve, and what is predicted for it: nouns of simulator, planner and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from codesign.artifacts.fields import checked, why
from codesign.config import Deployment
from codesign.errors import InputError
from codesign.policy.labels import FAMILIES
from codesign.policy.spec import SpeculationSpec

SIGMAS = 1.645  # of a normal error, from the middle of an interval that holds 90 % to its ends
# From simple to involved: at equal predictions the simpler one is chosen.
_SIMPLEST_FIRST = tuple(family.spec.family for family in FAMILIES)


@dataclass(frozen=True, slots=True)
class Interval:
    """A prediction and the range in which nine of ten measurements are expected."""

    value: float
    low: float
    high: float

    def contains(self, measured: float) -> bool:
        """Whether a measurement lies in the range."""
        return self.low <= measured <= self.high

    def overlaps(self, other: Interval) -> bool:
        """Whether two predictions cannot be told apart."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve: split of the machine, speculation policy, batch limit."""

    deployment: Deployment
    speculation: SpeculationSpec
    max_batch: int

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise InputError(f"max_batch must be at least 1, got {self.max_batch}")
        is_split = self.deployment.draft_workers > 0
        if is_split != self.speculation.is_async:
            needs = "no workers of its own" if is_split else "workers of its own"
            fix = ("2", "an async policy") if is_split else ("1+1", "one without async-")
            raise InputError(
                f"the draft of {self.speculation.label} needs {needs}, got deployment "
                f"{self.deployment.label}. Fix: a --deployment such as {fix[0]}, or {fix[1]}"
            )

    @property
    def label(self) -> str:
        """Name that is unique within a plan, for example "tree-8x4x2 on 2, batch 4"."""
        return f"{self.speculation.label} on {self.deployment.label}, batch {self.max_batch}"

    @property
    def family(self) -> str:
        """Of its policy, as in ``labels.FAMILIES``."""
        return self.speculation.family

    @property
    def runs_in_engine(self) -> bool:
        """Whether ``codesign run`` serves it: there are no heads, nor workers for prompts alone."""
        return self.speculation.runs_in_engine and not self.deployment.prefill_workers

    @property
    def complexity(self) -> tuple[int, int]:
        """Sort key of its policy, simpler first."""
        spec = self.speculation
        work = spec.max_rows + spec.width * spec.expansions
        return _SIMPLEST_FIRST.index(self.family), work

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a plan file or run.json; the label is for readers."""
        return {"label": self.label, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """What ``to_dict`` wrote.

        Raises:
            InputError: If a field is missing, unknown or out of range.
        """
        try:
            return checked(
                cls(
                    deployment=Deployment(**values["deployment"]),
                    speculation=SpeculationSpec(**values["speculation"]),
                    max_batch=values["max_batch"],
                )
            )
        except (KeyError, TypeError, ValueError) as err:
            raise InputError(f"not a candidate: {why(err)}") from err


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate and what the simulator predicts for it.

    Attributes:
        candidate: What was simulated.
        predicted: Figures of ``metrics.Metrics`` by name, and "ttft_slo" and "tpot_slo", the values
            at the SLO's percentile. Seconds, tokens per second, requests per second, shares.
        spans: Mean seconds per round of each span.
        origin: Where the step times come from: "measured", "fitted", "extrapolated"
            from measurements on fewer workers, or "roofline".
        is_feasible: Whether it meets the SLO.
        saturation: How it bears the load: "stable", "backlogged" or "overloaded".
        num_seeds: Simulations that the figures are means of: several only of finalists; 1, too,
            from a file that does not say.
    """

    candidate: Candidate
    predicted: dict[str, Interval]
    spans: dict[str, float]
    origin: str
    is_feasible: bool
    saturation: str = "stable"
    num_seeds: int = 1

    @property
    def label(self) -> str:
        """Label of the candidate."""
        return self.candidate.label

    @property
    def running(self) -> Interval | None:
        """Requests that decode at once on one replica; None where nobody knows."""
        taking_part = self.predicted.get("mean_batch")  # all that older plans say
        return self.predicted.get("mean_running", taking_part)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "candidate": self.candidate.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoredCandidate:
        """What ``to_dict`` wrote.

        Raises:
            InputError: If a field of the candidate is missing, unknown or out of range.
            KeyError: If another is missing.
            TypeError: If another is unknown.
            AttributeError: If ``predicted`` is no mapping.
        """
        return cls(
            candidate=Candidate.from_dict(values["candidate"]),
            predicted={name: Interval(**v) for name, v in values["predicted"].items()},
            spans=dict(values["spans"]),
            origin=values["origin"],
            is_feasible=values["is_feasible"],
            saturation=values["saturation"],
            num_seeds=values.get("num_seeds", 1),
        )
