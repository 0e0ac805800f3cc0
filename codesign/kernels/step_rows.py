"""What a kernel changes of a step's rows, where it makes the next step's from them.

Letters in shapes: T rows of a step, Q longest path.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows on the device, int32: those that were run last, then the next.

    Attributes:
        tokens_T: Tokens.
        positions_T: Positions.
        slots_T: Slab of each; ``scratch_slot`` for padding.
        kv_rows_T: Slab row that the key and value of each go to.
        prefixes_T: Slab rows that each sees before its path.
        path_TQ: Path of each, in rows behind its prefix, its own last; of a root it begins with 0.
        scratch_slot: Slab of rows that fill up a step, of which each row of a step has a row.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    kv_rows_T: Tensor
    prefixes_T: Tensor
    path_TQ: Tensor
    scratch_slot: int
