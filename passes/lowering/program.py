"""Program: the outer graph of :mod:`passes.lowering.segments` as a Python function that frees values after their last use.

The function takes its arguments as a list, which it empties. A value that a segment is the last to read is freed while the
segment runs. The input of a collective is kept until the wait: memory that is freed earlier could be reused, and written to,
while it is being sent.

As with FSDP2, each collective of a bucket, and its wait, is a range in profiles, with the bucket's name:
``FSDP::all_gather_into_tensor (blocks.0)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..collectives.host_copies import wait_copy, wait_offload
from ..fx.graph import argument_text, is_collective, is_host_copy
from ..fx.torch_internals.core import OpOverload, RecordFunctionFast
from ..fx.torch_internals.objects import operator_name
from ..ir.work import bucket

_wait = torch.ops._c10d_functional.wait_tensor.default
_all_reduce = torch.ops._c10d_functional.all_reduce.default
_all_reduce_in_place = torch.ops._c10d_functional.all_reduce_.default


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """Map each node to the values that it is the last to read. A collective reads its input until its wait."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    for node in graph.nodes:
        waits = [user for user in node.users if user.target == _wait] if is_collective(node) else []
        for source in node.all_input_nodes if waits else ():
            last[source] = max(last[source], waits[0], key=order.__getitem__)
    found: dict[Node, list[Node]] = {}
    for source, node in last.items():
        found.setdefault(node, []).append(source)
    return found


def _owns_what_it_reduces(node: Node) -> bool:
    """Return whether an all-reduce is the only reader of another collective's result, and so can reduce it in place."""
    source = node.args[0] if node.target == _all_reduce else None
    return isinstance(source, Node) and source.target == _wait and len(source.users) == 1


def _range_of(node: Node) -> str:
    """Return the name in profiles of a bucket's collective, host copy or wait; the empty string for other nodes."""
    if not (is_collective(node) or is_host_copy(node)) or bucket(node) is None:
        return ""
    is_wait = node.target in (_wait, wait_copy, wait_offload)
    started: Any = node.args[0] if is_wait else node
    return f"FSDP::{operator_name(started.target)}{' wait' if is_wait else ''} ({bucket(node)})"


class _Writer:
    """The writer of a program's source. It also collects the objects that the source refers to, by name."""

    def __init__(self, graph: Graph, owner: GraphModule):
        self.graph = graph
        self.owner = owner
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []
        self.last_uses = _last_uses(graph)

    def write(self) -> str:
        placeholders = self.graph.find_nodes(op="placeholder")
        self.lines += [f"{''.join(f'{node.name}, ' for node in placeholders)}= args", "args.clear()"]
        self._free([node for node in placeholders if not node.users])
        for node in self.graph.nodes:
            if node.op == "call_module":
                self._call_segment(node)
            elif node.op == "call_function" and not self._is_unpacked(node):
                target = _all_reduce_in_place if _owns_what_it_reduces(node) else node.target
                self._call_operator(node, f"{node.name} = {self._name_of(target)}({self._arguments(node)})")
                self._free(self.last_uses.get(node, []))
                self._free([node] if not node.users else [])
            elif node.op == "get_attr":
                self.names[node.name] = operator.attrgetter(str(node.target))(self.owner)
            elif node.op == "output":
                self.lines.append(f"return {self._text(list(node.args[0]))}")  # type: ignore[arg-type]
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def call(args):\n{body}"

    def _is_unpacked(self, node: Node) -> bool:
        return node.target is operator.getitem and node.args[0].op == "call_module"  # type: ignore[union-attr]

    def _call_segment(self, node: Node) -> None:
        self.lines.append(f"inputs = {self._text(list(node.args))}")
        self._free(self.last_uses.get(node, []))
        results = list(node.users)
        call = f"{node.target}(inputs)"
        self.lines.append(f"{''.join(f'{result.name}, ' for result in results)}= {call}" if results else call)
        self._free([result for result in results if not result.users])

    def _call_operator(self, node: Node, assignment: str) -> None:
        name = _range_of(node)
        # The range costs half a microsecond without a profiler.
        self.lines += [f"with named_range({name!r}):", f"    {assignment}"] if name else [assignment]

    def _free(self, nodes: list[Node]) -> None:
        names = [node.name for node in nodes if node.op not in ("get_attr", "call_module", "output")]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    def _text(self, value: Any) -> str:
        return argument_text(value, lambda node: node.name)

    def _arguments(self, node: Node) -> str:
        positional = [self._text(value) for value in node.args]
        return ", ".join([*positional, *(f"{key}={self._text(value)}" for key, value in node.kwargs.items())])

    def _name_of(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            return f"torch.ops.{target}"
        # Not the function's bare name, which a node may have.
        name = f"_{target.__module__}_{target.__name__}".replace(".", "_")
        self.names[name] = target
        return name


@dataclass(frozen=True)
class Program:
    """The source of a program.

    Attributes:
        source: defines the function ``call``.
        objects: the functions and tensors that the source refers to, by name.
    """

    source: str
    objects: Mapping[str, Any]

    @property
    def is_data(self) -> bool:
        """True if the program has no tensors of its own, so that another process can run it."""
        return not any(isinstance(value, torch.Tensor) for value in self.objects.values())

    def link(self, segments: Mapping[str, Callable[..., Any]]) -> Callable[[list[Any]], list[Any]]:
        """Return the function.

        Args:
            segments: the function to call for each module of the graph, by name. It takes a list, which it may empty.
        """
        namespace: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
        namespace |= {"named_range": RecordFunctionFast, **self.objects, **segments}
        exec(compile(self.source, "<fsdp program>", "exec"), namespace)
        return namespace["call"]


def write_program(graph: Graph, owner: GraphModule) -> Program:
    """Write the program of an outer graph.

    Args:
        graph: the outer graph.
        owner: the module with the tensors that the graph reads as attributes.
    """
    writer = _Writer(graph, owner)
    return Program(writer.write(), writer.names)
