"""The table in the place of ``_parameters``, for modules that register sharded parameters.

``nn.Module`` finds parameters in ``_parameters``, however they are read: as attributes, by ``parameters()``, ``get_parameter``
or ``state_dict``. So all of these give full tensors inside of a forward, and the registered DTensors outside. A module that was
not passed to ``fully_shard`` keeps its class. Dynamo traces a read like other Python code: its graph holds ``unshard``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling, is_exporting

from passes.fx.torch_internals.core import disable_dynamo, pytree
from passes.fx.torch_internals.objects import mark_as_parameter, own_parameters
from passes.fx.torch_internals.patches import check_escaped_gradients, slice_parameter_list, swap_tensor
from passes.ir.ops import unshard, unshard_extension

from ..runtime.lent_parameters import lend
from ..runtime.uncompiled import (
    in_global_pre_hook,
    in_tracing_mode,
    is_outside,
    is_recomputing,
    read,
    read_in_recomputation,
)
from ..torch_versions import in_compilation
from ..units.sharded_param import ShardedParam, UnshardArgs, shard_attribute
from ..units.unit import Unit


# Not a subclass of dict: Dynamo would look into it by itself, and make DTensors inputs of graphs.
class ShardedParameters(MutableMapping[str, Any]):
    """The parameters that a module registers, some of them sharded, by name.

    After ``unshard()``, names give full tensors outside of forwards, too. Iteration still gives the registered DTensors, which
    optimizers and state dicts need.

    Attributes:
        registered: the parameters that ``nn.Module`` registered, sharded ones as DTensors.
        sharded: the sharded parameters among them.
        unit: the unit that the module belongs to.
        scope: the unit's scope, read without the unit: Dynamo guards on each attribute that it reads on the way.
    """

    def __init__(self, registered: dict[str, nn.Parameter | None], sharded: dict[str, ShardedParam], unit: Unit):
        self.registered = registered
        self.sharded = sharded
        self.unit = unit
        self.scope = unit.scope
        # The full parameters that uncompiled reads returned last.
        self._last_reads: dict[str, weakref.ref[Tensor]] = {}

    # Dynamo traces this for each parameter of each layer: every object and attribute on the way costs time, and a guard.
    def __getitem__(self, name: str) -> Any:
        if not is_dynamo_compiling():
            if not in_compilation():
                return self._read_eagerly(name) if name in self.sharded else self.registered[name]
            self._check_is_seen_by_dynamo(name)
        if not self.scope.active and not _traces_recomputation():
            return self.registered[name]
        found = getattr(self, f"_fsdp_shard_{name}", None)
        if found is None:
            if name in self.sharded:
                raise RuntimeError(self.sharded[name].meta_message())
            return self.registered[name]
        if type(found) is not tuple:
            # A tensor that stands in the parameter's place.
            return self.sharded[name].convert_replacement(found)
        if len(found) == 2:
            shard, (args, kwargs) = found
            return unshard(shard, *args, **kwargs)
        return _unshard_special(*found)

    def _check_is_seen_by_dynamo(self, name: str) -> None:
        """Check that no opaque function reads a sharded parameter while a forward is traced.

        Raises:
            RuntimeError: one does: Dynamo's graph has no input for the parameter, and so would have no gradient.
        """
        is_read = name in self.sharded and not isinstance(getattr(self, shard_attribute(name)), Tensor)
        # Dynamo itself looks into tables, too, but not while operators are traced.
        if is_read and in_tracing_mode() and not is_exporting():
            message = _closes_over(self.sharded[name], "torch._dynamo.nonstrict_trace or torch.compiler.allow_in_graph")
            # Dynamo reports each error in a function of nonstrict_trace as one about its output, and breaks the graph there.
            warnings.warn(message, stacklevel=3)
            raise RuntimeError(message)

    @disable_dynamo
    def _read_eagerly(self, name: str) -> Any:
        registered, sharded = self.registered[name], self.sharded[name]
        is_active, found = self.scope.active, getattr(self, shard_attribute(name))
        if isinstance(found, Tensor):
            return sharded.convert_replacement(found) if is_active else found
        is_recomputed = not is_active and is_recomputing()
        if (not is_active and not is_recomputed) or in_global_pre_hook(self.unit):
            shown = sharded.state.shown(sharded.param)
            return registered if shown is None else self._remember(name, sharded.as_read(shown))
        if sharded.shard.is_meta:
            raise RuntimeError(sharded.meta_message())
        # Where a checkpoint recomputes a part of a unit, no forward of the unit runs.
        full = read_in_recomputation(sharded) if is_recomputed else read(sharded)
        if full is None:
            sharded.note_requires_grad()
            full = sharded.gather_alone()
        full = sharded.as_read(full)
        # Makes it an ``nn.Parameter`` for ``isinstance``. Else containers would make a new one of it, without a gradient.
        mark_as_parameter(full)
        if is_active and is_outside(self.unit):
            lend(sharded, full)
        return self._remember(name, full)

    def _remember(self, name: str, full: Tensor) -> Tensor:
        self._last_reads[name] = weakref.ref(full)
        return full

    def was_read(self, name: str, value: Any) -> bool:
        """Return whether ``value`` is the full parameter that an uncompiled read returned last."""
        lent = self._last_reads.get(name)
        return lent is not None and value is not None and lent() is value

    def __setitem__(self, name: str, value: Any) -> None:
        sharded = self.sharded.get(name)
        if sharded is None:
            self.registered[name] = value
            return
        if is_dynamo_compiling() or in_compilation():
            raise RuntimeError(
                f"A compiled forward puts a tensor into module._parameters, in the place of parameter {sharded.name}. Use "
                "torch.func.functional_call, or do it outside of the compiled function."
            )
        if value is sharded.param or self.was_read(name, value):
            # The caller replaced the parameter, and puts back what it had read before.
            self.registered[name] = sharded.param
            sharded.update_operator_args()
        else:
            sharded.check_is_no_other(value)
            self.registered[name] = value
            setattr(self, shard_attribute(name), value)

    def swap(self, name: str, value: Any) -> Any:
        """Make reads of a sharded parameter give another tensor. The parameter stays registered.

        Args:
            name: name of the parameter.
            value: the tensor; or the result of an earlier call, to undo that call.

        Returns:
            The tensor that reads gave before, or a stand-in for the parameter.
        """
        found = getattr(self, shard_attribute(name))
        if value is self.sharded[name].param:
            self.sharded[name].update_operator_args()
        else:
            setattr(self, shard_attribute(name), value)
        # A parameter without memory has None here. Put back later, None would count as a removed tensor.
        return self.sharded[name].param if found is None else found

    def __delitem__(self, name: str) -> None:
        del self.registered[name]
        self.__dict__.pop(shard_attribute(name), None)

    def __contains__(self, name: object) -> bool:
        # The attribute first: Dynamo would make the DTensor, if it found it in a dictionary, an input of the graph.
        return hasattr(self, f"_fsdp_shard_{name}") or name in self.registered

    def __iter__(self) -> Iterator[str]:
        return iter(self.registered)

    def __len__(self) -> int:
        return len(self.registered)

    def keys(self) -> Any:
        """Return the names."""
        return self.registered.keys()

    def items(self) -> Any:
        """Return names and parameters, full inside of a forward. A tensor in a parameter's place comes for the parameter."""
        if self._is_in_forward():
            return [(name, self._read_once(name)) for name in self.registered]
        swapped = {} if is_dynamo_compiling() else self._swapped()
        return (self.registered | swapped).items() if swapped else self.registered.items()

    def _swapped(self) -> dict[str, Any]:
        found = ((name, self.__dict__.get(shard_attribute(name))) for name in self.sharded)
        return {name: value for name, value in found if isinstance(value, Tensor)}

    def values(self) -> Any:
        """Return parameters, full inside of a forward."""
        return [param for _, param in self.items()]

    def _read_once(self, name: str) -> Any:
        """Return a parameter. If it is tied, all modules get the same tensor, so that ``parameters()`` lists it once."""
        sharded = self.sharded.get(name)
        if sharded is None or len(sharded.owners) == 1 or not self.scope.active:
            return self[name]
        reads = self.scope.tied_reads
        if sharded.name not in reads:
            reads[sharded.name] = self[name]
        return reads[sharded.name]

    def _is_in_forward(self) -> bool:
        if not (is_dynamo_compiling() or in_compilation()):
            return (self.scope.active or is_recomputing()) and not in_global_pre_hook(self.unit)
        # Dynamo's own code, unlike code that it traces, iterates over the registered parameters.
        return is_dynamo_compiling() and (self.scope.active or _traces_recomputation())

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        owned = ", ".join(sharded.name for sharded in self.sharded.values()) or "A module"
        raise NotImplementedError(
            f"{owned}: a module that holds sharded parameters cannot be copied or pickled. Copy the model before sharding, or "
            "build another one and load_state_dict."
        )


