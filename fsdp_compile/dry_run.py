"""Dry run: a training step of a sharded model with fake tensors and pretended ranks, which computes nothing.

Up to the lowering, a dry run does the same as a real run. The caller chooses the device and the backend that lowers graphs.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from passes.collectives.functional import forget_factors
from passes.fx.sizes import unknown_size
from passes.fx.torch_internals.core import (
    FakeCopyMode,
    FakeTensorMode,
    is_traceable_wrapper_subclass,
    pytree,
    unset_fake_temporarily,
)
from passes.fx.torch_internals.distributed import FakeStore

from .api.sharding import fully_shard
from .compiler.capture import Capture, capture
from .units.extension import with_tensors

#: The numbers of ranks: ``(shards,)``, ``(replicas, shards)``, or the sizes of mesh dimensions by name.
MeshShape = Sequence[int] | Mapping[str, int]


def check_arguments(caller: str, model: nn.Module, mesh_shape: MeshShape, shard: Callable[..., Any]) -> None:
    """Check arguments that public functions pass on to :func:`dry_step`.

    Args:
        caller: name of the public function, for messages.
        model: the model to shard.
        mesh_shape: the numbers of ranks.
        shard: the function that shards the model.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is sharded already; or ``mesh_shape`` is not a shape of a mesh; or it has names, and ``shard`` is
            the default, which does not know them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller} takes an nn.Module, not a {type(model).__name__}. Build it on the meta device, if it is large."
        )
    is_named = isinstance(mesh_shape, Mapping) and len(mesh_shape) > 0
    is_shape = is_named or (isinstance(mesh_shape, Sequence) and len(mesh_shape) in (1, 2))
    sizes = _sizes(mesh_shape) if is_shape else ()
    if not is_shape or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"mesh_shape={mesh_shape!r} must be (shards,) for FSDP or (replicas, shards) for HSDP, or sizes by name, such as "
            "{'dp': 8, 'tp': 4}, in ranks, each at least 1."
        )
    if is_named and shard is shard_layers:
        raise ValueError(
            f"{caller} cannot tell which dimensions of mesh_shape={mesh_shape!r} shard: give shard=, a function of model and "
            "mesh that calls fully_shard with slices of it, such as mesh=mesh['dp']."
        )
    if any(hasattr(module, "_fsdp_unit") for module in model.modules()):
        raise ValueError(f"{caller} takes a model that is not sharded yet, and shards a copy of it: see its argument shard.")


def num_ranks(mesh_shape: MeshShape) -> int:
    """Return the number of ranks of a mesh."""
    return math.prod(_sizes(mesh_shape))


def _sizes(mesh_shape: MeshShape) -> tuple[int, ...]:
    return tuple(mesh_shape.values() if isinstance(mesh_shape, Mapping) else mesh_shape)


def outermost_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the outermost module lists of a model."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from outermost_layers(child)


