"""Copies between the memory of the host and the memory of a device, concurrent with compute on the device.

``copy_to_device``  begins to copy flat tensors of the host, one after the other, into one buffer on the device.
``copy_to_host``    begins to copy a tensor to the host.
``wait_copy``       makes later work on the device wait for the copy, and returns the copy. The host does not wait.

Offloaded activations wait on the host for backward. They are copied with their strides:

``offload``         begins to copy a tensor to pinned memory. The caller keeps the tensor's memory until ``wait_offload``.
``wait_offload``    makes later work on the device, which may reuse that memory, wait for the copy, and returns the copy. The
                    host does not wait.
``fetch``           begins to copy an offloaded tensor back. ``wait_copy`` waits for it.

:func:`wait_on_host` is for the host: before it returns, the result of ``copy_to_host`` or ``offload`` may hold anything.

An :class:`Engine` does the copying. The engine of an accelerator has a stream for each direction, so copies of one direction
run one after the other. A device ``cpu`` shares the host's memory, so it has no engine and nothing is copied. Tests give it an
engine whose copies take time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..fx.torch_internals.core import disable_dynamo
from ..fx.torch_internals.objects import storage_id

_library = torch.library.Library("fsdp_host", "DEF")
# CUDA graphs must not contain these operators: between two replays, the host has to wait for copies.
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library.define("copy_to_device(Tensor[] pieces, str device) -> Tensor", tags=_tags)
_library.define("copy_to_host(Tensor value, bool pinned) -> Tensor", tags=_tags)
_library.define("wait_copy(Tensor(a) copy) -> Tensor(a)", tags=_tags)
_library.define("offload(Tensor value) -> Tensor", tags=_tags)
_library.define("wait_offload(Tensor(a) copy, Tensor value) -> Tensor(a)", tags=_tags)
_library.define("fetch(Tensor copy, str device) -> Tensor", tags=_tags)

copy_to_device = torch.ops.fsdp_host.copy_to_device.default
copy_to_host = torch.ops.fsdp_host.copy_to_host.default
wait_copy = torch.ops.fsdp_host.wait_copy.default
offload = torch.ops.fsdp_host.offload.default
wait_offload = torch.ops.fsdp_host.wait_offload.default
fetch = torch.ops.fsdp_host.fetch.default


class Copy(Protocol):
    """A copy that an engine has begun."""

    def wait_on_device(self) -> None:
        """Make later work on the device wait for the copy."""

    def wait_on_host(self) -> None:
        """Block until the copy is done."""


class Engine(Protocol):
    """The copier between the host and one device.

    Callers do not write to a source before its copy is done. They may free a source earlier, unless a method says otherwise:
    the engine keeps the memory from being reused.
    """

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        """Begin to copy flat tensors of one dtype, one after the other, into a new tensor on the device."""

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> tuple[Tensor, Copy]:
        """Begin to copy a flat tensor into a new one on the host, in pinned memory or not.

        With ``is_kept``, the caller does not free ``value`` before it has called ``wait_on_device`` of the copy.
        """

    def write_back(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> Copy:
        """Begin to overwrite flat tensors on the host with flat tensors of one device.

        The caller does not free ``values`` before it has called ``wait_on_device`` of the copy.

        Args:
            values: the sources.
            targets: the destinations, of the same sizes and dtypes.
        """


class _Event:
    def __init__(self, stream: torch.Stream):
        self._event = stream.record_event()
        self._device = stream.device

    def wait_on_device(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()


class StreamEngine:
    """The engine of a device with streams.

    Results of copies to the device are allocated on the compute stream, which waits for the copy before any use. So the
    allocator need not know of the copy stream.

    The source of a copy to the host may be freed during the copy, unless it is kept. ``record_stream`` tells the allocator,
    which reuses such memory once the host finds the copy done. The compute stream could reuse it earlier.

    A pageable tensor blocks the host while it is copied, as everywhere in torch.
    """

    def __init__(self, device: torch.device):
        self._in = torch.Stream(device=device)
        self._out = torch.Stream(device=device)

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        numels = [piece.numel() for piece in pieces]
        copy = torch.empty(sum(numels), dtype=pieces[0].dtype, device=device)
        # Earlier work on the compute stream may still read the memory that the new tensor reuses.
        self._in.wait_stream(torch.accelerator.current_stream(device))
        with self._in:
            for part, piece in zip(copy.split(numels), pieces, strict=True):
                part.copy_(piece, non_blocking=True)
        return copy, _Event(self._in)

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> tuple[Tensor, Copy]:
        copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pinned)
        self._out.wait_stream(torch.accelerator.current_stream(value.device))
        with self._out:
            copy.copy_(value, non_blocking=pinned)
        if not is_kept:
            value.record_stream(self._out)
        return copy, _Event(self._out)

    def write_back(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> Copy:
        self._out.wait_stream(torch.accelerator.current_stream(values[0].device))
        with self._out:
            for target, value in zip(targets, values, strict=True):
                target.copy_(value, non_blocking=True)
        return _Event(self._out)


_engines: dict[torch.device, Engine] = {}
# Copies in flight, by the address of the destination's storage object.
_begun: dict[int, Copy] = {}


def copies_to(device: torch.device) -> bool:
    """Return whether a device has memory of its own, so that tensors of the host are copied to it."""
    return device.type != "cpu" or device in _engines


def engine(device: torch.device) -> Engine:
    """Return the engine of a device with memory of its own. The first call makes it."""
    if device not in _engines:
        _engines[device] = StreamEngine(device)
    return _engines[device]


@contextlib.contextmanager
def engine_of(device: torch.device, other: Engine) -> Iterator[None]:
    """Copy to and from a device with the engine ``other`` for the duration of the block.

    With an engine for ``cpu``, models that are sharded there inside the block offload to the host as on an accelerator.
    """
    before = dict(_engines)
    _engines[device] = other
    try:
        yield
    finally:
        _engines.clear()
        _engines.update(before)


def _copy_to_device_kernel(pieces: Sequence[Tensor], device: str) -> Tensor:
    to = torch.device(device)
    if to.type != "cpu" and to.index is None:
        to = torch.device(to.type, torch.accelerator.current_device_index())
    with torch.no_grad():
        copy, begun = engine(to).to_device(pieces, to)
    _begun[storage_id(copy)] = begun
    return copy


def _copy_to_host_kernel(value: Tensor, pinned: bool) -> Tensor:
    with torch.no_grad():
        copy, begun = engine(value.device).to_host(value, pinned=pinned)
    _begun[storage_id(copy)] = begun
    return copy


def _wait_copy_kernel(copy: Tensor) -> Tensor:
    begun = _begun.pop(storage_id(copy), None)
    if begun is not None:
        begun.wait_on_device()
    return copy


def _all_memory(value: Tensor) -> Tensor:
    """View a tensor's memory as flat, from its first element to its last, including gaps between them."""
    numel = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((numel if value.numel() else 0,), (1,))


