"""AOTAutograd, and Inductor's passes over whole graphs before it lowers them."""

# Turns off AOTAutograd's cache and donated buffers: gathered parameters that are saved for backward may outlive it. Also sets
# the partitioner's memory budget.
import torch._functorch.config as functorch_config

# ``explain`` keeps the partitioner from asking for the generator of a GPU that does not exist. A memory budget partitions a
# joint graph several times.
import torch._functorch.partitioners as partitioners

# The cache of what AOTAutograd makes of Dynamo's graphs: an exception that leaves a graph out, the base class of its entries,
# and the format of graphs. An entry that lies in a stored frame is read without the cache. ``FakeScriptObject`` stands for a
# value, such as a device mesh, that the format loses.
from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

# Traces one of several equal layers, forward and backward, as compiled code is traced. The public function traces for export,
# and decomposes more operators.
from torch._functorch.aot_autograd import aot_function

# Makes one node of several that compute the same size. ``make_fx`` calls it after each trace.
from torch._inductor.fx_passes.dedupe_symint_uses import dedupe_symints

# Inductor's clean-up of joint graphs, also for a layer that is traced alone. ``cuda_code`` makes the class fold constants on
# the CPU.
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder, joint_graph_passes
from torch._inductor.output_code import OutputCode

# Sorts a joint graph before the passes: Inductor's patterns insert nodes before the ones that they read, and Inductor sorts
# them only after the passes.
from torch._inductor.pattern_matcher import stable_topological_sort

# Inductor's globals, among them its fake mode.
from torch._inductor.virtualized import V
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions
