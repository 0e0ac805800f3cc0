"""Shared by GPU tests: two runs on the same ranks, and how close calls were that differ.

And a table at the end of what was shown: what ran, requests that differ, rounds, flips, margins.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from codesign.engine import EngineRun
from codesign.engine.checkpoint import open_rank
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.policy.walk import gumbel_row, noise_key

# In logits, whose standard deviation is 4 in these models. Rounding to bfloat16 moves each by about
# 0.06, in every way of serving otherwise, which turns some tenths round; a wrong row or shard moves
# them by whole ones.
WIDEST_FLIP = 0.5
SHOWN = pytest.StashKey[list[dict[str, str]]]()
SHOWN_FILE = "CODESIGN_SHOWN_FILE"  # where run_all.py lets several runs leave their rows


@pytest.fixture(scope="session")
def shown(pytestconfig) -> Callable[..., None]:
    """``shown(what, **figures)``: a row of the table at the end."""
    rows = pytestconfig.stash.setdefault(SHOWN, [])

    def show(what: str, **figures) -> None:
        rows.append({"what": what} | {name: str(figure) for name, figure in figures.items()})

    return show


@pytest.fixture(scope="session")
def show_runs(shown) -> Callable[[str, EngineRun, EngineRun], None]:
    """``show_runs(what, plain, ours)``: a row of a run beside plain decoding's."""

    def show(what: str, plain: EngineRun, ours: EngineRun) -> None:
        differ = sum(ours.outputs[number] != tokens for number, tokens in plain.outputs.items())
        rounds = f"{len(ours.records.rounds)} of {len(plain.records.rounds)}"
        shown(what, requests=len(plain.outputs), differ=differ, rounds=rounds)

    return show


def pytest_terminal_summary(terminalreporter, config) -> None:
    """The table; of all runs so far, where they leave their rows in one file."""
    rows = config.stash.get(SHOWN, [])
    if path := os.environ.get(SHOWN_FILE):
        with Path(path).open("a+") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.seek(0)
            rows = [json.loads(line) for line in file]
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([row.get(name, "") for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    terminalreporter.write_sep("=", "what was shown")
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())


class Scores:
    """A target on one rank, by itself."""

    def __init__(self, directory, device) -> None:
        dtype = torch.bfloat16
        self.forward = RankForward(
            open_rank(directory, size=1, rank=0, device=device, dtype=dtype), SingleRank()
        )
        self.slabs = Slabs(
            self.forward.shape, num_slots=1, max_tokens=640, dtype=dtype, device=device
        )

    @torch.inference_mode()
    def margin(self, request, ours, theirs, sampling) -> float:
        """By how much ours beat theirs where they part, in logits with their noise."""
        place = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1)
        path = torch.tensor([*request.prompt_ids, *ours[:place]], device=self.forward.device)
        hidden_1D = self.forward.prompt_hidden(path, 0, self.slabs)
        scores = self.forward.head.logits(hidden_1D)[0].double().cpu().numpy()
        if sampling.temperature:
            key = noise_key(sampling.seed, request.request_id, len(path))
            scores = scores + sampling.temperature * gumbel_row(key, len(scores))
        return float(np.abs(scores[ours[place]] - scores[theirs[place]]))


@pytest.fixture(scope="module")
def serve_both() -> Callable[..., tuple[EngineRun, EngineRun]]:
    """``benchmarks.step_log.serve_both``; ranks import it, too, so it has its full name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        return importlib.import_module("benchmarks.step_log").serve_both


@pytest.fixture(scope="module")
def check_calls(shown) -> Callable[..., None]:
    """``check(what, directory, requests, ours, theirs, sampling)``: what differs was close."""
    loaded: dict = {}

    def check(what, directory, requests, ours, theirs, sampling) -> None:
        margins = []
        if ours != theirs and directory not in loaded:
            loaded[directory] = Scores(directory, torch.device("cuda", 0))
        for request in requests:
            mine, other = ours[request.request_id], theirs[request.request_id]
            if mine != other:
                margins.append(loaded[directory].margin(request, mine, other, sampling))
        margins.sort()
        median = f"{margins[len(margins) // 2]:.4f}" if margins else "-"
        widest = f"{margins[-1]:.4f}" if margins else "-"
        shown(what, requests=len(requests), flips=len(margins), median=median, widest=widest)
        assert max(margins, default=0.0) < WIDEST_FLIP

    return check
