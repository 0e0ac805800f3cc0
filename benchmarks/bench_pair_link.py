"""One verdict there and one answer back between the leaders of target and draft, by transport.

    python -m benchmarks.bench_pair_link [--out DIRECTORY]

``shared memory`` and ``gloo`` go from host to host. ``nccl`` starts and ends on the hosts as well,
with a copy to and from each GPU. ``peer memory`` is what two GPUs could do without their hosts:
one block on each writes into the other's memory and polls its own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.common import write_result
from codesign.engine.gpu.mailbox import GlooMailbox, Mailbox, SharedMailbox
from codesign.engine.gpu.wire import WireLimits

LIMITS = WireLimits(max_batch=4, max_rows=8)
ROUND_TRIPS, WARM_UP = 1000, 100
PING = r"""
__device__ __forceinline__ void put(uint4* at, unsigned data, unsigned flag) {
  asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%1,%2};" ::"l"(at), "r"(data), "r"(flag) : "memory");
}
__device__ __forceinline__ bool take(uint4* at, unsigned flag) {
  unsigned a, f, b, g;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(a), "=r"(f), "=r"(b), "=r"(g) : "l"(at) : "memory");
  return f == flag && g == flag;
}
// Every thread carries 8 bytes of the message beside their flags; the block waits for all of them.
extern "C" __global__ void ping(uint4* mine, uint4* theirs, int rounds, int is_first, long long* nanoseconds) {
  long long start = 0, end = 0, began = clock64();
  for (int round = 1; round <= rounds; round++) {
    if (round == rounds / 10) asm volatile("mov.u64 %0,%globaltimer;" : "=l"(start));
    if (is_first) put(theirs + threadIdx.x, round, round);
    while (!take(mine + threadIdx.x, round))
      if (clock64() - began > 4000000000LL) return;
    __syncthreads();
    if (!is_first) put(theirs + threadIdx.x, round, round);
  }
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(end));
  if (is_first && threadIdx.x == 0) *nanoseconds = end - start;
}
"""  # noqa: E501


def round_trips(send: Callable[[], None], receive: Callable[[], None]) -> dict[str, float]:
    """Microseconds of send and receive, one after the other."""
    times = []
    for _ in range(ROUND_TRIPS):
        start = perf_counter()
        send()
        receive()
        times.append(1e6 * (perf_counter() - start))
    median, high = np.quantile(times[WARM_UP:], (0.5, 0.9))
    return {"us": round(float(median), 2), "us_p90": round(float(high), 2)}


def answer(send: Callable[[], None], receive: Callable[[], None]) -> dict[str, float]:
    """The other end of ``round_trips``."""
    for _ in range(ROUND_TRIPS):
        receive()
        send()
    return {}


def host_ends(rank: int, verdicts: Mailbox, candidates: Mailbox) -> dict[str, float]:
    """A round trip through two mailboxes."""
    there = np.arange(LIMITS.verdict_words, dtype=np.int32)
    back = np.arange(LIMITS.candidate_words, dtype=np.int32)
    if rank == 0:
        return round_trips(lambda: verdicts.send(there), lambda: check(candidates.receive(), back))
    return answer(lambda: candidates.send(back), lambda: check(verdicts.receive(), there))


def check(found: np.ndarray, sent: np.ndarray) -> None:
    """A transport that loses words is no transport."""
    assert np.array_equal(found, sent)


def nccl_ends(rank: int) -> dict[str, float]:
    """A round trip from host to host over NCCL."""
    torch.cuda.set_device(rank)
    sizes = (LIMITS.verdict_words, LIMITS.candidate_words)
    sizes = sizes if rank == 0 else sizes[::-1]
    hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for size in sizes]
    out, into = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes)

    def send() -> None:
        out.copy_(hosts[0], non_blocking=True)
        dist.send(out, 1 - rank)

    def receive() -> None:
        dist.recv(into, 1 - rank)
        hosts[1].copy_(into, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return (round_trips if rank == 0 else answer)(send, receive)


def run_rank(rank: int, folder: str, queue: Any) -> None:
    """Both ends of every transport between processes."""
    shared = Path(folder)
    rows = []
    spin = 10.0
    verdicts = SharedMailbox(
        shared / "verdicts", max_words=4096, reader=None if rank == 0 else 0, spin=spin
    )
    candidates = SharedMailbox(
        shared / "candidates", max_words=4096, reader=None if rank == 1 else 0, spin=spin
    )
    rows.append(("shared memory", host_ends(rank, verdicts, candidates)))
    on_gpus = torch.cuda.device_count() > 1
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    store = f"file://{shared / 'rendezvous'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    ends = GlooMailbox(writer=0, readers=(1,)), GlooMailbox(writer=1, readers=(0,))
    rows.append(("gloo", host_ends(rank, *ends)))
    if on_gpus:
        rows.append(("nccl", nccl_ends(rank)))
    dist.barrier()
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def peer_memory(words: int) -> dict[str, float]:
    """Nanoseconds of a round trip between two GPUs' blocks, from one process."""
    threads = -(-words // 64) * 32
    kernels, ends = [], []
    for device in (0, 1):
        with torch.cuda.device(device):
            kernels.append(torch.cuda._compile_kernel(PING, "ping"))
            ends.append(torch.zeros(4 * threads, dtype=torch.int32, device=f"cuda:{device}"))
    ends[0].copy_(ends[1])  # lets each reach the other's memory
    ends[1].copy_(ends[0])
    rounds = 2000
    times = [torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}") for device in (0, 1)]
    for device in (0, 1):
        torch.cuda.synchronize(device)
    for device in (1, 0):
        with torch.cuda.device(device):
            mine, theirs = ends[device], ends[1 - device]
            kernels[device](
                (1, 1, 1), (threads, 1, 1), (mine, theirs, rounds, 1 - device, times[device])
            )
    for device in (0, 1):
        torch.cuda.synchronize(device)
    return {"us": round(int(times[0]) / (rounds - rounds // 10) / 1e3, 3)}


def main() -> None:
    """Measure what this machine allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ranks = [context.Process(target=run_rank, args=(r, folder, queue)) for r in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        measured = queue.get()
    rows = [{"transport": name, **times} for name, times in measured]
    if torch.cuda.device_count() > 1:
        words = LIMITS.verdict_words
        rows.append({"transport": "peer memory, polled by the GPUs", **peer_memory(words)})
    for row in rows:
        print(row)
    if torch.cuda.is_available():
        note = f"{LIMITS.verdict_words} and {LIMITS.candidate_words} int32 words"
        print(write_result("pair_link", rows, directory=args.out, note=note))


if __name__ == "__main__":
    main()
