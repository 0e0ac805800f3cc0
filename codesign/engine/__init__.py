"""The engine: the same plan on real models.

``run_candidate`` serves requests with a target and a draft on this machine, under the wall clock,
and returns the rows that the simulator predicts. Way of one request: run.py (set up) -> serve.py
(loop) -> target_worker.py (prefill, verify) <-> partner.py or remote_draft.py (exchange) <->
draft_worker.py (grow trees) -> drafter.py (draft forwards).

    llm                  text in, text out
    replay, source       a plan's runs, and the engine that serves them: this one, or replicas
                         (replica, replica_process, feed); measured_run
    run, serve           set-up and loop, with schedule (pieces), refusals, serving_log and garbage
    target               what the loop asks of a target; target_worker: on a CPU
    partner              what it asks of the draft, and tells it (draft_news); remote_draft,
                         draft_process: a process for it
    draft_worker, drafter  the draft's side
    model, rows          a decoder, and the rows of a forward; self_check
    kv_cache             slabs of running requests; prefix_store, blocks: prompts of earlier ones
    checkpoint, weights  what is read: draft_weights, rank_weights, random_weights
    quantize             int4 checkpoints: column_factors, awq_files
    inflate, degrade     models for measurements: inflate_places
    gpu                  the same on GPUs
"""

import os

from codesign.threads import calm_waits

os.environ.update(calm_waits(os.environ))  # before torch is imported

from codesign.engine.run import (
    DraftSource,
    EngineRun,
    PolicySetup,
    run_candidate,
)

__all__ = ["DraftSource", "EngineRun", "PolicySetup", "run_candidate"]
