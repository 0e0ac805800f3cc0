"""Profile to fit: step times, acceptance and calibration of one machine and one pair of models.

A profile is a folder (``codesign profile``): steps.parquet with one row per timing,
acceptance.parquet with one row per recorded token, and profile.json. A fit is one JSON file and
the recorded acceptance beside it. The planner and the simulator read fits, never profiles.

    steps          step times of forwards (step_forms), prompts on rank groups (prompt_stairs)
    least_squares  the solver of all of them
    round_costs    all of a deployment's; served_rounds: what served rounds say of the steps;
                   children: what a draft's rows cost by what comes of them
    fit_file       what the file of a fit says
    calibration    what a draft's confidence is worth
    prompt_luck, drift  what no residual shows: other prompts, and the machine's pace
    checks         what no fit and no timing can be
    shipped        fits that come with the package; of which machine a fit is
    step_pace      whether a run's steps took what its fit says; profile_command: what measures it
    roofline       step times from data sheets: devices, priced_model
    what_if        a fit from a few words on a command line: measured_pair if the package has it,
                   extrapolated to more GPUs than were measured, else a roofline

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from codesign.acceptance import AcceptanceProfile
from codesign.answer_parts import in_parts
from codesign.artifacts import (
    beside,
    header,
    read_json,
    read_table,
    sha256,
    write_json,
    write_table,
)
from codesign.artifacts.fields import why
from codesign.config import parse_deployment
from codesign.errors import InputError
from codesign.fit.calibration import CalibrationFit, fit_calibration
from codesign.fit.checks import check_steps, sound
from codesign.fit.drift import drift_error, host_spreads, visit_spreads
from codesign.fit.fit_file import read_fields
from codesign.fit.prompt_luck import acceptance_error, parts_covariance
from codesign.fit.round_costs import fit_costs
from codesign.fit.steps import MEASURE, StepFit
from codesign.policy.cost import Calibration, RoundCost
from codesign.policy.host_cost import SEVERAL

if TYPE_CHECKING:
    from codesign.config import Deployment

STEPS_FILE, ACCEPTANCE_FILE, PROFILE_FILE = "steps.parquet", "acceptance.parquet", "profile.json"
STEP_COLUMNS = ("deployment", "op", "rows", "requests", "context", "beside", "seconds")
ROOFLINE = "roofline"  # origin of a fit from data sheets
EXTRAPOLATED = "extrapolated"  # of one from measurements on fewer GPUs, and data sheets beyond
DRAFTS = ("draft", "draft_prefill")  # what the draft runs
SHEETS = (ROOFLINE, EXTRAPOLATED)  # these price every split that holds the weights
OTHER_PAIR = "not for this pair"  # in the origin of an acceptance that was recorded for another one
MEDIAN_ERROR = 0.6745  # of the size of a normal error, in standard deviations


def gpus_of(op: str, label: str) -> int:
    """GPUs that the model which runs an op has in a deployment."""
    size = parse_deployment(label)
    return (size.draft_workers or size.target_workers) if op in DRAFTS else size.target_workers


@dataclass(frozen=True, slots=True)
class Fit:
    """What the planner and the simulator know about a machine and a pair of models.

    Attributes:
        target: Name or directory of the target.
        draft: Name or directory of the draft; "ngram" for the drafter without a model.
        temperature: That acceptance was recorded at.
        costs: Step times by deployment label, for example "2" and "1+1".
        calibration: Of the draft's confidences.
        acceptance: Recorded agreement of draft and target.
        errors: Median held-out relative error of each "deployment/op", and under "acceptance"
            the relative error of the tokens emitted per round: a standard error if
            ``has_own_recordings``, else the most that they should be off.
        top_k: As temperature: likeliest tokens that the target sampled from, 0 for all.
        top_p: As temperature: share of the chance that it sampled from.
        origin: "fitted" to measurements, EXTRAPOLATED or ROOFLINE.
        acceptance_origin: "recorded": token by token; or what it was imported from.
        steps: How each forward was fitted, by "deployment/op".
        calibration_fit: How well the calibration does; None where it is not known.
        measured: Machine, day and parts of what was measured, as the profile has them.
        host_spread: How unsteady the host was, in seconds, by deployment label, where it is known.
        visit_spread: Relative standard error of forwards in a further start, by deployment label,
            where the profile has visited it several times.
        device: What was measured, as the profile has it: "cpu", "cuda" or "cpu-ranks"; "" for data
            sheets, and for fits older than this field, which were made on the machine measured.
        parts_covariance: (P, P) of the relative errors of tokens a round in the parts of an answer
            (answer_parts); empty where the error under "acceptance" is that of all of an answer.
    """

    target: str
    draft: str
    temperature: float
    costs: dict[str, RoundCost]
    calibration: Calibration
    acceptance: AcceptanceProfile
    errors: dict[str, float]
    top_k: int = 0
    top_p: float = 1.0
    origin: str = "fitted"
    acceptance_origin: str = "recorded"
    steps: dict[str, StepFit] = field(default_factory=dict)
    calibration_fit: CalibrationFit | None = None
    measured: Sequence[Mapping[str, Any]] = ()
    host_spread: dict[str, float] = field(default_factory=dict)
    visit_spread: dict[str, float] = field(default_factory=dict)
    device: str = ""
    parts_covariance: tuple[tuple[float, ...], ...] = ()

    def drift(self, label: str, seconds: float, *, requests: float = 1.0) -> float:
        """Relative standard error of a round's time by what machines do after their profile.

        Args:
            label: Of the deployment.
            seconds: Of the round.
            requests: That share it.
        """
        if self.origin == ROOFLINE:
            return 0.0  # of a machine that nobody has measured: its errors are those of data sheets
        return drift_error(
            seconds,
            requests=requests,
            host_spread=self.host_spread.get(label, 0.0),
            visit_spread=self.visit_spread.get(label, 0.0),
        )

    @property
    def has_own_recordings(self) -> bool:
        """Whether acceptance was recorded of this pair: neither of another one, nor made up."""
        is_own = self.origin != ROOFLINE and OTHER_PAIR not in self.acceptance_origin
        return is_own and self.acceptance_origin.startswith("recorded")

    def origin_of(self, deployment: Deployment) -> str:
        """Where its step times come from.

        Of an extrapolated fit, deployments were measured if both models were, on as many GPUs.
        """
        if self.origin != EXTRAPOLATED:
            return self.origin
        needed = {op: {gpus_of(op, deployment.unit.label)} for op in ("target", "draft")}
        needed["target"] |= {deployment.prefill_workers} - {0}
        is_measured = all(sizes <= self.sizes_measured(op) for op, sizes in needed.items())
        return "fitted" if is_measured else EXTRAPOLATED

    def sizes_measured(self, op: str) -> set[int]:
        """Numbers of GPUs on which a kind of forward was measured."""
        names = (name.partition("/") for name in self.steps)
        return {gpus_of(op, label) for label, _, known in names if known == op}

    @property
    def answers(self) -> AcceptanceProfile:
        """What was recorded, in the parts of answers in which simulations replay it.

        What was dialled or imported is the same everywhere in an answer, and stays whole.
        """
        is_recorded = self.acceptance_origin.startswith("recorded")
        return in_parts(self.acceptance) if is_recorded else self.acceptance

    def standard_error(self, name: str, *, requests: float = 1.0) -> float:
        """Relative standard error of a step of so many requests.

        Args:
            name: "deployment/op". Where it has no residuals, its held-out error stands for them.
            requests: That share a forward.
        """
        known = self.steps[name].unsure if name in self.steps else {}
        kind = "one" if requests < SEVERAL else "several"
        return known.get(kind, self.errors.get(name, 0.0)) / MEDIAN_ERROR

    def save(self, path: str | Path, *, inputs: Mapping[str, Path] | None = None) -> None:
        """Write the fit as JSON, and the recorded acceptance as Parquet beside it.

        Args:
            path: The JSON file; NAME.json is accompanied by NAME.acceptance.parquet (``beside``).
            inputs: Files that it was made from, by role, for the header.

        Raises:
            InputError: If a file cannot be written.
        """
        path = Path(path)
        recorded = beside(path, ACCEPTANCE_FILE)
        meta = header("fit", seed=None, inputs=inputs)
        write_table(recorded, self.acceptance.to_table(), meta)
        body = {
            "target": self.target,
            "draft": self.draft,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "origin": self.origin,
            "acceptance_origin": self.acceptance_origin,
            "costs": {label: asdict(cost) for label, cost in self.costs.items()},
            "calibration": asdict(self.calibration),
            "acceptance": {"path": recorded.name, "sha256": sha256(recorded)},
            "errors": self.errors,
            "parts_covariance": self.parts_covariance,
            "steps": {name: asdict(step) for name, step in self.steps.items()},
            "calibration_fit": None
            if self.calibration_fit is None
            else asdict(self.calibration_fit),
            "measured": self.measured,
            "host_spread": self.host_spread,
            "visit_spread": self.visit_spread,
            "device": self.device,
        }
        write_json(path, {**meta, **body})

    @classmethod
    def load(cls, path: str | Path) -> Fit:
        """Read what ``save`` wrote.

        Raises:
            InputError: If a file is missing, broken, of another version, or the acceptance is not
                the one that the fit was saved with.
        """
        path = Path(path)
        payload = read_json(path, kind="fit")
        try:
            acceptance_path = path.parent / payload["acceptance"]["path"]
            wanted = payload["acceptance"]["sha256"]
            values = read_fields(payload)
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise _refused(f"{path} is incomplete or damaged: {why(err)}", path) from err
        if sha256(acceptance_path) != wanted:
            raise _refused(f"{acceptance_path} is not the one that {path} was saved with", path)
        fit = cls(acceptance=_recorded(acceptance_path, wanted), **values)
        try:
            return sound(fit)
        except (ValueError, InputError) as err:
            raise _refused(f"{path} is incomplete or damaged: {why(err)}", path) from err


@lru_cache(maxsize=16)  # 2 MB each
def _recorded(path: Path, checksum: str) -> AcceptanceProfile:
    """What a file with this checksum holds; reading it takes far longer than the rest of a fit."""
    return AcceptanceProfile.from_table(read_table(path, kind="fit")[0])


def _refused(what: str, path: Path) -> InputError:
    return InputError(f"{what}. Fit again: codesign fit profile --out {quote(str(path))}")


def fit_profile(directory: str | Path) -> Fit:
    """Fit everything that a profile folder holds.

    Raises:
        InputError: If a file is missing or broken, or a measurement that a fit needs is not there.
    """
    directory = Path(directory)
    about = read_json(directory / PROFILE_FILE, kind="profile")
    steps, _ = read_table(directory / STEPS_FILE, kind="profile")
    recorded, _ = read_table(directory / ACCEPTANCE_FILE, kind="profile")
    missing = [name for name in STEP_COLUMNS if name not in steps]
    missing += [name for name in ("target", "draft", "temperature") if name not in about]
    if missing:
        raise InputError(f"profile {directory} lacks {', '.join(missing)}. {MEASURE}")
    acceptance = AcceptanceProfile.from_table(recorded)
    check_steps(steps, directory)
    costs, fits, errors = fit_costs(steps, on_ranks=about.get("device", "cpu") != "cpu")
    calibration = fit_calibration(acceptance)
    fit = Fit(
        target=about["target"],
        draft=about["draft"],
        temperature=about["temperature"],
        top_k=about.get("top_k", 0),
        top_p=about.get("top_p", 1.0),
        costs=costs,
        calibration=calibration.calibration,
        acceptance=acceptance,
        errors={**errors, "acceptance": acceptance_error(acceptance)},
        steps=fits,
        calibration_fit=calibration,
        measured=tuple(about.get("measured", ())),
        host_spread=host_spreads(steps),
        visit_spread=visit_spreads(steps),
        device=about.get("device", ""),
        parts_covariance=parts_covariance(acceptance),
    )
    try:
        return sound(fit)
    except (ValueError, InputError) as err:
        raise InputError(f"profile {directory} is damaged: {why(err)}. {MEASURE}") from err
