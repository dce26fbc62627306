"""Units in a forward that is not compiled: gathered whole, freed after forward, gathered again for backward, reduced whole.

The forward of a unit gathers all parameters of the unit when it begins. One autograd node stands for the trainable ones during
the model's forward. When their gradients exist, the engine runs the backward of the node, which reduces them together, with one
collective for each dtype and mesh. So gathers and reductions have the order in which forwards begin, whichever parameter a rank
reads first.

In a unit that reshards after forward, autograd saves *notes* in the place of gathered parameters: a saved-tensor hook replaces
each parameter by a description. Backward gathers the unit when it reaches an output of the unit's forward, or reads the first
note. So memory is freed after forward, but never the memory of a tensor that is still referenced.

Communication is as FSDP2's (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py), without prefetching.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as nn_module

from passes.fx.torch_internals.core import (
    TorchDispatchModeKey,
    disable_dynamo,
    get_dispatch_mode,
    global_forward_pre_hooks,
    is_in_any_mode_without_ignore_compile_internals,
    is_traceable_wrapper_subclass,
    peek_interpreter_stack,
    pytree,
    saved_tensors_hooks_is_enabled,
    top_saved_tensors_default_hooks,
)
from passes.fx.torch_internals.distributed import DTensorSpec
from passes.fx.torch_internals.dynamo import get_eval_frame_callback, skip_code
from passes.fx.torch_internals.objects import gradient_hooks, local_tensor, node_class, spec_of, storage_id, version_of
from passes.ir.ops import reshard

from ..units.param_state import Stamp, stamp
from ..units.sharded_param import ShardedParam
from ..units.unit import Scope, Unit
from .gradients import (
    at_end_of_backward,
    in_backward,
    is_asked_for,
    note_forward,
    receive_gradients,
    unreduced_gradient,
    zeros_like_gradient,
)
from .group_logs import record_failed_forward
from .lent_parameters import check_reads_of_running_node, end_loans, inputs_of_running_node, plain_tensors, write_back
from .schedule_settings import must_not_gather
from .stored_reads import written_since_forward
from .unsharding import Resharded, end_forward, finish_gather_of, finish_unshard, gathered_together, start_gathers

# Dynamo would trace this file where a compiled module calls an uncompiled one.
_python = disable_dynamo

#: The :class:`Gathered` that each storage with a gathered parameter belongs to, by the storage's ``_cdata``.
_by_storage: weakref.WeakValueDictionary[int, Gathered] = weakref.WeakValueDictionary()


class _Version(NamedTuple):
    """The identity and the stamp of a parameter when it was gathered."""

    param: nn.Parameter
    shard: nn.Parameter
    stamp: Stamp

    @staticmethod
    def of(param: ShardedParam) -> _Version:
        return _Version(param.param, param.shard, stamp(param.param))

    def is_same(self, param: ShardedParam) -> bool:
        return self.param is param.param and self.shard is param.shard and self.stamp == stamp(param.param)

    def was_written(self, param: ShardedParam) -> bool:
        # Without the last number of the stamp, which counts steps of all optimizers, even of those of other parameters.
        return self.param is not param.param or self.shard is not param.shard or self.stamp[:2] != stamp(param.param)[:2]


class Gathered:
    """The full parameters of a unit, until one of them is written. They are in memory, or can be gathered again.

    The autograd graphs of forwards hold references to this object. The unit holds one from a forward to the end of a backward:
    whether the next forward gathers must not depend on how long a rank keeps the output of this one.
    """

    def __init__(self, unit: Unit):
        self.unit = unit
        self.fulls: dict[ShardedParam, Tensor] = {}
        self._versions = {param: _Version.of(param) for param in unit.params}
        self._resharded: dict[ShardedParam, Resharded] = {}
        self._param_in: dict[int, tuple[ShardedParam, int, int]] = {}
        #: Outputs of forwards. Backward runs hooks on them before it reads a parameter.
        self.given_out: list[weakref.ref[Tensor]] = []
        self._emptied: dict[ShardedParam, tuple[Tensor, int]] = {}
        #: True if a forward with gradients enabled has read the parameters. The next forward reads them then, too.
        self.is_recorded = False

    def is_current(self) -> bool:
        """Return whether no parameter has changed since this object was made."""
        return self._versions.keys() == set(self.unit.params) and all(
            version.is_same(param) for param, version in self._versions.items()
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self) -> None:
        """Gather the parameters, unless they are in memory.

        Raises:
            RuntimeError: a backward runs, and a parameter was written since its forward.
        """
        if self.fulls:
            return
        if in_backward():
            self._check_may_gather()
            at_end_of_backward(self.end_backward)
        unit = self.unit
        finish_unshard(unit)
        missing = []
        for params in gathered_together(unit):
            kept = {param: full for param in params if (full := param.state.full(param.param)) is not None}
            if len(kept) == len(params):
                self.fulls.update(kept)
            else:
                missing.append(params)
        what = f"unshard of {unit.name or 'the root'}"
        # The bytes of rounded parameters cannot be recovered from full ones; everything else is resharded from full parameters.
        resharded = {param: piece for param, piece in self._resharded.items() if piece.shard.dtype == torch.uint8}
        for pending in start_gathers(unit, missing, what, self._resharded):
            self.fulls.update(finish_gather_of(pending, resharded))
        self._resharded = resharded
        self._refill()
        if unit.reshards_after_forward or state_of(unit).saves_notes:
            self._note_storages()

    def _refill(self) -> None:
        for param, (full, nbytes) in self._emptied.items():
            full.untyped_storage().resize_(nbytes)
            full.copy_(self.fulls[param])
            self.fulls[param] = full
        self._emptied = {}

    def _note_storages(self) -> None:
        by_storage: dict[int, list[tuple[ShardedParam, int, int]]] = {}
        for param in self.fulls:
            for place, full in enumerate(self.plain(param)):
                by_storage.setdefault(storage_id(full), []).append((param, place, version_of(full)))
        self._param_in = {storage: params[0] for storage, params in by_storage.items() if len(params) == 1}
        for storage in self._param_in:
            _by_storage[storage] = self

    def new_tensor(self, param: ShardedParam) -> Tensor:
        """Return a new tensor over the memory of a full parameter. Gather the unit if necessary."""
        if not self.fulls:
            self.fill()
        full = self.fulls[param]
        return full.detach() if is_traceable_wrapper_subclass(full) else full.data

    def plain(self, param: ShardedParam) -> list[Tensor]:
        """Return the full parameter, or the inner tensors of a tensor subclass."""
        return plain_tensors(self.fulls[param])

    def _check_may_gather(self) -> None:
        for param, version in self._versions.items():
            if version.was_written(param):
                raise written_since_forward(param)

    def free(self) -> None:
        """Drop the full parameters."""
        for storage in self._param_in:
            _by_storage.pop(storage, None)
        self.fulls, self._param_in = {}, {}

    def reshard(self) -> None:
        """Free the memory of full parameters, even of those that autograd has saved. Backward gathers them again.

        Do nothing while a module reads the parameters, or before a forward has given outputs that require gradients.
        """
        if state_of(self.unit).reading is not None or not self.given_out:
            return
        kept = {id(param.state.full(param.param)) for param in self.fulls}
        for param, full in self.fulls.items():
            # The user may hold parameters that unshard() gathered.
            if id(full) not in kept and param.extension is None:
                storage = full.untyped_storage()
                self._emptied[param] = full, storage.nbytes()
                storage.resize_(0)
        self.free()

    @torch.inference_mode(False)
    @torch.no_grad()
    def end_forward(self) -> None:
        """Free the full parameters. With ``reshard_after_forward=<int>``, keep their shards in a smaller group."""
        for param, full in self.fulls.items():
            if (group := param.post_forward_group) and not param.is_whole and param not in self._resharded:
                self._resharded[param] = Resharded(reshard(full, param.name, group, dim=param.dim), group)
        self.free()

    def prepare_backward(self) -> None:
        """Gather the parameters that were freed since forward, if backward may gather."""
        if self._emptied or (self.unit.reshards_after_forward and self.unit.flags.unshard_in_backward):
            self.fill()

    def end_backward(self) -> None:
        """Free the full parameters, or leave them to the next forward, as the unit's flags say."""
        if not self.unit.flags.reshard_after_backward and self.is_current():
            for param, full in self.fulls.items():
                param.state.keep_full(param.param, full)
        self.free()

    def note(self, tensor: Tensor) -> _Note | None:
        """Return the note to save for ``tensor``, which lies in the memory of a parameter; None: save the tensor itself."""
        param, place, version = self._param_in[storage_id(tensor)]
        full = self.plain(param)[place]
        if tensor.dtype != full.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        if version_of(full) != version or version_of(tensor) not in (0, version):
            return None  # The forward has written to it: the shards do not have this value.
        return _Note(self, param, place, tensor.shape, tensor.stride(), tensor.storage_offset() - full.storage_offset())


