"""Pages, prefix reuse, chunks and preemption on a GPU: not a bit differs from whole slabs.

Prompts run in the same pieces everywhere, so that equality is exact also in bfloat16.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_serving import ALL, Bench, make_pair, mixed
from codesign.config import Serving
from codesign.policy.walk import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CHUNKS = Serving(prefill_chunk=512)
REQUESTS = mixed(12, new_tokens=192)  # so many that those admitted outgrow TIGHT
TIGHT = 3 * max(len(r.prompt_ids) + r.max_new_tokens for r in REQUESTS) // 2


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(make_pair(tmp_path_factory.mktemp("serving"), ""), "cuda")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=3)])
def test_sharing_memory_and_steps_changes_no_token(bench, sampling):
    whole = bench.serve("slabs", "plain", REQUESTS, CHUNKS, sampling=sampling)
    for policy in ("plain", "tree-8x4x2"):
        bench.serve(
            "all", policy, REQUESTS, ALL, max_kv_tokens=TIGHT, sampling=sampling, against=whole
        )
        told = bench.rows[-1]
        assert told["requests_that_differ"] == 0
        assert told["notes"] == []
        assert told["preemptions"] > 0
        assert told["cached_share"] > 0
