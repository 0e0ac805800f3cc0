"""Who may import whom: read from the source, so that nothing has to be installed."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import codesign

PACKAGE = Path(codesign.__file__).parent
TORCH_MODULES = ("codesign.engine", "codesign.kernels", "codesign.profiler")
CLI_MAY_IMPORT_EARLY = ("codesign.errors", "codesign.cli")


def is_under(name: str, roots: Iterable[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(tree: ast.AST, *, top_level: bool) -> Iterator[ast.AST]:
    """Yield the nodes that run; with ``top_level``, only those that run when imported."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from walk(node, top_level=top_level)


def imports_of(source: str, *, top_level: bool = False) -> set[str]:
    """Return the dotted names a module imports; ``from a import b`` gives both a and a.b."""
    names: set[str] = set()
    for node in walk(ast.parse(source), top_level=top_level):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            assert node.module is not None
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_name(path: Path) -> str:
    parts = ["codesign", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
}
IMPORTS = {name: imports_of(source) for name, source in SOURCES.items()}


def reached_from(module: str) -> set[str]:
    """Return all names imported by a module, or by modules of ours that it imports, and so on.

    The package of each module is imported with it. The command line is left out: it imports
    every verb, one at a time.
    """
    reached: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        for found in IMPORTS.get(name, set()) | {name.rpartition(".")[0]}:
            if found and found not in reached:
                reached.add(found)
                todo.append(found)
    return reached


def modules_under(*roots: str) -> list[str]:
    return [name for name in SOURCES if is_under(name, roots)]


@pytest.mark.parametrize("module", modules_under("codesign.policy"))
def test_policy_reaches_no_torch_no_clock_no_simulator_and_no_engine(module):
    forbidden = ("torch", "simpy", "time", "datetime", "asyncio", "codesign.sim", "codesign.engine")
    assert [name for name in IMPORTS[module] if is_under(name, forbidden)] == []
    beyond = ("torch", "simpy", "codesign.sim", "codesign.engine")
    assert [name for name in reached_from(module) if is_under(name, beyond)] == []


@pytest.mark.parametrize("module", modules_under("codesign.sim", "codesign.planner"))
def test_simulator_and_planner_reach_no_torch_and_no_engine(module):
    forbidden = ("torch", *TORCH_MODULES)
    assert [name for name in reached_from(module) if is_under(name, forbidden)] == []


@pytest.mark.parametrize("module", SOURCES)
def test_only_engine_kernels_and_profiler_import_torch(module):
    if not is_under(module, TORCH_MODULES):
        assert [name for name in IMPORTS[module] if is_under(name, ["torch"])] == []


def test_the_large_packages_that_the_core_does_without_stay_where_they_are():
    large = {
        "scipy": {"codesign.fit.least_squares"},
        "pyarrow": set(),
        "altair": {"codesign.validate.charts"},
    }
    found = {
        package: {
            module for module in SOURCES if any(is_under(n, [package]) for n in IMPORTS[module])
        }
        for package in large
    }
    found["altair"] -= {*modules_under("codesign.dashboard")}  # runs in Streamlit, which has it
    assert found == large


def test_no_process_of_the_engine_loads_torchs_compiler():
    """It takes as long as the rest of torch, and each rank is a process."""
    compiler = ["torch._dynamo", "torch.nn.attention"]  # which imports the former
    found = {name for names in IMPORTS.values() for name in names if is_under(name, compiler)}
    assert found == set()


@pytest.mark.parametrize("module", [m for m in SOURCES if not is_under(m, ["codesign.dashboard"])])
def test_only_the_app_uses_what_the_dashboard_computes(module):
    assert [name for name in IMPORTS[module] if is_under(name, ["codesign.dashboard"])] == []


@pytest.mark.parametrize("module", SOURCES)
def test_nobody_imports_the_command_line_or_the_app(module):
    allowed = ("codesign.cli", "codesign.__main__")
    forbidden = ["app", "streamlit"] if is_under(module, allowed) else ["codesign.cli", "app"]
    assert [name for name in IMPORTS[module] if is_under(name, forbidden)] == []


@pytest.mark.parametrize("module", modules_under("codesign.cli", "codesign.__main__"))
def test_command_line_imports_heavy_things_only_inside_functions(module):
    early = imports_of(SOURCES[module], top_level=True)
    heavy = {
        name
        for name in early
        if name.partition(".")[0] not in sys.stdlib_module_names
        and name not in ("codesign", "codesign.__version__")
        and not is_under(name, CLI_MAY_IMPORT_EARLY)
    }
    assert heavy == set()


def test_every_package_that_a_rule_names_exists():
    named = ("codesign.policy", "codesign.cli", "codesign.sim", "codesign.planner", *TORCH_MODULES)
    assert [name for name in named if name not in SOURCES] == []


def test_imports_inside_functions_are_seen_and_type_checking_is_not():
    source = (
        "import os\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "class A:\n    import json\n"
        "def f():\n    from codesign import engine\n"
    )
    everything = {"os", "typing", "typing.TYPE_CHECKING", "json", "codesign", "codesign.engine"}
    assert imports_of(source) == everything
    assert imports_of(source, top_level=True) == everything - {"codesign", "codesign.engine"}


MAPPED = (
    "engine", "engine/gpu", "export", "fit", "kernels", "models", "planner", "policy", "profiler",
    "sim", "traces",
)  # fmt: skip


@pytest.mark.parametrize("folder", MAPPED)
def test_a_package_says_what_each_of_its_modules_is_for(folder):
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text("utf-8"))) or ""
    modules = {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"}
    assert not modules - set(re.findall(r"\w+", text))
    listed = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*) +\w", text, re.M)
    named = {name for names in listed for name in names.split(", ")}
    assert named <= modules | {"gpu"}  # a package
