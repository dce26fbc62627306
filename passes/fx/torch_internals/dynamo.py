"""Dynamo."""

# The function that Dynamo calls with each new frame; None where no compiled function runs.
from torch._C._dynamo.eval_frame import get_eval_frame_callback

# ``explain`` marks batch and sequence as dynamic, where the model allows it, to make formulae of the graph. ``cuda_code``
# answers what Dynamo and Inductor ask ``device_interface`` about a GPU.
from torch._dynamo import device_interface, maybe_mark_dynamic

# The lock that Dynamo holds while it compiles. Variants of a graph are lowered while Dynamo does not run, and take it, too.
from torch._dynamo.convert_frame import compile_lock

# The class of the module that ``torch.compile(module)`` returns. Users may shard it, or the module in it. And what makes Dynamo
# skip the frames of a code object, where ``torch.compiler.disable`` would also unset the callback above.
from torch._dynamo.eval_frame import OptimizedModule, skip_code

# The base of all errors that a model raises if it cannot be traced.
from torch._dynamo.exc import TorchDynamoException

# Guards on what Dynamo reads without tracing it.
from torch._dynamo.guards import GuardBuilder, install_guard

# Where a frame finds a value: an attribute, or an item, of what another source finds. And the source of a symbol that comes
# from nothing in a frame, such as a number of ranks.
from torch._dynamo.source import AttrSource, ConstantSource, GetItemSource

# Dynamo's variable for a constant that traced code reads, such as the name of a parameter.
from torch._dynamo.variables import ConstantVariable

# Dynamo's variables for an input of the frame, and for the result of a node.
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
