"""All GPU tests with one command: those of one GPU side by side on two, then those of several.

    python tests/gpu/run_all.py [WORDS FOR PYTEST]

Nothing is timed on one GPU, and what is timed on several runs alone. On one GPU it is pytest alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

FOLDER = Path("tests/gpu")
ASIDE = [FOLDER / name for name in ("test_degrees.py", "test_prompt_graphs.py", "test_serving.py")]
NOTHING_COLLECTED = 5


def start(log: Path, shown: Path, gpus: list[str], words: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus), "CODESIGN_SHOWN_FILE": str(shown),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-rfE", "--durations=12", *words, *sys.argv[1:]]
    return subprocess.Popen(
        command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment
    )


def main() -> int:
    begin = time.monotonic()
    found = [str(gpu) for gpu in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[: len(found)] if visible else found
    alone, several = ["-m", "not multigpu"], ["-m", "multigpu"]
    ignored = [f"--ignore={path}" for path in ASIDE]
    steps = [[(gpus, [str(FOLDER)])]]
    if len(gpus) > 1:
        rest = [str(FOLDER), *ignored, *alone]
        steps = [[(gpus[:1], rest), (gpus[1:2], [*map(str, ASIDE), *alone])]]
        steps.append([(gpus, [str(FOLDER), *several])])
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, lanes in enumerate(steps):
            running = []
            for i, (own, words) in enumerate(lanes):
                log = Path(folder) / f"{number}-{i}.log"
                running.append((start(log, Path(folder) / "shown", own, words), log))
            for process, log in running:
                code = process.wait()
                worst = max(worst, 0 if code == NOTHING_COLLECTED else abs(code))
                sys.stdout.write(log.read_text(errors="replace") + "\n")
                sys.stdout.flush()
    sys.stdout.write(f"all of {FOLDER} on {len(gpus)} GPUs: {time.monotonic() - begin:.0f} s\n")
    return min(worst, 255)


if __name__ == "__main__":
    sys.exit(main())
