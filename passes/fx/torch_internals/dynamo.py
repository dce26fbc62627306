"""Dynamo."""

# The function that Dynamo calls with each new frame; None where no compiled function runs.
from torch._C._dynamo.eval_frame import get_eval_frame_callback

# The state of the process that frames are guarded on, such as the grad mode.
from torch._C._dynamo.guards import GlobalStateGuard

# Dynamo's settings.
from torch._dynamo import config as dynamo_config

# ``explain`` marks batch and sequence as dynamic, where the model allows it, to make formulae of the graph. ``cuda_code``
# answers what Dynamo and Inductor ask ``device_interface`` about a GPU. ``convert_frame`` has the state of the process at the
# start of a trace.
from torch._dynamo import convert_frame, device_interface, maybe_mark_dynamic

# The lock that Dynamo holds while it compiles. Variants of a graph are lowered while Dynamo does not run, and take it, too.
# ``DynamoOutput`` is the result of a trace, before its guards are made.
from torch._dynamo.convert_frame import DynamoOutput, compile_lock

# The class of the module that ``torch.compile(module)`` returns. Users may shard it, or the module in it. And what makes Dynamo
# skip the frames of a code object, where ``torch.compiler.disable`` would also unset the callback above. Stored frames are
# looked up for one backend, which Dynamo has wrapped, and say whether a graph break is an error, as a trace does.
from torch._dynamo.eval_frame import OptimizedModule, _get_error_on_graph_break, innermost_backend, skip_code

# The base of all errors that a model raises if it cannot be traced. And that of missing code, which Dynamo does not wrap.
from torch._dynamo.exc import PackageError, TorchDynamoException

# Guards on what Dynamo reads without tracing it. And what makes guards of frames, with the names that their sources may use.
from torch._dynamo.guards import (
    CheckFunctionManager,
    GuardBuilder,
    _get_closure_vars,
    convert_to_concrete_values,
    install_guard,
)

# The result of a trace, in the form in which Dynamo hands it on: stored frames are put into it. And code that pickles.
from torch._dynamo.output_graph import DynamoTracerOutput, OutputGraph
from torch._dynamo.package import SerializedCode

# The sizes that inputs of a frame have had, by which Dynamo makes sizes symbols.
from torch._dynamo.pgo import CodeId, get_code_state

# Where a frame finds a value: an attribute, or an item, of what another source finds. And the source of a symbol that comes
# from nothing in a frame, such as a number of ranks.
from torch._dynamo.source import AttrSource, CallMethodItemSource, ConstantSource, GetItemSource, GlobalSource

# Dynamo turns inference mode off while it compiles.
from torch._dynamo.utils import maybe_disable_inference_mode

# Dynamo's variable for a constant that traced code reads, such as the name of a parameter.
from torch._dynamo.variables import ConstantVariable

# Dynamo's variables for an input of the frame, and for the result of a node.
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy

# The modes of ``__torch_function__`` around a frame, which Dynamo takes off while it compiles.
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr

# A tensor with symbolic sizes, as a trace keeps it to make guards.
from torch.fx.experimental.symbolic_shapes import TrackedFake
