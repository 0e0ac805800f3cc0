"""FlashInfer's one-shot sum over the ranks of a host: alone, and with residual and RMSNorm fused.

Its ranks push into each other's memory through CUDA's inter-process handles and poll for values
that are not there yet, as ours do. No NVLink multicast: its workspaces that use it are not made.
``bench_collectives --peers`` compares each with the sum of the ranks and times it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from codesign.kernels.reference import rms_norm, sum_of_ranks

LARGEST_ERROR = 5e-3  # bfloat16 is rounded once more than in ours
EPS = 1e-5
Call = Callable[[int], Any]


class FusedSums:
    """The workspace of a group and what is launched over it.

    Args:
        group: Ranks on GPUs of one host.
        rows: Most rows of a sum.
        hidden: Most columns.
    """

    def __init__(self, group: dist.ProcessGroup, rows: int, hidden: int) -> None:
        from flashinfer import comm  # type: ignore[import-not-found]

        self.comm, self.group = comm, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        _, self.workspace = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            self.rank, self.world, rows, hidden, group=group
        )

    def launch(self, part_TD: Tensor, pattern: int, **tensors: Any) -> None:
        """One launch; what a pattern does not need is None."""
        rows, hidden = part_TD.shape
        names = ("allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out")
        names += ("scale_out", "rms_gamma", "rms_eps", "scale_factor", "layout_code")
        self.comm.trtllm_allreduce_fusion(
            allreduce_in=part_TD,
            world_size=self.world,
            world_rank=self.rank,
            token_num=rows,
            hidden_dim=hidden,
            workspace_ptrs=self.workspace,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            fp32_acc=True,
            pattern_code=pattern,
            use_oneshot=True,
            **(dict.fromkeys(names) | tensors),
        )

    def calls(self, part_TD: Tensor) -> dict[str, Call]:
        """Return both versions over one part, after a comparison with the sum of the ranks.

        Raises:
            ValueError: If a version computes something else.
        """
        patterns = self.comm.AllReduceFusionPattern
        residual, weight = torch.ones_like(part_TD), torch.ones_like(part_TD[0])
        out, added, normed = (torch.full_like(part_TD, torch.nan) for _ in range(3))
        parts = [torch.empty_like(part_TD) for _ in range(self.world)]
        dist.all_gather(parts, part_TD, group=self.group)

        def plain(i: int) -> None:
            self.launch(part_TD, patterns.kAllReduce, allreduce_out=out)

        def fused(i: int) -> None:
            self.launch(
                part_TD,
                patterns.kARResidualRMSNorm,
                residual_in=residual,
                residual_out=added,
                norm_out=normed,
                rms_gamma=weight,
                rms_eps=EPS,
            )

        plain(0)
        fused(0)
        with_residual = sum_of_ranks(parts, residual)
        check(out, sum_of_ranks(parts, None))
        check(added, with_residual)
        check(normed, rms_norm(with_residual, weight, EPS))
        return {"FlashInfer one-shot": plain, "FlashInfer, residual and norm": fused}


def check(found: Tensor, expected: Tensor) -> None:
    """Compare a result with what is right.

    Raises:
        ValueError: If it is something else.
    """
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < LARGEST_ERROR:
        raise ValueError(f"another sum: relative error {error:.3g}")
