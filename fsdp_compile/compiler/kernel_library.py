"""C++ kernels of generated programs, compiled as one library.

Inductor compiles each kernel by itself, and the kernel is the smaller part of the work. After the precompiled header, the
compiler instantiates templates of ATen's vector headers for every file. That takes half a second, which kernels of one file
share.

The library lives in Inductor's cache and has Inductor's bindings: a Python function for each kernel, as torch's template for
one function has it. If the template has an unknown form, or the library does not compile, each kernel is compiled by itself,
with a warning. A library that was cut short, as by a process that was killed while it linked, is compiled anew.
"""

from __future__ import annotations

import os
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from passes.fx.torch_internals.inductor import (
    AsyncCompile,
    CppPythonBindingsCodeCache,
    get_compile_threads,
    kernel_code_log,
    load_bindings,
)

Kernel = Callable[..., None]

# The entry of a kernel, whose name is the same for all kernels of Inductor.
_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')

# Two parts of ``CppPythonBindingsCodeCache.suffix_template``: its one function, and the method entry of that function.
_BINDING = re.compile(
    r"\{extra_parse_arg\}\s*(?P<function>static PyObject\* \{entry_func\}_py\(.*?)"
    r"static PyMethodDef py_methods\[\] = \{\{\s*(?P<method>.*?),\s*\{\{NULL",
    re.DOTALL,
)

# Whether :func:`fall_back` has been called.
_fell_back = False


def fall_back(reason: str) -> None:
    """Compile kernels one by one from now on, as torch does, and warn once.

    Args:
        reason: the part of torch that has an unknown form, or the failure.
    """
    global _fell_back
    if not _fell_back:
        _fell_back = True
        warnings.warn(f"C++ kernels are compiled one by one, which takes longer: {reason}", stacklevel=3)


@dataclass(frozen=True)
class PendingKernel:
    """A placeholder for a kernel of a library that is not compiled yet.

    Attributes:
        library: the library.
        index: the kernel's index in the library.
    """

    library: KernelLibrary
    index: int


