"""Parameters that graphs read where they are stored, without a gather: scalars, and all of placement "ddp".

Autograd saves the memory of such a parameter, so backward must find the values of its forward. A write that no version counter
of that memory tells of would change gradients silently; as with DDP, it raises:

- A backward of the *last* forward checks that the parameter's stamp is the one of that forward (:func:`check_is_as_read`).
- For an earlier forward, autograd itself finds that the shard that it saved is of an earlier version (:func:`note_read`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from passes.collectives.layout import REPLICATED

from ..units.param_state import stamp
from ..units.sharded_param import ShardedParam, params_with_memory

#: The parameters of each optimizer that graphs read where they are stored, with the number of all its parameters.
_stored_in: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[nn.Parameter]]] = weakref.WeakKeyDictionary()


def note_read(params: Iterable[ShardedParam]) -> None:
    """Note that a forward reads parameters where they are stored, and end earlier forwards' right to read what has changed."""
    written = []
    for param in params:
        version = stamp(param.param)[:2]
        if param.state.read_at != version:
            param.state.read_at = version
            written.append(param.shard)
    if written:
        increment_version(written)


def check_is_as_read(param: ShardedParam) -> None:
    """Check that a parameter was not written since the last forward that read it where it is stored.

    Raises:
        RuntimeError: it was.
    """
    if param.state.read_at not in (None, stamp(param.param)[:2]):
        raise written_since_forward(param)


def written_since_forward(param: ShardedParam) -> RuntimeError:
    """Return the error for a backward that needs a parameter as it was in forward."""
    return RuntimeError(
        f"Parameter {param.name} was written after a forward whose backward needs it as it was. Call backward ahead of "
        "optimizer.step() and load_state_dict()."
    )


def _count_writes(optimizer: Optimizer, *_: object) -> None:
    """Count the writes of a step on parameters that are read where they are stored. Fused and flat steps count none."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known, stored = _stored_in.get(optimizer, (-1, []))
    if known != count:
        sharded = params_with_memory()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        stored = [param for param in params if id(param) in sharded and sharded[id(param)].dim == REPLICATED]
        _stored_in[optimizer] = count, stored
    written = [param for param in stored if param.grad is not None]
    if written:
        increment_version(written)


register_optimizer_step_post_hook(_count_writes)
