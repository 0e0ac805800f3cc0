"""Which engine serves a plan: made in this process, or in one process for each replica."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from codesign.plan import Plan

if TYPE_CHECKING:
    from codesign.engine.replay import Engine

Device = Literal["cpu", "cuda", "cpu-ranks"]


@dataclass(frozen=True, slots=True)
class EngineSource:
    """A plan's engine on this machine; picklable.

    Attributes:
        plan: Which models.
        device: A plan's workers are threads, GPUs, or processes that stand for GPUs.
        num_workers: CPU cores that may be used; for "cpu".
        padded_rows: Fewest rows of a target's forward; not for "cpu".
    """

    plan: Plan
    device: Device = "cpu"
    num_workers: int = 1
    padded_rows: int = 8

    def load(self) -> Engine:
        """The engine.

        Raises:
            HardwareError: If this machine cannot run it.
            InputError: If a model is not there.
        """
        if self.device == "cpu":
            from codesign.engine.replay import CpuEngine

            return CpuEngine(self.plan, num_workers=self.num_workers)
        from codesign.engine.gpu.rank_engine import RankEngine

        device = self.device.removesuffix("-ranks")
        return RankEngine(self.plan, device=device, padded_rows=self.padded_rows)

    def gpus(self) -> Sequence[str] | None:
        """Names of the GPUs that this process may use; None on a CPU."""
        if self.device != "cuda":
            return None
        import torch

        names = os.environ.get("CUDA_VISIBLE_DEVICES")
        if names is not None:
            return [name.strip() for name in names.split(",") if name.strip()]
        return [str(number) for number in range(torch.cuda.device_count())]
