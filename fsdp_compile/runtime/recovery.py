"""Recovery: go on with the next step after an exception, also if only some ranks met it.

The other ranks were woken by closing the channels that they waited at (:mod:`passes.collectives.gloo_channels`). So all ranks
have left the step, and hold gradients of different parts of it. They go on if no rank has stepped an optimizer that another has
not: they open the channels anew, and begin new histories.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from typing import Any

from passes.collectives.functional import resolve_group
from passes.collectives.gloo_channels import reopen_channels

from ..units.param_state import optimizer_steps
from .agreement import RankFailed, given_up
from .collective_log import CollectiveLog
from .group_logs import logs_of, place_of_role, record_exception

# The last steps of each rank, among which must be one that all ranks ran.
_COMPARED_STEPS = 256


def recover(group_names: Collection[str], *, updates_in_backward: bool = False) -> bool:
    """Wait until all ranks of process groups have left a step, if this rank has met an exception or a failed rank.

    All ranks have to call this. A rank that handles an exception has met it.

    Args:
        group_names: the names of the process groups.
        updates_in_backward: whether backward updates parameters, and so may have updated some of them on some ranks.

    Returns:
        Whether some ranks did not meet the exception. Then ranks are connected anew, and their gradients differ.

    Raises:
        RankFailed: a rank is lost, or the ranks cannot go on together.
        RanksDisagree: the ranks run different programs.
    """
    logs = logs_of(group_names)
    error = sys.exc_info()[1]
    if error is not None:
        # Nobody has told of an exception in code outside of units, or before their graphs are made.
        record_exception(error, group_names)
    for log in logs:
        try:
            log.settle()
            log.check()
        except RankFailed as failure:
            if not failure.may_recover:
                raise
            if updates_in_backward:
                _give_up(log, "an optimizer in backward may have updated parameters on some of them.")
    if not any(log.failure for log in logs):
        return False
    # In the same order on all ranks, of which each may be in other groups.
    family = sorted(
        set().union(*(log.family for log in logs)), key=lambda log: (place_of_role(log.agreement.label), log.group_name)
    )
    for log in family:
        log.agreement.store.set(_key(log, log.agreement.rank), _post(log))
    agreed = {log: _wait(log) for log in family}
    for log in family:
        log.restart(agreed[log])
    for name in sorted(set().union(*(log.group_names for log in family))):
        reopen_channels(resolve_group(name))
    return True


def _post(log: CollectiveLog) -> str:
    steps = [(step.number, step.mixed, step.updates) for step in log.last_steps(_COMPARED_STEPS)]
    return json.dumps({"steps": steps, "updates": optimizer_steps(), "agreed": sorted(log.agreement.agreed)})


def _wait(log: CollectiveLog) -> set[str]:
    """Wait until all ranks of a log want to go on. Return the programs that all have agreed on."""
    agreement = log.agreement
    keys = {rank: _key(log, rank) for rank in agreement.ranks}

    def missing() -> list[int]:
        return [rank for rank, key in keys.items() if not agreement.store.check([key])]

    agreement.wait(lambda: not missing(), missing, "to call reset_iter_state()", heeds_failures=False)
    posts = {rank: json.loads(agreement.store.get(key)) for rank, key in keys.items()}
    if reason := _obstacle(posts):
        _give_up(log, reason)
    return set.intersection(*(set(post["agreed"]) for post in posts.values()))


def _give_up(log: CollectiveLog, reason: str) -> None:
    log.learn_of_failure()
    log.fail(given_up(log.failure, reason))
    log.check()


def _obstacle(posts: Mapping[int, Mapping[str, Any]]) -> str:
    """Return why ranks cannot go on together; empty: they can.

    Args:
        posts: what each rank has posted.
    """
    ran = {rank: {(number, mixed): updates for number, mixed, updates in post["steps"]} for rank, post in posts.items()}
    common = set.intersection(*(set(steps) for steps in ran.values()))
    if not common:
        return f"they have not run the same program within their last {_COMPARED_STEPS}."
    last = max(common)
    since = {rank: posts[rank]["updates"] - ran[rank][last] for rank in posts}
    if len(set(since.values())) == 1:
        return ""
    counts = ", ".join(f"rank {rank}: {count}" for rank, count in since.items())
    return f"since the last program that all have run, optimizers have stepped ({counts})."


def _key(log: CollectiveLog, rank: int) -> str:
    return f"{log.agreement.prefix}/recovery/{rank}"
