"""Shared by GPU tests: two runs on the same ranks, and how close calls were that differ."""

from __future__ import annotations

import importlib
import sys
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
        scores = self.forward.logits(hidden_1D)[0].double().cpu().numpy()
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
def check_calls() -> Callable[..., None]:
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
        shown = [round(margin, 4) for margin in sorted(margins)]
        sys.stdout.write(f"{what} turn {len(shown)} of {len(requests)} requests, margins {shown}\n")
        assert max(margins, default=0.0) < WIDEST_FLIP

    return check
