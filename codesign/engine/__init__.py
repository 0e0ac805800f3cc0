"""The engine: the same plan on real models.

``run_candidate`` serves requests with a target and a draft on this machine, under the wall clock,
and returns the rows that the simulator predicts. Way of one request: run.py (set up) -> serve.py
(loop) -> target_worker.py (prefill, verify) <-> partner.py or remote_draft.py (exchange) <->
draft_worker.py (grow trees) -> drafter.py (draft forwards).
"""

import os

from codesign.threads import calm_waits

os.environ.update(calm_waits(os.environ))  # before torch is imported

from codesign.engine.run import (
    NGRAM,
    DraftSource,
    EngineRun,
    PolicySetup,
    run_candidate,
)

__all__ = ["NGRAM", "DraftSource", "EngineRun", "PolicySetup", "run_candidate"]
