"""What is measured, for which machine and models."""

from __future__ import annotations

import streamlit as st

st.title("Profiles")
st.caption("What is measured, for which machine and models.")
st.info("Nothing measured here yet. This command measures this machine")
st.code("codesign profile --out profile", language="shell", wrap_lines=True)
