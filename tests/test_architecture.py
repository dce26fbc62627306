"""Imports run in one direction: fsdp_compile -> passes -> torch, and within each from folder to folder as listed here.

Imports for types count as well.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from passes.fx.torch_internals.core import OpOverload
from passes.fx.torch_internals.distributed import DTensorSpec
from passes.fx.torch_internals.dynamo import OptimizedModule

ROOT = Path(__file__).parent.parent
# A module imports from its own folder and from those before it. Files beside the folders count as folders.
ORDER = {
    "passes": ["fx", "collectives", "ir", "models", "transforms", "auto", "lowering", "pass_runner", "pipeline"],
    "fsdp_compile": [
        "torch_versions",
        "units",
        "runtime",
        "optim",
        "compiler",
        "comm_hooks",
        "calibrate_cpu",
        "calibrate",
        "api",
        "dry_run",
        "precompiled",
        "cuda",
        "debug",
        "explain",
        "plan",
        "diagnose",
    ],
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ORDER
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
}


def imports_of(name: str) -> set[str]:
    """Return the modules of this repository that a module imports, also for types alone."""
    return {found for node in _imports(ast.parse(MODULES[name].read_text())) for found in _imported(node, name)}


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
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


# A parameter knows its unit and its optimizer, which know their parameters.
TYPES_OF_A_PARAMETER = {"fsdp_compile.units.unit", "fsdp_compile.units.updater"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    imports = {name: imports_of(name) for name in MODULES}
    assert imports["fsdp_compile.units.sharded_param"] >= TYPES_OF_A_PARAMETER
    imports["fsdp_compile.units.sharded_param"] -= TYPES_OF_A_PARAMETER
    TopologicalSorter(imports).prepare()


def test_packages_are_in_a_wheel() -> None:
    """Every folder has an ``__init__.py``, without which Setuptools does not find it."""
    folders = {path.parent for path in MODULES.values()}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_what_is_imported_is_a_dependency() -> None:
    """Only functions import the packages of extras."""
    required = [requirement for requirement in requires("fsdp-compile") or [] if "extra ==" not in requirement]
    dependencies, extras = {re.split(r"\W", requirement)[0] for requirement in required}, {"matplotlib", "triton"}
    assert "torch" in dependencies
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert packages_of(at_once) <= dependencies, name
        assert packages_of(_imports(tree)) <= dependencies | extras, name


def packages_of(imports: Iterable[ast.Import | ast.ImportFrom]) -> set[str]:
    """Return the packages of others that are imported: neither this repository's nor Python's."""
    names = [
        name
        for node in imports
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name and not getattr(node, "level", 0)
    ]
    return {name.split(".")[0] for name in names} - {*ORDER, *sys.stdlib_module_names}


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("passes.transforms.")])
def test_headers_of_passes(name: str) -> None:
    """Headers follow the contract in ``passes/transforms/__init__.py``."""
    header = ast.get_docstring(ast.parse(MODULES[name].read_text())) or ""
    title = name.split(".")[-1].replace("_", " ").capitalize()
    assert header.startswith(f"{title}: ")
    assert all(f"\n{section}" in header for section in ("Before: ", "After:  ", "Leaves alone "))


ATTRIBUTE = re.compile(r"_fsdp_\w+")


def attributes_of_ours(tree: ast.AST) -> set[str]:
    """Find the attributes named ``_fsdp_*`` that code sets or reads, also by a string (``getattr``, ``__dict__``)."""
    named = {ast.Attribute: "attr", ast.Name: "id", ast.Constant: "value"}
    found = (getattr(node, named[type(node)]) for node in ast.walk(tree) if type(node) in named)
    return {name for name in found if isinstance(name, str) and ATTRIBUTE.fullmatch(name)}


def test_attributes_on_modules_and_tensors_are_listed() -> None:
    """``fsdp_compile/units/__init__.py`` lists all attributes, with the files that use each."""
    used: dict[str, set[str]] = {}
    for path in [*MODULES.values(), *(ROOT / "benchmarks").rglob("*.py")]:
        for name in attributes_of_ours(ast.parse(path.read_text())):
            used.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    header = ast.get_docstring(ast.parse((ROOT / "fsdp_compile/units/__init__.py").read_text())) or ""
    listed = {
        name: set(re.findall(r"``([\w/]+/\w+\.py)``", entry))
        for names, entry in re.findall(r"^(``_fsdp_.*)\n((?:    .*\n?)+)", header, flags=re.MULTILINE)
        for name in ATTRIBUTE.findall(names)
    }
    assert listed == used


def test_attributes_are_found() -> None:
    code = "class C:\n    _fsdp_a: int\ndef f(x):\n    x._fsdp_b = getattr(x, '_fsdp_c')\n    return f'_fsdp_d_{x}'"
    assert attributes_of_ours(ast.parse(code)) == {"_fsdp_a", "_fsdp_b", "_fsdp_c", "_fsdp_d_"}


# The only modules that may use private names of torch: "the wall".
WALL = {name: path for name, path in MODULES.items() if name.startswith("passes.fx.torch_internals.")}


def private_names(tree: ast.AST) -> set[str]:
    """Find the private names of torch that code imports or reads, except operators."""
    return {name for name in torch_names(tree) if not name.startswith("torch.ops.") and _is_private(name)}


def torch_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of torch that code imports, and of the attributes that it reads from them."""
    modules = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.asname or "torch": alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        names = {known: name for known, name in names.items() if name.startswith("torch.")}
        modules |= {known: name for known, name in names.items() if known != "torch"}
        yield from names.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"\w+(\.\w+)+", ast.unparse(node)):
            first, _, rest = ast.unparse(node).partition(".")
            if first in modules:
                yield f"{modules[first]}.{rest}"


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("name", sorted(MODULES.keys() - WALL.keys()))
def test_private_names_of_torch_are_used_by_the_wall_alone(name: str) -> None:
    assert not private_names(ast.parse(MODULES[name].read_text())), "import them from passes.fx.torch_internals"


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch import _guards",
        "from torch.utils import _pytree as pytree",
        "from torch._inductor import config",
        "from torch.fx._lazy_graph_module import _make_graph_module",
        "def f():\n    from torch.autograd.graph import _engine_run_backward",
        "torch._dynamo.reset()",
        "torch.utils._pytree.tree_map(f, x)",
        "torch._C._current_graph_task_id()",
        "import torch.distributed as dist\ndist.distributed_c10d._resolve_process_group(name)",
        "from torch import Tensor\nTensor._make_subclass(kind, x)",
    ],
)
def test_private_names_are_found(code: str) -> None:
    assert private_names(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    ["import torch.fx", "from torch.fx import Graph", "torch.ops.aten._to_copy.default", "torch.__version__"],
)
def test_public_names_and_operators_are_not_private(code: str) -> None:
    assert not private_names(ast.parse(code))


