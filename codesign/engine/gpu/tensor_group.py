"""The ranks that hold one model together, and the two collectives of a forward.

A group of one does nothing. Larger groups use torch.distributed: NCCL between GPUs, where the calls
are captured into CUDA graphs, gloo between processes on a CPU.

Letters in shapes: T rows, v columns of one rank, W ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class TensorGroup(Protocol):
    """A tensor parallel group, seen from one rank."""

    size: int
    rank: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each; ``x`` may be overwritten."""
        ...

    def all_gather(self, x_Tv: Tensor) -> Tensor:
        """Every rank's columns side by side, (T, W v)."""
        ...


class SingleRank:
    """A group of one."""

    size, rank = 1, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x

    def all_gather(self, x_Tv: Tensor) -> Tensor:
        """``x`` itself."""
        return x_Tv


class ProcessGroupRank:
    """One rank of a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size = group.size()
        self.rank = group.rank()
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``TensorGroup.all_reduce``."""
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x_Tv: Tensor) -> Tensor:
        """See ``TensorGroup.all_gather``."""
        x_Tv = x_Tv.contiguous()
        if x_Tv.is_cuda:
            parts = x_Tv.new_empty(self.size, *x_Tv.shape)
            dist.all_gather_into_tensor(parts, x_Tv, group=self._group)
        else:
            rows = [torch.empty_like(x_Tv) for _ in range(self.size)]
            dist.all_gather(rows, x_Tv, group=self._group)
            parts = torch.stack(rows)
        return parts.transpose(0, 1).reshape(x_Tv.shape[0], -1)
