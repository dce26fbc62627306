"""Inductor's own operators, and how it decomposes those of ATen: light, next to the rest of Inductor."""

import torch

# Registers the operators below.
import torch._inductor.inductor_prims

# Graphs that go into others, and layers that are traced for all of their kind, are decomposed as Inductor decomposes.
from torch._inductor.decomposition import select_decomp_table

# Gives a value its strides in Inductor, where a kernel could write it otherwise.
force_stride_order = torch.ops.prims.inductor_force_stride_order.default

# Random numbers on Inductor's graphs: the seeds of a graph, one operator for all, and one of them.
seeds = torch.ops.prims.inductor_seeds.default
lookup_seed = torch.ops.prims.inductor_lookup_seed.default