@dataclass
class _State:
    """The state of a unit between uncompiled forwards.

    Attributes:
        reading: the parameters that the running call of a module reads; None: no call has read one.
        trainable: the autograd node of the unit's trainable parameters in the model's forward.
        running: the number of forwards of the unit's modules that run.
        is_compiled_in_part: whether they are parts of a compiled forward.
        modules_run: the modules of the unit whose forward is over; emptied when the forwards of all modules are.
        saves_notes: whether autograd saved notes in the place of parameters in the last forward. A checkpoint counts saved
            tensors, so a recomputation must do the same.
    """

    reading: CallParameters | None = None
    trainable: TrainableStandIns | None = None
    running: int = 0
    is_compiled_in_part: bool = False
    modules_run: set[nn.Module] = field(default_factory=set)
    saves_notes: bool = False

    def end_recomputation(self) -> None:
        """Drop the autograd node that reads in recomputations shared."""
        self.trainable = None


_states: weakref.WeakKeyDictionary[Unit, _State] = weakref.WeakKeyDictionary()


def state_of(unit: Unit) -> _State:
    """Return the state of a unit between uncompiled forwards, and make it at the first call."""
    state = _states.get(unit)
    if state is None:
        state = _states[unit] = _State()
    return state


def forget_forwards(scope: Scope) -> None:
    """Forget the forwards of a scope's units, and what they gathered.

    After an exception, tracebacks may hold full parameters on some ranks. A rank that read them again would not gather.
    """
    scope.uncompiled_depth = 0
    for unit in scope.units:
        _states.pop(unit, None)


