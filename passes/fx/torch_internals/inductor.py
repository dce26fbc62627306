"""Inductor as a compiler, of graphs and of C++."""

import torch._inductor.config as inductor_config

# The options that each mode of torch.compile stands for.
from torch._inductor import list_mode_options

# Kernels are collected, and compiled in the background several to a file (``patches.py``).
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log

# Compiles such a file; its template of bindings is for one function, and is adapted to several. Graphs that rely on more
# conditions than their entry says are taken out of the cache of compiled graphs, and lowered graphs name those in the cache by
# their keys. The key of a graph without nodes tells what else the code of graphs depends on.
from torch._inductor.codecache import CppPythonBindingsCodeCache, FxGraphCache, compiled_fx_graph_hash

# Inductor's backend, on which this library's is built. Its parameter ``inner_compile`` gets forward and backward graphs. From
# 2.12 on, both also take ``compile_region_name``, which is passed on among the keywords.
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

# The compiler that instruction sets are probed with. From 2.15 on, ``get_cpp_compiler`` takes a device; by default it is the
# host.
from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

# Inductor's probe of instruction sets.
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

# Base classes of Inductor's hooks. Its cache asks them for a key of everything that their result depends on.
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

# Inductor's patterns of products to pad. They run over segments, and a set of patterns without any others takes the place of
# ``joint_graph.patterns`` while they register.
from torch._inductor.fx_passes import joint_graph, pad_mm

# Inductor's overlap of tensor parallelism. It runs on whole graphs, as segments hold no collectives.
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.pad_mm import _pad_mm_init

# ``cuda_code`` stops a lowering when the code is written, before it is loaded.
from torch._inductor.graph import GraphLowering

# The operator by which the overlap pass sets the strides of a tensor.
from torch._inductor.inductor_prims import force_stride_order

# The node of generated C++ loops, with the indices that they read.
from torch._inductor.ir import ComputedBuffer

# A graph that is taken from Inductor's cache gets the constants that it was compiled with.
from torch._inductor.output_code import CompiledFxGraphConstants

# A set of patterns, and its replacement of what they match.
from torch._inductor.pattern_matcher import PatternMatcherPass

# Locks lie in the folder of the cache that they protect.
from torch._inductor.runtime.cache_dir_utils import cache_dir

# Uses an empty folder for the cache while a block runs.
from torch._inductor.utils import fresh_cache
from torch.utils._sympy.functions import FloorDiv

# Loads a library by its path and key, given the class of its bindings, a subclass of ``CppPythonBindingsCodeCache``.
load_bindings = CppPythonBindingsCodeCache._load_library.__func__  # type: ignore[attr-defined]
