"""Kernels are compiled in the background: ranks share the work, and wait for it as late as possible."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpu_vec_isa import VecISA, VecNEON, supported_vec_isa_list, x86_isa_checker
from torch.fx import GraphModule

from fsdp_compile import fully_shard
from fsdp_compile.compiler import background_kernels
from fsdp_compile.compiler.backend import compile_with
from fsdp_compile.compiler.background_kernels import (
    _SLEEF_FUNCTIONS,
    _compiles,
    kernels_in_background,
    share_among_ranks,
    split_among_cores,
)
from fsdp_compile.compiler.inductor_lowering import InductorLowering
from fsdp_compile.compiler.options import Options

pytestmark = pytest.mark.inductor


def test_ranks_share_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keys = [f"segment_{index}" for index in range(4)]
    cache: dict[str, int] = {}
    at_work: set[str] = set()
    made: list[tuple[int, str]] = []
    start = threading.Barrier(2)

    def compile_or_find(rank: int, key: str) -> int:
        assert key not in at_work
        at_work.add(key)
        if key not in cache:
            time.sleep(0.05)
            cache[key] = rank
            made.append((rank, key))
        at_work.remove(key)
        return cache[key]

    results: dict[int, dict[str, int]] = {}

    def run(rank: int) -> None:
        start.wait()
        results[rank] = share_among_ranks({key: lambda key=key: compile_or_find(rank, key) for key in keys})

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout=30)
    # Each key was made once, by the first rank to come. Both ranks have all results, in the order of the requests.
    assert sorted(key for _, key in made) == keys
    assert {rank for rank, _ in made} == {0, 1}
    assert results[0] == results[1] == cache
    assert [list(result) for result in results.values()] == [keys, keys]


def test_work_that_fails_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def fail() -> None:
        # Must not be mistaken for a lock that another process holds.
        raise TimeoutError("no compiler")

    with pytest.raises(TimeoutError, match="no compiler"):
        share_among_ranks({"segment": fail})
    assert share_among_ranks({"segment": lambda: 1}) == {"segment": 1}


@pytest.mark.parametrize(("cores", "groups"), [(1, ["cbad"]), (2, ["cd", "ba"]), (3, ["c", "b", "ad"]), (8, list("cbad"))])
def test_work_is_split_among_cores(cores: int, groups: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert split_among_cores({"a": 2, "b": 4, "c": 5, "d": 1}) == [tuple(group) for group in groups]
    assert split_among_cores({}) == []


def test_waits_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda compiler, scope: waited.append(scope["number"]))
    with kernels_in_background():
        for number in range(2):
            AsyncCompile().wait({"number": number})
        assert waited == []
    assert waited == [0, 1]
    AsyncCompile().wait({"number": 2})
    assert waited == [0, 1, 2]
    with pytest.raises(LookupError), kernels_in_background():
        raise LookupError
    AsyncCompile().wait({"number": 3})
    assert waited == [0, 1, 2, 3]


@pytest.mark.skipif(not x86_isa_checker(), reason="an x86 processor's instruction sets")
def test_a_probe_finds_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    isa = next(isa for isa in supported_vec_isa_list if set(str(isa).split()) <= set(x86_isa_checker()))
    assert _compiles(isa, VecISA._avx_code)
    with monkeypatch.context() as patch:
        # The answer is cached: no compiler runs.
        patch.setattr(subprocess, "run", None)
        assert _compiles(isa, VecISA._avx_code)
    # Three reasons to fail: the compiler does not know the flag, the code is wrong, or torch lacks the function.
    with monkeypatch.context() as patch:
        patch.setattr(isa, "_arch_flags", "-mno_such_instructions")
        assert not _compiles(isa, VecISA._avx_code)
    assert not _compiles(isa, "no code")
    monkeypatch.setitem(_SLEEF_FUNCTIONS, isa.bit_width(), "Sleef_nothing")
    assert not _compiles(isa, VecISA._avx_code)


@pytest.mark.night
@pytest.mark.skipif(not x86_isa_checker(), reason="an x86 processor's instruction sets")
def test_probing_finds_what_inductor_finds() -> None:
    def found_by(code: str) -> str:
        describe = "print([(str(isa), isa.build_arch_flags()) for isa in cpu_vec_isa.valid_vec_isa_list()])"
        return subprocess.run(
            [sys.executable, "-c", f"from torch._inductor import cpu_vec_isa\n{code}\n{describe}"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    probed = found_by(
        "from fsdp_compile.compiler.background_kernels import probe_instruction_set\nprobe_instruction_set().join()"
    )
    assert probed == found_by("")
    assert "avx" in probed


def test_inductor_probes_where_this_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pick() -> None:
        asked.append([VecISA.check_build(VecNEON(), code) for code in ("one", "another")])

    def fail(isa: VecISA, code: str) -> bool:
        raise AttributeError("a torch without _avx_code")

    monkeypatch.setattr(background_kernels, "pick_vec_isa", pick)
    monkeypatch.setattr(background_kernels, "_compiles", fail)
    monkeypatch.setattr(VecISA, "check_build", lambda isa, code: code == "one")
    background_kernels._warn_once_of_probe.cache_clear()
    with pytest.warns(UserWarning, match="which takes longer.*_avx_code") as warned:
        background_kernels.probe_instruction_set.__wrapped__().join()
    assert asked == [[True, False]]
    assert len(warned) == 1
    # Without a check_build to replace, nothing is probed: Inductor probes when it needs to know.
    monkeypatch.delattr(VecISA, "check_build")
    with pytest.warns(UserWarning, match="no such check_build"):
        background_kernels.probe_instruction_set.__wrapped__().join()
    assert len(asked) == 1


def test_a_failure_leaves_no_kernels_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward whose compilation failed is compiled anew when it is called again."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(fully_shard(nn.Sequential(nn.Linear(8, 8), nn.GELU())), nn.Linear(8, 8))
        calls = []

        def fail_at_the_second(segment: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            if kwargs.get("is_backward"):
                calls.append(segment)
                if len(calls) == 2:
                    raise OSError("no space left")
            return compile_fx_inner(segment, inputs, **kwargs)

        def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
            return compile_with(InductorLowering(fail_at_the_second), gm, inputs, Options())

        compiled = torch.compile(fully_shard(model), backend=backend)
        losses = [compiled(torch.ones(2, 8)).square().sum() for _ in range(2)]
        with pytest.raises(OSError, match="no space left"):
            losses[0].backward()
        losses[1].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