@torch.compiler.assume_constant_result
def _traces_recomputation() -> bool:
    """Return whether the code that Dynamo traces is a checkpoint's recomputation, outside of any unit's forward."""
    # Dynamo cannot guard on it. Code that is traced in a recomputation always reads full tensors, wherever it is called.
    return is_recomputing()


def _unshard_special(
    shard: Tensor,
    unshard_args: UnshardArgs,
    layout: Any,
    attributes: dict[str, Any] | None,
    optional: Iterable[str],
) -> Any:
    """Unshard a parameter with an extension or another parallelism, given its :func:`.sharded_param.shard_attribute`."""
    args, kwargs = unshard_args
    if attributes is None:
        full = unshard(shard, *args, **kwargs)
    else:
        names = tuple([key for key in optional if attributes[key] is not None])
        full = unshard_extension(shard, *args, tensors=[attributes[key] for key in names], names=names, **kwargs)
    return full if layout is None else layout.wrap(full)


def _closes_over(sharded: ShardedParam, decorators: str) -> str:
    return (
        f"Parameter {sharded.name} is read inside a function that Dynamo does not look into ({decorators}), so its gradient "
        "would be lost. Pass the parameter, or the module that it belongs to, to the function as an argument."
    )


def _refuse_escaped_parameters(outputs: Any, inputs: Sequence[Any]) -> None:
    """Check that the results of a leaf function depend on no sharded parameter but those among its arguments.

    Raises:
        RuntimeError: they do. The function has an autograd graph of its own, which gives gradients to its inputs alone.
    """
    nodes: list[Any] = [value.grad_fn for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]
    seen: set[Any] = {None}
    seen.update(get_gradient_edge(value).node for value in inputs if isinstance(value, Tensor) and value.requires_grad)
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        sharded = getattr(getattr(node, "variable", None), "_fsdp_sharded_param", None)
        if sharded is not None:
            raise RuntimeError(_closes_over(sharded, "torch._dynamo.decorators.leaf_function"))
        nodes += [earlier for earlier, _ in node.next_functions]


