"""What a link asks for and a page did not understand. Must not import Streamlit."""

from __future__ import annotations

from collections.abc import Mapping

OBJECTIVE_TITLES = {
    "goodput": "most goodput",
    "latency": "lowest mean TPOT",
    "fewest": "fewest GPUs in SLO",
}
_MOST = 60  # characters of a value that are shown
_TITLES = {"objective": OBJECTIVE_TITLES}  # of choices that a link calls by their title


def misread(
    asked: Mapping[str, str], kept: Mapping[str, str], chosen: Mapping[str, object]
) -> dict[str, str]:
    """What is used, in words, by the name of each control whose value in a link was dropped.

    Streamlit takes values that a control cannot have out of the address, and says nothing. It also
    takes out those that are the control's default. Names without a control are passed over: some
    controls are there for some choices only.

    Args:
        asked: The link's parameters.
        kept: Those that are still in the address when the controls are there.
        chosen: Values of the controls by name.
    """
    return {
        name: _in_words(name, chosen[name])
        for name, text in asked.items()
        if name in chosen and name not in kept and not _is_same(text, name, chosen[name])
    }


def misread_text(asked: Mapping[str, str], used: Mapping[str, str]) -> str:
    """One line about what ``misread`` found; "" if that is nothing."""
    if not used:
        return ""
    named = ", ".join(
        f"`{name}={_as_code(asked[name])}` (used: {word})" for name, word in used.items()
    )
    return (
        f"Not understood in the link: {named}. Once you choose another value on the page, the "
        "address shows how it is written."
    )


def _as_code(text: str) -> str:
    """Somebody else's words between backticks, where no page is made of them."""
    plain = " ".join(text.replace("`", "").split())
    return plain if len(plain) <= _MOST else f"{plain[:_MOST]}..."


def _in_words(name: str, value: object) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _TITLES.get(name, {}).get(str(value), str(value))


def _is_same(text: str, name: str, value: object) -> bool:
    if text.strip().lower() == _in_words(name, value).lower() or text == str(value):
        return True
    if isinstance(value, str) and value and text.startswith(f"{value}: "):
        return True  # with what a list says of it
    try:
        return not isinstance(value, bool) and float(text) == float(str(value))
    except ValueError:
        return False
