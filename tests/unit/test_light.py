from __future__ import annotations

from codesign.policy.protocol import KVMove


def test_light_values_are_slotted_and_equal_and_hashed_by_what_they_hold():
    move = KVMove(1, 2, (3,))
    assert move == KVMove(1, 2, (3,)) != KVMove(1, 2, (4,))
    assert len({move, KVMove(1, 2, (3,))}) == 1
    assert not hasattr(move, "__dict__")
