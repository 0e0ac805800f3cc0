"""What if: one way to serve one trace, simulated while you watch."""

from __future__ import annotations

import streamlit as st

st.title("What if")
st.info("codesign simulate --trace conv-twin --policy tree-8x4x2 --deployment 2")
