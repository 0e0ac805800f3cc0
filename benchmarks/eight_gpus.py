"""The paper's own configuration: 70B-shaped targets on all GPUs of one host, predicted, then run.

    python -m benchmarks.eight_gpus --predict FILE [--steps FILE ...]    # no GPU: what is expected
    python -m benchmarks.eight_gpus --out DIRECTORY --dry-run     # steps and seconds
    python -m benchmarks.eight_gpus --out DIRECTORY [--max-seconds 560]    # again until it says 0
    python -m benchmarks.eight_gpus --out DIRECTORY --compare FILE

Collectives at 6 and 8 ranks; steps of every shape at these degrees, beside their floors; plain,
serial and asynchronous decoding at each split, with the draft as it is and with noise on its
weights that dials the tokens a round. A step leaves one file, and is not run again. --gpus 4 does
the same at half the size. SwiftSpec (arXiv:2506.11309) prints 348 tokens/s on eight H800 for the
70B pair, and 275 asynchronous against 200 serial for Qwen2-72B (Table 6).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

TREE, ASYNC_TREE = "tree-8x4x4", "async-tree-8x4x4"
PAIRS = {  # pair of shapes: tokens/s that the paper prints, and flags of the inflated pair
    "llama-3-70b+llama-3.2-3b": (348.0, ()),
    "qwen2-72b+qwen2-1.5b": (275.0, ("--drop-kv-heads", "1")),
}
STEP_ONLY = ("llama-3-8b+llama-3.2-1b", "llama-3-70b+llama-3.2-1b")  # forward times
DIALLED = 3.3  # tokens a round, the paper's
NOISE = "0.05"  # on the draft's weights, for about as many
START, RUN = 20.0, 12.0  # seconds of a deployment's start, and of its requests; guesses
REQUESTS, TOKENS = 12, 128
STEP_FILES = "engine_steps_*_h200.json"  # of --predict, unless --steps names others


@dataclass(frozen=True, slots=True)
class Step:
    """One file of results.

    Attributes:
        name: What the file's name begins with.
        commands: Modules and flags, one after another.
        seconds: About how long.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float

    def is_done(self, out: Path) -> bool:
        """Whether its file is there."""
        return any(out.glob(f"{self.name}_2*.json"))


