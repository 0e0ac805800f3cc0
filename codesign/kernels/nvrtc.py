"""Machine code of the CUDA sources, by NVRTC at first use.

A source is a file of ``codesign/kernels/cuda``; what it includes is found there, and it includes no
CUDA header, so that NVRTC, which every CUDA build of PyTorch brings, is all that is needed. The
machine code is kept under the user's cache directory by the hash of everything that went into it.

Imports cuda-bindings, which comes with PyTorch, only when it is asked for.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from codesign.artifacts import cache_dir, elsewhere, replacing
from codesign.errors import HardwareError, InputError

SOURCES = Path(__file__).with_name("cuda")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def machine_code(source: str, architecture: str, options: tuple[str, ...]) -> bytes:
    """Return the cubin of a source, from the cache if it was compiled before.

    Args:
        source: File name in ``codesign/kernels/cuda``.
        architecture: Such as "sm_90a".
        options: Of the compiler, macros.

    Raises:
        HardwareError: If NVRTC or cuda-bindings is missing.
    """
    nvrtc = bindings().nvrtc
    text = source_text(source)
    version = checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((text, architecture, options, version)).encode()).hexdigest()[:32]
    path = cache_dir() / "kernels" / f"{Path(source).stem}-{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compile(nvrtc, text, source, (f"-arch={architecture}", "-std=c++17", *options))
    try:
        with replacing(path) as draft:  # ranks compile at the same time: the last one's stays
            draft.write_bytes(code)
    except InputError:
        warnings.warn(
            f"kernels are compiled anew each time: {path.parent} cannot be written"
            f"{elsewhere(path)}",
            stacklevel=2,
        )
    return code


def source_text(source: str) -> str:
    """Return a source with its includes pasted in, each once."""
    seen: set[str] = set()

    def paste(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return _INCLUDE.sub(paste, (SOURCES / name).read_text())

    return _INCLUDE.sub(paste, (SOURCES / source).read_text())


def _compile(nvrtc: Any, text: str, source: str, options: tuple[str, ...]) -> bytes:
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    assert int(status) == 0, f"{source} does not compile:\n{log.decode()}"
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return code


@cache
def bindings() -> Any:
    """Return cuda-bindings' modules ``driver`` and ``nvrtc``.

    Raises:
        HardwareError: If they or NVRTC itself are missing.
    """
    try:
        driver, nvrtc = (import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc"))
        nvrtc.nvrtcVersion()  # the first call loads the library
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise HardwareError(
            f"cuda-bindings or NVRTC is missing ({reason}); "
            "install them: pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from error
    return SimpleNamespace(driver=driver, nvrtc=nvrtc)


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a CUDA call gave besides its status.

    Raises:
        HardwareError: If the status is not success.
    """
    status, *values = result
    if int(status) != 0:
        raise HardwareError(f"CUDA call failed: {status!r}; see nvidia-smi for the device's state")
    return values[0] if len(values) == 1 else tuple(values)