def _offload_kernel(value: Tensor) -> Tensor:
    with torch.no_grad():
        copy, begun = engine(value.device).to_host(_all_memory(value), pinned=True, is_kept=True)
        _begun[storage_id(copy)] = begun
        return copy.as_strided(value.shape, value.stride())


def _wait_offload_kernel(copy: Tensor, value: Tensor) -> Tensor:
    # The copy stays in the table, as the host may still have to wait, too.
    _begun[storage_id(copy)].wait_on_device()
    return copy


def _fetch_kernel(copy: Tensor, device: str) -> Tensor:
    with torch.no_grad():
        return _copy_to_device_kernel([_all_memory(copy)], device).as_strided(copy.shape, copy.stride())


def wait_on_host(copy: Tensor) -> None:
    """Block until the result of ``copy_to_host`` or ``offload`` is complete."""
    begun = _begun.pop(storage_id(copy), None)
    if begun is not None:
        begun.wait_on_host()


def leave_to_device(copy: Tensor) -> None:
    """Forget the copy of an ``offload`` that the host will not read. The device, its only reader, waits for it already."""
    _begun.pop(storage_id(copy), None)


_library.impl("copy_to_device", disable_dynamo(_copy_to_device_kernel), "CompositeExplicitAutograd")
_library.impl("copy_to_host", disable_dynamo(_copy_to_host_kernel), "CompositeExplicitAutograd")
_library.impl("wait_copy", disable_dynamo(_wait_copy_kernel), "CompositeExplicitAutograd")
_library.impl("offload", disable_dynamo(_offload_kernel), "CompositeExplicitAutograd")
_library.impl("wait_offload", disable_dynamo(_wait_offload_kernel), "CompositeExplicitAutograd")
_library.impl("fetch", disable_dynamo(_fetch_kernel), "CompositeExplicitAutograd")


@torch.library.register_fake(copy_to_device, lib=_library)
def _(pieces: Sequence[Tensor], device: str) -> Tensor:
    return pieces[0].new_empty(sum(piece.numel() for piece in pieces), device=device)


@torch.library.register_fake(copy_to_host, lib=_library)
def _(value: Tensor, pinned: bool) -> Tensor:
    return value.new_empty(value.shape, device="cpu")


@torch.library.register_fake(wait_copy, lib=_library)
def _(copy: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(copy)


@torch.library.register_fake(offload, lib=_library)
def _(value: Tensor) -> Tensor:
    return value.new_empty_strided(value.shape, value.stride(), device="cpu")


@torch.library.register_fake(wait_offload, lib=_library)
def _(copy: Tensor, value: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(copy)


@torch.library.register_fake(fetch, lib=_library)
def _(copy: Tensor, device: str) -> Tensor:
    return copy.new_empty_strided(copy.shape, copy.stride(), device=device)
