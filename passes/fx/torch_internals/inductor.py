"""Inductor as a compiler, of graphs and of C++."""

import torch._inductor.config as inductor_config

# The options that each mode of torch.compile is short for.
from torch._inductor import list_mode_options

# Kernels are collected, and compiled in the background several to a file (``patches.py``).
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log

# Compiles such a file: its template of bindings for one function is written for several. And the cache of compiled graphs, from
# which one is taken that relies on more than its entry says.
from torch._inductor.codecache import CppPythonBindingsCodeCache, FxGraphCache

# The backend that is built on; its parameter ``inner_compile`` gets forward and backward graphs. From 2.12 on both take
# ``compile_region_name``, too, which is handed on among the keywords.
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

# Which compiler an instruction set is probed with. ``get_cpp_compiler`` takes a device from 2.15 on; by default it is the host.
from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

# The probe itself.
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

# Hooks of Inductor are objects that say what their result depends on, for its cache.
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

# Its overlap of tensor parallelism, for which segments hold no collectives.
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

# ``cuda_code`` ends a lowering when the code is written, and before it is loaded.
from torch._inductor.graph import GraphLowering

# How that pass has a tensor laid out.
from torch._inductor.inductor_prims import force_stride_order

# What loops of generated C++ read where.
from torch._inductor.ir import ComputedBuffer

# Where locks lie: with the cache that they are for.
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._sympy.functions import FloorDiv
