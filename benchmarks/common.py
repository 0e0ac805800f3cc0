"""What the GPU benchmarks share: their yardsticks, timing in CUDA graphs, and the JSON file."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.this_device import read_bandwidth
from codesign.artifacts import command_line
from codesign.artifacts.machine import short_gpu_name
from codesign.errors import HardwareError, counted

RESULTS = Path(__file__).with_name("results")
SHAPES = Path(__file__).parents[1] / "codesign" / "data" / "shapes"
READ_BANDWIDTH = read_bandwidth()
STANDS_OUT = 5.6  # standard deviations of logits by which SmolLM2's largest is above their mean
COLD_BYTES = 250e6  # of all inputs together: so many do not stay in the L2 cache


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median over graph replays, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @property
    def microseconds(self) -> dict[str, float]:
        """For the JSON file."""
        return {
            "us": round(self.median * 1e6, 3),
            "us_p10": round(self.low * 1e6, 3),
            "us_p90": round(self.high * 1e6, 3),
        }


def graph_time(
    call: Callable[[int], object],
    *,
    calls: int = 50,
    replays: int = 30,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Time ``call(i)``, i = 0, 1, ..., captured ``calls`` times in one graph.

    Args:
        call: Launches the work; i chooses among input sets, so that the caches are cold.
        calls: Captured in a row.
        replays: Timed replays of the graph.
        before: Run before each replay, not timed; of several ranks, their barrier.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(replays + 3):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / calls)
    times = sorted(times[3:])  # the first replays upload the graph
    tenth = len(times) // 10
    return Timing(statistics.median(times), times[tenth], times[-1 - tenth])


def need_gpus(number: int = 1) -> None:
    """End the script with a line where this machine has fewer GPUs."""
    found = torch.cuda.device_count()
    if found < number:
        name = Path(sys.argv[0]).name
        print(f"{name}: needs {counted(number, 'GPU')}, found {found}", file=sys.stderr)
        sys.exit(HardwareError.exit_code)


def why_not(error: Exception) -> str:
    """Return in a line why another project's kernel has no time."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    what = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {what[:200]}"


def hardware() -> dict[str, Any]:
    """What the numbers were measured on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def write_result(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    note: str,
    directory: Path | None = None,
    path: Path | None = None,
) -> Path:
    """Write ``rows`` to a path, or to ``NAME_DATE_GPU.json`` of a folder, and return the path."""
    gpu = short_gpu_name(torch.cuda.get_device_properties(0).name).lower()
    path = path or (directory or RESULTS) / f"{name}_{date.today()}_{gpu}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "benchmark": name,
        "command": command_line(),
        "hardware": hardware(),
        "note": note,
        "rows": list(rows),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
