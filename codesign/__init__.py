"""Co-design of LLM speculative decoding: simulate, plan, run, and check the prediction.

The pipeline, one module or folder a stage, one file between two stages::

    trace -> profile -> fit -> simulate -> plan -> run -> validate
    traces   profiler   fit    sim         planner engine validate

``codesign.policy`` holds every decision (what to draft, what to verify, who shares a
step). The simulator and the engine run the same policy objects and write the same rows
(``codesign.records``), so validation is a join of two tables.

Importing this package imports nothing heavy: take what you need from its modules.
"""

from __future__ import annotations

from collections.abc import Callable

__version__ = "0.1.0"

Progress = Callable[[str, int, int], None]  # told by long functions: stage, done, total
