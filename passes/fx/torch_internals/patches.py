"""All replacements in torch, except those of ``cuda_code`` (``fsdp_compile/cuda/pretend.py``).

A replacement gets the original method, to fall back to. It holds for a ``with`` block (:meth:`Method.replaced`), or from
:meth:`Method.install` until :func:`uninstall`. Kernels of operators are replaced from :func:`install_kernel` until
:func:`uninstall`. Importing replaces nothing.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch.library

from .core import disable_dynamo


@dataclass(frozen=True)
class Method:
    """A method of one of torch's classes, or a global function of one of its modules.

    Attributes:
        owner: the class, as ``"module:class"``, or the module. It is imported when it is needed.
        name: the name of the method.
        parameters: the number of parameters that the replacement takes, and that the installed torch's method must have.
    """

    owner: str
    name: str
    parameters: int

    def is_known(self) -> bool:
        """Return whether the installed torch has the method, with this number of parameters."""
        try:
            owner = self._owner()
        except ImportError:
            return False
        found = vars(owner).get(self.name)
        return callable(found) and len(signature(found).parameters) == self.parameters

    @contextlib.contextmanager
    def replaced(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Replace the method inside of the ``with`` block, for all threads.

        Args:
            make: takes the original method and returns the replacement.
        """
        owner = self._owner()
        original = vars(owner)[self.name]
        setattr(owner, self.name, make(original))
        try:
            yield
        finally:
            setattr(owner, self.name, original)

    def install(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the method until :func:`uninstall`.

        Nothing happens if it is replaced already, or if the installed torch has no such method.

        Args:
            make: takes the original method and returns the replacement.
        """
        if self not in _originals and self.is_known():
            owner = self._owner()
            _originals[self] = vars(owner)[self.name]
            setattr(owner, self.name, make(_originals[self]))

    def uninstall(self) -> None:
        """Give torch its own method back."""
        setattr(self._owner(), self.name, _originals.pop(self))

    def _owner(self) -> Any:
        return pkgutil.resolve_name(self.owner)


# While a graph is lowered for the CPU: collects kernels, to compile several in a file and to wait for all at once
# (``fsdp_compile/compiler/background_kernels.py``). The same in torch 2.11 to 2.15.
compile_kernel = Method("torch._inductor.async_compile:AsyncCompile", "cpp_pybinding", parameters=3)
wait_for_kernels = Method("torch._inductor.async_compile:AsyncCompile", "wait", parameters=2)

# While Inductor probes the processor's instruction sets: tries a quicker probe first (same file). The same in torch 2.11 to
# 2.15.
check_build = Method("torch._inductor.cpu_vec_isa:VecISA", "check_build", parameters=2)

# While a graph is lowered for the CPU: splits loops only where that loses no elements
# (``fsdp_compile/compiler/loop_splits.py``). The same in torch 2.11 to 2.15.
try_loop_split = Method("torch._inductor.codegen.cpp:CppScheduling", "try_loop_split", parameters=2)

# While a graph is traced: keeps the first proxy of a symbol (``fsdp_compile/compiler/traced_sizes.py``). Tested with torch
# 2.13; without such a function, tensor parallel layers with dynamic lengths may not be traced.
set_proxy_slot = Method("torch.fx.experimental.proxy_tensor", "set_proxy_slot", parameters=3)

# While a graph is partitioned: saves no states of random number generators for attention without dropout
# (``fsdp_compile/compiler/recomputed_attention.py``). Tested with torch 2.13; without such a function, they are saved.
functionalize_rng_ops = Method("torch._functorch.partitioners", "functionalize_rng_ops", parameters=4)

# While a group is made that only its own ranks know of (``passes/collectives/local_groups.py``): names it. torch's name counts
# the groups of the rank, so ranks with unequal numbers wait for each other forever. The same in torch 2.11 to 2.15.
hash_ranks_to_str = Method("torch.distributed.distributed_c10d", "_hash_ranks_to_str", parameters=1)

# From the first sharded module on, when Dynamo traces a read of its attribute: looks up registered parameters and submodules
# directly, as torch does in plain dictionaries (``fsdp_compile/compiler/registered_attributes.py``). The second name is that of
# torch 2.14 and later. Without such a method, Dynamo traces the lookup.
read_module_attribute = (
    Method("torch._dynamo.variables.nn_module:UnspecializedNNModuleVariable", "var_getattr", parameters=3),
    Method("torch._dynamo.variables.nn_module:UnspecializedNNModuleVariable", "tp_getattro_impl", parameters=3),
)

# From the first sharded module on, when Dynamo guards on an attribute of a module: has the guard read sharded parameters by
# ``getattr``. torch's guard looks into ``_parameters`` in C++, as into a dictionary, and fails
# (``fsdp_compile/compiler/registered_attributes.py``). Tested with torch 2.13.
guard_module_attribute = Method("torch._dynamo.guards:GuardBuilder", "getattr_on_nn_module", parameters=8)

# From the first sharded module on, when Dynamo traces a call of an operator: makes an ``unshard`` an ``nn.Parameter``, and
# those of one shard one object (``fsdp_compile/compiler/registered_attributes.py``). Tested with torch 2.13; without such a
# method, code that asks for either gets another answer than without compilation.
call_operator = Method("torch._dynamo.variables.torch:TorchInGraphFunctionVariable", "call_function", parameters=4)

# From the first sharded module on, when Dynamo is about to trace a frame that this library's backend compiles: takes what an
# earlier process has made of the frame (``fsdp_compile/compiler/stored_frame.py``). Tested with torch 2.13; without such a
# function, every process traces.
trace_frame = Method("torch._dynamo.convert_frame", "compile_frame", parameters=13)

# From the first sharded module on: makes a slice of a list of sharded parameters a plain list. torch would register the slice
# in a new ``nn.ParameterList``, as if each parameter was trained there (``fsdp_compile/api/parameters.py``). Tested with torch
# 2.13.
slice_parameter_list = Method("torch.nn.modules.container:ParameterList", "__getitem__", parameters=2)

# From the first sharded module on: makes ``torch.func.functional_call`` put tensors into the tables of sharded modules. Traced
# code would not see them elsewhere (``fsdp_compile/api/parameters.py``). Tested with torch 2.13.
swap_tensor = Method("torch.nn.utils._named_member_accessor", "swap_tensor", parameters=4)

# From the first sharded module on: raises where a leaf function of Dynamo reads a sharded parameter that is not among its
# arguments. torch loses such gradients, and checks for them only by request (``fsdp_compile/api/parameters.py``). Tested with
# torch 2.13.
check_escaped_gradients = Method("torch._higher_order_ops.invoke_leaf_function", "check_escaped_gradients", parameters=3)

# From the first sharded module on: removes the saved-tensor hooks of units while ``torch.func.grad``, ``vjp`` or what builds on
# them runs in the forward of a unit that reshards after it (``fsdp_compile/runtime/func_transforms.py``). Tested with torch
# 2.13.
gradient_transforms = (
    Method("torch._functorch.eager_transforms", "grad_and_value_impl", parameters=5),
    Method("torch._functorch.eager_transforms", "_vjp_with_argnums", parameters=4),
)

# Operators with other kernels over Gloo, from the first mesh over Gloo on (``passes/collectives/gloo.py``). torch's gather can
# abort the process and has no kernel on a GPU. Its exchange uses one direction of a connection at a time. Ranks that wait in
# its all-reduce cannot be woken without the group becoming unusable. The same in torch 2.11 to 2.15.
all_gather = "_c10d_functional::all_gather_into_tensor"
all_to_all = "_c10d_functional::all_to_all_single"
all_reduce = "_c10d_functional::all_reduce"
all_reduce_in_place = "_c10d_functional::all_reduce_"

_originals: dict[Method, Callable[..., Any]] = {}
_installed: dict[tuple[str, str], torch.library.Library] = {}


def install_kernel(operator: str, kernel: Callable[..., Any], device_type: str) -> None:
    """Replace an operator's kernel for a kind of device until :func:`uninstall`, unless it is replaced already.

    Args:
        operator: the operator's name, as ``"library::name"``.
        kernel: takes and returns the same as the operator. Dynamo does not trace it.
        device_type: the kind of device, such as "cpu".
    """
    key = device_type.upper()
    if (operator, key) in _installed:
        return
    library = torch.library.Library(operator.split("::")[0], "IMPL")
    library.impl(operator, disable_dynamo(kernel), key)
    _installed[operator, key] = library


def uninstall() -> None:
    """Give torch its own methods and kernels back. Models that are sharded later replace them again."""
    for method in list(_originals):
        method.uninstall()
    while _installed:
        _, library = _installed.popitem()
        # Deleting the library would remove its kernels at some later time.
        library._destroy()
