"""What a file says, held against the annotations of the dataclass that it becomes.

Python checks no annotation: a file that was edited by hand, or damaged, would be found out far from
where it was read, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Made = TypeVar("_Made")
_MOST = {int: 2**63, float: math.inf}  # what a table, or a float, does not hold any more


def checked(made: _Made) -> _Made:
    """The same dataclass, if each of its fields holds what it is annotated with.

    Numbers are finite, and a boolean is none. Dataclasses in fields are checked as well.

    Raises:
        ValueError: If a field does not; it names the field and the value.
    """
    hints = _hints(type(made))
    for each in fields(made):  # type: ignore[arg-type]
        check(getattr(made, each.name), hints[each.name], each.name)
    return made


def check(value: Any, wanted: Any, name: str) -> None:
    """Hold a value, and what is in it, against an annotation.

    Raises:
        ValueError: As ``checked``.
    """
    if not _is_a(value, wanted):
        raise ValueError(f"{name} is {_unlike(wanted)}: {repr(value)[:60]}")
    if is_dataclass(value):
        checked(value)
    elif isinstance(value, Mapping):
        item = (get_args(wanted) or (Any, Any))[1]
        for key, inner in value.items():
            check(inner, item, f"{name} of {key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        item = (get_args(wanted) or (Any,))[0]
        # Of whole numbers, as the tokens of a run, there are millions: the outermost two will do.
        are_whole = item is int and {int}.issuperset(map(type, value))
        outermost = (min(value), max(value)) if are_whole and value else value
        for inner in outermost:
            check(inner, item, f"one of {name}")


def _unlike(wanted: Any) -> str:
    """What a value is not."""
    if get_origin(wanted) is Literal:
        return f"none of {', '.join(map(str, get_args(wanted)))}"
    if {int, float} & {wanted, *get_args(wanted)}:
        return "no number"
    return f"no {wanted.__name__ if type(wanted) is type else wanted}"


def why(err: Exception) -> str:
    """What is wrong with a file, from the error of its reader, in one line."""
    text = " ".join(str(err).split())
    if isinstance(err, TypeError) and "'NoneType'" in text:
        return "a value that it needs is null"
    return f"{text} is missing" if isinstance(err, KeyError) else text


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _spelled_out(wanted: Any) -> Any:
    """What a name of ``type`` stands for, as numpy's NDArray is one from Python 3.12 on."""
    while hasattr(named := get_origin(wanted) or wanted, "__value__"):
        wanted = named.__value__
    return wanted


def _is_a(value: Any, wanted: Any) -> bool:
    """Whether a value is what an annotation says, as far as its outermost part goes."""
    wanted = _spelled_out(wanted)
    origin = get_origin(wanted)
    if origin is Literal:
        return value in get_args(wanted)
    if origin in (Union, UnionType):
        return any(_is_a(value, each) for each in get_args(wanted))
    if wanted is Any:
        return True
    if wanted in _MOST:
        is_number = isinstance(value, int if wanted is int else int | float)
        return is_number and not isinstance(value, bool) and -_MOST[wanted] < value < _MOST[wanted]
    return isinstance(value, origin or wanted)
