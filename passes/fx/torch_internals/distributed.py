"""Names of torch.distributed that are not public."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

# Loads the last two of ``NAMESPACES_OF_FULLY_SHARD``.
import torch.distributed._composable.fsdp

# The keys under which a module holds the composable APIs that were applied to it, and their state.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

# The names of reductions in functional collectives, for those that a traced hook calls. Outside of a graph, such collectives
# return an ``AsyncCollectiveTensor``: a subclass that stands for a plain tensor.
from torch.distributed._functional_collectives import REDUCE_OP_TO_STR, AsyncCollectiveTensor

# Tells whether Inductor may fuse a group's collectives with matrix products.
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

# FSDP1's communication hooks and their states, which users pass.
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, LowPrecisionState

# Sharded parameters are DTensors, made of a shard and a spec without autograd or communication, as FSDP2's are.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# FSDP2's placement of a dimension that another parallelism has already sharded. The same in torch 2.11 to 2.15.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# The store of the ranks that ``cuda_code`` pretends. The import registers the backend ``fake``. From 2.14 on, the class is C++.
from torch.testing._internal.distributed.fake_pg import FakeStore

# The modules of torch that offer FSDP2's ``fully_shard``. Other modules of torch use it for models that FSDP2 sharded, and keep
# it.
NAMESPACES_OF_FULLY_SHARD = {
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
}

# Find a process group by its name, which operators in graphs hold, and the store that a group was made with.
resolve_process_group = torch.distributed.distributed_c10d._resolve_process_group
# Gives a process group a further name. Raises RuntimeError if the name is taken. Names go with the default group.
register_process_group = torch._C._distributed_c10d._register_process_group
get_process_group_store = torch.distributed.distributed_c10d._get_process_group_store

# Attaches messages of this library to a result tensor, whose wait then waits for them.
register_work = torch._C._distributed_c10d._register_work

# Returns how many collectives this rank has begun over a group. Over Gloo, messages between two ranks count, too.
sequence_number = torch.distributed.ProcessGroup._get_sequence_number_for_group  # type: ignore[attr-defined]

# Makes the work object that a collective in a traced hook returns.
create_work_from_future = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]

# Makes a mesh of the dimensions of several slices of one mesh, as FSDP2 does. Takes a list of slices. Raises RuntimeError if
# they are not slices of one mesh, or share a dimension. The same in torch 2.11 to 2.15.
concatenate_meshes = torch.distributed.device_mesh.DeviceMesh._concatenate


class CheckpointHooks:
    """The hooks of composable ``checkpoint`` around a module, and the arguments that it got.

    Attributes:
        options: the arguments for ``torch.utils.checkpoint.checkpoint``, without those that have their default.
    """

    # The hook's closure has the arguments, all but one by their names.
    _DEFAULTS: ClassVar = {
        "user_context_fns": None,
        "preserve_rng_state": True,
        "determinism_check": "default",
        "debug": False,
        "early_stop": True,
    }

    def __init__(self, module: Any, before: int, after: int):
        self._module, self._before, self._after = module, before, after
        given = inspect.getclosurevars(module._forward_pre_hooks[before]).nonlocals
        chosen = {name: given[name] for name, default in self._DEFAULTS.items() if given.get(name, default) != default}
        self.options = {"context_fn" if name == "user_context_fns" else name: value for name, value in chosen.items()}

    @staticmethod
    def of(module: Any) -> CheckpointHooks | None:
        """Return the hooks around a module; None if it has none."""
        before, after = (
            next((key for key, hook in hooks.items() if _is_of_checkpoint(hook, name)), None)
            for hooks, name in ((module._forward_pre_hooks, "forward_pre_hook"), (module._forward_hooks, "forward_hook"))
        )
        return None if before is None or after is None else CheckpointHooks(module, before, after)

    def wrap(self, begin: Callable[[Any], Any], end: Callable[[Any], Any]) -> None:
        """Put other hooks in the place of the two, which ``begin`` and ``end`` make of them."""
        before, after = self._module._forward_pre_hooks, self._module._forward_hooks
        before[self._before], after[self._after] = begin(before[self._before]), end(after[self._after])


def _is_of_checkpoint(hook: Any, name: str) -> bool:
    is_torchs = getattr(hook, "__module__", "") == "torch.distributed._composable.checkpoint_activation"
    return is_torchs and hook.__qualname__ == f"checkpoint.<locals>.{name}"
