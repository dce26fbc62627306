"""Collective sequence: what a graph communicates, in its order, as lines that ranks can compare.

Changes nothing. Two ranks that run a graph each work together if and only if they issue the same collectives over the groups
that they share, in the same order: kind, operator of the reduction, number of elements and dtype. The bucket counts as well:
two units of equal size in another order would not hang, but mix up parameters.

Left out, as ranks may rightly differ there: point-to-point messages; sizes of an all-to-all of the model's own; how a
dynamic size is called; the names of process groups (a mesh has several groups of a role, each with its own); and what the
names of all units of a graph begin with, since equal blocks may share a graph, which then goes by the name of any of them.
Ranks that compare what they do over some groups compare no sizes over others, which only have to be equal among their ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch.fx import Graph, Node

from ..collectives.functional import group_size
from ..fx.torch_internals.core import OpOverload
from ..ir.work import BucketName, bucket

_POINT_TO_POINT = {"isend", "irecv", "batch_p2p_ops"}


@dataclass(frozen=True)
class Collective:
    """A collective of a graph.

    Attributes:
        text: what it does, and over which group; without names that only one rank knows.
        bucket: the bucket that it works for; None for one of the model's own.
        group: name of the process group.
        without_sizes: the text without numbers of elements.
    """

    text: str
    bucket: BucketName | None
    group: str
    without_sizes: str = ""

    def __str__(self) -> str:
        return f"{self.text}, bucket {self.bucket}" if self.bucket is not None else self.text


def collective_sequence(graph: Graph, group_names: Mapping[str, str]) -> list[Collective]:
    """The collectives of a graph after all passes.

    Args:
        graph: the graph.
        group_names: names of process groups to their roles in the mesh; others are numbered as they come.
    """
    roles = dict(group_names)
    sequence = []
    for node in graph.nodes:
        group = _group(node)
        if group:
            if group not in roles:
                roles[group] = f"group {len(roles) - len(group_names) + 1} of {group_size(group)} ranks"
            text, without_sizes = (f"{_operation(node, sizes)} over {roles[group]}" for sizes in (True, False))
            sequence.append(Collective(text, bucket(node), group, without_sizes))
    return sequence


def by_unit(sequence: Sequence[Collective]) -> list[Collective]:
    """A sequence without what depends on how parameters are bucketed: which units communicate how, and then the collectives of
    the model's own in their order."""
    units = {
        (collective.without_sizes, unit)
        for collective in sequence
        if collective.bucket is not None
        for unit in collective.bucket.unit_buckets
    }
    merged = [Collective(text, BucketName.of_unit(unit), "", text) for text, unit in sorted(units)]
    return [*merged, *(collective for collective in sequence if collective.bucket is None)]


def identities(sequence: Sequence[Collective], groups: Collection[str]) -> list[str]:
    """The part of each collective that has to be equal on all ranks of some groups.

    Args:
        sequence: the collectives.
        groups: names of the groups over which sizes have to be equal.
    """
    buckets = [_modules(collective.bucket) for collective in sequence]
    named = [path for paths in buckets for path in paths]
    shared = len(list(takewhile(lambda modules: len(set(modules)) == 1, zip(*named, strict=False))))
    names = ["+".join(".".join(path[shared:]) for path in paths) for paths in buckets]
    texts = [collective.text if collective.group in groups else collective.without_sizes for collective in sequence]
    return [f"{text}, {name}" for text, name in zip(texts, names, strict=True)]


def _modules(bucket: BucketName | None) -> list[list[str]]:
    """The path to each unit that a bucket has a part of, module by module, with the number of the piece."""
    parts = () if bucket is None else bucket.parts
    return [[*name.split("."), *([] if piece is None else [str(piece)])] for name, piece in parts]


def digest(lines: Sequence[str]) -> str:
    """A short text that differs where the lines do."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _argument(node: Node, name: str) -> Any:
    """An argument of an operator by its name in the schema; None if it has none."""
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _group(node: Node) -> str:
    """Name of the process group that a node is a collective over, or the empty string."""
    if not isinstance(node.target, OpOverload) or node.target._opname in _POINT_TO_POINT:
        return ""
    group = _argument(node, "group_name")
    # torch 2.13 also has graphs with the group itself in them.
    return group if isinstance(group, str) else getattr(group, "group_name", "")


def _operation(node: Node, sizes: bool) -> str:
    """Kind, what modifies it, and the tensors that this rank hands in, with or without their sizes."""
    name = node.target._opname  # type: ignore[union-attr]
    modifiers = [str(value) for key in ("reduce_op", "src") if (value := _argument(node, key)) is not None]
    tensors = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    # That of a bucket is a reduction (passes.collectives.functional.exchanges).
    is_all_to_all = "alltoall" in name.replace("_", "") and bucket(node) is None
    inputs = [_tensor(tensor, with_size=sizes and not is_all_to_all) for tensor in tensors]
    return " ".join([name + (f"({', '.join(modifiers)})" if modifiers else ""), " + ".join(inputs)])


def _tensor(node: Any, with_size: bool) -> str:
    value = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    numel = value.numel()
    return f"{numel if isinstance(numel, int) else '?'} x {dtype}" if with_size else dtype
