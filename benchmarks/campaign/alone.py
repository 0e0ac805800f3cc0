"""How many rounds each recorded request takes under a policy that serves it alone."""

from __future__ import annotations

from codesign.acceptance import AcceptanceProfile
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import Speculation
from codesign.sim.acceptance import SyntheticDrafter
from codesign.sim.played import PlayedBatch
from codesign.sim.tapes import play_alone
from codesign.sim.work import Entering

_MARGIN = 160  # tokens beyond the recorded ones, so that no tree is cut short by the end


def rounds_per_token(
    policy: Speculation, profile: AcceptanceProfile, *, hears_early: bool
) -> dict[int, float]:
    """Rounds a token of each recording, by the number of its request.

    Args:
        policy: Its own object. What it learns of one request it knows of the next, as in a run, so
            the order of the recordings changes a learning policy's rounds by about 1 %.
        profile: What was recorded.
        hears_early: As for PlayedBatch.
    """
    found: dict[int, float] = {}
    first = 0
    for kind, group in profile.recordings.items():
        for recording in group:
            length = len(recording.ranks)
            own = range(first, first + length)
            first += length
            drafter = SyntheticDrafter(
                profile, 0, lambda _, count, before, own=own: _again(own, before, count)
            )
            batch = PlayedBatch(DraftSide(policy), drafter, hears_early=hears_early)
            request = Entering(recording.request, kind, 1, length + _MARGIN)
            rounds, emitted = 0, 0
            for _, tokens in play_alone(batch, request):
                rounds, emitted = rounds + 1, emitted + tokens
                if emitted >= length - 1:
                    break
            found[recording.request] = rounds / emitted
    return found


def _again(own: range, before: int, count: int) -> list[int]:
    return [own[(before + i) % len(own)] for i in range(count)]
