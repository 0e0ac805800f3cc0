"""The ranks that hold one model together, and the two collectives of a forward.

A group of one does nothing. Larger groups add up through memory that the GPUs write into each
other, within the launch of an int4 map (``kernels.gemm_all_reduce``) or in one of its own
(``kernels.all_reduce``), or over NCCL where they cannot: between hosts, and on GPUs that the
kernels were not made for. Both are captured into CUDA graphs. On a CPU it is gloo.

Letters in shapes: T rows, D hidden size, K inputs and v columns of one rank, W ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from codesign.kernels.all_reduce import all_reduce_add
from codesign.kernels.gemm_all_reduce import linear_all_reduce
from codesign.kernels.packed_linear import LinearMap, PackedMap, add_map
from codesign.kernels.symmetric import Exchange


class TensorGroup(Protocol):
    """A tensor parallel group, seen from one rank."""

    size: int

    def add(self, partial_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """The sum over ranks and the residual, the same bits on each; may overwrite the first."""
        ...

    def add_map(self, linear: LinearMap, x_TK: Tensor, residual_TD: Tensor) -> Tensor:
        """``add`` of a rank's part of a map, in one launch where that can be."""
        ...

    def all_gather(self, x_Tv: Tensor) -> Tensor:
        """Every rank's columns side by side, (T, W v)."""
        ...

    def check(self) -> None:
        """Raise if a kernel waited in vain for another rank."""
        ...

    def patient(self) -> AbstractContextManager[None]:
        """Launches inside wait longer for other ranks, which may have kernels to compile."""
        ...


class SingleRank:
    """A group of one."""

    size = 1

    def add(self, partial_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """See ``TensorGroup.add``."""
        return residual_TD + partial_TD

    def add_map(self, linear: LinearMap, x_TK: Tensor, residual_TD: Tensor) -> Tensor:
        """See ``TensorGroup.add_map``."""
        return add_map(linear, x_TK, residual_TD)

    def all_gather(self, x_Tv: Tensor) -> Tensor:
        """``x`` itself."""
        return x_Tv

    def check(self) -> None:
        """A single rank waits for no other."""

    def patient(self) -> AbstractContextManager[None]:
        """A single rank waits for no other."""
        return nullcontext()


class ProcessGroupRank:
    """One rank of a torch.distributed group.

    Args:
        group: The ranks.
        exchange: Memory that they share, for sums; None to sum by torch.distributed.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: Exchange | None = None) -> None:
        self.size = group.size()
        self.rank = group.rank()
        self._group = group
        self._exchange = exchange

    def add(self, partial_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """See ``TensorGroup.add``."""
        if self._exchange is not None:
            return all_reduce_add(partial_TD, residual_TD, exchange=self._exchange, pdl=True)
        dist.all_reduce(partial_TD, group=self._group)
        return residual_TD + partial_TD

    def add_map(self, linear: LinearMap, x_TK: Tensor, residual_TD: Tensor) -> Tensor:
        """See ``TensorGroup.add_map``."""
        if self._exchange is None or not isinstance(linear, PackedMap):
            return self.add(linear(x_TK), residual_TD)
        return linear_all_reduce(
            x_TK, linear.weight, residual_TD, exchange=self._exchange, prompt=linear.prompt
        )

    def check(self) -> None:
        """See ``TensorGroup.check``."""
        if self._exchange is not None:
            self._exchange.check()

    def patient(self) -> AbstractContextManager[None]:
        """See ``TensorGroup.patient``."""
        return nullcontext() if self._exchange is None else self._exchange.patient()

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


class RankInTurns(ProcessGroupRank):
    """A rank that takes turns with others on one GPU, where NCCL does not run; for tests.

    gloo cannot be captured, so what is gathered goes through the exchange: each rank adds zeros for
    the others' bytes, and bfloat16 holds the numbers of a byte exactly.
    """

    def all_gather(self, x_Tv: Tensor) -> Tensor:
        """See ``TensorGroup.all_gather``."""
        assert self._exchange is not None, "ranks in turns need an exchange"
        bytes_TB = x_Tv.contiguous().view(torch.uint8)
        parts_WTB = bytes_TB.new_zeros((self.size, *bytes_TB.shape), dtype=torch.bfloat16)
        parts_WTB[self.rank] = bytes_TB
        every_WTB = all_reduce_add(parts_WTB, None, exchange=self._exchange).to(torch.uint8)
        return every_WTB.view(x_Tv.dtype).transpose(0, 1).reshape(x_Tv.shape[0], -1)
