"""Rounds of a run, target and draft, simulated and measured."""

from __future__ import annotations

import streamlit as st

st.title("Timeline")
st.caption("Rounds of a run, target and draft, simulated and measured.")
st.info("No run yet. This command makes one")
st.code("codesign simulate --trace conv-twin --out runs/simulated", language="shell")
