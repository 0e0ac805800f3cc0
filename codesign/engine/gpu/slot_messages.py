"""Messages about slots, for the steps that follow: pages of a slot, sampling of its request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codesign.engine.gpu.paging import Entry
from codesign.engine.gpu.prompt_rows import COUNT_WORD, SLOT_WORD
from codesign.engine.gpu.row_sampling import SAMPLING_WORDS, sampling_words
from codesign.engine.gpu.step_rows import HEADER, KIND, PAGES, SAMPLING, Words
from codesign.policy.walk import Sampling


def pages_message(entries: Sequence[Entry]) -> Words:
    """Message for ``ModelRank``: entries of page tables, for the steps that follow."""
    message = np.zeros(HEADER + 3 * len(entries), np.int32)
    message[KIND], message[COUNT_WORD] = PAGES, len(entries)
    message[HEADER:] = [word for e in entries for word in (e.slot, e.index, e.page)]
    return message


def sampling_message(slot: int, sampling: Sampling) -> Words:
    """Message for a ``ModelRank`` with ``RowTargetHead``: how the request in a slot samples."""
    message = np.zeros(HEADER + SAMPLING_WORDS, np.int32)
    message[KIND], message[SLOT_WORD] = SAMPLING, slot
    message[HEADER:] = sampling_words(sampling)
    return message