def shard_layers(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Make a unit of each module of the outermost module lists, and one of the rest of the model."""
    for layer in list(outermost_layers(model)):
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)


def train(compiled: Any, *args: Any, **kwargs: Any) -> None:
    """Run forward, and backward from the sum of all outputs that require gradients."""
    outputs = [value for value in pytree.tree_leaves(compiled(*args, **kwargs)) if isinstance(value, Tensor)]
    losses = [value.sum() for value in outputs if value.requires_grad]
    if losses:
        torch.autograd.backward(losses)


@contextlib.contextmanager
def dry_step(
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape,
    device_type: str,
    *,
    shard: Callable[[Any, DeviceMesh], Any],
    step: Callable[..., Any],
    backend: Callable[..., Any],
    options: dict[str, Any] | None,
    passes: bool = False,
) -> Iterator[Capture]:
    """Run a training step of a sharded copy of a model with fake tensors, and yield the capture. Nothing is allocated.

    The process groups that graphs name exist while the ``with`` block runs.

    Args:
        model: the model, on any device; not changed.
        inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        mesh_shape: ``(shards,)``, ``(replicas, shards)``, or sizes by name.
        device_type: the device type of the copy's fake tensors.
        shard: called with the copy and the mesh.
        step: called with the compiled copy and the inputs.
        backend: the backend of ``torch.compile``. The compiler is reset before and after the step.
        options: options of the backend.
        passes: also capture what each pass did.

    Raises:
        RuntimeError: there is a default process group already.
    """
    device = torch.device(device_type, 0) if device_type != "cpu" else torch.device("cpu")
    with pretended_ranks(mesh_shape, device_type) as device_mesh:
        with _fake_mode() as fake_mode:
            copied = _fake_copy(model, fake_mode, device)
            shard(copied, device_mesh)
            args = pytree.tree_map_only(Tensor, lambda value: _fake_like(value, device), inputs)
            compiled: Any = torch.compile(copied, backend=backend, options=options)
            with capture(passes=passes) as captured:
                run_step(step, compiled, args)
        yield captured


def run_step(step: Callable[..., Any], compiled: Any, inputs: Any) -> None:
    """Call ``step`` with a compiled model and the arguments of its forward, in any of the forms that users give."""
    if isinstance(inputs, dict):
        step(compiled, **inputs)
    else:
        step(compiled, *(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))


def _fake_mode() -> FakeTensorMode:
    """Make a fake mode, in which an element that Python reads is the size supposed for all sizes that depend on data."""
    # No subclass: higher-order operators look modes up by their class.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dispatch = mode.dispatch

    def dispatch_or_suppose(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return unknown_size() if func == torch.ops.aten._local_scalar_dense.default else dispatch(func, types, args, kwargs)

    mode.dispatch = dispatch_or_suppose  # type: ignore[method-assign]
    return mode


def _forget() -> None:
    """Clear compile caches and divide factors, so that fake tensors do not leak out of a dry run, nor real ones into it."""
    torch.compiler.reset()
    forget_factors()


def _fake_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Make a fake tensor like ``tensor``, with its strides, on ``device``. A tensor subclass holds fake tensors in turn."""
    if is_traceable_wrapper_subclass(tensor):
        return with_tensors(tensor, lambda held: _fake_like(held, device))
    size, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)


def _fake_copy(model: nn.Module, fake_mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Copy a model with fake parameters and buffers on ``device``. The caller is inside of ``fake_mode``."""
    copies: dict[int, Any] = {
        id(param): nn.Parameter(_fake_like(param.detach(), device), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    copies.update((id(buffer), _fake_like(buffer, device)) for buffer in model.buffers())
    # For tensors that are neither parameters nor buffers.
    with FakeCopyMode(fake_mode):
        return copy.deepcopy(model, copies)


@contextlib.contextmanager
def pretended_ranks(mesh_shape: MeshShape, device_type: str) -> Iterator[DeviceMesh]:
    """Pretend that the ranks of a mesh exist, with this process as the first, while the block runs.

    The compiler is reset before and after.

    Raises:
        RuntimeError: there is a default process group already.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        _forget()
        yield stack.enter_context(_world(mesh_shape, device_type))


@contextlib.contextmanager
def _world(mesh_shape: MeshShape, device_type: str) -> Iterator[DeviceMesh]:
    """Make a process group of pretended ranks, with this process as the first, while the block runs."""
    if dist.is_initialized():
        raise RuntimeError(
            "This makes a default process group of pretended ranks, but there is one already, and a process has only one. "
            "Call it ahead of init_process_group(), after destroy_process_group(), or in a process of its own."
        )
    names = tuple(mesh_shape) if isinstance(mesh_shape, Mapping) else ("replicate", "shard")[2 - len(mesh_shape) :]
    # init_process_group wraps the hook in one that writes the rank before each line.
    excepthook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks(mesh_shape))
    try:
        with _meshes_of_numbers():
            yield init_device_mesh(device_type, _sizes(mesh_shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


@contextlib.contextmanager
def _meshes_of_numbers() -> Iterator[None]:
    """Make meshes outside of fake modes while the block runs: a mesh finds this rank by the values of a tensor of ranks."""
    make = DeviceMesh.__init__

    def init(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            make(mesh, *args, **kwargs)

    with mock.patch.object(DeviceMesh, "__init__", init):
        yield
