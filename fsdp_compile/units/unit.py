"""A unit of sharding: the parameters that one ``fully_shard`` call groups, their storage, and the unit's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from passes.collectives.divide_factors import Averaging
from passes.collectives.gather import GatherFormat
from passes.collectives.host_copies import copies_to
from passes.collectives.layout import padding_to
from passes.collectives.rounded_gather import GatherPolicy
from passes.collectives.stateful_hook import StatefulHook
from passes.ir.plan import Plan
from passes.ir.reduction import Sync

from .extension import is_extension
from .mesh import ShardingMesh
from .param_state import FlatSlice
from .sharded_param import ShardedParam


class Event(Protocol):
    """The interface of a post-optimizer event, such as a ``torch.Event``."""

    def wait(self) -> Any:
        """Make the current stream wait for the event."""


class Scope:
    """State that all units of a tree of modules share.

    Attributes:
        active: whether a forward of one of the units runs. Then parameters of all units read as full tensors, so that a module
            can use a parameter of another unit inside it.
        uncompiled_depth: the number of nested forwards of sharded modules that run uncompiled.
        units: the units, in the order of their modules.
        tied_reads: the full tensors that iterations in the running forward returned for tied parameters, by name.
        is_last_backward: whether the next backward is that of the last microbatch.
        finalizes_by_hand: whether ``finalize_backward()``, not the end of a backward, reduces gradients that backward left.
        post_optim_event: the event that the next forward has to wait for.
        was_unsharded_by_hand: whether ``unshard()`` was ever called, as pipelines do.
        lent: the full parameters that code outside of their unit got in the running forward, by unit and identity
            (:mod:`fsdp_compile.runtime.lent_parameters`).
        left_out_gradients: whether, in a step of several microbatches, a backward dropped gradients of parameters because
            autograd had not asked for them.
        optimizer_state: bytes of optimizer state on the device, as text. A memory budget sets it to have the model compiled
            anew: compiled code guards on it. (A number that changes would become a symbol of the graph.)
        with_hooks: variants of graphs that call communication hooks of the units, by graph and plan. Kept here, so that they
            go when the hooks go.
    """

    # Not in a dictionary of the instance: Dynamo of torch 2.13 loses what traced code writes there after a hook on a tensor
    # (``register_hook``) has been registered, so that ``active`` would stay True.
    __slots__ = (
        "__weakref__",
        "active",
        "finalizes_by_hand",
        "is_last_backward",
        "left_out_gradients",
        "lent",
        "optimizer_state",
        "post_optim_event",
        "tied_reads",
        "uncompiled_depth",
        "units",
        "was_unsharded_by_hand",
        "with_hooks",
    )

    def __init__(self) -> None:
        self.active = False
        self.uncompiled_depth = 0
        self.units: list[Unit] = []
        self.tied_reads: dict[str, Any] = {}
        self.lent: dict[Unit, dict[int, Any]] = {}
        self.is_last_backward = True
        self.finalizes_by_hand = False
        self.post_optim_event: Event | None = None
        self.was_unsharded_by_hand = False
        self.left_out_gradients = False
        self.optimizer_state = ""
        self.with_hooks: WeakKeyDictionary[Any, dict[Plan, list[Any]]] = WeakKeyDictionary()

    @property
    def groups(self) -> list[str]:
        """The names of the process groups that parameters are sharded or replicated over."""
        return list(dict.fromkeys(group for unit in self.units for group in unit.groups))

    def wait_for_optimizer(self) -> None:
        """Make the current stream wait for the user's event, once."""
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()


@dataclass
class SyncFlags:
    """The settings by which a unit synchronises gradients and keeps parameters. Its modules' ``set_*`` methods set them.

    Attributes:
        reduce_grads: reduce gradients at all.
        all_reduce_grads: with replicas (HSDP), all-reduce after the reduce-scatter.
        before_last: the most that a backward reduces before the last one of a step.
        reshard_after_backward: free gathered parameters after backward.
        reduce_scatter_unused_params: reduce zeros for a parameter without a gradient.
        gradient_divide_factor: the divisor of gradients; None: the number of ranks.
        force_sum_reduction: reduce with sums only.
        comm_hook: replaces the reduce-scatter: ``hook(gradient, output)``, or ``hook(gradient)``, or a hook with tensors.
        comm_hook_in_place: whether ``comm_hook`` is ``hook(gradient)``, which replaces the all-reduce, too.
        replica_hook: averages reduced shards over the replicas in place, instead of the all-reduce.
        all_reduce_hook: changes the reduced shard in place.
        reduce_scatter_groups: names of groups that only reduce-scatters use, by the name of the gathers' group. Without an
            entry, reduce-scatters use the gathers' group.
        max_pending_reductions: how many reduce-scatters may be in flight; None: the schedule's default.
        unshard_in_backward: whether backward may gather.
    """

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    before_last: Sync = Sync.ALL
    reshard_after_backward: bool = True
    reduce_scatter_unused_params: bool = False
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    comm_hook: Callable[..., None] | StatefulHook | None = None
    comm_hook_in_place: bool = False
    replica_hook: Callable[[Tensor], None] | StatefulHook | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    reduce_scatter_groups: Mapping[str, str] = field(default_factory=dict)
    max_pending_reductions: int | None = None
    unshard_in_backward: bool = True


