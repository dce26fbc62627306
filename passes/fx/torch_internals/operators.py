"""Inductor's own operators, and its decompositions of ATen's. They load little of Inductor."""

import torch

# Registers the operators below.
import torch._inductor.inductor_prims

# Hooks and layers are traced into graphs that are decomposed already, so they are decomposed as Inductor does.
from torch._inductor.decomposition import select_decomp_table

# Fixes the strides of a value in Inductor, whose kernels may else write it with others.
force_stride_order = torch.ops.prims.inductor_force_stride_order.default

# Random numbers in Inductor's graphs: one operator makes all seeds of a graph, another looks one up.
seeds = torch.ops.prims.inductor_seeds.default
lookup_seed = torch.ops.prims.inductor_lookup_seed.default
