"""Dynamo's offline replay of a trace, for bench_sim.py; runs in a virtual environment of its own.

usage: dynamo_replay.py TRACE.jsonl WORKERS KV_BLOCKS

Its vLLM scheduler with the default timing: chunked prefill, prefix cache, preemption, blocks of 64
tokens, batches of 256. With the default timing drafts would be free, so speculation is left out.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Replay and print JSON."""
    from dynamo._core import _normalize_mocker_config
    from dynamo.replay import run_trace_replay

    trace, workers, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = {"block_size": 64, "num_gpu_blocks": blocks, "max_num_seqs": 256}
    config = _normalize_mocker_config({"engine": engine})
    started = time.perf_counter()
    report = run_trace_replay(
        [trace], extra_engine_args=config, num_workers=workers, trace_block_size=512
    )
    seconds = {"simulate": time.perf_counter() - started}
    found = getattr(report, "summary", report)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "requests": found["num_requests"],
                "finished": found["completed_requests"],
                "output_tokens": found["total_output_tokens"],
                "simulated_seconds": found["duration_ms"] / 1e3,
                "ttft_p50": found["median_ttft_ms"] / 1e3,
                "tpot_mean": found["mean_tpot_ms"] / 1e3,
                "cached_share": found["prefix_cache_reused_ratio"],
            }
        )
    )


if __name__ == "__main__":
    main()
