"""The round protocol: a draft side and a target side that exchange two messages.

Target to draft, a ``Verdict``: per request the tokens emitted since its base length, whether it is
finished, and requests newly admitted. Draft to target, ``Candidates``: per request a base length
and a tree of tokens. A base length that is not the target's own marks a stale entry, and a missing
or stale entry means "root only", which is plain decoding: load shedding and a dead draft are the
same code path.

Neither side owns a model. Whoever drives them (the engine with forwards, the simulator with
predicted times and drawn acceptance) runs the expansions that the draft side names and samples the
rows that the target side names.

One round of a request, in KV rows:
    target  [prefix]            + rows of the candidates -> accepted rows join the prefix
    draft   [prefix | tree]     -> re-root: promoted rows join the prefix, kept rows stay

Must not import torch or read a clock.

Source:
    SwiftSpec, Algorithm 1.
"""

from __future__ import annotations

from codesign.policy.draft_side import DraftSide
from codesign.policy.messages import (
    Admission,
    Candidates,
    ExpansionRows,
    Growth,
    KVMove,
    PromptRows,
    RequestCandidates,
    RequestVerdict,
    Verdict,
    VerifyRows,
)
from codesign.policy.target_side import TargetSide

__all__ = [
    "Admission",
    "Candidates",
    "DraftSide",
    "ExpansionRows",
    "Growth",
    "KVMove",
    "PromptRows",
    "RequestCandidates",
    "RequestVerdict",
    "TargetSide",
    "Verdict",
    "VerifyRows",
]
