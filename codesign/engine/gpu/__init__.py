"""The engine on GPUs: rank groups, CUDA graphs, messages between leaders.

The state machines (codesign/policy), the loop (engine/serve.py), the draft's worker
(engine/draft_worker.py) and the records are the CPU engine's. What is here replaces its forwards
and its transport. The same code runs on a CPU over gloo, with plain PyTorch ops and no graphs: that
is how it is tested where there is no GPU.
"""
