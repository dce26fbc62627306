"""Keep C++ compilers busy while Python traces and generates: in the background, and shared by the ranks of a machine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar
from unittest import mock

from filelock import FileLock
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa, supported_vec_isa_list, x86_isa_checker
from torch._inductor.runtime.cache_dir_utils import cache_dir

from .kernel_library import KernelLibrary

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@contextlib.contextmanager
def kernels_in_background() -> Iterator[None]:
    """Let C++ compilers work while Inductor goes on: what it compiles inside of the ``with`` block is waited for at its end.

    Generated code waits for its own kernels when it is loaded. Nothing runs it before the block ends, so it may as well wait
    then. Its kernels are compiled together (:mod:`fsdp_compile.kernel_library`). Only for C++: Inductor's cache wants to see
    Triton kernels when a graph is done.
    """
    # Otherwise Inductor would probe, too.
    probe_instruction_set().join()
    waits: list[tuple[AsyncCompile, dict[str, Any]]] = []
    libraries: dict[AsyncCompile, KernelLibrary] = {}
    compile_alone = AsyncCompile.cpp_pybinding

    def cpp_pybinding(compiler: AsyncCompile, argtypes: list[str], source: str) -> Any:
        if not KernelLibrary.takes(source):
            return compile_alone(compiler, argtypes, source)
        return libraries.setdefault(compiler, KernelLibrary()).add(argtypes, source)

    def wait(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
        if compiler in libraries:
            libraries[compiler].compile()
        waits.append((compiler, scope))

    with mock.patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding), mock.patch.object(AsyncCompile, "wait", wait):
        yield
    for compiler, scope in waits:
        compiler.wait(scope)
        if compiler in libraries:
            libraries[compiler].fill(scope)


# What Inductor's own probe (``VecISA._avx_code``) finds out of an instruction set: that the compiler takes its flags, and that
# torch has Sleef's functions for it. Without the headers of ATen it takes a fraction of a second instead of three.
_SMALL_PROBE = """
#include <immintrin.h>
#if defined(CPU_CAPABILITY_AVX512)
extern "C" __m512 Sleef_expf16_u10(__m512);
extern "C" __m512 __avx_chk_kernel() { return Sleef_expf16_u10(_mm512_set1_ps(1)); }
#else
extern "C" __m256 Sleef_expf8_u10(__m256);
extern "C" __m256 __avx_chk_kernel() { return Sleef_expf8_u10(_mm256_set1_ps(1)); }
#endif
"""


@functools.cache
def probe_instruction_set() -> threading.Thread:
    """Let Inductor find out, in a thread, what the processor can do: in an empty cache it compiles probes, for seconds."""

    def probe() -> None:
        # One rank of a machine compiles them.
        with _lock("instruction set"):
            has_flags = [isa for isa in supported_vec_isa_list if set(str(isa).split()) <= set(x86_isa_checker())]
            with mock.patch.object(VecISA, "check_build", functools.cache(VecISA.check_build)):
                # Where the small one fails, on another processor, compiler or torch than it is for, Inductor's own decides.
                if has_flags and all(isa.check_build(_SMALL_PROBE) for isa in has_flags):
                    with mock.patch.object(VecISA, "_avx_code", _SMALL_PROBE):
                        pick_vec_isa()
                else:
                    pick_vec_isa()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    return thread


def _lock(key: Hashable) -> FileLock:
    folder = os.path.join(cache_dir(), "fsdp_compile_locks")
    os.makedirs(folder, exist_ok=True)
    return FileLock(os.path.join(folder, hashlib.sha256(repr(key).encode()).hexdigest()[:32]))


def share_among_ranks(work: Mapping[K, Callable[[], T]]) -> dict[K, T]:
    """Do pieces of work that fill a cache, each on one rank of a machine first.

    Ranks compile the same segments at the same time. Each takes those that nobody works on, and finds the others in Inductor's
    cache afterwards. A rank that ends, in whatever way, lets go of its piece.

    Args:
        work: what to do, by keys that are equal on all ranks.
    """
    done: dict[K, T] = {}
    for timeout in (0, -1):
        for key, function in work.items():
            if key in done:
                continue
            lock = _lock(key)
            try:
                lock.acquire(timeout=timeout)
            except TimeoutError:
                continue
            try:
                done[key] = function()
            finally:
                lock.release()
    return {key: done[key] for key in work}
