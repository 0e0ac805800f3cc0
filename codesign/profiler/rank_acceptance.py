"""Acceptance recorded on rank groups: plain decoding, then what the draft expects of each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from codesign.config import Serving
from codesign.engine.gpu.group_drafter import GroupDrafter
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.partner import NoDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.policy.batching import BatchLimits
from codesign.policy.protocol import ExpansionRows
from codesign.policy.walk import Sampling
from codesign.profiler.rank_bench import RankBench
from codesign.profiler.rank_steps import NUM_SLOTS
from codesign.profiler.recorder import MAX_BATCH, TOP_K, Ranked, ngram_predictions, ranked_tokens
from codesign.profiler.store import Tick
from codesign.prompts import BoundRequest


def recorded(
    bench: RankBench, requests: Sequence[BoundRequest], sampling: Sampling, tick: Tick
) -> pd.DataFrame:
    """Emitted tokens ranked among what the draft expects, on ranks that hold both models.

    Args:
        bench: The ranks.
        requests: To decode.
        sampling: Of the target.
        tick: Told the share of requests that are done.
    """
    return rank_outputs(bench, requests, _decoded(bench, requests, sampling, tick))


def rank_outputs(
    bench: RankBench, requests: Sequence[BoundRequest], outputs: Mapping[int, Sequence[int]]
) -> pd.DataFrame:
    """Rank emitted tokens among what the draft expects, on ranks that hold both models."""

    def predictions(request: BoundRequest, output: Sequence[int]) -> Iterator[Ranked]:
        if bench.draft is None:
            return ngram_predictions(request, output)
        drafter = GroupDrafter(bench.draft, num_slots=NUM_SLOTS, choices=TOP_K)
        return _model_predictions(request, output, drafter)

    return ranked_tokens(requests, outputs, predictions)


def num_rows(request: BoundRequest) -> int:
    """KV rows of a request at its longest."""
    return len(request.prompt_ids) + request.max_new_tokens + 1


def _decoded(
    bench: RankBench, requests: Sequence[BoundRequest], sampling: Sampling, tick: Tick
) -> dict[int, list[int]]:
    """The requests' tokens without speculation."""
    limits = BatchLimits(MAX_BATCH, sum(num_rows(request) for request in requests))
    schedule = Schedule(requests, limits, Serving(), round_rows=1)
    worker = GroupTarget(bench.target, num_slots=NUM_SLOTS, sampling=sampling)
    server = Server(
        worker,
        NoDraft(),
        schedule,
        requests,
        progress=lambda stage, done, total: tick(done / total),
    )
    server.run()
    return server.outputs


def _model_predictions(
    request: BoundRequest, output: Sequence[int], drafter: GroupDrafter
) -> Iterator[Ranked]:
    """What the draft expects at each position of the output, in one forward."""
    path = (*request.prompt_ids, *output[:-1])
    rows = ExpansionRows(
        request_id=request.request_id,
        tokens=path,
        positions=tuple(range(len(path))),
        nodes=tuple(range(len(output))),
        visible=None,
        context=0,
    )
    [(tokens, log_probs)] = drafter.forward([rows], TOP_K)
    return iter(list(zip(tokens, log_probs, strict=True)))