# Classes of torch whose objects the library handles.
CLASSES = (
    nn.Module,
    torch.Tensor,
    torch.UntypedStorage,
    torch.autograd.Function,
    torch.fx.Graph,
    torch.fx.Node,
    torch.library.Library,
    torch.optim.Optimizer,
    DeviceMesh,
    DTensor,
    DTensorSpec,
    OpOverload,
    OptimizedModule,
    ProcessGroup,
)
PRIVATE_ATTRIBUTES = {
    name for kind in CLASSES for base in kind.__mro__ for name in {*vars(base), *vars(base).get("__annotations__", ())}
}


def private_attributes(tree: ast.AST) -> set[str]:
    """Find the private attributes of torch's objects that code names. Those of ``self`` are a class's own."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not _is_own(node) | _is_operator(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "attrgetter"):
            found |= {str(value.value) for value in node.args[:2] if isinstance(value, ast.Constant)}
    private = {name for name in found if _is_private(name) and not name.startswith("_fsdp_")}
    return {name for name in private if name in PRIVATE_ATTRIBUTES or name not in own_attributes()}


@functools.cache
def own_attributes() -> set[str]:
    """Find the attributes of the classes of this repository, and the methods of named tuples."""
    nodes = [node for path in MODULES.values() for node in ast.walk(ast.parse(path.read_text()))]
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_own(node)}
    found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            targets = (
                field.targets if isinstance(field, ast.Assign) else [field.target] if isinstance(field, ast.AnnAssign) else []
            )
            found |= {ast.unparse(target) for target in targets}
    return found | {"_asdict", "_replace"}


def _is_own(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def _is_operator(node: ast.Attribute) -> bool:
    """Return whether an attribute is an operator: of ``torch.ops``, or of a namespace of it under a name such as ``_aten``."""
    return re.match(r"(torch\.ops|_aten|_c10d)\b", ast.unparse(node)) is not None


@pytest.mark.parametrize("name", sorted(MODULES.keys() - WALL.keys()))
def test_private_attributes_of_torch_are_used_by_the_wall_alone(name: str) -> None:
    assert not private_attributes(ast.parse(MODULES[name].read_text())), "use passes.fx.torch_internals.objects"


@pytest.mark.parametrize(
    "code",
    [
        "param._local_tensor",
        "def f(x):\n    x._spec = None",
        "getattr(tensor, '_version', 0)",
        "node._made_up",
        "class C:\n    def f(self, other):\n        self._parameters = other._parameters",
    ],
)
def test_private_attributes_are_found(code: str) -> None:
    assert private_attributes(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "param.grad.shape",
        "class C(nn.Module):\n    def f(self):\n        super()._apply(self._buffers)",
        "class C:\n    def f(self, other):\n        return self._order < other._order",
        "_aten._to_copy.default",
        "pair._replace(x=1)",
        "shard._fsdp_unit",
    ],
)
def test_own_attributes_and_operators_are_not_private(code: str) -> None:
    assert not private_attributes(ast.parse(code))


@pytest.mark.parametrize("name", WALL)
def test_installed_torch_has_every_name_of_the_wall(name: str) -> None:
    names = sorted({*torch_names(ast.parse(WALL[name].read_text()))})
    missing = [name for name in names if not exists(name)]
    assert names and not missing, f"torch {torch.__version__} has no {', '.join(missing)}"


def exists(name: str) -> bool:
    """Return whether a module of torch, or an attribute of one, exists.

    A module whose own imports are not installed (such as Triton) counts as existing, with all its attributes.
    """
    found, path = torch, "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        # Modules first: a package may have a function of the same name.
        if _is_module(path):
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                return True
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return False
    return True


def _is_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def test_exists_knows_what_is_missing() -> None:
    assert exists("torch._inductor.config") and exists("torch._guards.TracingContext")
    assert (
        not exists("torch.ops.prims.missing.default")
        and not exists("torch._guards.Missing")
        and not exists("torch._missing.module.Name")
    )


def test_wall_has_no_name_that_nothing_imports() -> None:
    trees = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
    used = {alias.name for tree in trees.values() for node in _imports(tree) if _is_of_wall(node) for alias in node.names}
    defined = {name for module in WALL for node in trees[module].body for name in _defined(node)}
    # Users and tests call it by its full name.
    assert defined <= used | {"uninstall"}


def _is_of_wall(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and "torch_internals" in (node.module or "")


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign | ast.FunctionDef):
        name = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.target)
        return [] if name.startswith("_") else [name]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        return [alias.asname or alias.name for alias in node.names]
    return [alias.asname for alias in node.names if alias.asname] if isinstance(node, ast.Import) else []
