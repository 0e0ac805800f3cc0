"""Meet the other ranks of a run, and make the groups that hold a model together."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _world
from torch.distributed.rendezvous import rendezvous

from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.tensor_group import (
    ProcessGroupRank,
    RankInTurns,
    SingleRank,
    TensorGroup,
)
from codesign.engine.gpu.watch import Watch
from codesign.kernels.cuda_module import kernels_run
from codesign.kernels.symmetric import open_exchange
from codesign.policy.step_time import BUCKETS

JOIN_TIMEOUT = timedelta(seconds=600)  # loading and capturing large models takes minutes
Groups = dict[range, dist.ProcessGroup | None]


def join(setup: RankSetup, rank: int, watch: Watch | None = None) -> Groups:
    """Meet the other ranks, and make the groups that hold a model together; None for one of one.

    Args:
        setup: The run.
        rank: Global number.
        watch: Ends the wait for ranks that are gone; None where somebody else does.
    """
    if setup.num_ranks == 1:
        return {range(1): None}

    def meet() -> Groups:
        select_device(setup, rank)  # each thread has its own
        _meet(setup, rank)
        # torch.distributed wants every rank to make every group.
        both = {setup.group_ranks(draft=False): 0, setup.group_ranks(draft=True): 0}
        return {ranks: _process_group(setup, ranks) for ranks in both}

    return meet() if watch is None else watch.over(meet)


def _meet(setup: RankSetup, rank: int) -> None:
    has_nccl = setup.device == "cuda" and not setup.shares_gpus  # not of two ranks on a GPU
    if setup.folder is None:
        store = next(rendezvous("env://"))[0]
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name look-ups
        store = next(rendezvous(f"file://{setup.folder}/rendezvous", rank, setup.num_ranks))[0]
    _world.group_count = 0  # a join that failed has counted, and the count is in groups' names
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=PrefixStore(f"run-{setup.number}", store),
        rank=rank,
        world_size=setup.num_ranks,
        timeout=JOIN_TIMEOUT,
    )


def select_device(setup: RankSetup, rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU."""
    if setup.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    local = rank if setup.folder is not None else int(os.environ.get("LOCAL_RANK", rank))
    if setup.shares_gpus:
        local %= torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def tensor_groups(
    setup: RankSetup, joined: Groups, rank: int, hidden: int, device: torch.device
) -> dict[range, TensorGroup]:
    """The groups that this rank is in; models on the same ranks share one.

    Args:
        setup: The run.
        joined: From ``join``.
        rank: Global number.
        hidden: Of this rank's largest model.
        device: Of this rank.
    """
    return {
        ranks: _tensor_group(setup, made, BUCKETS[-1] * hidden, device)
        for ranks, made in joined.items()
        if rank in ranks
    }


def _process_group(setup: RankSetup, ranks: range) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    # Of GPUs it is the leader who notices silence; NCCL would end the process.
    limit = JOIN_TIMEOUT if setup.device == "cuda" else timedelta(seconds=setup.silence)
    made = dist.new_group(list(ranks), timeout=limit)
    return made if isinstance(made, dist.ProcessGroup) else None


def _tensor_group(
    setup: RankSetup, group: dist.ProcessGroup | None, elements: int, device: torch.device
) -> TensorGroup:
    """Ranks of a model, with shared memory for their sums where the kernel for it runs."""
    if group is None:
        return SingleRank()
    if not setup.fused or not _shares_memory(setup, device):
        return ProcessGroupRank(group)
    exchange = open_exchange(group, max_elements=elements, device=device)
    return (RankInTurns if setup.shares_gpus else ProcessGroupRank)(group, exchange)


def _shares_memory(setup: RankSetup, device: torch.device) -> bool:
    """Whether all ranks are of one host, and their sums go through its memory."""
    if device.type == "cpu":
        return True  # the same call, over gloo
    one_host = setup.folder is not None or (
        os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    )
    return one_host and setup.dtype == "bfloat16" and kernels_run(device.index or 0)
