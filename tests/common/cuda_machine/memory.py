"""Memory: fake tensors on ``cuda`` with values.

A fake tensor has a storage without memory. Here each such storage has a *shadow*: a storage on the CPU with the same number of
bytes. An operator first runs on fake tensors, as without values, then on views of their shadows. So views, aliases and writes
are those of the fake tensors, which are those of a run on a device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree

from fsdp_compile.units.own_storage import has_memory, with_own_storage
from passes.collectives.host_copies import wait_copy, wait_offload
from passes.fx.torch_internals.core import FakeTensor, FakeTensorMode, unset_fake_temporarily

_aten = torch.ops.aten
# Operators that change what a tensor refers to, and no values.
_REFERRING = {
    _aten.set_.source_Tensor,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten.resize_.default,
    _aten.record_stream.default,
}
# Operators that return what they are given, once a stream has written it. Not all have fake kernels that do.
_WAITS = {torch.ops._c10d_functional.wait_tensor.default, wait_copy, wait_offload}
_DEVICE_ARGUMENTS = ("device", "pin_memory")
_SHADOW = "_cuda_machine_shadow"


@dataclass
class Tape:
    """A record of computations, which can run again in the same memory, and of the contents that they found there."""

    launches: list[Callable[[], None]] = field(default_factory=list)
    before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)

    def restore(self) -> None:
        """Write back to memory what it held before."""
        for storage, contents in self.before.values():
            storage.copy_(contents)


class Memory:
    """The values of fake tensors.

    Attributes:
        mode: the fake mode. Inside of it, operators on its tensors compute values, too.
        tape: receives what is computed; None: nothing is recorded.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        # A cached result would not tell which of its storages are new.
        self.mode.cache_enabled = False
        # No subclass: higher-order operators look modes up by their class.
        self._dispatch = self.mode.dispatch
        self.mode.dispatch = self._compute  # type: ignore[method-assign]
        self.tape: Tape | None = None
        self._is_inside = False

    def record(self, compute: Callable[[], Sequence[Tensor]], results: Sequence[Tensor]) -> None:
        """Record a computation, if there is a tape.

        Args:
            compute: computes results again.
            results: the tensors that are to get them.
        """
        if self.tape is None:
            return
        with unset_fake_temporarily():
            values = [self.value(result) for result in results]

        def launch() -> None:
            with unset_fake_temporarily(), torch.no_grad():
                for value, result in zip(values, compute(), strict=True):
                    if value.data_ptr() != result.data_ptr():
                        value.copy_(result)

        self.tape.launches.append(launch)

    def note_inputs(self, values: Any) -> None:
        """Note the memory of tensors ahead of a computation that may write to it, if there is a tape."""
        if self.tape is not None:
            for value in tensors_in(values):
                storage = value.untyped_storage()
                self.tape.before.setdefault(storage._cdata, (storage, storage.clone()))

    def shadow_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return the shadow of a storage; None: it has none."""
        return getattr(storage, _SHADOW, None)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a fake tensor: a view of its shadow, with its size and strides. Others are their own values."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            return view_of(self._shadow(tensor), like=tensor)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of this memory."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode

    def alias(self, tensor: Tensor) -> Tensor:
        """Return what :func:`with_own_storage` returns for tensors with memory."""
        with unset_fake_temporarily(), torch.no_grad():
            value = with_own_storage(self.value(tensor))
        return self.tensors_of([value], (), tensor.device)[0]

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Set the values of a fake tensor."""
        with unset_fake_temporarily(), torch.no_grad():
            self.value(tensor).copy_(value)

    def tensors_of(self, values: Sequence[Any], known: Sequence[Tensor], device: torch.device) -> list[Any]:
        """Make fake tensors for results that were computed on shadows.

        Args:
            values: the results.
            known: fake tensors whose memory results may lie in.
            device: the device of results in new memory.
        """
        bases = {self._shadow(tensor)._cdata: tensor for tensor in known}
        found = []
        with self.without_values(), torch.no_grad():
            for value in values:
                if not isinstance(value, Tensor):
                    found.append(value)
                    continue
                storage = value.untyped_storage()
                if storage._cdata not in bases:
                    base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                    setattr(base.untyped_storage(), _SHADOW, storage)
                    bases[storage._cdata] = base
                fake = torch.empty(0, dtype=value.dtype, device=device)
                place = value.storage_offset(), value.size(), value.stride()
                found.append(fake.set_(bases[storage._cdata].untyped_storage(), *place))  # type: ignore[call-overload]
        return found

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Enter the mode for the block, in which its tensors have memory for the library, too."""
        address = FakeTensor.data_ptr

        def data_ptr(tensor: Any) -> int:
            return self.value(tensor).data_ptr() if self.has(tensor) else address(tensor)

        with (
            _replaced(has_memory, lambda tensor: self.has(tensor) or has_memory(tensor)),
            _replaced(with_own_storage, lambda tensor: (self.alias if self.has(tensor) else with_own_storage)(tensor)),
            mock.patch.object(FakeTensor, "data_ptr", data_ptr),
            self.mode,
        ):
            yield

    @contextlib.contextmanager
    def without_values(self) -> Iterator[None]:
        """Compute no values in the block, only fake tensors."""
        before, self._is_inside = self._is_inside, True
        try:
            with self.mode:
                yield
        finally:
            self._is_inside = before

    def _shadow(self, tensor: Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        shadow: torch.UntypedStorage | None = getattr(storage, _SHADOW, None)
        if shadow is None:
            shadow = uninitialised(storage.nbytes())
            setattr(storage, _SHADOW, shadow)
        return shadow

    def _compute(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._is_inside or func in _REFERRING:
            return self._dispatch(func, types, args, kwargs)
        # Before the operator changes what the tensors refer to.
        values = pytree.tree_map_only(Tensor, self.value, (tuple(args), kwargs))
        self._is_inside = True
        try:
            fake = self._dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            fake = None
        finally:
            self._is_inside = False
        if fake is NotImplemented:
            # For tensor subclasses, such as DTensor, whose own tensors follow.
            return fake
        outputs = tensors_in(fake)
        new = [not hasattr(output.untyped_storage(), _SHADOW) for output in outputs]
        if fake is not None and not any(new) and not func._schema.is_mutable and func not in _WAITS:
            return fake
        with unset_fake_temporarily(), torch.no_grad():
            self.note_inputs(values)
            results = self._run(func, *values)
        leaves, structure = pytree.tree_flatten(results)
        if fake is None:
            # Its shape, or what it returns, is known from values alone.
            return pytree.tree_unflatten(self.tensors_of(leaves, (), _device_of(args)), structure)
        with unset_fake_temporarily(), torch.no_grad():
            given = {value.untyped_storage()._cdata for value in tensors_in(values)}
            for output, result, is_new in zip(outputs, tensors_in(leaves), new, strict=True):
                if is_new:
                    self._keep(output, result, may_share=func in _WAITS or result.untyped_storage()._cdata not in given)
        self.record(lambda: tensors_in(self._run(func, *values)), outputs)
        return fake

    def _keep(self, output: Tensor, result: Tensor, *, may_share: bool) -> None:
        """Make a result the values of a new fake tensor: its memory, which a collective may write later, or else a copy."""
        storage = result.untyped_storage()
        same = (output.stride(), output.storage_offset()) == (result.stride(), result.storage_offset())
        if may_share and same and storage.nbytes() == output.untyped_storage().nbytes():
            setattr(output.untyped_storage(), _SHADOW, storage)
        else:
            self.value(output).copy_(result)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":
            raise NotImplementedError(f"{func} would move no values among pretended groups: use functional collectives.")
        kwargs = {name: value for name, value in kwargs.items() if name not in _DEVICE_ARGUMENTS}
        args = [torch.device("cpu") if isinstance(value, torch.device) else value for value in args]
        return func(*args, **kwargs)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _device_of(args: Any) -> torch.device:
    return next((value.device for value in tensors_in(args)), torch.device("cpu"))


@contextlib.contextmanager
def _replaced(function: Callable[..., Any], by: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of the library in all modules that import it, while the block runs."""
    name = function.__name__
    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if module.__name__.startswith("fsdp_compile") and vars(module).get(name) is function:
                stack.enter_context(mock.patch.object(module, name, by))
        yield


def view_of(storage: torch.UntypedStorage, *, like: Tensor) -> Tensor:
    """View memory on the CPU with the dtype, the place, the size and the strides of a tensor in other memory."""
    view = torch.empty(0, dtype=like.dtype)
    return view.set_(storage, like.storage_offset(), like.size(), like.stride())  # type: ignore[call-overload, no-any-return]


def new_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor on the CPU without values: NaN in each floating-point format."""
    span = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return torch.empty(0, dtype=dtype).set_(uninitialised(span * dtype.itemsize), 0, size, stride)  # type: ignore[call-overload, no-any-return]


def uninitialised(nbytes: int) -> torch.UntypedStorage:
    """Allocate memory that is NaN in each floating-point format."""
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8).untyped_storage()
