"""Values that are quickly made: a round of a batch makes hundreds of them while GPUs wait.

Must not import torch or read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True)
def light(made: type[_Class]) -> type[_Class]:
    """A slotted dataclass that the type checker keeps frozen, not Python.

    Python would set every field of a frozen one by a call: eight fields take 2.0 us, these 0.4.
    """
    return dataclass(slots=True, unsafe_hash=True)(made)
