"""Kernels of other projects, for the ``--peers`` of the benchmarks of ours."""
