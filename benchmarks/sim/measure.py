"""Wall time and peak memory of a command, virtual environments of peers, the size of an install.

Standard library only: what this process holds counts towards its children's peak.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PEERS = {
    "dynamo": (
        "--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1", "typing_extensions",
        "pydantic==2.13.5", "pydantic-core==2.50.4", "annotated-types", "typing-inspection",
        "uvloop", "numpy", "pyyaml",
    ),
    "aiconfigurator": ("aiconfigurator==0.12.0",),
}  # fmt: skip


class NotRunError(Exception):
    """A case that cannot run here, and why."""


def measure(command: list[str], folder: Path) -> dict[str, Any]:
    """Run it in a fresh process: wall and CPU seconds, peak MB, and the JSON of its last line.

    The child's peak includes what this process had when it forked, so this one imports little.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=err, cwd=folder)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        lines, errors = out.read().splitlines(), err.read().splitlines()
    if child.returncode:
        raise NotRunError(f"exit code {child.returncode}: {errors[-1][:200] if errors else ''}")
    try:
        said = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = {}
    return {
        "wall": wall,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
        "load_before": load,
        "said": {k: v for k, v in said.items() if k == "seconds" or not isinstance(v, list | dict)},
    }


def measure_install(project: Path, work: Path) -> dict[str, Any]:
    """MB of site-packages of a core install, pip itself not counted; the heavy packages by name."""
    folder = work / "core"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        started = time.perf_counter()
        subprocess.run([*pip, str(project)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as err:
        raise NotRunError(f"cannot be installed here ({err})") from err
    seconds = time.perf_counter() - started
    site = next((folder / "lib").glob("python*/site-packages"))
    sizes: dict[str, float] = {}
    for path in site.rglob("*"):
        top = path.relative_to(site).parts[0].split("-")[0].removesuffix(".libs")
        if path.is_file() and not path.is_symlink() and top not in ("pip", "setuptools"):
            sizes[top] = sizes.get(top, 0.0) + path.stat().st_size / 1e6
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1])[:8])
    shutil.rmtree(folder)
    return {"mb": sum(sizes.values()), "seconds": seconds, "largest": largest}


def installed_peer(name: str, work: Path) -> Path:
    """The bin folder of a peer's virtual environment; made once.

    Raises:
        NotRunError: If it cannot be made.
    """
    folder = work / name
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        try:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([*pip, *PEERS[name]], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as err:
            raise NotRunError(f"cannot be installed here ({err})") from err
        (folder / "installed").touch()
    return folder / "bin"