def gathered_of(unit: Unit) -> Gathered:
    """Return the unit's full parameters with their present values. Gather them if necessary."""
    found = unit.gathered
    if not isinstance(found, Gathered) or not found.is_current():
        found = unit.gathered = Gathered(unit)
    found.fill()
    return found


def is_outside(unit: Unit) -> bool:
    """Return whether no forward of the unit's modules runs, or one that is compiled in part, whose graphs read the shards."""
    state = state_of(unit)
    return (state.running == 0 or state.is_compiled_in_part) and not _is_traced()


def reshard_by_hand(unit: Unit) -> None:
    """Free the full parameters that a forward left for its backward. Backward gathers them again."""
    write_back(unit)
    if isinstance(unit.gathered, Gathered):
        unit.gathered.reshard()


# Tensors that autograd saves.


class _Note(NamedTuple):
    """A description of a saved tensor that lies in the memory of a gathered parameter."""

    gathered: Gathered
    param: ShardedParam
    place: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int | torch.SymInt

    def restore(self) -> Tensor:
        unit = self.gathered.unit
        if not self.gathered.fulls and not unit.flags.unshard_in_backward:
            raise RuntimeError(must_not_gather(unit, [self.param.name]))
        self.gathered.fill()
        full = self.gathered.plain(self.param)[self.place]
        if not in_backward():
            # Code reads a node's saved tensors outside of a backward: no end of a backward will free the parameters.
            self.gathered.free()
        return full.as_strided(self.size, self.stride, full.storage_offset() + self.offset)


class _NoteOfDTensor(NamedTuple):
    """A description of a saved DTensor, whose local tensor lies in the memory of a gathered parameter.

    Another parallelism, such as tensor parallelism, has laid out the parameter.
    """

    local: _Note
    spec: DTensorSpec

    def restore(self) -> Tensor:
        return DTensor(self.local.restore(), self.spec, requires_grad=False)


