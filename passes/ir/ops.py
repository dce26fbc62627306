"""The intermediate representation: operators that represent sharding in a traced graph.

``unshard``          from a rank's padded shard of a parameter to the full parameter in the compute dtype.
``reduce_grad``      from the full gradient on this rank to this rank's padded shard of the averaged gradient.
``reshard``          from the full parameter to this rank's shard in a smaller group, for ``reshard_after_forward=<int>``.
``reshard_rounded``  as ``reshard``, for a parameter that is rounded for its gather: from the gathered bytes to some of them.
``tie``              returns its first argument. For the partitioner, it makes forward depend on the second argument, too. A
                     pass removes ties, so they are never lowered.
``with_unit``        returns values of a unit, and reads all parameters of the unit, in forward and in backward. So the unit is
                     gathered whole, and parameters that the unit's forward does not read get gradients of zeros.
                     :mod:`passes.transforms.bucket` removes it.

``unshard_extension`` is a function that AOTAutograd traces through. It is ``unshard`` between an encoding and a decoding by the
user (:mod:`passes.ir.extension`).

The autograd formula of ``unshard`` is ``reduce_grad``. Printed nodes of the two name the parameter and its full shape. The
eager kernels communicate at once, so parts of a model that are not compiled train as well.

``reduce_grad`` takes the shard, too, without reading its values. In the backward graph, the shard identifies the parameter that
a gradient belongs to. That works even if equal blocks share one compiled graph.

Eager kernels call an :class:`EagerRuntime`, whoever calls them: eager autograd, or a graph that another backend has compiled.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..collectives.functional import group_size, resolve_group
from ..collectives.gather import choose_format, finish_gather, shard_on_device, start_gather
from ..collectives.gather import reshard_rounded as functional_reshard
from ..collectives.layout import REPLICATED, disassemble, padded_shard_shape
from ..collectives.rounded_gather import GatherPolicy
from ..fx.torch_internals.core import disable_dynamo
from .extension import extension_of, gathered_shape, plain_gradient, with_rows
from .reduction import average

_library = torch.library.Library("fsdp_compile", "DEF")

# The operators' schemas, and the defaults of their arguments, are made of the next two classes.


@dataclass
class Unshard:
    """The arguments of an ``unshard`` or ``unshard_extension`` node.

    Attributes:
        shard: the padded shard.
        name: qualified name of the parameter.
        shape: full shape of the parameter.
        group: name of the process group that the parameter is sharded over.
        token: the tensor that identifies the parameter, if ``shard`` is a tensor that an extension sends; else None.
        unit: qualified name of the parameter's ``fully_shard`` unit, which decides the bucket.
        dim: the dimension that the parameter is cut along, or ``REPLICATED``.
        offset: where the shard starts in the unit's flat storage, in elements; -1: the shard is not in flat storage.
        param_dtype: dtype to cast the shard to before the gather; None: no cast.
        reduce_dtype: dtype that the gradient is reduced in; None: the gradient's own.
        replicate_group: name of the group of replicas (HSDP); empty: none.
        node_group: name of the group of a node's ranks, if ``group`` has the ranks of several nodes, and replicas are equal
            ranks of these (hybrid sharding). Then graphs gather over the replicas first, within the node afterwards, and reduce
            the other way round. Empty: one collective over ``group``.
        reshard_after_forward: gather the parameter again for backward, rather than keep it.
        post_forward_group: name of the smaller group that the parameter is resharded to after forward; empty: none.
        sent_as: the :class:`~passes.collectives.rounded_gather.GatherPolicy` of the gather, as text; empty: no rounding.
        packed: the shard may share a collective with tensors of other dtypes, as bytes.
        encoded_over: for rounded bytes in a smaller group: name of the larger group that was gathered over before; else empty.
        device: for a shard on the host: the type of the device that it is copied to before its gather; else empty.
        extension: the key of the extension; empty for an ``unshard``.
        tensors, names: the inner tensors of an ``unshard_extension``'s shard, and their attribute names.
    """

    shard: Node
    name: str
    shape: Sequence[int]
    group: str
    token: Node | None = None
    _: KW_ONLY
    unit: str = ""
    dim: int = 0
    offset: int = -1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    replicate_group: str = ""
    node_group: str = ""
    reshard_after_forward: bool = True
    post_forward_group: str = ""
    sent_as: str = ""
    packed: bool = False
    encoded_over: str = ""
    device: str = ""
    extension: str = ""
    tensors: Sequence[Node] = ()
    names: Sequence[str] = ()

    @property
    def source(self) -> Node:
        """The graph input that identifies the parameter."""
        return self.shard if self.token is None else self.token

    @staticmethod
    def of(node: Node) -> "Unshard":
        return Unshard(*node.args, **node.kwargs)  # type: ignore[arg-type]


@dataclass
class ReduceGrad:
    """The arguments of a ``reduce_grad`` node.

    Attributes:
        grad: the full gradient.
        grad_dtype: dtype of the result; None: dtype of the reduction.
        shard, name, shape, group, unit, dim, reduce_dtype, replicate_group, node_group: as for :class:`Unshard`.
    """

    grad: Node
    shard: Node
    name: str
    shape: Sequence[int]
    group: str
    _: KW_ONLY
    unit: str = ""
    dim: int = 0
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    replicate_group: str = ""
    node_group: str = ""

    @property
    def scatter_group(self) -> str:
        """The name of the group that reduce-scatters first."""
        return self.node_group or self.group

    @staticmethod
    def of(node: Node) -> "ReduceGrad":
        return ReduceGrad(*node.args, **node.kwargs)  # type: ignore[arg-type]


_OF_EXTENSIONS = ("extension", "tensors", "names")
#: The defaults of the arguments of ``unshard`` that have one, by name.
UNSHARD_DEFAULTS = {each.name: each.default for each in fields(Unshard) if each.default is not MISSING}
#: Types of arguments in dataclasses, and in schemas of operators.
_TYPES: dict[Any, str] = {
    Node: "Tensor",
    Node | None: "Tensor?",
    str: "str",
    int: "int",
    bool: "bool",
    Sequence[int]: "int[]",
    torch.dtype | None: "ScalarType?",
}


def _schema(arguments: type) -> str:
    """Write the arguments of a dataclass as those of an operator, without those of an extension."""
    written = {
        each.name: f"{_TYPES[each.type]} {each.name}" + ("" if each.default is MISSING else f"={each.default!r}")
        for each in fields(arguments)
        if each.name not in _OF_EXTENSIONS
    }
    positional = [written[each.name] for each in fields(arguments) if not each.kw_only]
    return ", ".join([*positional, "*", *(text for text in written.values() if text not in positional)])


# CUDA graphs must not contain the first two operators: a replay would skip the Python functions that kernels call.
_COMMUNICATES = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_COMPUTES = (torch.Tag.pt2_compliant_tag,)
_library.define(f"unshard({_schema(Unshard)}) -> Tensor", tags=_COMMUNICATES)
_library.define(f"reduce_grad({_schema(ReduceGrad)}) -> Tensor", tags=_COMMUNICATES)
_library.define("reshard(Tensor full, str name, str group, *, int dim=0) -> Tensor", tags=_COMPUTES)
_library.define(
    "reshard_rounded(Tensor[] parts, str name, int[] shape, str encoded_over, str group, *, int dim=0, "
    "str sent_as='') -> Tensor",
    tags=_COMPUTES,
)
_library.define("tie(Tensor full, Tensor kept) -> Tensor", tags=_COMPUTES)
_library.define("with_unit(Tensor[] values, Tensor[] fulls) -> Tensor[]", tags=_COMPUTES)

unshard = torch.ops.fsdp_compile.unshard.default
reduce_grad = torch.ops.fsdp_compile.reduce_grad.default
reshard = torch.ops.fsdp_compile.reshard.default
reshard_rounded = torch.ops.fsdp_compile.reshard_rounded.default
tie = torch.ops.fsdp_compile.tie.default
with_unit = torch.ops.fsdp_compile.with_unit.default


@torch.compiler.allow_in_graph
def unshard_extension(
    shard: Tensor, name: str, shape: Sequence[int], group: str, *, tensors: Sequence[Tensor], **options: Any
) -> Tensor:
    """Unshard a parameter that is encoded before its gather and decoded after it (:mod:`passes.ir.extension`).

    Dynamo's graphs hold this function as one node. AOTAutograd traces through it: the encoding, an ``unshard`` for each tensor
    that is sent, and the decoding.

    Args:
        shard: the tensor that identifies the parameter; its values are not read.
        name, shape, group: as for ``unshard``.
        tensors: the inner tensors of the shard.
        options: the key of the ``extension``, the ``names`` of the tensors, and keyword arguments of ``unshard``.

    Returns:
        The parameter as the extension decodes it, of ``shape``; perhaps a tensor subclass.
    """
    result: Tensor = _UnshardExtension.apply(shard, name, shape, group, options, *tensors)  # type: ignore[no-untyped-call]
    return result


class EagerRuntime:
    """The runtime that eager kernels call. This one does nothing: gathers and reductions communicate at once."""

    def before_unshard(self, shard: Tensor) -> None:
        """Prepare the parameter of a shard for its gather."""

    def receiver(self, shard: Tensor, *, is_saved: bool = False) -> Callable[[Tensor], None] | None:
        """Return the function that takes the full gradient of a parameter in the place of its reduction; None: there is none.

        Args:
            shard: the parameter's shard.
            is_saved: whether ``shard`` was saved for backward: a checkpoint may have put another tensor in its place.
        """
        return None

    def communicating(
        self, operator: str, shard: Tensor, name: str, shape: Sequence[int], groups: tuple[str, ...]
    ) -> AbstractContextManager[Any]:
        """Make the context of a kernel's communication.

        Args:
            operator: the name of the operator.
            shard, name, shape: the parameter's shard, its name, and its full shape.
            groups: the names of the process groups.
        """
        return nullcontext()


_runtime = EagerRuntime()


def set_eager_runtime(runtime: EagerRuntime) -> None:
    """Set the object that eager kernels call."""
    global _runtime
    _runtime = runtime


def update_args(node: Node, **changes: Any) -> None:
    """Set arguments of an ``unshard`` or ``reduce_grad`` node by name. A keyword with its default value is dropped."""
    given = fields(ReduceGrad if node.target == reduce_grad else Unshard)
    defaults = {each.name: each.default for each in given}
    required = [each.name for each in given if each.default is MISSING]
    for name, value in changes.items():
        if name in required:
            node.update_arg(required.index(name), value)
        elif value == defaults[name]:
            node.kwargs = {key: kept for key, kept in node.kwargs.items() if key != name}
        else:
            node.update_kwarg(name, value)


def is_unshard(node: Node) -> bool:
    return node.op == "call_function" and node.target in (unshard, unshard_extension)


def unshards(nodes: Sequence[Node] | Any) -> list[Node]:
    return [node for node in nodes if is_unshard(node)]


def reduce_grads(nodes: Sequence[Node] | Any) -> list[Node]:
    return [node for node in nodes if node.op == "call_function" and node.target == reduce_grad]


def _unshard_kernel(
    shard: Tensor,
    name: str,
    shape: Sequence[int],
    group: str,
    token: Tensor | None = None,
    *,
    dim: int = 0,
    param_dtype: torch.dtype | None = None,
    sent_as: str = "",
    packed: bool = False,
    encoded_over: str = "",
    device: str = "",
    **_: Any,
) -> Tensor:
    _runtime.before_unshard(shard if token is None else token)
    if device:
        shard = shard_on_device(shard, device)
    if dim == REPLICATED or group_size(group) == 1:
        return shard.to(param_dtype or shard.dtype, copy=True)
    format = choose_format(
        [shape],
        [shard.dtype],
        dtype=param_dtype,
        sent_as=GatherPolicy.parse(sent_as),
        packed=packed,
        encoded_over=encoded_over,
    )
    operator = f"unshard as {sent_as}" if sent_as else "unshard"
    with _runtime.communicating(operator, shard, name, shape, (group,)):
        (full,) = finish_gather(start_gather([shard], group, format=format), [shape], [dim], group, format=format)
    return full


def _reduce_grad_kernel(
    grad: Tensor,
    shard: Tensor,
    name: str,
    shape: Sequence[int],
    group: str,
    *,
    dim: int = 0,
    reduce_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    replicate_group: str = "",
    node_group: str = "",
    **_: Any,
) -> Tensor:
    receive_gradient = _runtime.receiver(shard, is_saved=True)
    if receive_gradient is not None:
        receive_gradient(grad)
        return shard.new_zeros(shard.shape, dtype=grad_dtype or reduce_dtype or grad.dtype)
    grad = grad.to(reduce_dtype or grad.dtype)
    if node_group:
        # The group has the ranks of all nodes.
        replicate_group = ""
    with _runtime.communicating("reduce_grad", shard, name, shape, (group, replicate_group)):
        shard_grad = average(grad, shape, dim, group, replicate_group)
    return shard_grad.to(shard.device, grad_dtype or grad.dtype)


def _reshard_kernel(full: Tensor, name: str, group: str, *, dim: int = 0) -> Tensor:
    process_group = resolve_group(group)
    piece = disassemble(full, dim, process_group.size())[process_group.rank()]
    return piece.reshape(padded_shard_shape(full.shape, dim, process_group.size())).clone()


def _reshard_rounded_kernel(
    parts: Sequence[Tensor], name: str, shape: Sequence[int], encoded_over: str, group: str, **_: Any
) -> Tensor:
    if parts[0].dtype != torch.uint8:
        raise TypeError(f"Parameter {name} is resharded as it was rounded, but only a graph that gathers it has these bytes.")
    return functional_reshard(parts, group)


_library.impl("unshard", disable_dynamo(_unshard_kernel), "CompositeExplicitAutograd")
_library.impl("reduce_grad", disable_dynamo(_reduce_grad_kernel), "CompositeExplicitAutograd")
_library.impl("reshard", disable_dynamo(_reshard_kernel), "CompositeExplicitAutograd")
_library.impl("reshard_rounded", disable_dynamo(_reshard_rounded_kernel), "CompositeExplicitAutograd")


_library.impl("tie", lambda full, kept: full.clone(), "CompositeExplicitAutograd")
_library.impl("with_unit", lambda values, fulls: [value.clone() for value in values], "CompositeExplicitAutograd")


@torch.library.register_fake(unshard, lib=_library)
def _(shard: Tensor, name: str, shape: Sequence[int], group: str, token: Tensor | None = None, **kwargs: Any) -> Tensor:
    return shard.new_empty(shape, dtype=kwargs.get("param_dtype") or shard.dtype, device=kwargs.get("device") or shard.device)


@torch.library.register_fake(reduce_grad, lib=_library)
def _(grad: Tensor, shard: Tensor, name: str, shape: Sequence[int], group: str, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("grad_dtype") or kwargs.get("reduce_dtype") or grad.dtype
    return shard.new_empty(shard.shape, dtype=dtype)


@torch.library.register_fake(reshard, lib=_library)
def _(full: Tensor, name: str, group: str, *, dim: int = 0) -> Tensor:
    return full.new_empty(padded_shard_shape(full.shape, dim, group_size(group)))


@torch.library.register_fake(reshard_rounded, lib=_library)
def _(
    parts: Sequence[Tensor],
    name: str,
    shape: Sequence[int],
    encoded_over: str,
    group: str,
    *,
    dim: int = 0,
    sent_as: str = "",
) -> Tensor:
    policy, ranks = GatherPolicy.parse(sent_as), group_size(encoded_over)
    assert policy is not None
    numel = policy.encoded_numel(padded_shard_shape(shape, dim, ranks))
    return parts[0].new_empty([ranks // group_size(group), numel], dtype=torch.uint8)


@torch.library.register_fake(tie, lib=_library)
def _(full: Tensor, kept: Tensor) -> Tensor:
    return torch.empty_like(full)


@torch.library.register_fake(with_unit, lib=_library)
def _(values: Sequence[Tensor], fulls: Sequence[Tensor]) -> list[Tensor]:
    # The operator is removed, so its results have the strides of its inputs.
    return [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device) for value in values]


def _save_fulls(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    _, fulls = inputs
    ctx.save_for_backward(*fulls)
    trained = [index for index, full in enumerate(fulls) if full.requires_grad]
    ctx.smallest = min(trained, key=lambda index: fulls[index].numel(), default=None)


def _backward_with_unit(ctx: Any, grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    fulls = list(ctx.saved_tensors)
    zeros = list(map(torch.zeros_like, fulls))
    if ctx.smallest is None:
        return with_unit(list(grads), fulls), zeros
    # One of the gradients passes through the operator. Else it would be dead code where no gradient of the unit depends on
    # ``grads``: torch knows those of a batch of no elements in advance.
    *passed, zeros[ctx.smallest] = with_unit([*grads, zeros[ctx.smallest]], fulls)
    return passed, zeros


torch.library.register_autograd(with_unit, _backward_with_unit, setup_context=_save_fulls, lib=_library)


# The keyword arguments of ``reduce_grad`` that are those of ``unshard``.
_PASSED_ON = [each.name for each in fields(ReduceGrad) if each.kw_only and each.name in UNSHARD_DEFAULTS]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    shard, ctx.name, ctx.shape, ctx.group, *_ = inputs
    ctx.save_for_backward(shard)
    # Asked of the leaf now, as a checkpoint may pass backward another tensor. Fake shards of a trace have no receiver.
    ctx.receive_gradient = _runtime.receiver(shard)
    ctx.kwargs = {key: value for key in _PASSED_ON if (value := keyword_only_inputs[key]) not in ("", None)}
    reduced_in = keyword_only_inputs["reduce_dtype"] or output.dtype
    if shard.dtype != reduced_in:
        ctx.kwargs["grad_dtype"] = shard.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    (shard,) = ctx.saved_tensors
    grad = plain_gradient(grad, ctx.name)
    if ctx.receive_gradient is not None:
        ctx.receive_gradient(grad)
        # Autograd needs a gradient of the shard's shape. The real gradient has gone to ``receive_gradient``.
        return shard.new_zeros(()).expand(shard.shape), None, None, None, None
    return reduce_grad(grad, shard, ctx.name, ctx.shape, ctx.group, **ctx.kwargs), None, None, None, None


torch.library.register_autograd(unshard, _backward, setup_context=_setup_context, lib=_library)


class _UnshardExtension(torch.autograd.Function):
    """The autograd function of :func:`unshard_extension`, with the backward of ``unshard``."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, name: str, shape: Sequence[int], group: str, options: dict[str, Any], *tensors: Tensor
    ) -> Tensor:
        kwargs = {**{key: UNSHARD_DEFAULTS[key] for key in _PASSED_ON}, **options}
        extension = extension_of(kwargs["extension"], name)
        pieces, metadata = extension.encode(dict(zip(kwargs["names"], tensors, strict=True)), name)
        sent = {"unit": kwargs["unit"], "packed": True}
        sent |= {key: value for key, value in kwargs.items() if key == "reshard_after_forward"}
        ranks = group_size(group)
        fulls = [unshard(piece, name, gathered_shape(piece, ranks), group, shard, **sent) for piece in map(with_rows, pieces)]
        full = extension.decode(fulls, metadata, name)
        ctx.num_tensors = len(tensors)
        _setup_context(ctx, (shard, name, shape, group), kwargs, full)
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return *_backward(ctx, grad), *(None for _ in range(ctx.num_tensors))
