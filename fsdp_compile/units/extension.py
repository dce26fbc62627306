"""All-gather extensions: parameters whose local tensors are subclasses with ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``, as FSDP2 has them (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).

Tensors in attributes of the local tensor are inputs of a graph; its other attributes are constants of the graph. Traced code
puts the local tensor together again (``__tensor_unflatten__``), and calls the two functions on it. So each step reads anew
what an optimizer, or a precomputation of scales, has written to attributes.

Graphs that equal blocks share must not depend on the module. So parameters of several modules share an extension only if
``fsdp_pre_all_gather`` does not read its argument ``module``.

The functions may be set on a plain local tensor, too, after ``fully_shard``. Then the tensor itself is what a graph takes.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from passes.fx.torch_internals.core import is_traceable_wrapper_subclass, make_wrapper_subclass
from passes.fx.torch_internals.objects import local_tensor
from passes.ir.extension import copied_to_plain, register_extension

from .mesh import ShardingMesh

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
# The name of a plain local tensor among the tensors that it holds.
_ITSELF = "local_tensor"
_numbers = itertools.count()


def is_extension(tensor: Tensor) -> bool:
    """Return whether a local tensor is gathered by an extension: it has the functions, or is a subclass that may get them."""
    return hasattr(tensor, "fsdp_pre_all_gather") or (is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor))


def check_extension(tensor: Tensor, name: str) -> None:
    """Check that an extension can be traced. A subclass may get the functions later.

    Raises:
        TypeError: the tensor lacks one of the functions, or cannot be flattened.
        NotImplementedError: the tensor is a DTensor of another parallelism.
        ValueError: ``fsdp_pre_all_gather`` has neither of the signatures that FSDP2 knows.
    """
    if isinstance(tensor, DTensor):
        raise NotImplementedError(
            f"Parameter {name} is a DTensor of {type(local_tensor(tensor)).__name__}, which has an fsdp_pre_all_gather. That "
            "is supported for parameters that no other parallelism has laid out."
        )
    if any(hasattr(tensor, hook) for hook in _HOOKS):
        check_functions(tensor, name)
    kind = type(tensor).__name__
    if not is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"Parameter {name} is a {kind} with an fsdp_pre_all_gather, but without __tensor_flatten__ and "
            "__tensor_unflatten__, which tracing needs. Define them (torch/testing/_internal/two_tensor.py shows how). Or set "
            "the functions on the local tensor of a plain parameter, after fully_shard."
        )
    names, _ = tensor.__tensor_flatten__()
    if any(vars(tensor).get(inner) is not getattr(tensor, inner) for inner in names):
        raise TypeError(
            f"Parameter {name} is a {kind} that has the tensors of its __tensor_flatten__, {names}, in other places than in "
            "attributes of these names, where a graph cannot find them."
        )


def check_functions(tensor: Tensor, name: str) -> None:
    """Check that a tensor has both functions of an extension, with a signature that FSDP2 knows.

    Raises:
        TypeError: one of the functions is missing.
        ValueError: ``fsdp_pre_all_gather`` has another signature.
    """
    kind = type(tensor).__name__
    missing = [hook for hook in _HOOKS if not hasattr(tensor, hook)]
    if missing:
        raise TypeError(f"Parameter {name} is a {kind}, which has one of {' and '.join(_HOOKS)}, but no {missing[0]}.")
    if _num_arguments(tensor) not in (1, 5):
        raise ValueError(
            f"Parameter {name} is a {kind} whose fsdp_pre_all_gather takes {inspect.signature(tensor.fsdp_pre_all_gather)}. "  # type: ignore[attr-defined]
            "It has to take (mesh, outer_size, outer_stride, module, mp_policy), or (mesh)."
        )


def _num_arguments(tensor: Any) -> int:
    function = getattr(tensor, "fsdp_pre_all_gather", None)
    return 0 if function is None else len(inspect.signature(function).parameters)


class _Functions(NamedTuple):
    """The two functions of an extension.

    Attributes:
        functions: the functions, without the tensor that they are methods of; None for one that is missing.
        are_methods: for each, whether its first argument is the tensor.
    """

    functions: tuple[Any, ...]
    are_methods: tuple[bool, ...]

    @staticmethod
    def of(tensor: Any) -> _Functions:
        # A bound method is a new object at each read.
        found = [getattr(tensor, hook, None) for hook in _HOOKS]
        methods = tuple(getattr(each, "__self__", None) is tensor for each in found)
        unbound = (getattr(each, "__func__", each) if bound else each for each, bound in zip(found, methods, strict=True))
        return _Functions(tuple(unbound), methods)

    def call(self, hook: str, tensor: Tensor, *args: Any) -> Any:
        index = _HOOKS.index(hook)
        return self.functions[index](*((tensor,) if self.are_methods[index] else ()), *args)


def _reads_module(tensor: Any) -> bool:
    """Return whether ``fsdp_pre_all_gather`` reads its argument ``module``; True if its code does not tell."""
    if _num_arguments(tensor) < 5:
        return False
    function = inspect.unwrap(_Functions.of(tensor).functions[0])
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount < 5 or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return True
    module = [*inspect.signature(tensor.fsdp_pre_all_gather).parameters][3]
    return any(instruction.argval == module for instruction in dis.get_instructions(code) if "RESUME" not in instruction.opname)


def with_tensors(tensor: Any, made_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Copy a tensor subclass, with ``made_of(inner)`` in the place of each tensor ``inner`` that it holds."""
    names, context = tensor.__tensor_flatten__()
    held = {name: made_of(getattr(tensor, name)) for name in names}
    attributes = {key: made_of(value) for key, value in vars(tensor).items() if isinstance(value, Tensor) and key not in held}
    copied = _maker(tensor)(held, context, tensor.size(), tensor.stride())
    copied.__dict__.update({**vars(tensor), **{key: held[key] for key in held if key in vars(tensor)}, **attributes})
    return copied