class _NoteOfSubclass(NamedTuple):
    """A description of a saved tensor subclass with inner tensors in the memory of gathered parameters."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: Sequence[int]
    stride: Sequence[int]

    def restore(self) -> Tensor:
        inner = {name: value if isinstance(value, Tensor) else value.restore() for name, value in self.inner.items()}
        restored: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return restored


class _SavedTensor(NamedTuple):
    """A saved tensor of no parameter. Autograd leaves version counters to hooks."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _SavedTensor:
        # With its autograd node, a saved output of the node would keep the node alive, which keeps the tensor alive.
        return cls(tensor if tensor.grad_fn is None else tensor.detach(), version_of(tensor))

    def restore(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}] is at version {version_of(self.tensor)}; expected version "
                f"{self.version} instead. Hint: enable anomaly detection to find the operation that failed to compute its "
                "gradient, with torch.autograd.set_detect_anomaly(True)."
            )
        return self.tensor


class _UserPacked(NamedTuple):
    """A saved tensor that the user's saved-tensor hooks have packed."""

    unpack: Callable[[Any], Tensor]
    packed: Any

    def restore(self) -> Tensor:
        return self.unpack(self.packed)


def _hooks(unit: Unit) -> torch.autograd.graph.saved_tensors_hooks:
    """Make hooks that save notes of a unit's gathered parameters, and leave all other tensors to the hooks around them.

    Parameters of other units count as other tensors: the hooks of a checkpoint, which may be in between, must see the same
    tensors in a recomputation.
    """
    others = top_saved_tensors_default_hooks(False)

    @_python
    def pack(tensor: Tensor) -> Any:
        note = _note_of(tensor, unit)
        if note is not None:
            return note
        return _SavedTensor.of(tensor) if others is None else _UserPacked(others[1], others[0](tensor))

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


@contextlib.contextmanager
def without_hooks_of_units() -> Iterator[None]:
    """Remove the innermost saved-tensor hooks in the block, if they are of units. What is saved then is saved as it is."""
    removed = []
    while (hooks := top_saved_tensors_default_hooks(False)) is not None and hooks[1] is _unpack:
        removed.append(torch.autograd.graph.saved_tensors_hooks(*hooks))
        removed[-1].__exit__()
    try:
        yield
    finally:
        for each in reversed(removed):
            each.__enter__()


def _note_of(tensor: Tensor, unit: Unit) -> _Note | _NoteOfDTensor | _NoteOfSubclass | None:
    if type(tensor) is DTensor:
        note = _note_of(local_tensor(tensor), unit)
        return _NoteOfDTensor(note, spec_of(tensor)) if isinstance(note, _Note) else None
    if is_traceable_wrapper_subclass(tensor) and unit.has_extensions:
        return _note_of_subclass(tensor, unit)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    gathered = _by_storage.get(storage_id(tensor))
    return None if gathered is None or gathered.unit is not unit else gathered.note(tensor)


def _note_of_subclass(tensor: Any, unit: Unit) -> _NoteOfSubclass | None:
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    notes = {name: note for name, value in held.items() if (note := _note_of(value, unit)) is not None}
    return _NoteOfSubclass(type(tensor), held | notes, context, tensor.size(), tensor.stride()) if notes else None


@_python
def _unpack(packed: _Note | _NoteOfDTensor | _NoteOfSubclass | _SavedTensor | _UserPacked) -> Tensor:
    return packed.restore()


# Parameters that a forward reads.


def _without_memory(param: ShardedParam) -> Tensor:
    return param.shard.new_zeros((), dtype=param.compute_dtype, device=param.compute_device).expand(param.shape)


