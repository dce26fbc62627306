"""C++ kernels of one program in one library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_compile.background_kernels import kernels_in_background
from fsdp_compile.kernel_library import KernelLibrary

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
    with pytest.raises(RuntimeError, match="requires a tuple of 3 args"):
        program["negate"](x, out)


def test_takes_what_has_one_kernel_of_the_common_name() -> None:
    assert KernelLibrary.takes(_KERNEL.format(change="value"))
    assert not KernelLibrary.takes(_KERNEL.format(change="value").replace("kernel", "inductor_entry"))
    assert not KernelLibrary.takes(_KERNEL.format(change="value") * 2)


@pytest.mark.parametrize("apart", [False, True])
def test_kernels_of_programs_share_a_library(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x + 1) @ weight, -1)

    def another(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x + 2) @ weight

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    programs = {}
    with kernels_in_background() as end_library:
        for traced in (function, another):
            programs[traced] = torch._inductor.compile(torch.fx.symbolic_trace(traced), inputs)
            if apart:
                end_library()
    for traced, program in programs.items():
        torch.testing.assert_close(program(*inputs), traced(*inputs))
    sources = [path.read_text() for path in tmp_path.rglob("*.main.cpp")]
    assert sorted(source.count('extern "C"') for source in sources) == ([1, 2] if apart else [3])
