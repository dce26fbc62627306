"""Methods of sharded modules for the schedule: when gathers start, gathering and freeing by hand, and how much communication is
in flight. docs/schedule.md describes the effect of each on a graph.

Source: the methods of torch's ``FSDPModule`` (torch/distributed/fsdp/_fully_shard/_fully_shard.py), whose names, arguments and
meaning these have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from torch.distributed.fsdp import UnshardHandle

from passes.fx.torch_internals.core import disable_dynamo

from ..runtime.uncompiled import reshard_by_hand
from ..runtime.unsharding import finish_unshard, start_unshard
from ..units.unit import Event, Unit
from .gradient_controls import Controls


class _PendingUnshard(UnshardHandle):
    """The handle of a unit whose gathers are in flight."""

    def __init__(self, unit: Unit):
        self._unit: Unit | None = unit

    def wait(self) -> None:
        if self._unit is not None:
            finish_unshard(self._unit)
            self._unit = None


class ScheduleControls(Controls):
    """The part of ``FSDPModule`` that controls the schedule."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[ScheduleControls]) -> None:
        """Set the units whose gathers start in forward when this unit's compute starts, in list order.

        Args:
            modules: sharded modules. Each has an effect in graphs that gather its unit and this one. An empty list restores the
                default, the next unit.

        Raises:
            ValueError: an entry is not sharded.
        """
        self._fsdp_unit.forward_prefetch = self._listed(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[ScheduleControls]) -> None:
        """Set the units whose gathers start in backward when this unit's compute starts there.

        Args and errors are as for :meth:`set_modules_to_forward_prefetch`.
        """
        self._fsdp_unit.backward_prefetch = self._listed(modules, "set_modules_to_backward_prefetch")

    def _listed(self, modules: Iterable[object], method: str) -> tuple[Unit, ...]:
        units = []
        for module in modules:
            if not isinstance(module, ScheduleControls):
                raise ValueError(
                    f"{method} takes modules that fully_shard has sharded, but got {type(module).__name__}: {module}"
                )
            units.append(module._fsdp_unit)
        return tuple(units)

    @disable_dynamo
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, in the dtype that they compute in. Units inside are not gathered.

        The next compiled forward takes the full parameters and gathers nothing. Until then, or until :meth:`reshard`, the
        module's attributes are the full tensors; ``state_dict``, ``parameters`` and optimizers still see shards.

        Args:
            async_op: only start the gather. A forward that comes before the handle's ``wait`` waits by itself.

        Returns:
            The handle, with ``async_op``.

        Raises:
            RuntimeError: a parameter is on the meta device.
        """
        self._fsdp_unit.scope.was_unsharded_by_hand = True
        start_unshard(self._fsdp_unit)
        if async_op:
            return _PendingUnshard(self._fsdp_unit)
        finish_unshard(self._fsdp_unit)
        return None

    @disable_dynamo
    def reshard(self) -> None:
        """Free this unit's gathered parameters.

        These are the parameters of :meth:`unshard`, those that outlived a backward, and those that an uncompiled forward left
        for its backward. The backward gathers them again.
        """
        reshard_by_hand(self._fsdp_unit)
        self._fsdp_unit.drop_full()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward may gather this unit. With False, a backward that has to gather a parameter raises.

        The ``RuntimeError`` names the parameter. False saves nothing, as graphs gather only parameters that backward reads.
        """
        self._fsdp_unit.flags.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: Event | None) -> None:
        """Make the next forward of the whole model wait for an event before its gathers.

        Args:
            event: the event; None, which the current stream of a CPU records: there is nothing to wait for.

        Raises:
            TypeError: ``event`` has no ``wait``.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"set_post_optim_event takes an event with a wait() method, such as torch.Event, not {event!r}.")
        self._fsdp_unit.scope.post_optim_event = event

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reduce-scatters have a process group of their own, so that NCCL can run them beside gathers.

        The group has the same ranks, all of which must call this method. A communication hook keeps its group.

        Args:
            enable: False: reduce-scatters share the group of the gathers.
            recurse: set it for all units inside, too.
        """
        for unit in self._units(recurse):
            meshes = unit.meshes if enable else ()
            unit.flags.reduce_scatter_groups = {mesh.scatter_group: mesh.reduce_scatter_group() for mesh in meshes}

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reduce-scatters may be in flight, each holding its unit's whole gradient.

        The largest number among a graph's units counts. The default of a unit is two, or with replicas one.

        Raises:
            TypeError: ``max_input_buffers`` is no int.
            ValueError: it is not positive.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers takes an int, not {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers takes a positive number, not {max_input_buffers}.")
        for unit in self._units(recurse):
            unit.flags.max_pending_reductions = max_input_buffers

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: every gather of a graph is asynchronous and allocates on the computing stream, as in FSDP2 with True.

        Defaults and prefetch lists decide where a gather starts.
        """

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept only False, the default: buffers of collectives are values of the graph.

        Raises:
            NotImplementedError: ``enable`` is True.
        """
        if enable:
            raise NotImplementedError(_BUFFERS.format("set_allocate_memory_from_process_group_for_comm"))

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Accept only False, the default: gathered parameters are values of the graph, without a fixed address.

        Raises:
            NotImplementedError: ``keep`` is True.
        """
        if keep:
            raise NotImplementedError(_BUFFERS.format("set_keep_unsharded_storage"))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raise ``NotImplementedError``: buffers of collectives are values of the graph."""
        raise NotImplementedError(_BUFFERS.format("set_symm_mem_for_comm"))


_BUFFERS = (
    "{}: buffers of collectives are values of a compiled graph, allocated like all others; a process group cannot bring its "
    "own. Leave the call out."
)


def share_comm_ctx(modules: Sequence[object]) -> None:
    """Check ``modules``, and do nothing: FSDP2 lets modules share streams for communication. Graphs have no such streams.

    Raises:
        ValueError: an entry was not passed to ``fully_shard``.

    Source: ``torch.distributed.fsdp.share_comm_ctx``.
    """
    for module in modules:
        if not isinstance(module, ScheduleControls):
            raise ValueError(f"share_comm_ctx takes modules that fully_shard has sharded, but got {type(module).__name__}.")
