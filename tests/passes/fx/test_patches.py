"""Functions of torch that the library replaces: the installed torch has them, and they are restored."""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import fsdp_backend, fully_shard
from passes.fx.torch_internals import patches
from passes.fx.torch_internals.patches import Method

METHODS = {
    method.name: method
    for listed in vars(patches).values()
    for method in (listed if isinstance(listed, tuple) else (listed,))
    if isinstance(method, Method)
}
# The digest of each method's source, in those versions of torch for which a replacement was written and read again; empty: it
# is not replaced there.
SOURCES = {
    "2.11": {
        "functionalize_rng_ops": "",
        "cpp_pybinding": "adfc5d58fbfc",
        "wait": "ff438904c663",
        "check_build": "8164db4a4496",
        "try_loop_split": "d16b290adabf",
        "set_proxy_slot": "5fbc7c5250ca",
        "_hash_ranks_to_str": "4b228805ef00",
        "var_getattr": "f712fad85ea8",
        "getattr_on_nn_module": "99002266f091",
        "call_function": "228f0622dea6",
        "__getitem__": "d928e9310b7e",
        "swap_tensor": "0920c1a0d49a",
        "compile_frame": "6ce0b9e766ae",
        "check_escaped_gradients": "d082b02411e7",
        "grad_and_value_impl": "7a522f9e0b2d",
        "_vjp_with_argnums": "0ec398d7f183",
    },
    "2.13": {
        "cpp_pybinding": "adfc5d58fbfc",
        "wait": "6c00a87786a8",
        "check_build": "3806b8a29a79",
        "try_loop_split": "0c800d833139",
        "set_proxy_slot": "54797f802a29",
        "functionalize_rng_ops": "4d40906cdabc",
        "_hash_ranks_to_str": "4b228805ef00",
        "var_getattr": "f40e5d29d75f",
        "getattr_on_nn_module": "09980c8687d6",
        "call_function": "dde2a600743f",
        "__getitem__": "d928e9310b7e",
        "swap_tensor": "0920c1a0d49a",
        "compile_frame": "c93a569003b9",
        "check_escaped_gradients": "7221cf530d28",
        "grad_and_value_impl": "7a522f9e0b2d",
        "_vjp_with_argnums": "375ec4f4a62a",
    },
}
VERSION = ".".join(torch.__version__.split(".")[:2])
KERNELS = [patches.all_gather, patches.all_to_all]


@pytest.mark.parametrize("name", ["_hash_ranks_to_str", "check_build", "cpp_pybinding", "try_loop_split", "wait"])
def test_torch_has_its_method_again(name: str) -> None:
    method = METHODS[name]
    owner = pkgutil.resolve_name(method.owner)
    original = getattr(owner, name)
    given = []

    def make(found: Callable[..., Any]) -> Callable[..., Any]:
        given.append(found)
        return lambda *args: None

    assert method.is_known(), f"torch {torch.__version__} has no {method.owner}.{name} of {method.parameters} parameters"
    with pytest.raises(LookupError), method.replaced(make):
        assert given == [original]
        assert getattr(owner, name) is not original
        raise LookupError
    assert getattr(owner, name) is original


@pytest.mark.skipif(VERSION not in SOURCES, reason=f"no sources of torch {VERSION} are listed")
@pytest.mark.parametrize("name", METHODS)
def test_sources_are_those_that_were_read(name: str) -> None:
    """The number of parameters does not tell what a method does.

    If this fails, read what changed in torch, see whether the replacement still fits, and list the new digest.
    """
    patches.uninstall()
    method = METHODS[name]
    replaced = vars(pkgutil.resolve_name(method.owner)).get(name)
    assert method.is_known() == (name in SOURCES[VERSION])
    if replaced is not None and SOURCES[VERSION][name]:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(replaced)))
        assert hashlib.sha256(source.encode()).hexdigest()[:12] == SOURCES[VERSION][name]


def test_other_methods_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["wait"]
    owner = pkgutil.resolve_name(method.owner)
    monkeypatch.setattr(owner, "wait", lambda self, scope, timeout: None)
    assert not method.is_known()
    monkeypatch.delattr(owner, "wait")
    assert not method.is_known()


def kernels() -> list[str]:
    """Return the registered kernels of each operator in ``KERNELS``, with the places of registration."""
    return [torch._C._dispatch_dump(operator) for operator in KERNELS]


def train(lowering: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8))
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": lowering})
    compiled(torch.ones(2, 8)).square().sum().backward()
    grad: Any = model.weight.grad
    return grad.full_tensor()


def test_torch_has_its_kernels_again(one_rank: None) -> None:
    patches.uninstall()
    torchs = kernels()
    assert not any("CPU: " in text for text in torchs)
    first = train("aot_eager")
    ours = kernels()
    assert all("CPU: " in text for text in ours)
    fully_shard(nn.Linear(8, 8))
    assert kernels() == ours, "once"

    patches.uninstall()
    assert kernels() == torchs
    patches.uninstall()
    # The next model installs them again.
    assert torch.equal(train("aot_eager"), first)
    assert kernels() == ours


def test_other_backends_keep_torchs_kernels(fake_ranks: None) -> None:
    patches.uninstall()
    torchs = kernels()
    fully_shard(nn.Linear(8, 8))
    assert kernels() == torchs


def test_an_import_replaces_nothing() -> None:
    """Nor does it load the parts that only look at a model."""
    code = f"""
import sys
import torch.distributed
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import VecISA
state = lambda: [*map(torch._C._dispatch_dump, {KERNELS}), dict(vars(AsyncCompile)), dict(vars(VecISA))]
before = state()
import fsdp_compile
assert state() == before
parts = {{name.split(".")[1] for name in sys.modules if name.startswith("fsdp_compile.")}}
assert "compiler" in parts and not parts & {{"cuda", "debug", "explain", "plan"}}, parts
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)