class _Parameters(torch.autograd.Function):
    """The autograd function of a unit's trainable parameters in one forward of a model.

    Forward returns a stand-in for each parameter: a tensor of full shape and compute dtype without memory. Backward gets the
    sum of gradients over all calls of the unit's modules, and reduces it.
    """

    @staticmethod
    def forward(ctx: Any, params: list[ShardedParam], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.params = params
        return tuple(_without_memory(param) for param in params)

    @staticmethod
    @_python
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        found = dict(zip(ctx.params, grads, strict=True))
        if ctx.params[0].unit.flags.reduce_scatter_unused_params:
            # Not at the end of backward: other ranks may have used other parameters, and all reduce them together.
            found = {param: zeros_like_gradient(param) if grad is None else grad for param, grad in found.items()}
        receive_gradients(ctx.params[0].unit, {param: grad for param, grad in found.items() if grad is not None})
        # None for the shards: gradients are written to param.grad.
        return (None,) * (1 + len(grads))


class _Unshard(torch.autograd.Function):
    """The autograd function that turns outputs of :class:`_Parameters` into gathered parameters, for one call.

    Backward calls :meth:`Gathered.end_backward`, and passes the gradients on. The node saves its outputs, as notes: read later,
    they are outputs of this node again.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, params: list[ShardedParam], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gathered, ctx.params = gathered, params
        # New tensors for each call, as autograd marks them as outputs of this node.
        outputs = tuple(map(gathered.new_tensor, params))
        ctx.save_for_backward(*outputs)
        return outputs

    @staticmethod
    def of_running_node(unit: Unit) -> Any:
        """Return the node of the unit whose outputs the running autograd node got as inputs; None: there is none.

        The backward of a custom function may call a module again, and ask ``autograd.grad`` for the gradients of the full
        parameters that its forward was given.
        """
        for node, _ in inputs_of_running_node():
            if isinstance(node, node_class(_Unshard)) and node.gathered.unit is unit:  # type: ignore[attr-defined]
                return node
        return None

    @staticmethod
    def apply_to(gathered: Gathered, params: list[ShardedParam], stand_ins: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gathered parameters, as outputs of a new node."""
        order = iter(params)
        with torch.autograd.graph.saved_tensors_hooks(lambda _: next(order), gathered.new_tensor):
            return _Unshard.apply(gathered, params, *stand_ins)  # type: ignore[no-untyped-call, no-any-return]

    @staticmethod
    @_python
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.gathered.end_backward()
        return (None, None, *grads)


class _Linked(torch.autograd.Function):
    """The autograd function that makes a gathered parameter depend on the DTensor parameter, too.

    A pipeline without bubbles asks ``autograd.grad`` for the gradients of weights. It gets this rank's full gradients. The unit
    reduces their sum over microbatches (:func:`~fsdp_compile.runtime.gradients.collect_unreduced`).
    """

    @staticmethod
    def forward(ctx: Any, param: ShardedParam, full: Tensor, _: nn.Parameter) -> Tensor:
        ctx.param = param
        return full.detach()

    @staticmethod
    @_python
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, unreduced_gradient(ctx.param, grad) if is_asked_for(ctx.param.param) else None


def _link(param: ShardedParam, full: Tensor) -> Tensor:
    # A parameter with hooks is not linked: in other backwards, the hooks would be called without a gradient.
    has_hooks = bool(gradient_hooks(param.param))
    return full if has_hooks else _Linked.apply(param, full, param.param)  # type: ignore[no-untyped-call, no-any-return]


class TrainableStandIns:
    """The trainable parameters of a unit in one forward of a model."""

    def __init__(self, unit: Unit):
        self.params = [param for param in unit.params if param.shard.requires_grad]
        shards = [param.shard for param in self.params]
        self.stand_ins: Sequence[Tensor] = _Parameters.apply(self.params, *shards) if shards else ()  # type: ignore[no-untyped-call]


class CallParameters:
    """The full parameters of a unit, as the running call of a module reads them."""

    def __init__(self, unit: Unit):
        unit.follow_extensions()
        for param in unit.params:
            if param.extension is not None:
                param.check_gather()
            param.note_requires_grad()
        unit.scope.wait_for_optimizer()
        self.gathered = gathered_of(unit)
        self.is_recorded = self._is_noted = False
        self._values: dict[ShardedParam, Tensor] = self.gathered.fulls

    def value(self, param: ShardedParam) -> Tensor:
        """Return the full parameter. If gradients are enabled, a trainable one is the output of an autograd node."""
        if torch.is_grad_enabled():
            if param.note_requires_grad():
                state_of(self.gathered.unit).trainable = None
                self.is_recorded = False
            if not self.is_recorded:
                self._record()
        return self._values[param]

    def stand_ins(self) -> TrainableStandIns:
        """Return the autograd node of the unit's trainable parameters, which the first call in a model's forward makes."""
        state = state_of(self.gathered.unit)
        if state.trainable is None:
            state.trainable = TrainableStandIns(self.gathered.unit)
        return state.trainable

    def _record(self) -> None:
        if not self._is_noted:
            # Not noted at the first read, which may need no gradients.
            note_forward(self.gathered.unit.params)
            self._is_noted = True
        self._values = dict(self.gathered.fulls)
        self.is_recorded = self.gathered.is_recorded = True
        node = _Unshard.of_running_node(self.gathered.unit)
        if node is not None:
            self._values.update(zip(node.params, node.saved_tensors, strict=True))
            return
        check_reads_of_running_node(self.gathered.unit)
        trainable = self.stand_ins()
        if trainable.params:
            fulls = _Unshard.apply_to(self.gathered, trainable.params, trainable.stand_ins)
            if self.gathered.unit.scope.was_unsharded_by_hand:
                fulls = [_link(param, full) for param, full in zip(trainable.params, fulls, strict=True)]
            self._values.update(zip(trainable.params, fulls, strict=True))


def read(param: ShardedParam) -> Tensor | None:
    """Return the full parameter in the running forward; None if the unit cannot be gathered as a whole.

    Units cannot be gathered so in the uncompiled rest of a compiled forward, or while the forward is traced or transformed.
    """
    unit = param.unit
    if unit.scope.uncompiled_depth == 0 or _is_traced():
        return None
    state = state_of(unit)
    if state.reading is None:
        state.reading = CallParameters(unit)
    return state.reading.value(param)


def in_global_pre_hook(unit: Unit) -> bool:
    """Return whether a hook of all modules (``register_module_forward_pre_hook``) runs, before the forward of the unit.

    FSDP2 gathers after such hooks, so they see DTensors, as ``CommDebugMode`` expects. Hooks of the module itself see full
    parameters.
    """
    if not global_forward_pre_hooks or state_of(unit).running:
        return False
    # ``nn.Module`` tells nobody which hook it calls, so the frames of its calls are read.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals is vars(nn_module) and frame.f_locals.get("hook_id") in global_forward_pre_hooks:
            called = frame.f_locals["self"]
            if any(called is module for module in unit.modules):
                return True
        frame = frame.f_back
    return False


def is_recomputing() -> bool:
    """Return whether a checkpoint recomputes a part of a forward, in a backward."""
    # A part that records no gradients still has the saved-tensor hooks of the checkpoint around it.
    return in_backward() and (torch.is_grad_enabled() or top_saved_tensors_default_hooks(False) is not None)


def read_in_recomputation(param: ShardedParam) -> Tensor | None:
    """Return the full parameter, as :func:`read` does, where a checkpoint recomputes a part of a forward."""
    unit, scope = param.unit, param.unit.scope
    scope.uncompiled_depth += 1
    try:
        return read(param)
    finally:
        scope.uncompiled_depth -= 1
        if scope.uncompiled_depth == 0:
            state_of(unit).reading = None
            # Until the backward ends, reads share one autograd node, as reads in a forward do.
            at_end_of_backward(state_of(unit).end_recomputation)


_TRACING_MODES = tuple(getattr(TorchDispatchModeKey, mode) for mode in ("FAKE", "PROXY", "FUNCTIONAL"))


def in_tracing_mode() -> bool:
    """Return whether a mode that traces, or that computes with fake tensors, sees operators."""
    return any(get_dispatch_mode(mode) is not None for mode in _TRACING_MODES)


def _is_traced() -> bool:
    return peek_interpreter_stack() is not None or in_tracing_mode()


def _can_gather(unit: Unit) -> bool:
    """Return whether all parameters have memory, and no tensor is read in the place of one (``functional_call``)."""
    return not unit.is_meta and not any(param.is_replaced() for param in unit.params)


class UncompiledForward:
    """An uncompiled forward of a unit's module.

    Args:
        unit: the unit.
        module: the module.
    """

    @staticmethod
    def begin(unit: Unit, module: nn.Module) -> UncompiledForward:
        """Begin an uncompiled forward. Gather the unit.

        In a part of a compiled forward, whose graphs may gather the unit, only a read gathers it.
        """
        # Not in the constructor: in code that Dynamo is disabled for, there is no callback. Dynamo skips this function's code.
        compiles = get_eval_frame_callback() is not None and not is_in_any_mode_without_ignore_compile_internals()
        forward = UncompiledForward(unit, module)
        try:
            forward._gather(gathers=not compiles)
        except BaseException:
            forward.end()
            raise
        return forward

    @_python
    def __init__(self, unit: Unit, module: nn.Module):
        self._unit, self._module = unit, module
        self._scope = unit.scope
        self._scope.uncompiled_depth += 1
        self._has_returned = False
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        state_of(unit).running += 1

    @_python
    def _gather(self, *, gathers: bool) -> None:
        unit = self._unit
        if self._scope.uncompiled_depth == 1:
            # Compiled blocks are guarded by it, and a checkpoint expects forward and recomputation to run the same code.
            for param in itertools.chain.from_iterable(other.params for other in self._scope.units):
                param.note_requires_grad()
        state = state_of(unit)
        if self._scope.lent and write_back(unit):
            state.reading = None
        state.is_compiled_in_part = not gathers
        if gathers and state.reading is None and _can_gather(unit) and not _is_traced():
            state.reading = CallParameters(unit)
            if torch.is_grad_enabled():
                state.reading.stand_ins()
        if not torch.is_grad_enabled():
            return
        if not in_backward():
            state_of(unit).saves_notes = unit.reshards_after_forward
        if state_of(unit).saves_notes and saved_tensors_hooks_is_enabled():
            self._hooks = _hooks(unit)
            self._hooks.__enter__()

    @_python
    def returns(self, output: Any, inputs: Any) -> None:
        """Register hooks: backward gathers the unit at this forward's outputs, and frees it after this forward's inputs."""
        self._has_returned = True
        reading = state_of(self._unit).reading
        if reading is None or not reading.is_recorded:
            return
        gathered, given_out = reading.gathered, _differentiable(output)
        # The gradient of an input that is an output of the same unit does not end the unit's backward.
        taken = [tensor for tensor in _differentiable(inputs) if not any(given() is tensor for given in gathered.given_out)]
        for tensor in given_out:
            tensor.register_hook(_GatherForBackward(gathered))
        gathered.given_out += [weakref.ref(tensor) for tensor in given_out]
        if given_out and len(self._unit.modules) == 1:
            hook = _FreeAfterBackward(gathered, len(taken))
            for tensor in taken:
                tensor.register_hook(hook)

    @_python
    def end(self) -> None:
        """Remove the hooks, free the gathered parameters of units that reshard after forward, and record an exception."""
        if self._hooks is not None:
            self._hooks.__exit__()
        self._scope.uncompiled_depth -= 1
        state = state_of(self._unit)
        state.running -= 1
        state.modules_run.add(self._module)
        if state.is_compiled_in_part and self._scope.lent:
            end_loans(self._scope, self._unit)
        if len(state.modules_run) == len(self._unit.modules):
            _end_forward(self._unit)
        if self._scope.uncompiled_depth == 0:
            error = None if self._has_returned else sys.exc_info()[1]
            if error is not None:
                record_failed_forward(error, self._scope.groups)
            for unit in self._scope.units:
                state = state_of(unit)
                state.trainable = None
                if state.reading is not None or state.modules_run:
                    _end_forward(unit)


skip_code(UncompiledForward.begin.__code__)


class _GatherForBackward:
    """A hook on the outputs of a forward, which gathers the unit for backward."""

    def __init__(self, gathered: Gathered):
        self._gathered = gathered

    @_python
    def __call__(self, _gradient: Tensor) -> None:
        self._gathered.prepare_backward()


class _FreeAfterBackward:
    """A hook on the inputs of a forward. Their last gradient ends the unit's backward, even if parameters are frozen."""

    def __init__(self, gathered: Gathered, inputs: int):
        self._gathered = gathered
        self._inputs = self._left = inputs

    @_python
    def __call__(self, _gradient: Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = self._inputs
            self._gathered.end_backward()


def _differentiable(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


def _end_forward(unit: Unit) -> None:
    state = state_of(unit)
    reading, state.reading = state.reading, None
    state.modules_run.clear()
    end_forward(unit)
    # A recomputation in backward frees nothing, as this backward may still read the parameters.
    if reading is not None and not in_backward():
        if unit.reshards_after_forward:
            reading.gathered.end_forward()
        if not reading.gathered.is_recorded:
            unit.gathered = None
