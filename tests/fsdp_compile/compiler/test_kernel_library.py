"""C++ kernels that share a library, within a program and among programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from fsdp_compile.compiler import kernel_library
from fsdp_compile.compiler.background_kernels import kernels_in_background
from fsdp_compile.compiler.kernel_library import KernelLibrary

pytestmark = pytest.mark.inductor

_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
static float change(float value) {{ return {change}; }}
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{{
    for (int64_t x0 = 0; x0 < ks0; x0 += 1) out_ptr0[x0] = change(in_ptr0[x0]);
}}
"""
_TYPES = ["const float*", "float*", "const int64_t"]


def test_kernels_share_a_file_and_not_their_helpers() -> None:
    library = KernelLibrary()
    program = {"double": library.add(_TYPES, _KERNEL.format(change="2 * value")), "number": 3}
    program["negate"] = library.add(_TYPES, _KERNEL.format(change="-value"))
    other_program = {"minus": library.add(_TYPES, _KERNEL.format(change="-value"))}
    assert other_program["minus"] == program["negate"]
    library.compile()
    library.fill([program, other_program])
    x, out = torch.arange(5.0), torch.empty(5)
    program["double"](x, out, 5)
    assert out.tolist() == [0, 2, 4, 6, 8]
    program["negate"](x, out, 5)
    assert out.tolist() == [0, -1, -2, -3, -4]
    other_program["minus"](out, out, 5)
    assert out.tolist() == [0, 1, 2, 3, 4]
    assert program["number"] == 3
    with pytest.raises(RuntimeError, match="requires 3 args"):
        program["negate"](x, out)


def test_takes_what_has_one_kernel_of_the_common_name() -> None:
    assert KernelLibrary.takes(_KERNEL.format(change="value"))
    assert not KernelLibrary.takes(_KERNEL.format(change="value").replace("kernel", "inductor_entry"))
    assert not KernelLibrary.takes(_KERNEL.format(change="value") * 2)


def _function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x + 1) @ weight, -1)


def _another(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x + 2) @ weight


def _check_programs(cache: Path, apart: bool) -> list[int]:
    """Compile two programs, with a library for each or one for both, and run them. Return the numbers of kernels in files."""
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    programs = {}
    with kernels_in_background() as end_library:
        for traced in (_function, _another):
            programs[traced] = torch._inductor.compile(torch.fx.symbolic_trace(traced), inputs)
            if apart:
                end_library()
    for traced, program in programs.items():
        torch.testing.assert_close(program(*inputs), traced(*inputs))
    return sorted(path.read_text().count('extern "C"') for path in cache.rglob("*.main.cpp"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Inductor cache, and a process in which no library has failed to compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_library, "_fell_back", False)
    return tmp_path


@pytest.mark.parametrize("apart", [False, True])
def test_kernels_of_programs_share_a_library(apart: bool, cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert _check_programs(cache, apart) == ([1, 2] if apart else [3])


@pytest.mark.parametrize("size", [0, 4096, -1])
def test_a_library_that_was_cut_short_is_compiled_anew(size: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some calls of such a library end the process: the part that is missing is mapped into its memory."""
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})
    _check_programs(cache, apart=False)
    (library,) = cache.rglob("*.so")
    whole = library.read_bytes()
    # This process has the file mapped, so it stays.
    library.unlink()
    library.write_bytes(whole[:size])
    assert kernel_library.is_cut_short(library)
    torch._dynamo.reset()
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})
    with pytest.warns(UserWarning, match=r"\.so, in Inductor's cache, was damaged, and is compiled anew"):
        _check_programs(cache, apart=False)
    assert not kernel_library.is_cut_short(library)
    assert KernelLibrary.takes(_KERNEL.format(change="value")), "has fallen back to one file for each kernel"


def test_libraries_of_torch_are_whole() -> None:
    libraries = list(Path(torch.__file__).parent.glob("lib/libtorch*.so"))
    assert libraries and not any(map(kernel_library.is_cut_short, libraries))


def _unknown_form(template: str) -> str:
    return template.replace("py_methods", "methods_of_the_module")


def _no_two_functions(template: str) -> str:
    """Change a template so that a file with two functions does not compile."""
    return template.replace("static PyMethodDef py_methods", "static const int only_once = 0; static PyMethodDef py_methods")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("change", "reason", "files"),
    [
        (_unknown_form, "bindings has an unknown form", [1, 1, 1]),
        (_no_two_functions, "CppCompileError.*only_once", [1, 1, 1, 1, 2]),
    ],
    ids=["unknown", "no_library"],
)
def test_kernels_are_compiled_as_torch_does_where_a_library_cannot_be(
    change: Callable[[str], str], reason: str, files: list[int], threads: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = change(CppPythonBindingsCodeCache.suffix_template)
    assert template != CppPythonBindingsCodeCache.suffix_template
    monkeypatch.setattr(CppPythonBindingsCodeCache, "suffix_template", template)
    with inductor_config.patch(compile_threads=threads), pytest.warns(UserWarning, match=reason) as warned:
        _check_programs(cache, apart=True)
        # No library is tried again.
        torch._dynamo.reset()
        assert _check_programs(cache, apart=False) == files
    assert len([warning for warning in warned if "C++ kernels" in str(warning.message)]) == 1
    assert not KernelLibrary.takes(_KERNEL.format(change="value"))


def test_async_compile_of_an_unknown_form_stays_as_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = AsyncCompile.wait
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope, extra=None: wait(self, scope))
    with pytest.warns(UserWarning, match="AsyncCompile of torch .* unknown form"):
        assert _check_programs(cache, apart=False) == [1, 1, 1]
