"""The bytes that live on the device while a graph is executed on the CPU, counted by weak references to results of nodes.

Copies between device and host are done at once, and their results on the host are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.multiprocessing.reductions import StorageWeakRef

from passes.collectives import host_copies
from passes.collectives.host_copies import engine_of


def executed(graph: Graph) -> list[tuple[str, int]]:
    """Return the name of each node and the bytes that live while it runs: results of nodes, and inputs that are freed."""
    engine = _Engine()
    # A forward graph that is executed alone leaves copies that nothing waits for.
    with engine_of(torch.device("cpu"), engine), patch.dict(host_copies._begun), torch.no_grad():
        execution = _Execution(GraphModule({}, graph), engine)
        execution.run(*[None] * len(graph.find_nodes(op="placeholder")))
    return execution.live


class _Done:
    def wait_on_device(self) -> None: ...

    def wait_on_host(self) -> None: ...


class _Engine:
    """An engine that copies at once, but keeps the source of the last copy that nothing on the device waits for."""

    def __init__(self) -> None:
        self.on_host: list[StorageWeakRef] = []
        self.replaced: Tensor | None = None
        self._source: Tensor | None = None

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, _Done]:
        return torch.cat(list(pieces)), _Done()

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> tuple[Tensor, _Done]:
        copy = value.clone()
        self.on_host.append(StorageWeakRef(copy.untyped_storage()))
        if not is_kept:
            # The previous copy counts as done only when this one begins; until then its source lives.
            self.replaced, self._source = self._source, value
        return copy, _Done()


class _Execution(Interpreter):
    def __init__(self, gm: GraphModule, engine: _Engine):
        super().__init__(gm)
        self.live: list[tuple[str, int]] = []
        self._engine = engine
        self._made: dict[StorageWeakRef, int] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            # Inputs are made here: the caller would keep tensors of its own alive.
            value = n.meta.get("val")
            result = torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
        else:
            result = super().run_node(n)
        counts = n.op == "call_function" or "freed" in n.meta
        for one in result if isinstance(result, (tuple, list)) and counts else [result]:
            if isinstance(one, Tensor) and counts:
                storage = one.untyped_storage()
                ref = StorageWeakRef(storage)
                if not any(ref == host for host in self._engine.on_host):
                    self._made.setdefault(ref, storage.nbytes())
        self.live.append((n.name, sum(nbytes for ref, nbytes in self._made.items() if not ref.expired())))
        self._engine.replaced = None
        return result
