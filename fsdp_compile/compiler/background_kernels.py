"""Background compilation of C++ kernels, while Python traces, shared by the ranks of a machine."""

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
from passes.fx.torch_internals.objects import simd_probe
from passes.fx.torch_internals.patches import check_build, compile_kernel, wait_for_kernels

from .kernel_library import KernelLibrary, fall_back

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@contextlib.contextmanager
def kernels_in_background() -> Iterator[Callable[[], None]]:
    """Compile C++ kernels in the background inside of the ``with`` block, and wait for all of them at its end.

    Inductor waits for the kernels of each generated program when it loads the program. No program runs before the block ends,
    so waiting there is enough. For C++ only: Inductor's cache needs Triton kernels when a graph is done.

    Yields:
        A function to call now and then. It starts to compile the kernels requested since its last call, as one library
        (:mod:`fsdp_compile.compiler.kernel_library`).
    """
    # Without the wait, Inductor would probe as well.
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


# Inductor's own probe of an instruction set (``VecISA._avx_code``) shows that the compiler takes its flags, and that torch has
# Sleef's functions for it. To that end, Inductor compiles headers of ATen, links, and loads the result in a process. Here, the
# compiler gets a vector product, and torch's libraries are searched for the functions.
_SMALL_PROBE = "typedef float vector __attribute__((vector_size(64))); vector probe(vector a, vector b) { return a * b; }"
_SLEEF_FUNCTIONS = {512: "Sleef_expf16_u10", 256: "Sleef_expf8_u10"}


@functools.cache
def probe_instruction_set() -> threading.Thread:
    """Start a thread in which Inductor finds out the processor's instruction set, and return the thread.

    Inductor's own probe compiles and loads half a dozen libraries. The probe here only compiles, in a fraction of the time. If
    it fails, as on an unknown processor, compiler or torch, Inductor's own probe decides.
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
    """Return whether a probe's code compiles for an instruction set and torch has the functions that the code calls."""
    if code == simd_probe(VecISA):
        if not _torch_has(_SLEEF_FUNCTIONS.get(isa.bit_width(), "")):
            return False
        code = _SMALL_PROBE
    flags = [*isa.build_arch_flags().split(), *(f"-D{macro}" for macro in isa.build_macro())]
    command = [get_cpp_compiler(), *flags, "-O1", "-S", "-x", "c++", "-o", os.devnull, "-"]
    # One rank of a machine runs the compiler, once for each version of it.
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
    """Split work into groups of about equal size, one for each core of the machine.

    Fewer groups would leave cores idle. More would make more libraries than needed.

    Args:
        sizes: the size of each piece of work by its key. Keys are equal, and in the same order, on all ranks.
    """
    groups: list[list[K]] = [[] for _ in range(min(len(sizes), os.cpu_count() or 1))]
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        min(groups, key=lambda group: sum(map(sizes.__getitem__, group))).append(key)
    return [tuple(group) for group in groups]


def share_among_ranks(work: Mapping[K, Callable[[], T]]) -> dict[K, T]:
    """Do pieces of work that fill a cache, each on one rank of a machine first.

    Ranks compile the same segments at the same time. Each rank takes the pieces that no other rank works on, and afterwards
    finds the rest in Inductor's cache. When a rank exits, for whatever reason, its lock is released.

    Args:
        work: a function for each piece, by a key that is equal on all ranks.

    Returns:
        The result of each piece, by its key.
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
