"""CUDA graphs without CUDA: record operators with the memory that they work on, and run them again on that memory.

A replay treats memory as a CUDA graph does. It reads from the addresses of the recorded inputs, and writes to those of the
recorded outputs and intermediate values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile.compiler import cuda_graphs

_wait = torch.ops._c10d_functional.wait_tensor.default


def _where_it_is(tensor: Tensor) -> Tensor:
    """Return an alias that does not keep lent memory alive, as a CUDA graph knows addresses alone; else the tensor itself."""
    memory = tensor.untyped_storage()
    if not hasattr(memory, "_fsdp_loan"):
        return tensor
    alias = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), memory.device, memory.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]


def _like_result(collective: Any, args: tuple[Any, ...]) -> Tensor:
    """Return a tensor like the result of a collective, without its values."""
    if collective is _wait:
        return args[0]
    (sent,) = [arg for arg in args if isinstance(arg, Tensor)]
    shaped = collective(*pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args))
    return torch.zeros(shaped.shape, dtype=shaped.dtype, device=sent.device)


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(math.nan)


class _Tape(TorchDispatchMode):
    """A record of the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before.append((value, value.clone()))
        # Collectives send nothing here: other ranks may not record in this call.
        results = _like_result(func, args) if func.namespace == "_c10d_functional" else func(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in func._schema.returns if returned.alias_info is not None]
        if func is not _wait and (not aliases or any(alias.is_write for alias in aliases)):
            new = [] if aliases else [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
            self._steps.append((func, *pytree.tree_map_only(Tensor, _where_it_is, (args, kwargs or {}, new))))
        return results

    def undo(self) -> None:
        """Restore the values that the recorded operators overwrote: recording a launch does not run it."""
        while self._before:
            written, before = self._before.pop()
            written.copy_(before)

    def replay(self) -> None:
        for *_, results in self._steps:
            for result in results:
                _poison(result)
        for func, args, kwargs, results in self._steps:
            again = [leaf for leaf in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(results, again if results else [], strict=True):
                old.copy_(_wait(new) if func.namespace == "_c10d_functional" else new)


class ReplayRecorder:
    """A recorder of operators on the CPU. A replay first fills all recorded floating-point results with NaN."""

    def is_recording(self) -> bool:
        return False

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with _Tape() as tape:
            run()
        tape.undo()
        return tape.replay


@contextlib.contextmanager
def on_cpu(recorder: type[ReplayRecorder] = ReplayRecorder) -> Iterator[None]:
    """Make ``options={"cudagraphs": True}`` record on the CPU inside the block, for programs that run operator by operator."""
    cuda_graphs.RECORDERS["cpu"] = recorder
    try:
        yield
    finally:
        del cuda_graphs.RECORDERS["cpu"]
