"""Write a trace as Mooncake JSON Lines for bench_sim.py, several times one after another if asked.

usage: make_trace.py TRACE TIMES OUT.jsonl [REQUESTS]

A prompt of a later copy shares no prefix with an earlier one. With REQUESTS a bundled twin is drawn
again at that length from the same statistics.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pandas as pd

from codesign.traces import load_trace
from codesign.traces.catalog import TWINS
from codesign.traces.mooncake import write_mooncake
from codesign.traces.synth import synthesise


def main() -> None:
    """Read, copy, write."""
    name, times, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if len(sys.argv) > 4:
        trace = synthesise(TWINS[name], num_requests=int(sys.argv[4]), seed=1)
    else:
        trace = load_trace(name)
    hour = trace.requests
    has_blocks = "hash_ids" in hour
    num_ids = 1 + max(map(max, hour["hash_ids"])) if has_blocks else 0
    period = trace.duration + trace.duration / (len(trace) - 1)
    copies = []
    for copy in range(times):
        moved = hour.assign(arrival=hour["arrival"] + copy * period)
        if has_blocks:
            moved["hash_ids"] = [[i + copy * num_ids for i in ids] for ids in hour["hash_ids"]]
        copies.append(moved)
    write_mooncake(replace(trace, requests=pd.concat(copies, ignore_index=True)), out)


if __name__ == "__main__":
    main()
