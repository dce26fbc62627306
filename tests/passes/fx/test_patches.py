"""Functions of torch that the library replaces: the installed torch has them, and they are restored."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import fsdp_backend, fully_shard
from passes.fx.torch_internals import patches
from passes.fx.torch_internals.patches import Method

METHODS = {method.name: method for method in vars(patches).values() if isinstance(method, Method)}
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
assert "compiler" in parts and not parts & {{"cuda", "debug", "dry_run", "explain", "plan"}}, parts
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)
