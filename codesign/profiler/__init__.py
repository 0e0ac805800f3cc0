"""Profile this machine: step times alone and beside a partner, and acceptance on real text.

    session     the whole profile
    grids       what is timed; steps: in which order
    bench       a step in the engine's own workers; draft_steps: a draft's; neighbour: while the
                other model is busy
    link        messages between target and draft
    deciding    the policy's own Python
    recorder    acceptance
    host_pace, steadiness  whether host and machine kept their pace
    store       the folder of the profile, and its finished parts

On rank groups: rank_parts (what is measured), rank_bench (steps) and rank_serving (what is served
on the same ranks), rank_steps, rank_draft, rank_rounds, kept_trees (what re-roots kept), rank_joins
and rank_acceptance. Imports torch, as only the engine does.
"""

import os

from codesign.threads import calm_waits

os.environ.update(calm_waits(os.environ))  # before torch is imported
