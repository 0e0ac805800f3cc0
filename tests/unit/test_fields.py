"""What a file's values are held against."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
from typing_extensions import TypeAliasType

from codesign.artifacts.fields import check

_Item = TypeVar("_Item", bound=np.generic)
Array = TypeAliasType("Array", np.ndarray[Any, np.dtype[_Item]], type_params=(_Item,))
Floats = TypeAliasType("Floats", Array[np.float64])


@pytest.mark.parametrize("named", [Array[np.float64], Floats])
def test_an_alias_is_what_it_stands_for(named):
    """From Python 3.12 on numpy's NDArray is one: no fit could be read there."""
    check(np.zeros(3), named, "ranks")
    with pytest.raises(ValueError, match="ranks"):
        check([0.0], named, "ranks")
