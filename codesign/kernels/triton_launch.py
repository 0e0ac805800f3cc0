"""Launches of Triton kernels that were launched alike before, without Triton's own checks.

Triton's own launch takes the host longer than most kernels of a prompt run. Whatever it
chooses machine code by is in the key here, and more: each value of a number has its own entry.

Imports torch and nothing of the engine; Triton's objects come from the callers.
"""

from __future__ import annotations

from typing import Any

import torch

_ALIGNED = 16  # bytes; machine code for aligned pointers is another
_MOST = 1 << 14  # of entries: rows of prompts times maps
_NUMBERS = frozenset((bool, int, float))
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, int, int], *args: Any, **options: int) -> None:
    """Launch a Triton kernel on PyTorch's current device and stream.

    Args:
        kernel: A function under ``triton.jit``.
        grid: Programs.
        args: All of its arguments in order, constants, too: tensors and Python's numbers.
        options: Launch options, such as ``num_warps``.
    """
    pointers = 0
    kinds = []
    for arg in args:
        if type(arg) in _NUMBERS:
            kinds.append(arg)
        else:
            kinds.append(arg.dtype)
            pointers |= arg.data_ptr()
    repeats = pointers % _ALIGNED == 0 and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if repeats else -1
    key = (kernel, device, *kinds, *options.values())
    known = _compiled.get(key)
    if known:
        try:
            known[grid](*args, stream=torch._C._cuda_getCurrentRawStream(device))
            return
        except TypeError:  # this Triton wants something else: leave it all to it
            _compiled[key] = None
    compiled = kernel[grid](*args, **options)  # nothing in the interpreter
    if repeats and key not in _compiled:
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled
