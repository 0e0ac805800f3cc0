"""Print the machine and the versions as JSON: bench_sim.py itself imports nothing heavy."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

from codesign import __version__
from codesign.artifacts.machine import hardware


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    packages = ("numpy", "pandas", "fastparquet", "simpy")
    versions = {name: _version(name) for name in packages}
    print(json.dumps({"hardware": hardware(), "codesign": __version__, "versions": versions}))
