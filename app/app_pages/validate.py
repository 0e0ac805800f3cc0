"""What was predicted against what was measured."""

from __future__ import annotations

import streamlit as st

st.title("Validate")
st.caption("What was predicted against what was measured.")
st.info("No measured run yet. This command measures one")
st.code("codesign run --plan plan.json", language="shell", wrap_lines=True)
