"""Mutants: what a run needs, shown by taking away each mask of each kernel, and each wait for a collective."""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from . import kernels
from .machine import Machine
from .memory import view_of


@dataclass
class Launch:
    """A launch of a kernel, with copies of its arguments from before.

    Attributes:
        name: the name of the kernel.
        source: its source.
        args: its arguments. Tensors of one storage still share one.
    """

    name: str
    source: str
    args: list[Any]

    def run(self, source: str) -> list[bytes]:
        """Run a kernel of this name on the arguments. Return the contents of all memory afterwards.

        Raises:
            OutOfBounds: the kernel accesses memory that is not its own.
        """
        args, storages = _copied(self.args)
        kernels.load_kernel(self.name, source).run(*args)
        return [bytes(storage) for storage in storages]  # type: ignore[call-overload]


def _copied(args: list[Any]) -> tuple[list[Any], list[torch.UntypedStorage]]:
    copies: dict[int, torch.UntypedStorage] = {}
    found = []
    for value in args:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            copy = copies.setdefault(storage._cdata, storage.clone())
            value = view_of(copy, like=value)
        found.append(value)
    return found, list(copies.values())


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """Record the first launch of each kernel that is loaded and runs in the block, by the kernel's source."""
    launches: dict[str, Launch] = {}
    load = kernels.Compiler.triton

    def load_recorded(compiler: kernels.Compiler, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel = load(compiler, name, source, device_str)
        run = kernel.run

        def run_recorded(*args: Any, stream: Any = None) -> None:
            if source not in launches:
                launches[source] = Launch(name, source, _copied(list(args))[0])
            run(*args, stream=stream)

        kernel.run = run_recorded
        return kernel

    with mock.patch.object(kernels.Compiler, "triton", load_recorded):
        yield launches


class _DropMask(ast.NodeTransformer):
    """Replaces the mask of the ``number``-th load or store by None.

    Attributes:
        masks: for each mask, the function that takes it.
    """

    def __init__(self, number: int):
        self._number = number
        self.masks: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        function = ast.unparse(node.func)
        place = {"tl.load": 1, "tl.store": 2}.get(function)
        if place is not None and len(node.args) > place and ast.unparse(node.args[place]) != "None":
            if len(self.masks) == self._number:
                node.args[place] = ast.Constant(None)
                node.keywords = [keyword for keyword in node.keywords if keyword.arg != "other"]
            self.masks.append(function)
        return node


def without_each_mask(source: str) -> list[tuple[str, str]]:
    """Return sources of a kernel, each without one of its masks, with the function that takes the mask: a load or a store."""
    counter = _DropMask(-1)
    counter.visit(ast.parse(source))
    return [
        (function, ast.unparse(_DropMask(number).visit(ast.parse(source)))) for number, function in enumerate(counter.masks)
    ]


def count_masks(launches: dict[str, Launch]) -> Counter[tuple[str, str]]:
    """Take away each mask of each kernel, and run it as it was launched.

    Returns:
        How many masks there are, by the function that takes the mask, and by what became of the kernel: "out of bounds",
        "other results", or "unnoticed".
    """
    counts: Counter[tuple[str, str]] = Counter()
    for launch in launches.values():
        expected = launch.run(launch.source)
        for function, mutant in without_each_mask(launch.source):
            try:
                outcome = "unnoticed" if launch.run(mutant) == expected else "other results"
            except kernels.OutOfBounds:
                outcome = "out of bounds"
            counts[function, outcome] += 1
    return counts


def unneeded_waits(cuda: Machine, step: Callable[[], list[Tensor]]) -> tuple[int, set[int]]:
    """Leave out each wait of a step, for a collective or for a copy.

    Args:
        cuda: the machine, which runs collectives or copies late.
        step: runs the step, from the same state each time, and returns results.

    Returns:
        How many waits the step has, and the numbers of those without which its results are the same.
    """
    waits = 0
    left_out: int | None = None

    def counting(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wait_or_not(what: Any) -> Any:
            nonlocal waits
            waits += 1
            return what if waits - 1 == left_out else wait(what)

        return wait_or_not

    def results() -> list[Tensor]:
        nonlocal waits
        waits = 0
        found = step()
        cuda.network.finish()
        cuda.copies.finish()
        return found

    with (
        mock.patch.object(cuda.network, "wait", counting(cuda.network.wait)),
        mock.patch.object(cuda.copies, "wait", counting(cuda.copies.wait)),
    ):
        expected = results()
        number = waits
        same = set()
        for left_out in range(number):
            found = results()
            if all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
                same.add(left_out)
    return number, same
