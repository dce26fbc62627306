"""C++ kernels of generated programs, compiled as one library.

Inductor compiles each kernel by itself, and most of what that takes is not the kernel: behind the precompiled header, the
compiler instantiates for every file what the headers of ATen's vectors need, which is half a second that kernels can share.

The library lives in Inductor's cache and has Inductor's bindings: a Python function for each kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CppPythonBindingsCodeCache

Kernel = Callable[..., None]

# The name that Inductor gives to all of them.
_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')

# Of several kernels what ``CppPythonBindingsCodeCache.suffix_template`` has for one.
_FUNCTION = """
static PyObject* %(name)s_py(PyObject* self, PyObject* args) {
    try {
        if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != %(num_args)s) [[unlikely]]
            throw std::runtime_error("requires a tuple of %(num_args)s args");
        %(name)s(%(args)s);
        Py_RETURN_NONE;
    } catch (std::exception const& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }
    return nullptr;
}
static PyMethodDef %(name)s_method = {"%(name)s", %(name)s_py, METH_VARARGS, ""};
"""


@dataclass(frozen=True)
class PendingKernel:
    """Stands for a kernel of a library.

    Attributes:
        library: the library.
        index: the kernel's place there.
    """

    library: KernelLibrary
    index: int


class KernelLibrary:
    """The kernels that programs ask for, to be compiled together once they have asked for all."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[tuple[str, ...], str], int] = {}
        self._load: Callable[[], Callable[[], Sequence[Kernel]]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nobody has asked for a kernel."""
        return not self._kernels

    @staticmethod
    def takes(source: str) -> bool:
        """Whether a kernel's source can share a file."""
        return len(_ENTRY.findall(source)) == 1

    def add(self, argtypes: Sequence[str], source: str) -> PendingKernel:
        """Something to stand for a kernel until :meth:`fill`.

        Args:
            argtypes: C++ types of its arguments.
            source: C++ of the kernel, as Inductor writes it.
        """
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source)
        # Programs may have a kernel in common.
        return PendingKernel(self, self._kernels.setdefault((tuple(argtypes), source), len(self._kernels)))

    def compile(self) -> None:
        """Begin to compile in the background; where Inductor has no workers for that, :meth:`fill` does it."""
        bindings, code = self._bindings()
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        self._load = bindings.load_pybinding_async([], code, submit_fn=submit)

    def fill(self, scopes: Iterable[dict[str, Any]]) -> None:
        """Wait, and put the kernels among the globals of the programs, in the place of what stands for them."""
        assert self._load is not None, "The library has not been compiled."
        kernels = self._load()()
        for scope in scopes:
            for name, value in scope.items():
                if isinstance(value, PendingKernel) and value.library is self:
                    scope[name] = kernels[value.index]

    def _bindings(self) -> tuple[type[CppPythonBindingsCodeCache], str]:
        """Inductor's bindings for one function, which gives the kernels, and the code that stands ahead of them."""
        includes: dict[str, None] = {}
        kernels, functions, results = [], [], []
        for (argtypes, source), index in self._kernels.items():
            name = f"kernel_{index}"
            lines = source.splitlines()
            includes.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
            body = "\n".join(line for line in lines if not line.startswith("#include"))
            body = _ENTRY.sub(f'extern "C" void {name}(', body)
            # Two kernels may have helpers of one name.
            kernels.append(f"namespace {name}_only {{\n{body}\n}}")
            kernels.append(f"using {name}_only::{name};")
            types = (argtype.replace("const ", "") for argtype in argtypes)
            args = ", ".join(f"parse_arg<{argtype}>(args, {position})" for position, argtype in enumerate(types))
            functions.append(_FUNCTION % {"name": name, "num_args": len(argtypes), "args": args})
            results.append(f"PyCFunction_New(&{name}_method, nullptr)")
        bindings = type(
            "KernelBindings",
            (CppPythonBindingsCodeCache,),
            {
                "entry_function": "kernels",
                "call_entry_function": f'return Py_BuildValue("({"N" * len(results)})", {", ".join(results)});',
                "extra_parse_arg": "".join(functions).replace("{", "{{").replace("}", "}}"),
            },
        )
        return bindings, "\n".join([*includes, *kernels])