class KernelLibrary:
    """Kernels that programs request, compiled together after the last request."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[tuple[str, ...], str], int] = {}
        self._load: Callable[[], Sequence[Kernel]] | None = None

    @property
    def is_empty(self) -> bool:
        """True if no kernel was requested."""
        return not self._kernels

    @staticmethod
    def takes(source: str) -> bool:
        """Return whether a kernel's source can share a file with others."""
        return not _fell_back and len(_ENTRY.findall(source)) == 1

    def add(self, argtypes: Sequence[str], source: str) -> PendingKernel:
        """Add a kernel, and return a placeholder for it, which :meth:`fill` replaces.

        Args:
            argtypes: C++ types of the kernel's arguments.
            source: C++ source of the kernel, as Inductor writes it.
        """
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source)
        # Programs may request the same kernel.
        return PendingKernel(self, self._kernels.setdefault((tuple(argtypes), source), len(self._kernels)))

    def compile(self) -> None:
        """Start to compile in the background. Without workers of Inductor, :meth:`fill` compiles instead."""
        try:
            bindings, code = self._bindings()
            load = bindings.load_pybinding_async([], code, submit_fn=_submit())
            self._load = lambda: load()()
        except Exception as error:
            self._load = self._compile_apart(error)

    def fill(self, scopes: Iterable[dict[str, Any]]) -> None:
        """Wait for the library, and replace the placeholders among the programs' globals by its kernels.

        Args:
            scopes: the globals of each program.
        """
        assert self._load is not None, "The library has not been compiled."
        try:
            kernels = self._load_whole()
        except Exception as error:
            kernels = self._compile_apart(error)()
        for scope in scopes:
            for name, value in scope.items():
                if isinstance(value, PendingKernel) and value.library is self:
                    scope[name] = kernels[value.index]

    def _load_whole(self) -> Sequence[Kernel]:
        assert self._load is not None
        try:
            return self._load()
        except DamagedLibrary as error:
            warnings.warn(f"{error}, in Inductor's cache, was damaged, and is compiled anew.", stacklevel=3)
            self.compile()
            return self._load()

    def _compile_apart(self, error: Exception) -> Callable[[], Sequence[Kernel]]:
        """Start to compile each kernel by itself, after the library failed with ``error``."""
        # Compilers print pages of errors, of which the warning has one line.
        lines = str(error).splitlines()
        line = next((line for line in lines if "error:" in line), next(iter(lines), ""))
        fall_back(f"for torch {torch.__version__}, a library of them fails with {type(error).__name__}: {line}")
        loads = [
            CppPythonBindingsCodeCache.load_pybinding_async(argtypes, source, submit_fn=_submit())
            for argtypes, source in self._kernels
        ]
        return lambda: [load() for load in loads]

    def _bindings(self) -> tuple[type[CppPythonBindingsCodeCache], str]:
        """Generate the code of the library.

        Returns:
            Inductor's bindings for one function, which returns all kernels, and the C++ code that precedes these bindings.
        """
        binding = _BINDING.search(CppPythonBindingsCodeCache.suffix_template)
        if binding is None:
            raise ValueError("the template of Inductor's bindings has an unknown form.")
        includes: dict[str, None] = {}
        kernels, functions, results = [], [], []
        for (argtypes, source), index in self._kernels.items():
            name = f"kernel_{index}"
            lines = source.splitlines()
            includes.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
            body = "\n".join(line for line in lines if not line.startswith("#include"))
            body = _ENTRY.sub(f'extern "C" void {name}(', body)
            # Two kernels may define helpers of the same name.
            kernels.append(f"namespace {name}_only {{\n{body}\n}}")
            kernels.append(f"using {name}_only::{name};")
            types = (argtype.replace("const ", "") for argtype in argtypes)
            args = ", ".join(f"parse_arg<{argtype}>(args, {position})" for position, argtype in enumerate(types))
            call = f"{name}({args}); Py_RETURN_NONE;"
            function, method = (
                binding[part].format(entry_func=name, arg_len=len(argtypes), call_entry_func=call)
                for part in ("function", "method")
            )
            functions.append(f"{function}static PyMethodDef {name}_method = {method};")
            results.append(f"PyCFunction_New(&{name}_method, nullptr)")
        bindings = type(
            "KernelBindings",
            (CppPythonBindingsCodeCache,),
            {
                "entry_function": "kernels",
                "call_entry_function": f'return Py_BuildValue("({"N" * len(results)})", {", ".join(results)});',
                "extra_parse_arg": "\n".join(functions).replace("{", "{{").replace("}", "}}"),
                "_load_library": classmethod(_load_if_whole),
            },
        )
        return bindings, "\n".join([*includes, *kernels])


class DamagedLibrary(RuntimeError):
    """The error for a compiled library that was cut short, and has been removed."""


def _load_if_whole(cls: Any, path: str, key: str) -> Any:
    """Load a library as Inductor does, but not one that was cut short, whose first call would end the process (SIGBUS)."""
    if is_cut_short(Path(path)):
        os.unlink(path)
        # Inductor remembers that the library is there.
        cls.cache.pop(key, None)
        raise DamagedLibrary(path)
    return load_bindings(cls, path, key)


def is_cut_short(library: Path) -> bool:
    """Return whether a file ends before its table of sections, the last part that linkers write. Knows 64-bit ELF alone."""
    with library.open("rb") as file:
        header = file.read(64)
    if not header:
        return True
    if header[:5] != b"\x7fELF\x02"[: len(header)]:
        return False
    if len(header) < 64:
        return True
    (sections,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return library.stat().st_size < sections + size * count


def _submit() -> Callable[..., Any] | None:
    return AsyncCompile.submit if get_compile_threads() > 1 else None
