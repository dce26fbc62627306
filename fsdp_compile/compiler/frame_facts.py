"""Facts about a frame, in text that is equal in every process in which Dynamo would trace the frame alike.

Dynamo guards on objects of its process, such as the identity of a function. A fact names the object in the place of its
address: a function by its module, name and code, a class by the code of its methods, a tensor by its metadata. Of what has no
such name, :class:`NotPortable` is raised.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from passes.fx.torch_internals.core import OpOverload, OpOverloadPacket, dispatch_keys

# The parts of a guard's code that hold an address, with the object or its type.
_ADDRESS = re.compile(r"___check_(obj|type)_id\((.*), \d+\), type=<class '[^']*'>")
# The guards whose code, without addresses, tells all that they compare.
_BY_CODE = frozenset(
    [
        "TYPE_MATCH",
        "ID_MATCH",
        "FUNCTION_MATCH",
        "CLASS_MATCH",
        "MODULE_MATCH",
        "BUILTIN_MATCH",
        "CONSTANT_MATCH",
        "EQUALS_MATCH",
        "BOOL_MATCH",
        "NONE_MATCH",
        "NOT_NONE_MATCH",
        "SEQUENCE_LENGTH",
        "DICT_KEYS_MATCH",
        "DICT_CONTAINS",
        "DICT_NOT_CONTAINS",
        "SET_CONTAINS",
        "SET_NOT_CONTAINS",
        "HASATTR",
        "MAPPING_KEYS_CHECK",
        "DUPLICATE_INPUT",
        "RANGE_ITERATOR_MATCH",
        "TUPLE_ITERATOR_LEN",
        "DEFAULT_DEVICE",
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "DUAL_LEVEL",
        "SHAPE_ENV",
    ]
)
# The guards on the state of the process, which is compared as a whole.
_OF_STATE = frozenset(["GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "FSDP_TRAINING_STATE"])
# Packages whose objects Dynamo may take as constants when it guards on their identity.
_OF_TRACE = ("torch", "builtins", "functools", "typing", "types", "collections")
#: The guards for which Dynamo prints no code, or none that tells what they compare. Any other guard without code repeats one.
WITHOUT_CODE = _OF_STATE.union(
    ["CLOSURE_MATCH", "EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT", "TENSOR_MATCH", "SHAPE_ENV"]
)
# Where static methods, properties and the like keep their functions.
_OF_DESCRIPTORS = ("__func__", "fget", "fset", "func")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.layout)


class NotPortable(Exception):
    """A value has no name that is equal in another process."""


class Describer:
    """Describes objects in text. Serves one moment: classes and functions may be changed later.

    Args:
        names: the names of attributes that the traced code may read.

    Attributes:
        codes: the code of the functions that were described.
        names: the first source of each object that :meth:`identify` told by it, by the object's ``id``.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._read = names
        self._classes: dict[type, str] = {}
        self._functions: dict[FunctionType, str] = {}
        self.codes: set[CodeType] = set()
        self.names: dict[int, str] = {}

    def describe(self, value: Any) -> str:
        """Return the text of an object.

        Raises:
            NotPortable: it has none.
        """
        if isinstance(value, enum.Enum):
            return f"{self.describe(type(value))}.{value.name}"
        if isinstance(value, (*_PLAIN, torch.Size, torch.memory_format)):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, FunctionType):
            return f"function {value.__module__}.{value.__qualname__} {self._function(value)}"
        if isinstance(value, MethodType):
            return f"method {self.describe(value.__func__)} of {self.describe(type(value.__self__))}"
        if isinstance(value, CodeType):
            return f"code {self._code(value)}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, (OpOverload, OpOverloadPacket)):
            return f"operator {value}"
        if isinstance(value, BuiltinFunctionType) or type(value).__name__ in ("method_descriptor", "wrapper_descriptor"):
            return f"builtin {value.__module__ if hasattr(value, '__module__') else ''}.{value.__qualname__}"
        if type(value).__module__ in ("typing", "types") and " at 0x" not in repr(value):
            return f"annotation {value!r}"
        if isinstance(value, (tuple, list)):
            return f"{self.describe(type(value))}({', '.join(map(self.describe, value))})"
        if type(value) is dict:
            return "{" + ", ".join(f"{self.describe(key)}: {self.describe(item)}" for key, item in value.items()) + "}"
        if type(value) in (set, frozenset):
            return f"{type(value).__name__}({', '.join(sorted(map(self.describe, value)))})"
        raise NotPortable(f"an object of {type(value)}")

    def identify(self, value: Any, name: str) -> str:
        """Return the text of an object of which a frame has used the identity alone, unless it has a text of its own.

        It tells the first source at which the frame finds the object.

        Args:
            value: the object.
            name: the source.
        """
        try:
            return self.describe(value)
        except NotPortable:
            if type(value).__module__.partition(".")[0] in _OF_TRACE:
                raise
        return f"{self.describe(type(value))} of {self.names.setdefault(id(value), name)}"

    def _class(self, kind: type) -> str:
        if kind not in self._classes:
            methods = (self._methods(base) for base in kind.__mro__ if base.__module__ != "builtins")
            digest = hashlib.sha256("\n".join(methods).encode()).hexdigest()[:16]
            self._classes[kind] = f"class {kind.__module__}.{kind.__qualname__} {digest}"
        return self._classes[kind]

    def _methods(self, kind: type) -> str:
        found = [f"{kind.__module__}.{kind.__qualname__}"]
        later = _added_later(kind).difference(self._read)
        for name, value in vars(kind).items():
            if name in later:
                continue
            functions = [value, *(getattr(value, attribute, None) for attribute in _OF_DESCRIPTORS)]
            found += [f"{name} {self._function(each)}" for each in functions if isinstance(each, FunctionType)]
        return "\n".join(found)

    def _function(self, function: FunctionType) -> str:
        """Return a key of a function's code, and of the code of functions that it wraps: decorators share their wrapper's."""
        if function in self._functions:
            return self._functions[function]
        self._functions[function] = key = self._code(function.__code__)
        contents = [content for cell in function.__closure__ or () if isinstance(content := _content(cell), FunctionType)]
        if contents:
            key = hashlib.sha256(" ".join([key, *map(self._function, contents)]).encode()).hexdigest()[:16]
            self._functions[function] = key
        return key

    def _code(self, code: CodeType) -> str:
        self.codes.add(code)
        return code_digest(code)