def attributes_of(local: Any) -> dict[str, Any]:
    """Return the attributes of a local tensor with an extension, the tensors that it holds among them.

    Those of a subclass are the dictionary that it keeps them in. Those of a plain tensor are a copy, with the tensor itself.
    """
    if is_traceable_wrapper_subclass(local):
        return vars(local)
    return {_ITSELF: local} | vars(local)


def _flatten(local: Any) -> tuple[Sequence[str], Any]:
    """Call ``__tensor_flatten__``, or do the like for a plain tensor."""
    return local.__tensor_flatten__() if is_traceable_wrapper_subclass(local) else ([_ITSELF], None)


def _maker(tensor: Any) -> Callable[..., Tensor]:
    """Return ``__tensor_unflatten__`` of a subclass, or, if it does not make such tensors, a function in its place.

    FSDP2 never calls ``__tensor_unflatten__``, so that nobody may have noticed that it is wrong.
    """
    kind, dtype = type(tensor), tensor.dtype
    names, context = _flatten(tensor)
    if names == [_ITSELF]:
        # A tensor that gets attributes is another object than the parameter's local tensor.
        return lambda inner, *_: inner[_ITSELF].detach()
    layout = tensor.size(), tensor.stride()

    def make(inner: Mapping[str, Tensor], _context: Any, size: torch.Size, stride: Sequence[int]) -> Tensor:
        device = next(iter(inner.values())).device
        made: Tensor = make_wrapper_subclass(kind, size, stride, dtype=dtype, device=device)
        return made

    try:
        made = kind.__tensor_unflatten__({name: getattr(tensor, name) for name in names}, context, *layout)
    except Exception:
        return make
    return kind.__tensor_unflatten__ if type(made) is kind else make  # type: ignore[no-any-return]


