"""Private attributes of torch's objects, under names. Other modules of the two packages read none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any

import torch

# The local tensor of a DTensor, and its ``DTensorSpec``. ``to_local()`` would record a node of autograd, and return another
# object each time.
local_tensor: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
spec_of: Callable[[Any], Any] = attrgetter("_spec")

# The ranks of the mesh that a mesh is a slice of; a mesh that is no slice: its own. In the order of the mesh.
all_ranks_of: Callable[[Any], Sequence[int]] = attrgetter("_flatten_rank_map")

# The number of writes by operators to a tensor, to its views, or to the tensor that it is a view of.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# The hooks of ``register_hook`` on a tensor; None: there was none.
gradient_hooks: Callable[[Any], Mapping[int, Callable[..., Any]] | None] = attrgetter("_backward_hooks")
# The hooks of ``register_post_accumulate_grad_hook`` on a tensor; None: there was none.
post_accumulate_grad_hooks: Callable[[Any], Mapping[int, Callable[..., Any]] | None] = attrgetter("_post_accumulate_grad_hooks")

# The function that ``module.compile()`` has made; None: it was not called.
compiled_call: Callable[[Any], Any] = attrgetter("_compiled_call_impl")

# The module in the wrapper that ``torch.compile(module)`` returns.
wrapped_module: Callable[[Any], Any] = attrgetter("_orig_mod")

# The schema of an operator in a graph, and its name without namespace and overload.
schema_of: Callable[[Any], Any] = attrgetter("_schema")
operator_name: Callable[[Any], str] = attrgetter("_opname")

# Shape, dtype and device of each gradient that a node of autograd takes; the place of the node in the order of forward; and the
# class of the nodes that a custom function records.
input_metadata: Callable[[Any], Sequence[Any]] = attrgetter("_input_metadata")
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
node_class: Callable[[Any], type] = attrgetter("_backward_cls")

# Inductor's setting for products that overlap with the collectives of tensor parallelism, of its config.
fuses_products: Callable[[Any], bool] = attrgetter("_micro_pipeline_tp")

# The source with which Inductor probes an instruction set.
simd_probe: Callable[[Any], str] = attrgetter("_avx_code")

# Undoes what a ``torch.library.Library`` has registered.
undo: Callable[[torch.library.Library], None] = methodcaller("_destroy")


# Dynamo traces these two.


def own_parameters(module: Any) -> Any:
    """Return the mapping in which a module registers its parameters, or what has its place."""
    return module._parameters


def own_buffers(module: Any) -> dict[str, Any]:
    """Return the mapping in which a module registers its buffers."""
    return module._buffers


def as_local(tensor: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def local_of(value: object) -> torch.Tensor | None:
    """Return the local tensor of a DTensor; None for anything else."""
    return getattr(value, "_local_tensor", None)


def set_local_tensor(tensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor, which keeps the offset and the device of the tensor that it was made from."""
    tensor._local_tensor = local


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if they share a storage object, for as long as it lives.

    Tensors may lie in one memory through several storages, so the address of their data does not tell.
    """
    return id_of_storage(tensor.untyped_storage())


def id_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the :func:`storage_id` of the tensors in a storage."""
    return storage._cdata


def set_how_it_moves(storage: Any, move: Callable[..., Any]) -> None:
    """Replace the methods by which a storage on the host moves to shared memory."""
    storage._share_fd_cpu_ = storage._share_filename_cpu_ = move


def mark_as_parameter(tensor: Any) -> None:
    """Make a tensor that is no leaf an ``nn.Parameter`` for ``isinstance``."""
    tensor._is_param = True


def mark_as_boxed(function: Any) -> None:
    """Tell AOTAutograd that a function takes its arguments as a list, and empties the list."""
    function._boxed_call = True


def is_wrapped_by_scheduler(step: object) -> bool:
    """Return whether an optimizer's ``step`` is the wrapper of a learning rate scheduler, which only records the call."""
    return hasattr(step, "_wrapped_by_lr_sched")


def set_compiled_call(module: Any, function: Callable[..., Any]) -> None:
    """Replace the function that ``module.compile()`` has made."""
    module._compiled_call_impl = function


def rename(node: torch.fx.Node, name: str) -> None:
    """Rename a node of a graph, which makes the name unique."""
    node._rename(name)


def first_expression(size: Any) -> Any:
    """Return the expression with which a symbolic size was made, in which no symbol that was fixed is a number."""
    return size._expr


def replace_hint(size: Any, value: Any) -> Any:
    """Replace the traced value of a symbolic size, and return the one before."""
    before, size._hint = size._hint, value
    return before


def backend_on(group: Any, device: torch.device) -> Any:
    """Return the backend of a process group for a device. Raises RuntimeError if it has none."""
    return group._get_backend(device)


def running_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identifier. Python has no public name for this."""
    return sys._current_frames()


def timeout_on(group: Any, device: torch.device | None = None) -> timedelta | None:
    """Return the timeout of a process group's collectives, on a device or on its first. None: its backend has none."""
    backend = backend_on(group, group._device_types[0] if device is None else device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def flattened(mesh: Any, name: str) -> Any:
    """Return the mesh of one dimension with the ranks of a mesh. Makes its group at the first call, which is collective."""
    return mesh._flatten(name)


def cache_key(compiled: object) -> str | None:
    """Return the key of a graph in Inductor's cache; None: it is not in there."""
    return getattr(compiled, "_fx_graph_cache_key", None)


def set_cache_key(compiled: Any, key: str) -> None:
    """Note the key of a graph in Inductor's cache."""
    compiled._fx_graph_cache_key = key


def cache_folder(cache: Any, key: str) -> str:
    """Return the folder in which Inductor's cache keeps the graphs of a key."""
    return cache._get_tmp_dir_for_key(key)


def compiled_kernel(kernel: Any) -> Any:
    """Compile a Triton kernel of Inductor's in the first of its configurations."""
    return kernel._precompile_config(kernel.configs[0]).kernel


def replace_driver(driver: Any, active: Any) -> Any:
    """Replace Triton's driver, and return the one before. None: the driver is looked for at its next use."""
    before, driver._active = driver._active, active
    return before
