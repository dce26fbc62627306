"""AOTAutograd, and what Inductor does to whole graphs before it lowers them."""

# Switches of AOTAutograd that a compilation with parameters that outlive it needs.
import torch._functorch.config as functorch_config

# ``explain`` keeps the partitioner from asking a GPU that is not there for its generator. A memory budget has it partition a
# joint graph several times.
import torch._functorch.partitioners as partitioners

# A layer that stands for others is traced, forward and backward, as compiled code is; what is public traces for export, and
# decomposes more.
from torch._functorch.aot_autograd import aot_function

# The clean-up of joint graphs, which a layer that is traced alone goes through, too. ``cuda_code`` lets the class fold
# constants on the CPU.
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder, joint_graph_passes

# Puts what passes inserted behind what it reads, and leaves the rest in order.
from torch._inductor.pattern_matcher import stable_topological_sort

# Inductor's globals: its fake mode is one of them.
from torch._inductor.virtualized import V