class ParamExtension:
    """The all-gather extension of a parameter. Parameters whose extensions do the same share one.

    Args:
        local: the local tensor.
        shape: shape of the full parameter.
        padded_shape: shape of every rank's padded shard.
        mesh: the mesh that the parameter is sharded on.
        module: the module that registers the parameter.
        mp_policy: the mixed-precision policy of its unit.
        dtype: the dtype that the parameter computes in.

    Attributes:
        key: the extension's name in graphs.
        optional: names of the attributes that hold a tensor, or None and later perhaps a tensor.
    """

    def __init__(
        self,
        local: Any,
        shape: torch.Size,
        padded_shape: Sequence[int],
        mesh: ShardingMesh,
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
    ):
        self._kind = type(local)
        self._inner_names, self._context = _flatten(local)
        self._size, self._stride = local.size(), local.stride()
        self._make = _maker(local)
        attributes = attributes_of(local)
        self.optional = tuple(key for key, value in attributes.items() if value is None or isinstance(value, Tensor))
        self._constants = {key: value for key, value in attributes.items() if key not in (*self.optional, *_HOOKS)}
        self._shape, self._padded_shape = shape, torch.Size(padded_shape)
        self._mesh = mesh.shard_mesh
        self._functions = _Functions.of(local)
        self._module = module if _reads_module(local) else None
        self._mp_policy = mp_policy
        self._is_old = _num_arguments(local) == 1
        self._dtype = dtype
        self.key = f"{self._kind.__name__} {next(_numbers)}"

    @staticmethod
    def of(
        local: Tensor,
        shape: torch.Size,
        padded_shape: Sequence[int],
        mesh: ShardingMesh,
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
    ) -> ParamExtension:
        """Return the extension of a local tensor. Local tensors that differ only in the tensors they hold share one."""
        made = ParamExtension(local, shape, padded_shape, mesh, module, mp_policy, dtype)
        same = made._identity()
        try:
            found = _shared.setdefault(same, made)
        except TypeError:
            # Attributes that cannot be hashed: it is not shared.
            found = made
        register_extension(found.key, found)
        return found

    def _identity(self) -> Hashable:
        context = tuple(self._context.items()) if isinstance(self._context, dict) else self._context
        constants = tuple(self._constants.items())
        laid_out = (tuple(self._size), tuple(self._stride), tuple(self._shape), self._mesh, self._mp_policy)
        told = self._kind, tuple(self._inner_names), self.optional, context, constants
        return *told, laid_out, self._dtype, self._module, self._functions

    def has_functions_of(self, local: Any) -> bool:
        """Return whether a local tensor has the functions that this extension calls."""
        return _Functions.of(local) == self._functions

    def check_constants(self, local: Any, name: str) -> None:
        """Check that the attributes that graphs have as constants are unchanged.

        Raises:
            RuntimeError: one has changed.
        """
        found_now = attributes_of(local)
        for key, value in self._constants.items():
            found = found_now.get(key)
            if found is not value and found != value:
                raise RuntimeError(
                    f"Attribute {key} of the local tensor of parameter {name}, a {self._kind.__name__}, was {value!r} when the "
                    f"model was sharded, and is {found!r}. Graphs have it as a constant: make it a tensor, or set it before "
                    "sharding."
                )

    def num_bytes(self, local: Any) -> int:
        """Count the bytes of the tensors that a local tensor holds."""
        return sum(tensor.nbytes for tensor in self.tensors_of(local).values())

    def tensors_of(self, local: Any) -> dict[str, Tensor]:
        """Return the tensors that a local tensor holds, by the names of its attributes."""
        attributes = attributes_of(local)
        return {key: value for key in self.optional if (value := attributes.get(key)) is not None}

    @torch.no_grad()
    def encode(self, tensors: Mapping[str, Tensor], name: str) -> tuple[Sequence[Tensor], Any]:
        """Put a local tensor together, and call ``fsdp_pre_all_gather`` on it.

        Args:
            tensors: the tensors that the local tensor holds, by the names of its attributes.
            name: the parameter's name, for errors.

        Returns:
            The tensors to send, and the argument ``encoded`` of :meth:`decode`.

        Raises:
            RuntimeError: a function is missing; the call fails; returns something other than tensors and metadata; or, if the
                parameter is sharded unevenly, returns tensors of another shape than the padded shard's.
            TypeError: the call returns a tensor subclass that does not copy into a plain tensor.
        """
        if None in self._functions.functions:
            raise RuntimeError(
                f"Parameter {name} is a {self._kind.__name__}, a tensor subclass with operators of its own, but without "
                f"{' and '.join(_HOOKS)}, so it cannot be gathered. Define them; or add the parameter to ignored_params, which "
                "leaves it whole on every rank; or convert the model after sharding."
            )
        local = self._together(tensors)
        stride = tuple(math.prod(self._shape[dim + 1 :]) for dim in range(len(self._shape)))
        further = () if self._is_old else (self._shape, stride, self._module, self._mp_policy)
        try:
            pieces, metadata = self._functions.call("fsdp_pre_all_gather", local, self._mesh, *further)
        except Exception as error:
            raise RuntimeError(self._failed(name, "fsdp_pre_all_gather", error)) from error
        return self._plain(pieces, name), (local, metadata)

    def _plain(self, pieces: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return what is sent as plain tensors. FSDP2 copies subclasses, too, into the plain buffer of a collective."""
        for piece in pieces:
            if not isinstance(piece, Tensor):
                raise RuntimeError(
                    f"fsdp_pre_all_gather of parameter {name}, a {self._kind.__name__}, returned a {type(piece).__name__} "
                    "among what it sends. Return tensors."
                )
        if self._size != self._padded_shape and any(piece.shape != self._padded_shape for piece in pieces):
            raise RuntimeError(
                f"Parameter {name} of shape {tuple(self._shape)} is sharded unevenly, so fsdp_pre_all_gather must return "
                f"tensors of the padded shard's shape, {tuple(self._padded_shape)}, but returned "
                f"{[tuple(piece.shape) for piece in pieces]}."
            )
        return [copied_to_plain(piece, f"A tensor that fsdp_pre_all_gather of parameter {name} sends") for piece in pieces]

    @torch.no_grad()
    def decode(self, gathered: Sequence[Tensor], encoded: Any, name: str) -> Tensor:
        """Call ``fsdp_post_all_gather`` on the gathered tensors, and return the full parameter.

        Raises:
            RuntimeError: the call fails, or returns no tensor of the parameter's shape.
        """
        local, metadata = encoded
        try:
            full, _ = self._functions.call("fsdp_post_all_gather", local, tuple(gathered), metadata, self._dtype)
            if full.shape != self._shape:
                stride = [math.prod(self._shape[dim + 1 :]) for dim in range(len(self._shape))]
                full = torch.as_strided(full, self._shape, stride, 0)
        except Exception as error:
            raise RuntimeError(self._failed(name, "fsdp_post_all_gather", error)) from error
        result: Tensor = full
        return result

    def _together(self, tensors: Mapping[str, Tensor]) -> Any:
        missing = [key for key in self._inner_names if key not in tensors]
        assert not missing, f"a {self._kind.__name__} has lost {missing}"
        inner = {key: tensors[key] for key in self._inner_names}
        local: Any = self._make(inner, self._context, self._size, self._stride)
        # Not every __tensor_flatten__ returns all attributes.
        local.__dict__.update({**self._constants, **dict.fromkeys(self.optional), **tensors})
        return local

    def _failed(self, name: str, function: str, error: Exception) -> str:
        return (
            f"{function} of parameter {name}, a {self._kind.__name__}, failed: {error!r}. A compiled model traces it, so it "
            "must not depend on the values of tensors (.item(), branches)."
        )


_shared: weakref.WeakValueDictionary[Hashable, ParamExtension] = weakref.WeakValueDictionary()