def table_of(module: nn.Module) -> ShardedParameters | None:
    """Return the table of a module that registers sharded parameters."""
    params: Any = own_parameters(module)
    return params if isinstance(params, ShardedParameters) else None


def sharded_params_of(module: nn.Module) -> dict[str, ShardedParam]:
    """Return the sharded parameters that a module registers, by name."""
    table = table_of(module)
    return {} if table is None else table.sharded


def replace_functions() -> None:
    """Replace functions of torch for modules with a table, until ``patches.uninstall()``. Other modules keep torch's.

    - Slicing an ``nn.ParameterList`` registers the parameters in a new list, as if they were trained there.
    - ``swap_tensor``, by which ``torch.func.functional_call`` puts tensors into modules, puts back the full parameter that it
      found in a forward.
    - ``check_escaped_gradients``, which torch calls after each leaf function, does its work by request only.
    """

    def make_getitem(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def getitem(self: Any, index: Any) -> Any:
            if isinstance(index, slice) and table_of(self) is not None:
                return [self[position] for position in range(len(self))[index]]
            return original(self, index)

        return getitem

    def make_swap(original: Callable[..., Any]) -> Callable[..., Any]:
        def swap(module: nn.Module, name: str, tensor: Any, allow_missing: bool = False) -> Any:
            table = table_of(module)
            if table is not None and isinstance(tensor, Tensor | tuple) and name in table.sharded:
                return table.swap(name, tensor)
            return original(module, name, tensor, allow_missing)

        return swap

    def make_check(original: Callable[..., None]) -> Callable[..., None]:
        def check(outputs: Any, inputs: Sequence[Any], requires_grad_indices: set[int]) -> None:
            _refuse_escaped_parameters(outputs, inputs)
            original(outputs, inputs, requires_grad_indices)

        return check

    slice_parameter_list.install(make_getitem)
    swap_tensor.install(make_swap)
    check_escaped_gradients.install(make_check)
