"""Profile and fit the inflated pairs on this machine's GPUs, in calls of limited length.

    python benchmarks/profile_h200.py --out profiles --gpus 4             # the same again goes on
    python benchmarks/profile_h200.py --out profiles --pair llama-3-8b+llama-3.2-1b --dry-run

Each pair is a `codesign profile --resume` of every deployment of up to so many GPUs. A call ends
before its seconds are over and keeps the deployments that are done in --out. The small models, in
`codesign models fetch` and the package, must be there; nothing large is downloaded.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[1]
# The shipped draft has 3 key-value heads, Qwen2-1.5B's shape 2.
PAIRS = {
    "llama-3-70b+llama-3.2-3b": (),
    "llama-3-70b+llama-3.2-1b": (),
    "qwen2-72b+qwen2-1.5b": ("--drop-kv-heads", "1"),
    "llama-3-8b+llama-3.2-1b": (),
}
END_SECONDS = 30.0  # to write what is measured and to end the ranks


def deployments(gpus: int) -> list[str]:
    """Labels of one group, and of every split, of up to so many GPUs."""
    whole = [str(size) for size in range(1, gpus + 1)]
    return whole + [f"{x}+{d}" for x in range(1, gpus) for d in range(1, gpus - x + 1)]


def commands(pair: str, out: Path, labels: list[str], *, quick: bool) -> list[list[str]]:
    """What to type: inflate both models, profile, fit."""
    target, draft = pair.split("+")
    folder = out / pair
    names = f"inflated-{target}", f"inflated-draft-{draft}"
    inflate = ("models", "inflate")
    profile = ("profile", "--device", "cuda", "--target", names[0], "--draft", names[1])
    return [
        [*inflate, "--target", "--shape", target, "--name", names[0]],
        [*inflate, "--draft", "--shape", draft, "--name", names[1], *PAIRS[pair]],
        [*profile, "--deployments", ",".join(labels), "--out", str(folder), "--resume"]
        + ["--quick"] * quick,
        ["fit", str(folder), "--out", str(folder / "fit.json")],
    ]


def run(words: list[str], seconds: float) -> int:
    """Run one command; interrupt it when its seconds are over."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "codesign", *words], env=environment)
    try:
        return process.wait(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def is_there(words: list[str]) -> bool:
    """Whether the model that an inflate command makes is in the cache."""
    from codesign.models import models_dir

    name = words[words.index("--name") + 1] if "--name" in words else ""
    return bool(name) and (models_dir() / name).is_dir()


def main() -> int:
    """Profile until everything is done or the seconds are over; 130 when there is more to do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder of profiles per pair")
    parser.add_argument("--gpus", type=int, default=4, help="largest deployment (4)")
    parser.add_argument("--pair", action="append", choices=tuple(PAIRS), help="these pairs (all)")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call (560)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    args = parser.parse_args()
    end = monotonic() + args.seconds - END_SECONDS
    for pair in args.pair or PAIRS:
        for words in commands(pair, args.out, deployments(args.gpus), quick=args.quick):
            print("codesign", shlex.join(words), flush=True)
            if args.dry_run or is_there(words):
                continue
            code = run(words, end - monotonic())
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
