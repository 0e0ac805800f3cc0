"""All GPU tests with one command: each part starts as soon as it has the GPUs that it needs.

    python tests/gpu/run_all.py [WORDS FOR PYTEST]

What needs all GPUs runs alone; on one GPU it is pytest alone. A part's log is written when it ends;
an interrupt ends all parts and writes what they have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path("tests/gpu")
LOSSLESS, DEGREES = FOLDER / "test_lossless.py", FOLDER / "test_degrees.py"
GROUPS = [FOLDER / name for name in ("test_rank_groups.py", "test_run_ahead.py")]  # of two ranks
ASIDE = [FOLDER / name for name in ("test_prompt_graphs.py", "test_serving.py")]
NOTHING_COLLECTED = 5
POLL, LAST_WORDS = 0.2, 15.0  # seconds; the latter for parts that are interrupted


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that one pytest runs, and how many GPUs it sees."""

    name: str
    gpus: int
    words: tuple[str, ...]


def parts(gpus: int) -> list[Part]:
    """Every test once, those that take longest first.

    On fewer than four GPUs those of one GPU come first, side by side, and then all others in one
    pytest: each takes 10 s to begin.
    """
    if gpus < 2:
        return [Part("all", gpus, (str(FOLDER),))]
    alone, several = ("-m", "not multigpu"), ("-m", "multigpu")
    apart = [f"--ignore={path}" for path in (LOSSLESS, DEGREES)]
    aside = [f"--ignore={path}" for path in ASIDE]
    pairs = [f"--ignore={path}" for path in GROUPS]
    degrees = Part("degrees", 4 if gpus >= 4 else 1, (str(DEGREES),))
    of_one = [
        Part("lossless", 1, (str(LOSSLESS), *alone)),
        Part("maps and the rest", 1, (str(FOLDER), *apart, *aside, *alone)),
        Part("prompts and serving", 1, (*map(str, ASIDE), *alone)),
    ]
    if gpus < 4:
        every = (str(FOLDER), f"--ignore={DEGREES}", *several)
        return [degrees, *of_one, Part("groups of several", gpus, every)]
    return [
        Part("lossless on two", 2, (str(LOSSLESS), *several, "-k", "not 0.7 and not lost")),
        *of_one,
        degrees,
        Part("lossless on two at 0.7", 2, (str(LOSSLESS), *several, "-k", "0.7 and not lost")),
        Part("lost ranks", 2, (str(LOSSLESS), *several, "-k", "lost")),
        Part("groups of two", 2, (*map(str, GROUPS), *several)),
        Part("exchange", gpus, (str(FOLDER), *apart, *pairs, *several)),
    ]


class Running:
    """A part at work.

    Args:
        part: Which.
        gpus: Its GPUs.
        folder: For its log and the rows of the table.
    """

    def __init__(self, part: Part, gpus: Sequence[str], folder: Path) -> None:
        self.part, self.gpus, self.begin = part, gpus, time.monotonic()
        self._log = folder / f"{part.name}.log"
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus), "CODESIGN_SHOWN_FILE": str(folder / "shown"),
        }  # fmt: skip
        words = ["-m", "pytest", "-rfE", "--durations=12", *part.words, *sys.argv[1:]]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def end(self) -> int:
        """Write the log; the code, 0 if there was nothing to run."""
        code = self.process.wait()
        took = f"{time.monotonic() - self.begin:.0f} s on {len(self.gpus)} GPUs, code {code}"
        log = self._log.read_text(errors="replace")
        sys.stdout.write(f"===== {self.part.name}: {took}\n{log}\n")
        sys.stdout.flush()
        return 0 if code == NOTHING_COLLECTED else abs(code)


def interrupt(running: Sequence[Running]) -> None:
    """Let parts say what they have, then end them."""
    for each in running:
        each.process.send_signal(signal.SIGINT)
    until = time.monotonic() + LAST_WORDS
    for each in running:
        try:
            each.process.wait(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            each.process.kill()
        each.end()


def run(todo: Sequence[Part], gpus: Sequence[str], folder: Path) -> int:
    """Run parts side by side as far as GPUs go; the worst code."""
    waiting, free, worst = list(todo), list(gpus), 0
    running: list[Running] = []
    try:
        while waiting or running:
            for part in [*waiting]:
                if part.gpus <= len(free):
                    waiting.remove(part)
                    running.append(Running(part, free[: part.gpus], folder))
                    free = free[part.gpus :]
            time.sleep(POLL)
            for each in [one for one in running if one.process.poll() is not None]:
                running.remove(each)
                free += each.gpus
                worst = max(worst, each.end())
    except KeyboardInterrupt:
        interrupt(running)
        names = ", ".join(part.name for part in waiting) or "nothing"
        sys.stdout.write(f"interrupted; not begun: {names}\n")
        return 130
    return worst


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit's, too
    begin = time.monotonic()
    found = [str(gpu) for gpu in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[: len(found)] if visible else found
    with tempfile.TemporaryDirectory() as folder:
        worst = run(parts(len(gpus)), gpus, Path(folder))
    sys.stdout.write(f"all of {FOLDER} on {len(gpus)} GPUs: {time.monotonic() - begin:.0f} s\n")
    return min(worst, 255)


if __name__ == "__main__":
    sys.exit(main())
