"""Names that ``import torch`` loads: fake and functional tensors, contexts of a compilation, parts of FX and autograd."""

import torch

# Joint graphs have been decomposed when passes write to them; what passes write is decomposed likewise.
from torch._decomp import get_decompositions

# Variants of a graph are lowered long after AOTAutograd has returned, in the contexts that it had. ``TracingContext`` also says
# which fake mode a compilation works in.
from torch._guards import CompileContext, TracingContext, compile_context, tracing

# Passes are logged as torch's own are, for ``TORCH_TRACE`` and tlparse; the logger says whether anything listens.
from torch._logging import trace_structured
from torch._logging._internal import trace_log

# Tells operators from other functions in a graph, and has their schema.
from torch._ops import OpOverload

# The strides that a tensor of a certain shape has where nothing else is said.
from torch._prims_common import make_contiguous_strides_for

# ``cuda_code`` keeps fake tensors from looking for a device: functions of the module are replaced.
from torch._subclasses import fake_tensor

# To know fake tensors, and to make them: of a model (FakeCopyMode), or without dispatching an operator for each, as copies of
# layers need by the thousand (in_kernel_invocation_manager, and ``FakeTensor(mode, meta, device)`` by position: from 2.13 on
# its first parameter has another name).
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)

# Communication hooks are traced as AOTAutograd traces: functionalised. From 2.14 on a parameter of ``dispatch_functionalize``
# says whether writes reach the inputs; by default they do not, as before.
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, dispatch_functionalize

# ``Tensor.backward`` and ``autograd.grad`` call it by a global name of their module, where ``cuda_code`` puts its own:
# this is torch's, bound at import, while no one has put another there.
from torch.autograd.graph import _engine_run_backward  # type: ignore[attr-defined]

# Graph modules whose Python code is not written until it is called: segments never are, Inductor reads their graph.
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_pre_hooks

# Trees of what modules take and give out, in the form that Dynamo traces.
from torch.utils import _pytree as pytree

# Modes see every operator, those too that a function calls by way of others. Tensors of subclasses that AOTAutograd takes apart
# are more than one input of a graph.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

# The innermost mode that sees operators, if any.
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

# What expressions of sizes are written with.
from torch.utils._sympy import functions as sympy_functions

# Conditions on sizes are checked as Python.
from torch.utils._sympy.printers import PythonPrinter

# Autograd's engine: which backward runs (-1: none), whether it is to run a node, and what it is to call when it ends.
current_graph_task_id = torch._C._current_graph_task_id
will_engine_execute_node = torch._C._will_engine_execute_node
queue_callback = torch.autograd.Variable._execution_engine.queue_callback

# How many tensors share a memory, given the address of its storage.
storage_use_count = torch._C._storage_Use_Count

# Lowered graphs run below autograd, which has nothing to record there.
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd

# Uncompiled units leave tensors to the saved-tensor hooks of others, if these have any, and do without hooks where those are
# refused.
saved_tensors_hooks_is_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# Whether a transform of torch.func, or a mode that traces, sees what is dispatched: no time to communicate.
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
TorchDispatchModeKey = torch._C._TorchDispatchModeKey
get_dispatch_mode = torch._C._get_dispatch_mode

# Marks Python code in a forward that Dynamo has to call instead of tracing it. ``torch.compiler.disable`` would
# load Dynamo where the function is defined.
disable_dynamo = torch._disable_dynamo

# Ranges in profiles, at a tenth of the cost of ``torch.profiler.record_function``.
RecordFunctionFast = torch._C._profiler._RecordFunctionFast

# Many copies by one operator: of the inputs of a recorded graph.
foreach_copy_ = torch._foreach_copy_

# A storage over memory of a recorded graph, which outputs of its replays lie in.
construct_storage_from_data_pointer = torch._C._construct_storage_from_data_pointer

# A hook's functional tensors: what they stand for, and whether the hook has written to them.
from_functional_tensor = torch._from_functional_tensor
functionalize_has_data_mutation = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
sync_functional_tensor = torch._sync

# Modules of torch call it to count their uses: a folded layer need not repeat it.
log_api_usage_once = torch._C._log_api_usage_once
