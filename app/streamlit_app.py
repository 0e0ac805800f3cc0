"""The dashboard's pages and their order. Started by ``codesign dashboard``."""

from __future__ import annotations

from pathlib import Path

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
    if page.title in PREDICTING:
        from sidebar import choose_shared

        st.session_state["shared"] = choose_shared()
    page.run()


if __name__ == "__main__":
    main()
