"""Collective sequence: the collectives of a graph in order, as lines that ranks can compare.

No graph is changed. Two ranks can run their graphs together if and only if they issue the same collectives, in the same order,
over the groups that they share. Collectives are the same if kind, reduction operator, number of elements and dtype are equal.
The bucket counts as well, and the parameters in it: others of equal size would not hang, but be mixed up.

Ranks may rightly differ in these, which are left out:

- point-to-point messages;
- sizes of the model's own all-to-all;
- names of dynamic sizes;
- names of process groups: a mesh has several groups of a role, each with its own name;
- the common beginning of all unit names in a graph: blocks that share a graph may each give it their name;
- sizes over groups outside of a comparison: only the ranks of such a group need equal sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch.fx import Graph, Node

from ..collectives.functional import group_size
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import operator_name, schema_of
from ..ir.work import BucketName, Role, bucket, role

_POINT_TO_POINT = {"isend", "irecv", "batch_p2p_ops"}


@dataclass(frozen=True)
class Collective:
    """A collective of a graph.

    Attributes:
        text: its kind, inputs and group, without names that only one rank knows.
        bucket: the bucket that it works for; None for the model's own collectives.
        group: name of the process group.
        without_sizes: ``text`` without numbers of elements.
        operation: the name of the operator.
        gathers: whether it gathers parameters.
        members: its bucket's parameters, in the order in which it has them: each by its unit's bucket, and by its name within
            the unit.
    """

    text: str
    bucket: BucketName | None
    group: str
    without_sizes: str = ""
    operation: str = ""
    gathers: bool = False
    members: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.text}, bucket {self.bucket}" if self.bucket is not None else self.text


#: For each bucket of a graph, its parameters (:attr:`passes.ir.interface.Interface.members`).
Members = Mapping[tuple[bool, BucketName], tuple[tuple[str, str], ...]]
_NO_MEMBERS: Members = {}


def collective_sequence(graph: Graph, group_names: Mapping[str, str], members: Members = _NO_MEMBERS) -> list[Collective]:
    """List the collectives of a graph after all passes, in order.

    Args:
        graph: the graph.
        group_names: the roles in the mesh, by the names of process groups. Other groups are numbered in the order of use.
        members: the parameters of each bucket, if they are to be compared.
    """
    return [collective for _, collective in collectives_of(graph, group_names, members)]


def collectives_of(
    graph: Graph, group_names: Mapping[str, str], members: Members = _NO_MEMBERS
) -> Iterator[tuple[Node, Collective]]:
    """Yield the collectives of a graph, as :func:`collective_sequence` lists them, with their nodes."""
    roles = dict(group_names)
    for node in graph.nodes:
        group = _group(node)
        if group:
            if group not in roles:
                roles[group] = f"group {len(roles) - len(group_names) + 1} of {group_size(group)} ranks"
            text, without_sizes = (f"{_operation(node, sizes)} over {roles[group]}" for sizes in (True, False))
            gathers, name = role(node) in (Role.GATHER_NODE, Role.START_GATHER), bucket(node)
            named = () if name is None else members.get((gathers, name), ())
            yield node, Collective(text, name, group, without_sizes, operator_name(node.target), gathers, named)


def by_unit(sequence: Sequence[Collective]) -> list[Collective]:
    """Make a sequence that does not depend on buckets.

    Returns:
        The distinct collectives of each unit, without sizes, sorted; then the model's own collectives in order.
    """
    units = {
        (collective.without_sizes, unit)
        for collective in sequence
        if collective.bucket is not None
        for unit in collective.bucket.unit_buckets
    }
    merged = [Collective(text, BucketName.of_unit(unit), "", text) for text, unit in sorted(units)]
    return [*merged, *(collective for collective in sequence if collective.bucket is None)]


def identities(sequence: Sequence[Collective], groups: Collection[str]) -> list[str]:
    """Return, for each collective, the text that must be equal on all ranks of some groups.

    Args:
        sequence: the collectives.
        groups: names of the groups over which sizes must be equal.
    """
    buckets = [_modules(collective.bucket) for collective in sequence]
    named = [path for paths in buckets for path in paths]
    shared = len(list(takewhile(lambda modules: len(set(modules)) == 1, zip(*named, strict=False))))
    names = ["+".join(".".join(path[shared:]) for path in paths) for paths in buckets]
    found = []
    for collective, name in zip(sequence, names, strict=True):
        text = collective.text if collective.group in groups else collective.without_sizes
        found.append(", ".join(filter(None, [text, name and f"bucket {name}"])) + _listed(collective.members))
    return found


def _listed(members: Sequence[tuple[str, str]]) -> str:
    return f" with {', '.join(name for _, name in members)}" if members else ""


def _modules(bucket: BucketName | None) -> list[list[str]]:
    """Return the path to each unit that a bucket has a part of: its modules, then the number of the piece, if any."""
    parts = () if bucket is None else bucket.parts
    return [[*name.split("."), *([] if piece is None else [str(piece)])] for name, piece in parts]


def digest(lines: Sequence[str]) -> str:
    """Hash ``lines`` to a short text (SHA-256, in hexadecimal)."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _argument(node: Node, name: str) -> Any:
    """Return an argument of an operator by its name in the schema; None if the schema has no such name."""
    for index, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _group(node: Node) -> str:
    """Return the name of the process group of a collective; the empty string for point-to-point messages and other nodes."""
    if not isinstance(node.target, OpOverload) or operator_name(node.target) in _POINT_TO_POINT:
        return ""
    group = _argument(node, "group_name")
    # In graphs of torch 2.13, the argument may be the group itself.
    return group if isinstance(group, str) else getattr(group, "group_name", "")


def _operation(node: Node, sizes: bool) -> str:
    """Describe a collective: its kind, modifiers, and the tensors of this rank, with or without their sizes."""
    name = operator_name(node.target)
    modifiers = [str(value) for key in ("reduce_op", "src") if (value := _argument(node, key)) is not None]
    tensors = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    # An all-to-all of a bucket is a reduction (passes.collectives.functional.exchanges), whose sizes must be equal.
    is_all_to_all = "alltoall" in name.replace("_", "") and bucket(node) is None
    inputs = [_tensor(tensor, with_size=sizes and not is_all_to_all) for tensor in tensors]
    return " ".join([name + (f"({', '.join(modifiers)})" if modifiers else ""), " + ".join(inputs)])


def _tensor(node: Any, with_size: bool) -> str:
    value = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    numel = value.numel()
    return f"{numel if isinstance(numel, int) else '?'} x {dtype}" if with_size else dtype
