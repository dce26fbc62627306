"""The work of a node: what it does for which bucket. Passes leave it on the nodes that they insert, for each other.

It says which nodes the schedule may move, which kernels may reach across, and what a collective is called in profiles and
messages. It is text only where it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.fx import Graph, Node

from ..fx.emit import WORK
from ..fx.graph import is_collective, is_host_copy


class Role(Enum):
    """The part of a node in the communication of its bucket.

    Attributes:
        COPY_TO_DEVICE: starts the copy of shards that are kept on the host.
        START_GATHER: copies shards in, and starts the all-gather.
        FINISH_GATHER: waits for it, and cuts the parameters out.
        UNPACK: cuts the parameters of one of several units out of what they have gathered together.
        ACCUMULATE: adds gradients to those of earlier microbatches, without communication.
        START_REDUCE: copies gradients in, and starts the reduce-scatter.
        ALL_REDUCE: finishes the reduce-scatter, and starts the all-reduce over replicas.
        FINISH_REDUCE: waits for the last collective, and makes its result what lands.
        UPDATE: updates parameters and what an optimizer keeps, in place.
        COPY_TO_HOST: starts the copy of that to the host, if it is to land there.
    """

    COPY_TO_DEVICE = "copy_to_device"
    START_GATHER = "start_gather"
    FINISH_GATHER = "finish_gather"
    UNPACK = "unpack"
    ACCUMULATE = "accumulate"
    START_REDUCE = "start_reduce"
    ALL_REDUCE = "all_reduce"
    FINISH_REDUCE = "finish_reduce"
    UPDATE = "update"
    COPY_TO_HOST = "copy_to_host"

    def __str__(self) -> str:
        return self.value


#: What makes parameters of a gathered buffer.
MAKES_PARAMETERS = (Role.FINISH_GATHER, Role.UNPACK)


@dataclass(frozen=True)
class BucketName:
    """The name of parameters that share a collective.

    Attributes:
        parts: what they are of each unit's bucket: its name, and the number of the piece; None: all of it.
    """

    parts: tuple[tuple[str, int | None], ...]

    @staticmethod
    def of_unit(name: str) -> BucketName:
        """A unit's bucket, whole."""
        return BucketName(((name, None),))

    @property
    def unit_buckets(self) -> tuple[str, ...]:
        """The names of the units' buckets that it has a part of."""
        return tuple(name for name, _ in self.parts)

    def __str__(self) -> str:
        return "+".join(name if piece is None else f"{name}/{piece}" for name, piece in self.parts)


@dataclass(frozen=True)
class Work:
    """The role of a node, and the bucket that it works for."""

    role: Role
    bucket: BucketName

    def __str__(self) -> str:
        return f"{self.role} {self.bucket}"


def mark(node: Node, work: Work) -> None:
    """Say what a node does."""
    node.meta[WORK] = work


def work(node: Node) -> Work | None:
    """The work of a node; None for nodes of the model."""
    return node.meta.get(WORK)


def role(node: Node) -> Role | None:
    """The role of a node that works for a bucket; else None."""
    found = work(node)
    return None if found is None else found.role


def bucket(node: Node) -> BucketName | None:
    """The bucket that a node works for, if any."""
    found = work(node)
    return None if found is None else found.bucket


def nodes_of(graph: Graph, wanted: Role) -> dict[BucketName, list[Node]]:
    """The nodes of one role by bucket, in graph order."""
    found: dict[BucketName, list[Node]] = {}
    for node in graph.nodes:
        done = work(node)
        if done is not None and done.role is wanted:
            found.setdefault(done.bucket, []).append(node)
    return found


def kernel_boundaries(graph: Graph) -> set[Node]:
    """The nodes that no kernel reaches across: collectives, copies between host and device, the first node of each reduction's
    copy-in, that of the copies of each unit out of what several have gathered, and that of an update that is not behind the
    wait for its gradients.

    A kernel that copied gradients in and read a parameter as well would hold a whole gathered buffer beside the gradients and
    their copy. Between units, kernels end where they would if each had gathered by itself, so that equal units share them.

    A compiler of kernels does not know that an update writes to what gathers read: so nothing that was ahead of the update may
    be in one kernel with it.
    """
    first = {nodes[0] for role in (Role.START_REDUCE, Role.UNPACK) for nodes in nodes_of(graph, role).values()}
    first |= {nodes[0] for nodes in nodes_of(graph, Role.UPDATE).values() if not _is_behind_its_wait(nodes[0])}
    return first | {node for node in graph.nodes if is_collective(node) or is_host_copy(node)}


def _is_behind_its_wait(update: Node) -> bool:
    """Whether only work of its own bucket stands between an update and a collective, or the wait for one."""
    node = update.prev
    while node.op == "call_function" and bucket(node) == bucket(update) and not is_collective(node):
        node = node.prev
    return is_collective(node) and bucket(node) == bucket(update)
