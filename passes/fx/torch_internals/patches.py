"""All replacements in torch, except those of ``cuda_code`` (``fsdp_compile/cuda/pretend.py``).

Methods are replaced by what is given the method that was there, to fall back to: for a ``with`` block, or from
:meth:`Method.install` to :func:`uninstall`, as kernels of operators are from :func:`install_kernel` on. Then torch has its own
again. No import replaces anything.
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
    """A method of a class of torch's, or a function that its module calls.

    Attributes:
        owner: the class, as ``"module:class"``, or the module: it is imported when it is needed.
        name: of the method.
        parameters: how many it has, which its replacement takes.
    """

    owner: str
    name: str
    parameters: int

    def is_known(self) -> bool:
        """Whether the installed torch has such a method."""
        found = vars(self._owner()).get(self.name)
        return callable(found) and len(signature(found).parameters) == self.parameters

    @contextlib.contextmanager
    def replaced(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Replace the method inside of the ``with`` block, for all threads.

        Args:
            make: makes the replacement of the method that is there.
        """
        owner = self._owner()
        original = vars(owner)[self.name]
        setattr(owner, self.name, make(original))
        try:
            yield
        finally:
            setattr(owner, self.name, original)

    def install(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the method until :func:`uninstall`, unless it is already, or the installed torch has no such method."""
        if self not in _originals and self.is_known():
            owner = self._owner()
            _originals[self] = vars(owner)[self.name]
            setattr(owner, self.name, make(_originals[self]))

    def uninstall(self) -> None:
        """Give torch its own method back."""
        setattr(self._owner(), self.name, _originals.pop(self))

    def _owner(self) -> Any:
        return pkgutil.resolve_name(self.owner)


# While a graph is lowered for the CPU: kernels are collected, to be compiled several to a file, and waited for all at once
# (``fsdp_compile/compiler/background_kernels.py``). Alike in torch 2.11 to 2.15.
compile_kernel = Method("torch._inductor.async_compile:AsyncCompile", "cpp_pybinding", parameters=3)
wait_for_kernels = Method("torch._inductor.async_compile:AsyncCompile", "wait", parameters=2)

# While Inductor finds out what the processor can do: a quicker probe comes first (same file). Alike in torch 2.11 to 2.15.
check_build = Method("torch._inductor.cpu_vec_isa:VecISA", "check_build", parameters=2)

# While a graph is lowered for the CPU: loops are split only where that is right
# (``fsdp_compile/compiler/loop_splits.py``). Alike in torch 2.11 to 2.15.
try_loop_split = Method("torch._inductor.codegen.cpp:CppScheduling", "try_loop_split", parameters=2)

# While a group is made that only its own ranks know of (``passes/collectives/local_groups.py``): torch names it by how many
# groups the rank has, and ranks with unequal numbers wait for each other. Alike in torch 2.11 to 2.15.
hash_ranks_to_str = Method("torch.distributed.distributed_c10d", "_hash_ranks_to_str", parameters=1)

# From the first sharded module on, when Dynamo traces what reads an attribute of it: what the module registers is looked up at
# once, as torch does where that is in plain dictionaries (``fsdp_compile/compiler/registered_attributes.py``). Tried with torch
# 2.13; without such a method, Dynamo traces the lookup.
read_module_attribute = Method("torch._dynamo.variables.nn_module:UnspecializedNNModuleVariable", "var_getattr", parameters=3)

# From the first sharded module on: a slice of a list of parameters, which torch registers in a new list, as if each was one
# that is trained there (``fsdp_compile/api/parameters.py``). Tried with torch 2.13.
slice_parameter_list = Method("torch.nn.modules.container:ParameterList", "__getitem__", parameters=2)

# From the first sharded module on: how ``torch.func.functional_call`` puts tensors into modules, which traced code of sharded
# ones would not see (``fsdp_compile/api/parameters.py``). Tried with torch 2.13.
swap_tensor = Method("torch.nn.utils._named_member_accessor", "swap_tensor", parameters=4)

# Gloo's (``passes/collectives/gloo.py``), from the first mesh over Gloo: torch's gather can abort the process, has none on a
# GPU, and its exchange uses one direction of a connection at a time. Alike in torch 2.11 to 2.15.
all_gather = "_c10d_functional::all_gather_into_tensor"
all_to_all = "_c10d_functional::all_to_all_single"

_originals: dict[Method, Callable[..., Any]] = {}
_installed: dict[tuple[str, str], torch.library.Library] = {}


def install_kernel(operator: str, kernel: Callable[..., Any], device_type: str) -> None:
    """Give an operator another kernel for a kind of device, unless it has one from here.

    Args:
        operator: its name, with that of its library.
        kernel: takes and returns what the operator does; Dynamo does not look into it.
        device_type: such as "cpu".
    """
    key = device_type.upper()
    if (operator, key) in _installed:
        return
    library = torch.library.Library(operator.split("::")[0], "IMPL")
    library.impl(operator, disable_dynamo(kernel), key)
    _installed[operator, key] = library


def uninstall() -> None:
    """Give torch its own methods and kernels back. What is sharded after this installs others where it needs them."""
    for method in list(_originals):
        method.uninstall()
    while _installed:
        _, library = _installed.popitem()
        # Deleting a library does it some time later.
        library._destroy()
