"""The search for the best way to serve a trace."""

from __future__ import annotations

import streamlit as st

st.title("Plan")
st.caption("The search for the best way to serve a trace.")
st.info("No plan yet. This command makes one")
st.code("codesign plan --trace conv-twin --rate-scale 0.1 --out plan.json", language="shell")