@dataclass(frozen=True)
class PendingGather:
    """A gather in flight.

    Attributes:
        params: the parameters that are gathered together: of one unit, mesh and, unless packed, dtype.
        sent: the tensors that each parameter sends, without parameters that all ranks have whole.
        format: the format in which they travel.
        gathered: the flat buffer in flight; None: nothing is sent.
        group: name of the process group of the gather.
        run: the gather as a program that ranks compare (:mod:`fsdp_compile.runtime.checked_program`).
    """

    params: list[ShardedParam]
    sent: Mapping[ShardedParam, SentTensors]
    format: GatherFormat
    gathered: Tensor | None
    group: str
    run: AbstractContextManager[Any]


class SentTensors(NamedTuple):
    """The tensors that a parameter sends in a gather: its shard, or what an extension makes of it.

    Attributes:
        tensors: this rank's tensors.
        metadata: an extension's further input to decode the parameter.
    """

    tensors: list[Tensor]
    metadata: Any = None


class MovedError(RuntimeError):
    """The error for a parameter that is kept on the host and was moved to a device."""


class Unit:
    """The parameters that one ``fully_shard`` call groups.

    Attributes:
        modules: the modules that were passed (one, or a list).
        mesh: the mesh of its parameters, unless ``shard_placement_fn`` gives a parameter another.
        meshes: all meshes that its parameters are sharded on.
        mp_policy: mixed-precision policy.
        gather_policy: rounds parameters for their gathers; None: they are not rounded.
        offload: keeps shards and gradients, and so the optimizer, on the host; None: they are where the unit computes.
        copies: whether ``offload`` needs copies, as the unit computes on a device with memory of its own.
        name: qualified name of the first module, from the outermost sharded one; empty for the root.
        is_root: no other unit encloses this one.
        scope: the state that it shares with all units of its tree.
        is_meta: whether parameters have no memory yet.
        has_extensions: whether a parameter has an all-gather extension.
        has_several_dtypes: whether parameters differ in dtype, or in the dtype that they compute in.
        params: its parameters, in registration order.
        storages: flat storage for each dtype.
        places: for each storage, the buffer that it is a run of: itself, or a buffer for storages of several units.
        flags: the settings of its synchronisation.
        forward_prefetch, backward_prefetch: the units whose gathers start when this unit's compute does; empty: the default.
        pending: gathers that ``unshard()`` started.
        gathered: what uncompiled forwards have gathered (:class:`fsdp_compile.runtime.uncompiled.Gathered`); None: nothing.
        attach: called with a parameter whose shard is new, or whose ``requires_grad`` has changed.
        post_forward_size: the number of ranks of the group that keeps shards after forward (``reshard_after_forward=<int>``);
            0: no number was given.
        averagings: cache of averaging and divide factors, by the settings that determine them.
        updates: whether an optimizer that steps in backward was ever given one of its parameters.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        mesh: ShardingMesh,
        meshes: Iterable[ShardingMesh],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        attach: Callable[[ShardedParam], None] = lambda _: None,
        gather_policy: GatherPolicy | None = None,
        offload: CPUOffloadPolicy | None = None,
    ):
        self.modules = modules
        self.attach = attach
        self.mesh = mesh
        self.meshes = tuple(meshes)
        self.mp_policy = mp_policy
        self.gather_policy = gather_policy
        self.offload = offload
        self.copies = offload is not None and copies_to(mesh.device)
        self.name = ""
        self.is_root = True
        self.scope = Scope()
        self.flags = SyncFlags()
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.pending: list[PendingGather] = []
        self.gathered: object = None
        self.averagings: dict[tuple[Any, ...], tuple[Averaging, tuple[float, ...]]] = {}
        self.updates = False
        self.is_meta = False
        self.has_extensions = False
        self.has_several_dtypes = False
        self.params: list[ShardedParam] = []
        self.storages: dict[torch.dtype, Tensor] = {}
        self.places: dict[torch.dtype, FlatSlice] = {}
        self.post_forward_size = 0
        self._reshard_after_forward = reshard_after_forward
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            for each in self.meshes:
                each.post_forward_group(reshard_after_forward)
            self.post_forward_size = reshard_after_forward
            # In a group of one rank, a shard is the whole parameter: nothing is resharded.
            self._reshard_after_forward = reshard_after_forward != 1

    @property
    def groups(self) -> list[str]:
        """The names of the process groups that its parameters are sharded or replicated over."""
        return list(dict.fromkeys(group for mesh in self.meshes for group in mesh.groups))

    @property
    def reshards_after_forward(self) -> bool:
        """True if backward gathers the unit again. The default is False for the root, which backward reads first; else True."""
        return not self.is_root if self._reshard_after_forward is None else self._reshard_after_forward is True

    @property
    def pins_memory(self) -> bool:
        """True if shards and gradients on the host are in pinned memory, which a device can copy from by itself."""
        if self.offload is None or not self.offload.pin_memory:
            return False
        return self.mesh.device.type != "cpu" or torch.accelerator.is_available()

    @property
    def may_choose_reshard(self) -> bool:
        """True if the user has left it to the library whether backward gathers the unit again."""
        return self._reshard_after_forward is None

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Set whether backward gathers the unit again. Compiled graphs are traced again."""
        self._reshard_after_forward = reshard
        self.post_forward_size = 0
        for sharded in self.params:
            sharded.update_operator_args()

    def take_gathers(self) -> list[PendingGather]:
        """Remove and return the gathers in flight. The caller has to wait for them."""
        taken, self.pending = self.pending, []
        return taken

    def abandon_gathers(self) -> None:
        """Wait for gathers in flight, and drop their results."""
        for pending in self.take_gathers():
            if pending.gathered is not None:
                with pending.run:
                    torch.ops._c10d_functional.wait_tensor(pending.gathered)
            for param in pending.params:
                param.state.drop_full()

    def drop_full(self) -> None:
        """Free gathered parameters, and abandon gathers in flight."""
        self.abandon_gathers()
        self.gathered = None
        for sharded in self.params:
            sharded.state.drop_full()

    def allocate(self) -> None:
        """Lay out the parameters in new flat storage, in their present dtypes.

        Raises:
            NotImplementedError, TypeError, ValueError: a parameter may not have the extension of its local tensor
                (:meth:`ShardedParam.check_extension`). Nothing has changed then.
        """
        extensions = [sharded for sharded in self.params if is_extension(sharded.local)]
        for sharded in extensions:
            sharded.check_extension(sharded.local)
        self.has_extensions = bool(extensions)
        self.has_several_dtypes = len({(sharded.local.dtype, sharded.param_dtype) for sharded in self.params}) > 1
        device = self.mesh.device if self.offload is None else torch.device("cpu")
        if self.params and self.params[0].local.is_meta:
            device = torch.device("meta")
        sizes: dict[torch.dtype, int] = {}
        offsets: dict[ShardedParam, int] = {}
        # Parameters that are gathered together are neighbours.
        for sharded in (param for mesh in self.meshes for param in self.params if param.mesh is mesh):
            if is_extension(sharded.local):
                continue
            dtype, numel = sharded.local.dtype, sharded.padded_numel
            offsets[sharded] = sizes.get(dtype, 0)
            sizes[dtype] = offsets[sharded] + numel + padding_to(sharded.alignment, numel)
        # Storage begins as zeros, as padding is gathered, too, and must be finite.
        self.is_meta = device.type == "meta"
        pinned = self.pins_memory and not self.is_meta
        self.storages = {
            dtype: torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned) for dtype, size in sizes.items()
        }
        self.places = {dtype: FlatSlice(storage, 0, storage.numel()) for dtype, storage in self.storages.items()}
        for sharded in self.params:
            if sharded in offsets:
                sharded.bind(self.storages[sharded.local.dtype], offsets[sharded])
            else:
                sharded.bind_extension()

    def move_storage(self, dtype: torch.dtype, place: FlatSlice) -> None:
        """Copy the flat storage of a dtype into ``place``, a run of a buffer, and make parameters and shards lie there."""
        self.places[dtype], self.storages[dtype] = place, place.tensor()
        for sharded in self.params:
            if sharded.extension is None and sharded.local.dtype == dtype:
                sharded.bind(self.storages[dtype], sharded.offset)

    def follow_extensions(self) -> None:
        """Lay out the parameters anew if a local tensor has got or lost functions of an all-gather extension.

        Raises:
            NotImplementedError, TypeError, ValueError: as :meth:`allocate`.
        """
        if any(sharded.extension_changed() for sharded in self.params):
            self.allocate()

    def sync(self) -> None:
        """Make storage and shards follow parameters that were replaced, cast, or moved.

        Raises:
            MovedError: a parameter that has to stay on the host was moved to a device. Its values are on the host again.
        """
        for sharded in self.params:
            sharded.adopt_assigned_parameter()
        devices = {sharded.name: sharded.local.device for sharded in self.params if self.offload is not None}
        self._sync()
        for name, device in devices.items():
            if device.type not in ("cpu", "meta"):
                raise MovedError(
                    f"Parameter {name} was moved to {device}, but fully_shard(offload_policy=CPUOffloadPolicy()) keeps it on "
                    "the host, where it is again. Move only inputs and buffers to the device; give a model on the meta device "
                    'memory with to_empty(device="cpu"), and load state dicts that are on the CPU.'
                )

    def _sync(self) -> None:
        if len({sharded.local.is_meta for sharded in self.params}) > 1:
            # Only some parameters have memory: a load or an initialisation is under way, and will sync again.
            return
        layout_holds = all(
            sharded.local.dtype == sharded.shard.dtype
            and sharded.local.device == sharded.shard.device
            and not sharded.extension_changed()
            for sharded in self.params
        )
        if not layout_holds:
            self.allocate()
            return
        for sharded in self.params:
            if sharded.is_bound():
                continue
            if sharded.extension is not None:
                sharded.bind_extension()
            else:
                sharded.bind(self.storages[sharded.local.dtype], sharded.offset)
