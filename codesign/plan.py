"""The plan file: what to deploy, what it is predicted to do, and what else was considered.

The engine runs the chosen candidate or any alternative by its label; validation simulates the same
requests with the same seeds again. Files that it depends on have a checksum (file_ref.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codesign.artifacts import header, read_json, read_table, write_json
from codesign.artifacts.fields import checked, why
from codesign.candidate import ScoredCandidate
from codesign.config import SLO, Serving
from codesign.errors import InputError
from codesign.file_ref import FileRef
from codesign.policy.cost import RoundCost
from codesign.policy.walk import Sampling

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Economics:
    """Whether speculation pays on this machine for this trace, and how far it could pay.

    Batches are requests that run at once on all workers together. The speculative side is the
    chosen candidate or, if that is plain decoding, the best that speculates.

    Attributes:
        null_plan: Label of the best plan without a draft.
        speculative: Label of the candidate that the other figures are about.
        gain: Decode speed (tokens per second of one request) over the null plan's, 1 for equal,
            at the batch that was simulated.
        crossover: Most running requests at which it decodes no slower than the null plan, without
            a gap from ``batch`` on; 0 if it never does, None if it does up to the largest batch.
        largest_batch: Up to which the crossover was looked for.
        batch: Requests running at once on average, as simulated; where the next three hold.
        break_even_length: Tokens per round from which speculation pays.
        acceptance_length: Tokens per round as simulated.
        break_even_rate: For chains, the chance of each token to be accepted that gives
            ``break_even_length``; None for others and where no chance would.
        oracle_gain: Decode speed over the null plan's if each round drafted exactly what will be
            accepted.
        lasting: Label of the simulated candidate that pays up to most running requests, if there
            is one that pays longer than ``speculative``; else "".
        lasting_crossover: Its crossover, or the largest batch that was looked at; None without it.
    """

    null_plan: str
    speculative: str
    gain: float
    crossover: int | None
    largest_batch: int
    batch: float
    break_even_length: float
    acceptance_length: float
    break_even_rate: float | None
    oracle_gain: float
    lasting: str = ""
    lasting_crossover: int | None = None


@dataclass(frozen=True, slots=True)
class Doubt:
    """A term of the fit that, off by its own error, would make another plan better.

    Attributes:
        term: For example "draft step of 3+1" or "tokens per round".
        change: Its error, relative, with the sign that hurts.
        rival: Label of the plan that would then be best.
        regret: By which share the chosen plan would then be worse, in what decides between them.
        figure: What that is: "goodput", "latency_mean" or "tpot_mean"; "" in older plans.
    """

    term: str
    change: float
    rival: str
    regret: float
    figure: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to deploy on this machine for this trace.

    Attributes:
        target: Target model, a name or a directory.
        draft: Draft model; "" if the fit has none.
        slo: Targets that the plan was made for.
        objective: "goodput", "latency" or "fewest".
        sampling: How the target samples; the seed keys its noise.
        serving: How memory and steps are shared between requests.
        trace: Prepared trace (Parquet): exactly the requests that were simulated.
        num_requests: Rows of it.
        fit: Fit that the step times and acceptance came from.
        seed: First seed of the simulations.
        num_seeds: Simulations of each finalist, with seeds ``seed``, ``seed + 1``, ...
        chosen: The best candidate.
        alternatives: What else was simulated, best first.
        ties: Labels of alternatives that the prediction cannot tell from ``chosen``.
        reason: Why this one: what a round spends its time on, which target is nearest.
        notes: What a reader must know about the trace and the search.
        runner_up: Why the second one lost; "" if nothing else was simulated.
        economics: Whether speculation pays; None if only plain decoding, or no plan without a
            draft, was simulated.
        doubts: What would change the choice if it were off by its error, the worst first.
    """

    target: str
    draft: str
    slo: SLO
    objective: str
    sampling: Sampling
    serving: Serving
    trace: FileRef
    num_requests: int
    fit: FileRef
    seed: int
    num_seeds: int
    chosen: ScoredCandidate
    alternatives: tuple[ScoredCandidate, ...] = ()
    ties: tuple[str, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    runner_up: str = ""
    economics: Economics | None = None
    doubts: tuple[Doubt, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 1), ("num_seeds", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def scored(self) -> tuple[ScoredCandidate, ...]:
        """The chosen candidate and the alternatives, best first."""
        return (self.chosen, *self.alternatives)

    @property
    def simulation_seeds(self) -> range:
        """Seeds that each finalist was simulated with."""
        return range(self.seed, self.seed + self.num_seeds)

    def find(self, name: str = "") -> ScoredCandidate:
        """The chosen candidate, or the best that a name fits.

        Args:
            name: "" for the chosen one; a whole label ("chain-3 on 2, batch 4"), a policy
                ("chain-3") or a family ("tree", "async-tree").

        Raises:
            InputError: If none fits.
        """
        if not name:
            return self.chosen
        for scored in self.scored:
            candidate = scored.candidate
            if name in (scored.label, candidate.speculation.label, candidate.family):
                return scored
        labels = "; ".join(scored.label for scored in self.scored)
        raise InputError(f"the plan holds no candidate {name!r}; it holds: {labels}")

    def max_kv_tokens(self, cost: RoundCost | None, *, has_draft: bool) -> int:
        """KV rows of one replica.

        Args:
            cost: Step times of its deployment, if the fit has them.
            has_draft: Whether a draft needs room beside the target.

        Raises:
            InputError: If neither the plan nor the fit says.
        """
        limit = self.serving.max_kv_tokens
        rows = limit if cost is None else cost.kv_room(limit, has_draft=has_draft)
        if rows is None:
            raise InputError(
                "neither the plan nor its fit says how many KV rows fit. Plan again: codesign plan "
                "--trace TRACE --max-kv-tokens N"
            )
        return rows

    def requests(self) -> pd.DataFrame:
        """The requests to serve: arrival, prompt_tokens, output_tokens, category.

        Raises:
            InputError: If the prepared trace is gone or has changed.
        """
        return read_table(self.trace.check(), kind="trace")[0]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; paths in it are relative to its folder.

        Raises:
            InputError: If the path cannot be written.
        """
        folder = Path(path).parent
        body = {
            "target": self.target,
            "draft": self.draft,
            "slo": asdict(self.slo),
            "objective": self.objective,
            "sampling": asdict(self.sampling),
            "serving": asdict(self.serving),
            "trace": self.trace.to_dict(folder),
            "num_requests": self.num_requests,
            "fit": self.fit.to_dict(folder),
            "num_seeds": self.num_seeds,
            "chosen": self.chosen.to_dict(),
            "alternatives": [scored.to_dict() for scored in self.alternatives],
            "ties": self.ties,
            "reason": self.reason,
            "runner_up": self.runner_up,
            "economics": None if self.economics is None else asdict(self.economics),
            "doubts": [asdict(doubt) for doubt in self.doubts],
            "notes": self.notes,
        }
        files = {"trace": self.trace, "fit": self.fit}
        inputs = {n: {"path": str(ref.path), "sha256": ref.sha256} for n, ref in files.items()}
        write_json(path, {**header("plan", seed=self.seed), "inputs": inputs, **body})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file.

        Raises:
            InputError: If it is missing, not a plan of this schema version, or damaged.
        """
        values = read_json(path, kind="plan")
        folder = Path(path).parent
        try:
            plan = cls(
                target=values["target"],
                draft=values["draft"],
                slo=SLO(**values["slo"]),
                objective=values["objective"],
                sampling=Sampling(**values["sampling"]),
                serving=Serving(**values["serving"]),
                trace=FileRef.from_dict(values["trace"], folder),
                num_requests=values["num_requests"],
                fit=FileRef.from_dict(values["fit"], folder),
                seed=values["seed"],
                num_seeds=values["num_seeds"],
                chosen=ScoredCandidate.from_dict(values["chosen"]),
                alternatives=tuple(map(ScoredCandidate.from_dict, values["alternatives"])),
                ties=tuple(values["ties"]),
                reason=values["reason"],
                notes=tuple(values["notes"]),
                runner_up=values["runner_up"],
                economics=values["economics"] and Economics(**values["economics"]),
                doubts=tuple(Doubt(**doubt) for doubt in values["doubts"]),
            )
            return checked(plan)
        except (KeyError, TypeError, ValueError, AttributeError, InputError) as err:
            text = (
                f"{path} is not a whole plan: {why(err)}. Plan again: codesign plan --trace TRACE"
            )
            raise InputError(text) from err
