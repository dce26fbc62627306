"""Whole units: compiled code gathers and reduces all parameters of a unit, also those that its forward does not read.

Compiled code leaves out parameters that a graph does not read. Where ranks read different parameters of a unit, their
collectives would differ. With ``set_reduce_scatter_unused_params(True)``, which says that this may be so, they are those of the
whole unit, as FSDP2's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.fx.torch_internals.core import pytree
from passes.fx.torch_internals.objects import own_parameters
from passes.ir.ops import unshard, with_unit

from ..units.sharded_param import shard_attribute
from ..units.unit import Unit


def with_unit_of(unit: Unit, result: Any) -> Any:
    """Make the results of a unit's forward depend on all parameters of the unit. Dynamo traces it.

    Parameters with an all-gather extension, and those in whose place a tensor stands, are left out.
    """
    fulls = []
    for param in unit.params:
        module, name = param.owners[0]
        found = getattr(own_parameters(module), shard_attribute(name))
        if type(found) is tuple and param.extension is None:
            shard, (args, kwargs), *_ = found
            fulls.append(unshard(shard, *args, **kwargs))
    leaves, spec = pytree.tree_flatten(result)
    candidates = [index for index, leaf in enumerate(leaves) if _is_floating_point(leaf)]
    # A detached result stays detached, unless there are no others.
    places = [index for index in candidates if leaves[index].requires_grad] or candidates
    if not places or not fulls:
        return result
    for index, value in zip(places, with_unit([leaves[index] for index in places], fulls), strict=True):
        leaves[index] = value
    return pytree.tree_unflatten(leaves, spec)


def _is_floating_point(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.is_floating_point()
