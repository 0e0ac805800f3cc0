"""Profile this machine: step times alone and beside a partner, and acceptance on real text.

session.py runs the whole profile; steps.py says what is timed, bench.py and draft_steps.py stage a
step in the engine's own workers, neighbour.py keeps the other model busy, link.py times messages,
recorder.py ranks tokens, store.py keeps finished parts. rank_parts.py, rank_bench.py and
rank_steps.py do the same on rank groups. Imports torch, as only the engine does.
"""

import os

from codesign.threads import calm_waits

os.environ.update(calm_waits(os.environ))  # before torch is imported
