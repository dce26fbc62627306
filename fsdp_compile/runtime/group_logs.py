"""The collective logs of process groups, and the signs of life of the job."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from passes.collectives.functional import resolve_group
from passes.collectives.gloo import backend_of, message_tags
from passes.collectives.gloo_channels import collectives_begun
from passes.fx.torch_internals.core import current_graph_task_id
from passes.fx.torch_internals.distributed import get_process_group_store
from passes.fx.torch_internals.objects import timeout_on

from .agreement import Agreement, ranks_text
from .collective_log import SHARDING_ROLES, CollectiveLog, text_of
from .pulse import Pulse
from .watchdog import watchdog

_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = weakref.WeakKeyDictionary()


def find_logs(group_names: Iterable[str], roles: Mapping[str, str]) -> list[CollectiveLog]:
    """Return the logs of process groups, in the same order on all ranks: by role and name.

    A group whose ranks are all in an earlier group belongs to the log of that group. A group that parameters are sharded or
    replicated over has a log of its own, unless an earlier group has the same ranks.
    """
    found: list[CollectiveLog] = []
    for name in sorted(set(group_names), key=lambda name: (place_of_role(roles.get(name, "")), name)):
        group = resolve_group(name)
        ranks = dist.get_process_group_ranks(group)
        shards = roles.get(name) in SHARDING_ROLES
        around = next((log for log in found if (log.has_ranks_of if shards else log.includes)(name)), None)
        if around is not None:
            around.group_names.add(name)
        elif len(ranks) > 1 and (log := _log_of(group, name, roles.get(name, f"of {ranks_text(ranks)}"))):
            found.append(log)
    for log in found:
        log.family.update(found)
    return found


def place_of_role(role: str) -> int:
    """Return where the logs of a role come in the order that all ranks have."""
    return SHARDING_ROLES.index(role) if role in SHARDING_ROLES else len(SHARDING_ROLES)


def backward_begins(task: int, group_name: str) -> None:
    """Note that a backward begins, which is to reduce gradients over a process group.

    Args:
        task: the identifier of autograd's task.
        group_name: name of the group.
    """
    if (log := _logs.get(resolve_group(group_name))) is not None:
        log.backwards.add(task)


def backward_ends(task: int, group_names: Iterable[str]) -> None:
    """Note that a backward has ended without an exception. Arguments as for :func:`backward_begins`."""
    for name in group_names:
        if (log := _logs.get(resolve_group(name))) is not None:
            log.backwards.discard(task)


def record_exception(error: BaseException, group_names: Iterable[str]) -> None:
    """Record that an exception has ended a program, a forward or a backward over process groups."""
    record_in(error, logs_of(group_names))


def record_failed_forward(error: BaseException, group_names: Iterable[str]) -> None:
    """Record that an exception has ended a forward. Not that of a recomputation, which raises to stop early."""
    if current_graph_task_id() == -1:
        record_exception(error, group_names)


def record_in(error: BaseException, logs: Iterable[CollectiveLog]) -> None:
    """Record that an exception has ended a program in some logs."""
    for log in logs:
        if not log.failure:
            log.record_exception(text_of(error))


def settle(group_names: Iterable[str]) -> None:
    """Wait until all ranks of process groups have met an exception that this rank has met. See :meth:`CollectiveLog.settle`."""
    for log in logs_of(group_names):
        log.settle()


def logs_of(group_names: Iterable[str]) -> list[CollectiveLog]:
    """Return the logs of process groups, of those that have one."""
    return list(filter(None, (_logs.get(resolve_group(name)) for name in group_names)))


def _log_of(group: dist.ProcessGroup, name: str, label: str) -> CollectiveLog | None:
    if group not in _logs:
        store = get_process_group_store(group)
        # A fake group has no other ranks, MPI has no store.
        if "fake" in dist.get_backend(group) or store is None:
            return None
        ranks = dist.get_process_group_ranks(group)
        agreement = Agreement(store, ranks, dist.get_rank(), label=label, timeout_s=_timeout_s(group), pulse=_pulse_of_job())
        has_tags = backend_of(name, torch.device("cpu")) == "gloo"
        is_asynchronous = torch.accelerator.is_available() and dist.get_backend(group) != "gloo"
        _logs[group] = log = CollectiveLog(
            agreement, name, has_tags=has_tags, is_asynchronous=is_asynchronous, begun=_counter([group, dist.group.WORLD])
        )
        message_tags.pop(name, None)
        watchdog.add(log)
    return _logs[group]


def _counter(groups: Iterable[dist.ProcessGroup | None]) -> Callable[[], tuple[int, ...]]:
    """Return a function that returns the number of collectives that this rank has begun over each group since now."""
    # The logs would keep their groups alive.
    counted = []
    for group in dict.fromkeys(groups):
        # Not every backend counts.
        with contextlib.suppress(RuntimeError):
            if group is not None:
                counted.append((weakref.ref(group), collectives_begun(group)))

    def begun() -> tuple[int, ...]:
        living = [(group(), first) for group, first in counted]
        return tuple(collectives_begun(group) - first for group, first in living if group is not None)

    return begun


def _pulse_of_job() -> Pulse | None:
    """Return the signs of life of the job's ranks, and begin to give them; None: ranks have no store."""
    world = dist.group.WORLD
    if world is None or (store := get_process_group_store(world)) is None:
        return None
    if world not in _pulses:
        _pulses[world] = pulse = Pulse(store, dist.get_rank())
        # At once: a rank may end before the watchdog's first round.
        pulse.beat(time.monotonic())
        watchdog.add_pulse(pulse)
    return _pulses[world]


_pulses: weakref.WeakKeyDictionary[dist.ProcessGroup, Pulse] = weakref.WeakKeyDictionary()


def _timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a group's collectives in seconds."""
    return (timeout_on(group) or default_pg_timeout).total_seconds()
