"""Names of prompt blocks: equal names, equal tokens up to and including that block."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from codesign.policy.kv_memory import PREFIX_BLOCK


def block_ids(tokens: Sequence[int], block: int = PREFIX_BLOCK) -> tuple[int, ...]:
    """Ids of the whole blocks that ``tokens`` begin with, each a hash of all tokens up to its end.

    64 bits: two prompts of different beginnings share an id once in 10^19 pairs.
    """
    ids: list[int] = []
    digest = hashlib.blake2b(digest_size=8)
    for end in range(block, len(tokens) + 1, block):
        digest.update(np.array(tokens[end - block : end], np.int64).tobytes())
        ids.append(int.from_bytes(digest.digest(), "little"))
    return tuple(ids)
