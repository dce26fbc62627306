"""Keep C++ compilers busy while Python traces and generates: in the background, and shared by the ranks of a machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock

from passes.fx.torch_internals.inductor import (
    AsyncCompile,
    VecISA,
    cache_dir,
    get_compiler_version_info,
    get_cpp_compiler,
    pick_vec_isa,
)
from passes.fx.torch_internals.patches import check_build, compile_kernel, wait_for_kernels

from .kernel_library import KernelLibrary, fall_back

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@contextlib.contextmanager
def kernels_in_background() -> Iterator[Callable[[], None]]:
    """Let C++ compilers work while Inductor goes on: what it compiles inside of the ``with`` block is waited for at its end.

    Generated code waits for its own kernels when it is loaded. Nothing runs it before the block ends, so it may as well wait
    then. Only for C++: Inductor's cache wants to see Triton kernels when a graph is done.

    Gives a function to call now and then: what was asked for since the last call is compiled together
    (:mod:`fsdp_compile.compiler.kernel_library`), from then on.
    """
    # Otherwise Inductor would probe, too.
    probe_instruction_set().join()
    if not (compile_kernel.is_known() and wait_for_kernels.is_known()):
        fall_back(f"the AsyncCompile of torch {torch.__version__} has an unknown form.")
        yield lambda: None
        return
    waits: list[tuple[AsyncCompile, dict[str, Any]]] = []
    libraries = [KernelLibrary()]

    def collecting(compile_alone: Callable[..., Any]) -> Callable[..., Any]:
        def cpp_pybinding(compiler: AsyncCompile, argtypes: list[str], source: str) -> Any:
            if not KernelLibrary.takes(source):
                return compile_alone(compiler, argtypes, source)
            return libraries[-1].add(argtypes, source)

        return cpp_pybinding

    def putting_off(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda compiler, scope: waits.append((compiler, scope))

    def end_library() -> None:
        if not libraries[-1].is_empty:
            libraries[-1].compile()
            libraries.append(KernelLibrary())

    with compile_kernel.replaced(collecting), wait_for_kernels.replaced(putting_off):
        yield end_library
    end_library()
    for compiler, scope in waits:
        compiler.wait(scope)
    for library in libraries[:-1]:
        library.fill([scope for _, scope in waits])


# What Inductor's own probe (``VecISA._avx_code``) finds out of an instruction set is that the compiler takes its flags, and
# that torch has Sleef's functions for it. For that it compiles headers of ATen, links, and loads the result in a process.
_SMALL_PROBE = "typedef float vector __attribute__((vector_size(64))); vector probe(vector a, vector b) { return a * b; }"
_SLEEF_FUNCTIONS = {512: "Sleef_expf16_u10", 256: "Sleef_expf8_u10"}


@functools.cache
def probe_instruction_set() -> threading.Thread:
    """Let Inductor find out, in a thread, what the processor can do.

    Inductor's own way compiles and loads half a dozen libraries; this one only compiles, and each in a fraction of the time.
    Where it says no, on another processor, compiler or torch than it is for, Inductor's own decides.
    """

    def probing(build: Callable[..., bool]) -> Callable[..., bool]:
        def check(isa: VecISA, code: str) -> bool:
            try:
                compiles = _compiles(isa, code)
            except Exception as error:
                _warn_once_of_probe(repr(error))
                compiles = False
            return compiles or build(isa, code)

        return check

    def probe() -> None:
        if not check_build.is_known():
            _warn_once_of_probe("VecISA has no such check_build")
            return
        with check_build.replaced(probing):
            pick_vec_isa()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    return thread


@functools.cache
def _warn_once_of_probe(error: str) -> None:
    warnings.warn(f"torch {torch.__version__} probes the processor in its own way, which takes longer: {error}", stacklevel=2)


def _compiles(isa: VecISA, code: str) -> bool:
    """Whether code that is to probe an instruction set compiles, and torch has the functions that it calls."""
    if code == VecISA._avx_code:
        if not _torch_has(_SLEEF_FUNCTIONS.get(isa.bit_width(), "")):
            return False
        code = _SMALL_PROBE
    flags = [*isa.build_arch_flags().split(), *(f"-D{macro}" for macro in isa.build_macro())]
    command = [get_cpp_compiler(), *flags, "-O1", "-S", "-x", "c++", "-o", os.devnull, "-"]
    # One rank of a machine asks, once for a compiler.
    lock = _lock((command, code, get_compiler_version_info(command[0])))
    compiles = Path(f"{lock.lock_file}.compiles")
    with lock:
        if not compiles.exists() and subprocess.run(command, input=code, text=True, capture_output=True).returncode == 0:
            compiles.touch()
        return compiles.exists()


def _torch_has(function: str) -> bool:
    libraries = [path for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.*") if path.suffix in (".so", ".dylib")]
    return any(hasattr(ctypes.CDLL(str(path)), function) for path in libraries)


def _lock(key: Hashable) -> FileLock:
    folder = os.path.join(cache_dir(), "fsdp_compile_locks")
    os.makedirs(folder, exist_ok=True)
    return FileLock(os.path.join(folder, hashlib.sha256(repr(key).encode()).hexdigest()[:32]))


def split_among_cores(sizes: Mapping[K, int]) -> list[tuple[K, ...]]:
    """Groups of about equal size, one for each core of the machine: as few libraries as keep all of them busy.

    Args:
        sizes: of what there is to compile, by keys that are equal, and in the same order, on all ranks.
    """
    groups: list[list[K]] = [[] for _ in range(min(len(sizes), os.cpu_count() or 1))]
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        min(groups, key=lambda group: sum(map(sizes.__getitem__, group))).append(key)
    return [tuple(group) for group in groups]


def share_among_ranks(work: Mapping[K, Callable[[], T]]) -> dict[K, T]:
    """Do pieces of work that fill a cache, each on one rank of a machine first.

    Ranks compile the same segments at the same time. Each takes those that no rank works on, and finds the others in Inductor's
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