def splits(gpus: int) -> list[str]:
    """Deployments to compare, plain decoding aside: all in turn, half, three quarters, all but one.

    On 8 these are the paper's: 8, 4+4, 6+2 and 7+1.
    """
    sizes = dict.fromkeys((gpus // 2, gpus - gpus // 4, gpus - 1))
    return [str(gpus), *(f"{size}+{gpus - size}" for size in sizes)]


def steps(gpus: int, out: Path) -> list[Step]:
    """Everything, the most telling first."""
    degrees = (gpus, gpus - gpus // 4)
    found = []
    for pair, (_, flags) in PAIRS.items():
        policies = [f"{policy_on(split)}@{split}" for split in splits(gpus)]
        found += [
            engine_step(f"eight_{pair}", pair, policies, out, flags),
            engine_step(f"eight_{pair}_dialled", pair, policies, out, (*flags, "--noise", NOISE)),
        ]
    for size in degrees:
        flags = ("--gpus", str(size), "--out", str(out / f"collectives_{size}"))
        found.append(
            Step(f"collectives_{size}/collectives", (("bench_collectives", *flags),), 60.0)
        )
    for pair in STEP_ONLY:
        policies = [f"{TREE}@{size}" for size in degrees]
        found.append(engine_step(f"eight_steps_{pair}", pair, policies, out, ()))
    return found


def policy_on(split: str) -> str:
    """The policy for a deployment."""
    return ASYNC_TREE if "+" in split else TREE


def engine_step(
    name: str, pair: str, policies: Sequence[str], out: Path, flags: Sequence[str]
) -> Step:
    """A plan with these candidates, then their runs."""
    plan = ("--plan", str(out / f"{name}.plan.json"))
    sizes = ("--requests", str(REQUESTS), "--tokens", str(TOKENS))
    write = ("inflated_plan", pair, *plan, *sizes, *flags, "--policies", *policies)
    files = ("--out", str(out), "--trace", str(out / f"{name}.trace.json"))
    run = ("bench_engine", *plan, "--name", name, *files)
    return Step(name, (write, run), (START + RUN) * len(policies))


def measure(args: argparse.Namespace) -> int:
    """Run steps until all are done or the time is over; 130 if something is left."""
    from benchmarks.common import need_gpus

    need_gpus(args.gpus)
    args.out.mkdir(parents=True, exist_ok=True)
    end, is_complete = monotonic() + args.max_seconds, True
    for step in steps(args.gpus, args.out):
        if step.is_done(args.out):
            continue
        left = end - monotonic()
        if left < step.seconds or not run_step(step, left):
            is_complete = False
    return 0 if is_complete else 130


def run_step(step: Step, seconds: float) -> bool:
    """Whether it ran to its end in so many seconds."""
    print(f"{step.name}: about {step.seconds:.0f} s", flush=True)
    end = monotonic() + seconds
    for module, *flags in step.commands:
        words = [sys.executable, "-m", f"benchmarks.{module}", *flags]
        try:
            code = subprocess.run(words, check=False, timeout=end - monotonic()).returncode
        except subprocess.TimeoutExpired:
            print(f"  {module} was ended, its time is over", flush=True)
            return False
        if code:
            print(f"  {module} ended with {code}", flush=True)
            return False
    return True


def predict(args: argparse.Namespace) -> None:
    """Write what the simulator expects of each split, before anybody has run it."""
    from benchmarks import eight_predictions as predictions

    known = predictions.known_steps(args.steps or sorted(predictions.RESULTS.glob(STEP_FILES)))
    software, rows = predictions.software_of(known), []
    for pair, (printed, _) in PAIRS.items():

        def found(split: str, acceptance: float | None, pair: str = pair) -> dict[str, Any]:
            fit = predictions.priced(pair, args.gpus, acceptance, software)
            return predictions.simulated(fit, split, policy_on(split))

        chance = dialled_chance(lambda p: found(str(args.gpus), p)["tokens_a_round"])
        for acceptance in (None, chance):
            about = {"pair": pair, "printed": printed, "acceptance": acceptance or "recorded"}
            rows += [{**about, "split": s, **found(s, acceptance)} for s in splits(args.gpus)]
    body = {
        "gpus": args.gpus,
        "dialled_tokens_a_round": DIALLED,
        "software": asdict(software),
        "fitted_to_gpus": sorted({step.gpus for step in known}),
        "errors_by_degree": predictions.degree_errors(known),
        "rows": rows,
    }
    args.predict.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    show(rows)
    for row in body["errors_by_degree"]:
        print("fitted up to {fitted_up_to}: {model} on {gpus}, {ms} ms {error:+.1%}".format(**row))


def dialled_chance(tokens_a_round: Callable[[float], float]) -> float:
    """Chance of a first draft token at which a serial round yields what the paper's do."""
    low, high = 0.3, 0.99
    for _ in range(8):
        middle = (low + high) / 2.0
        low, high = (middle, high) if tokens_a_round(middle) < DIALLED else (low, middle)
    return round((low + high) / 2.0, 3)


def compare(args: argparse.Namespace) -> None:
    """Print predicted beside measured, and what the predicted choice of split costs."""
    predicted = json.loads(args.compare.read_text(encoding="utf-8"))["rows"]
    for pair in PAIRS:
        for suffix in ("", "_dialled"):
            for path in args.out.glob(f"eight_{pair}{suffix}_2*.json"):
                measured = {
                    row["candidate"].split(" on ")[1].split(",")[0]: row["tokens_per_second"]
                    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
                    if not row["candidate"].startswith("plain")
                }
                of_pair = {
                    row["split"]: row["tokens_per_second"]
                    for row in predicted
                    if row["pair"] == pair and (row["acceptance"] == "recorded") == (not suffix)
                }
                print(f"{pair}{suffix}")
                for split in measured.keys() & of_pair.keys():
                    error = of_pair[split] / measured[split] - 1.0
                    print(f"  {split:5} {of_pair[split]:8.1f} {measured[split]:8.1f} {error:+.1%}")
                pick = max(of_pair, key=lambda split: of_pair[split])
                if pick in measured:
                    regret = max(measured.values()) / measured[pick] - 1.0
                    print(f"  picks {pick}: regret {regret:.1%}")


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line per prediction."""
    for row in rows:
        print(
            f"{row['pair']:26} {row['split']:4} acceptance {row['acceptance']!s:9}"
            f" {row['tokens_a_round']:5.2f} tokens a round {row['tokens_per_second']:8.1f} tokens/s"
        )


def main() -> int:
    """Do what the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("eight_gpus"))
    parser.add_argument("--max-seconds", type=float, default=560.0, help="of this call (560)")
    parser.add_argument("--dry-run", action="store_true", help="print steps and seconds only")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write predictions, no GPU")
    parser.add_argument("--steps", nargs="+", type=Path, metavar="FILE", help="with --predict")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="predictions beside results")
    args = parser.parse_args()
    if args.predict:
        predict(args)
    elif args.compare:
        compare(args)
    elif args.dry_run:
        for step in steps(args.gpus, args.out):
            print(f"{step.seconds:6.0f} s  {step.name}{'  done' if step.is_done(args.out) else ''}")
    else:
        return measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
