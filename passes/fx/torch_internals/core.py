"""Names that ``import torch`` loads: fake and functional tensors, contexts of a compilation, parts of FX and autograd."""

import torch

# Joint graphs are decomposed before passes write into them, so new nodes are decomposed, too.
from torch._decomp import get_decompositions

# Operators with symbolic sizes are evaluated as in the trace, by torch's kernels in Python.
from torch._dispatch.python import enable_python_dispatcher

# Variants of a graph are lowered long after AOTAutograd has returned, in the contexts that it had. ``TracingContext`` also has
# the fake mode of a compilation. ``Guard`` is a guard of a frame.
from torch._guards import CompileContext, Guard, TracingContext, compile_context, tracing

# Passes are logged like torch's own, for ``TORCH_TRACE`` and tlparse. The logger tells whether anything listens.
from torch._logging import trace_structured
from torch._logging._internal import trace_log

# The classes of operators in a graph, which tell them from other functions and have their schema, and of those with bodies.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# The strides of a contiguous tensor of a certain shape.
from torch._prims_common import make_contiguous_strides_for

# ``cuda_code`` replaces functions of the module, so that fake tensors do not look for a device.
from torch._subclasses import fake_tensor

# Recognise and make fake tensors. ``FakeCopyMode`` makes those of a model. ``in_kernel_invocation_manager`` makes the thousands
# that copies of layers need, without dispatching an operator for each. ``FakeTensor(mode, meta, device)`` is called by
# position, as its first parameter has another name from 2.13 on.
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)

# Communication hooks are functionalised, as AOTAutograd does when it traces. From 2.14 on, a parameter of
# ``dispatch_functionalize`` says whether writes reach the inputs; by default they do not, as before.
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, dispatch_functionalize

# ``Tensor.backward`` and ``autograd.grad`` call it by a global name of their module, which ``cuda_code`` rebinds. This name is
# bound at import, before that, so it is torch's own function.
from torch.autograd.graph import _engine_run_backward  # type: ignore[attr-defined]

# Graph modules that write their Python code at the first call. Segments are never called, as Inductor reads their graph.
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

# Hooks of all modules, which run before FSDP2 gathers a unit.
from torch.nn.modules.module import _global_forward_pre_hooks as global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_pre_hooks

# Trees of the inputs and outputs of modules, in the form that Dynamo traces.
from torch.utils import _pytree as pytree

# Modes see every operator, including those that a function calls indirectly. AOTAutograd takes traceable subclasses apart, so
# one tensor may be several inputs of a graph. Dynamo compiles nothing in modes that do not leave compiled code alone.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_in_any_mode_without_ignore_compile_internals,
    is_traceable_wrapper_subclass,
)

# The sympy functions in expressions of sizes.
from torch.utils._sympy import functions as sympy_functions

# Prints conditions on sizes as Python, which checks them.
from torch.utils._sympy.printers import PythonPrinter

# Autograd's engine: the backward that runs (-1: none), the node, whether it will run a node, and callbacks at its end.
current_graph_task_id = torch._C._current_graph_task_id
current_autograd_node = torch._C._current_autograd_node
will_engine_execute_node = torch._C._will_engine_execute_node
queue_callback = torch.autograd.Variable._execution_engine.queue_callback

# The keys by which operators on a tensor are dispatched.
dispatch_keys = torch._C._dispatch_keys

# The number of tensors that share a memory, given the address of its storage.
storage_use_count = torch._C._storage_Use_Count

# Lowered graphs run below autograd, which has nothing to record in them.
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd

# Uncompiled units pass tensors on to the saved-tensor hooks around theirs, and set no hooks where hooks are disabled.
saved_tensors_hooks_is_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# Tensors in a transform of torch.func wrap others, whose memory they share.
get_unwrapped = torch._C._functorch.get_unwrapped
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor

# Tell whether a transform of torch.func, or a mode that traces, sees operators: then units do not communicate.
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
TorchDispatchModeKey = torch._C._TorchDispatchModeKey
get_dispatch_mode = torch._C._get_dispatch_mode

# Marks Python code in a forward that Dynamo calls instead of tracing it. ``torch.compiler.disable`` would load Dynamo when the
# function is defined.
disable_dynamo = torch._disable_dynamo

# Ranges in profiles, at a tenth of the cost of ``torch.profiler.record_function``.
RecordFunctionFast = torch._C._profiler._RecordFunctionFast

# Copies many tensors by one operator, such as the inputs of a recorded graph.
foreach_copy_ = torch._foreach_copy_

# Makes a storage over memory of a recorded graph, for outputs of its replays.
construct_storage_from_data_pointer = torch._C._construct_storage_from_data_pointer

# The functional tensors of a traced hook: the tensor inside, and whether the hook has written to it.
from_functional_tensor = torch._from_functional_tensor
functionalize_has_data_mutation = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
sync_functional_tensor = torch._sync

# Makes tensors of a subclass that holds others, for subclasses that cannot do it themselves.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

# Modules of torch call it to count their uses, which a folded layer need not repeat.
log_api_usage_once = torch._C._log_api_usage_once
