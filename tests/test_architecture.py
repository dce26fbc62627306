"""Imports run in one direction: fsdp_compile -> passes -> torch, and within each from folder to folder as listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module imports from its own folder and from those before it. Files that stand beside folders are named like these.
ORDER = {
    "passes": ["collectives", "fx", "ir", "models", "transforms", "auto", "lowering", "pipeline"],
    "fsdp_compile": ["torch_versions", "units", "runtime", "compiler", "comm_hooks", "calibrate", "api", "cuda"],
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ORDER
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
}


def imports_of(name: str) -> set[str]:
    """The modules of ours that a module imports when it runs; what it names in annotations alone does not count."""
    return {found for node in _imports(ast.parse(MODULES[name].read_text())) for found in _imported(node, name)}


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from _imports(node)


def _imported(node: ast.Import | ast.ImportFrom, importer: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        package = importer.split(".")[: -node.level] if node.level else []
        base = ".".join([*package, *([node.module] if node.module else [])])
        names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
    yield from (name for name in names if name in MODULES)


def place_of(name: str) -> int:
    package, folder, *_ = name.split(".")
    return ORDER[package].index(folder)


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_in_one_direction(name: str) -> None:
    for imported in imports_of(name):
        inside = imported.split(".")[0] == name.split(".")[0]
        assert place_of(imported) <= place_of(name) if inside else name.startswith("fsdp_compile."), imported


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({name: imports_of(name) for name in MODULES}).prepare()


def test_packages_are_in_a_wheel() -> None:
    """Setuptools finds packages, which folders without an ``__init__.py`` are not."""
    folders = {path.parent for path in MODULES.values()}
    assert all((folder / "__init__.py").exists() for folder in folders)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("passes.transforms.")])
def test_headers_of_passes(name: str) -> None:
    """The contract in ``passes/transforms/__init__.py``."""
    header = ast.get_docstring(ast.parse(MODULES[name].read_text())) or ""
    title = name.split(".")[-1].replace("_", " ").capitalize()
    assert header.startswith(f"{title}: ")
    assert all(f"\n{section}" in header for section in ("Before: ", "After:  ", "Leaves alone "))
