"""What the dashboard shows: data frames, charts and cached computations, without Streamlit.

The pages in ``app/`` lay out what these modules compute and hold no logic, so that everything here
can be tested without a browser. Must not import streamlit or torch. Charts need altair, which comes
with Streamlit.
"""