def _added_later(kind: type) -> set[str]:
    """Return the names that were given to ``nn.Module`` after its class was made. Libraries add methods for their own use."""
    names = list(vars(kind)) if kind is nn.Module else []
    # Python adds it last.
    return set(names[names.index("__weakref__") :]) if "__weakref__" in names else set()


def code_digest(code: CodeType) -> str:
    """Return a key of a function's code that does not depend on where its file lies."""
    digest = hashlib.sha256(code.co_code)
    digest.update(repr((list(map(_constant, code.co_consts)), code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()[:16]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # It is empty, as that of ``super()`` while a class is made.
        return None


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    # The order of a set differs between processes.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def guard_fact(
    kind: str, name: str, codes: Iterable[str], kwargs: Mapping[str, Any], value: Callable[[], Any], to: Describer
) -> str:
    """Return the fact of a guard other than that on a tensor.

    Args:
        kind: its kind, such as ``"ID_MATCH"``.
        name: the name of its source.
        codes: its code, as Dynamo prints it.
        kwargs: its further arguments.
        value: returns the value that is guarded.
        to: describes values.

    Raises:
        NotPortable: the guard compares what has no name in another process.
    """
    if kind in _OF_STATE:
        return kind
    if kind == "CLOSURE_MATCH":
        return f"{kind} {name} {to.describe(value())}"
    if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
        # Dynamo skips this guard, but has traced no hook.
        return f"{kind} {name} {len(value())}"
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return f"{kind} {name} {kwargs['attr']} {kwargs['attr'] in vars(value())}"
    if kind not in _BY_CODE:
        raise NotPortable(f"a guard {kind} on {name}")
    parts = [kind, name]
    for code in codes:
        found = _ADDRESS.fullmatch(code)
        if found is None:
            parts.append(code)
        else:
            parts.append(to.identify(value(), name) if found[1] == "obj" else to.describe(type(value())))
    text = " ".join(parts)
    if " at 0x" in text or ("hooks ids == " in text and "ids == None" not in text):
        raise NotPortable(text)
    return text


def tensor_fact(name: str, value: Any, size: Any, stride: Any, codes: Iterable[str], to: Describer) -> str:
    """Return the fact of a guard on a tensor; with its size and stride, in which None stands for a dynamic one."""
    if not isinstance(value, Tensor):
        raise NotPortable(f"{name}, which is no tensor")
    kind = to.describe(type(value))
    return f"TENSOR_MATCH {name} {kind} {list(size)} {list(stride)} {value.requires_grad} {input_fact(value)} {' '.join(codes)}"


def input_fact(value: Tensor) -> str:
    """Return what code for a tensor may depend on, but its size and stride."""
    keys = dispatch_keys(value)
    return f"{value.dtype} {value.device} {value.layout} {value.is_leaf} {value.is_conj()} {value.is_neg()} {keys}"
