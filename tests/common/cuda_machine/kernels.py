"""Run generated segments on the CPU: Triton kernels in Triton's interpreter, products by torch.

The process must have been started with ``TRITON_INTERPRET=1``: Triton decides when its functions are defined.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_heuristics import GridExpr
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from passes.fx.torch_internals.objects import undo

from .memory import new_tensor

_numbers = itertools.count()


class OutOfBounds(RuntimeError):
    """A kernel reads or writes outside of its arguments."""


class Kernel:
    """A Triton kernel, with its candidate configurations. Launches use them in turn.

    Args:
        function: the kernel, as Triton's interpreter has it.
        configs: the configurations that Inductor would choose from.
        inductor_meta: how to compute the grid.
    """

    def __init__(self, function: Any, configs: Sequence[Any], inductor_meta: dict[str, Any]):
        self._function = function
        self._configs = itertools.cycle(configs)
        self._inductor_meta = inductor_meta

    def run(self, *args: Any, stream: Any = None) -> None:
        """Launch the kernel."""
        config = next(self._configs)
        names = [name for name in self._function.arg_names if name not in config.kwargs]
        given = dict(zip(names, args, strict=True))
        grid = GridExpr.from_meta(self._inductor_meta, config).eval_slow({**given, **config.kwargs})
        with _within([value for value in args if isinstance(value, Tensor)], self._function.__name__):
            try:
                self._function[grid](**given, **config.kwargs)
            except InterpreterError as error:
                raise (error.__cause__ if isinstance(error.__cause__, OutOfBounds) else error) from None


@contextlib.contextmanager
def _within(tensors: Sequence[Tensor], kernel: str) -> Iterator[None]:
    """Check that all accesses in the block lie in the memory of some tensors."""
    ranges = [(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors]
    starts = np.array([start for start, _ in ranges], dtype=np.uint64)
    ends = np.array([start + nbytes for start, nbytes in ranges], dtype=np.uint64)
    builder = interpreter.interpreter_builder
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def check(pointers: Any, mask: Any, what: str) -> None:
        used = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].reshape(-1, 1)
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        inside = ((used >= starts) & (used + np.uint64(size) <= ends)).any(axis=1)
        if not inside.all():
            address = int(used[~inside][0, 0])
            nearest = min(range(len(ranges)), key=lambda index: abs(address - ranges[index][0]))
            offset = (address - ranges[nearest][0]) // size
            raise OutOfBounds(
                f"{kernel} {what} element {offset} of tensor {nearest}, of {ranges[nearest][1] // size} elements."
            )

    def checked_load(pointers: Any, mask: Any, *args: Any) -> Any:
        check(pointers, mask, "reads")
        return load(pointers, mask, *args)

    def checked_store(pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        check(pointers, mask, "writes")
        return store(pointers, value, mask, *args)

    def checked_atomic(operation: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        check(pointers, mask, "writes")
        return atomic(operation, pointers, value, mask, *args)

    checked = {"create_masked_load": checked_load, "create_masked_store": checked_store, "create_atomic_rmw": checked_atomic}
    with mock.patch.multiple(builder, **checked):
        yield


def _autotune(_hints: Any, configs: list[Any], *_args: Any, inductor_meta: Any = None, **_kwargs: Any) -> Any:
    def decorate(function: Any) -> Kernel:
        for config in configs:
            # As torch's cached_autotune: a kernel without an x dimension has no such argument.
            if "XBLOCK" not in function.arg_names:
                config.kwargs.pop("XBLOCK", None)
        return Kernel(function, triton_heuristics.unique_configs(configs), inductor_meta)

    return decorate


class Compiler:
    """Takes the place of Inductor's ``AsyncCompile`` in a generated segment."""

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        return load_kernel(name, source)

    def wait(self, _scope: dict[str, Any]) -> None:
        pass


def load(source: str) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Load the source of a segment. Return the function that runs it."""
    with mock.patch.object(torch._inductor.async_compile, "AsyncCompile", Compiler):
        return _execute(source).call  # type: ignore[no-any-return]


def load_kernel(name: str, source: str) -> Kernel:
    """Load the source of a kernel."""
    with mock.patch.object(triton_heuristics, "cached_autotune", _autotune):
        return getattr(_execute(source), name)  # type: ignore[no-any-return]


def _execute(source: str) -> types.ModuleType:
    """Execute a source as a module. The interpreter rewrites functions, and so has to find their source."""
    name = f"<generated {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = types.ModuleType(name)
    module.__file__ = name
    exec(compile(source, name, "exec"), module.__dict__)
    return module


class _Libdevice:
    """The functions of libdevice that kernels call, in NumPy. The interpreter would call stubs, which return None."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _FUNCTIONS:
            raise NotImplementedError(f"libdevice.{name} has no function in NumPy here.")

        def call(*arguments: Any) -> Any:
            tensors = [interpreter.interpreter_semantic.to_tensor(argument) for argument in arguments]
            with np.errstate(all="ignore"):
                data = np.asarray(_FUNCTIONS[name](*(tensor.handle.data for tensor in tensors)))
            scalar = tl.int32 if data.dtype.kind in "ib" else tensors[0].dtype
            data = data.astype(interpreter._get_np_dtype(scalar))
            shape = tensors[0].type if scalar == tensors[0].dtype else tensors[0].type.with_element_ty(scalar)
            return tl.tensor(interpreter.TensorHandle(data, scalar), shape)

        return call


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "exp": np.exp,
    "tanh": np.tanh,
    "log1p": np.log1p,
    "pow": np.power,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "nearbyint": np.rint,
    "trunc": np.trunc,
    "fmod": np.fmod,
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
    "sin": np.sin,
    "cos": np.cos,
}


def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Compute ``torch.histc`` also of integers, which torch counts on a GPU, but not on the CPU."""
    limits = (float(min), float(max)) if min != max else (float(values.min()), float(values.max()))
    return torch.histogram(values.double(), bins, range=limits).hist.to(values.dtype)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Load and run generated segments on the CPU while the block runs.

    Raises:
        RuntimeError: Triton would compile kernels.
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("Start the process with TRITON_INTERPRET=1, as RankPools('pretended cuda') does.")
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new, create=True))

        patch(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0)
        patch(torch._C._dynamo.guards, "_empty_strided_cuda", new_tensor)
        patch(triton_helpers, "libdevice", _Libdevice())
        library = torch.library.Library("aten", "IMPL")
        stack.callback(undo, library)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl("histc", _histc, "CPU")
        yield
