"""The dashboard's pages and their order. Started by ``codesign dashboard``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamlit.delta_generator import DeltaGenerator

OPENED = "opened"  # whether this visitor has seen a page
PREDICTING = ("What if", "Plan")


def main() -> None:
    # Imported here, because processes that the search starts import this file and need none of it.
    import streamlit as st

    # A picture of our own: icons of pages are fetched from another host.
    icon = Path(__file__).with_name("icon.png")
    st.set_page_config(page_title="codesign", page_icon=icon, layout="wide")
    pages = [
        st.Page("app_pages/what_if.py", title="What if", icon=":material/tune:", default=True),
        st.Page("app_pages/plan.py", title="Plan", icon=":material/search:"),
        st.Page("app_pages/timeline.py", title="Timeline", icon=":material/view_timeline:"),
        st.Page("app_pages/validate.py", title="Validate", icon=":material/rule:"),
        st.Page("app_pages/profiles.py", title="Profiles", icon=":material/speed:"),
    ]
    page = st.navigation(pages, position="top")
    st.title(page.title)  # there while the page's own imports go on
    # Of the first run alone, before controls take out of the address what they do not understand.
    asked = {} if OPENED in st.session_state else st.query_params.to_dict()
    st.session_state[OPENED] = True
    warning = st.empty()
    if page.title in PREDICTING:
        from sidebar import choose_shared

        st.session_state["shared"] = choose_shared()
        warn_of_link(warning, asked)
    page.run()
    warn_of_link(warning, asked)


def warn_of_link(place: DeltaGenerator, asked: Mapping[str, str]) -> None:
    """Say which of a link's values were not understood by the controls that are there so far."""
    import streamlit as st

    from codesign.dashboard.links import misread, misread_text

    chosen = {name: st.session_state[name] for name in asked if name in st.session_state}
    if said := misread_text(asked, misread(asked, st.query_params.to_dict(), chosen)):
        place.warning(said, icon=":material/warning:")


if __name__ == "__main__":
    main()
