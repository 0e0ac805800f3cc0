"""What a link asks for in vain."""

from __future__ import annotations

import pytest

from codesign.dashboard.links import misread, misread_text


@pytest.mark.parametrize(
    ("text", "value", "used"),
    [
        ("99", 8, "8"),
        ("8", 8, None),
        ("8.0", 8, None),
        ("1", True, "true"),
        ("TRUE", True, None),
        ("1", False, "false"),
        ("-3", None, "none"),
        ("fewest", "goodput", "most goodput"),
        ("most goodput", "goodput", None),
        ("goodput", "goodput", None),
        ("steady: Azure 2023", "steady", None),
    ],
)
def test_what_was_taken_out_of_the_address_was_the_default_or_is_not_understood(text, value, used):
    found = misread({"objective": text}, {}, {"objective": value})
    assert found == ({} if used is None else {"objective": used})


def test_what_is_still_in_the_address_or_has_no_control_was_not_misread():
    assert misread({"k": "5", "rows": "x"}, {"rows": "x"}, {"rows": 8}) == {}
    assert misread_text({}, {}) == ""
    assert misread_text({"k": "x"}, {"k": "3"}).startswith(
        "Not understood in the link: `k=x` (used: 3)."
    )


def test_what_somebody_wrote_into_a_link_is_no_markdown():
    said = misread_text({"k": "`![x](http://x/y.png)" + 90 * "z"}, {"k": "3"})
    assert said.startswith("Not understood in the link: `k=![x](http://x/y.png)zzz")
    assert said.count("`") == 2
    assert "z... (used" in said.replace("`", "")
    assert len(said) < 250
