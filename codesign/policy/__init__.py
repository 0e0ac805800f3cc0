"""Every decision of speculative decoding, shared by the simulator and the engine.

No torch, no clock, no input or output: the simulator runs these objects under SimPy's clock with
predicted step times, the engine runs the same objects under the wall clock with real forwards.
"""
