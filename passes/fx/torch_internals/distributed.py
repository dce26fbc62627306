"""Names of torch.distributed that are not public."""

# Loads the last two of the places below.
import torch.distributed._composable.fsdp

# Under these keys a module says which composable APIs were applied to it, and what state they have for it.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

# The names of reductions in functional collectives, for those that a traced hook calls; and what such a collective returns
# outside of a graph: a subclass, but no value of another kind.
from torch.distributed._functional_collectives import REDUCE_OP_TO_STR, AsyncCollectiveTensor

# Whether Inductor may fuse a group's collectives with products.
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

# FSDP1's communication hooks and their states, which users hand over.
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, LowPrecisionState

# Sharded parameters are DTensors that are made of a shard and a spec, as FSDP2's are, without autograd or communication.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# How FSDP2 says that a dimension was cut by another parallelism first. Alike in torch 2.11 to 2.15.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# Ranks that ``cuda_code`` pretends: importing it registers the backend ``fake``. From 2.14 on the class is written in C++.
from torch.testing._internal.distributed.fake_pg import FakeStore

# Where torch offers FSDP2's ``fully_shard``. Its own modules that use it ask it for what FSDP2 sharded, and go on doing so.
NAMESPACES_OF_FULLY_SHARD = {
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
}

# Process groups by their names, as operators in graphs have them, and the store that a group was made with.
resolve_process_group = torch.distributed.distributed_c10d._resolve_process_group
get_process_group_store = torch.distributed.distributed_c10d._get_process_group_store

# Messages of ours belong to a result, and are waited for with it.
register_work = torch._C._distributed_c10d._register_work

# A result that is waited for: of a collective that a traced hook calls.
create_work_from_future = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]

# The mesh with the dimensions of several slices of one mesh, as FSDP2 makes it. Takes a list of them, and raises a RuntimeError
# if they are no slices of one mesh, or share a dimension. Alike in torch 2.11 to 2.15.
concatenate_meshes = torch.distributed.device_mesh.DeviceMesh._concatenate
