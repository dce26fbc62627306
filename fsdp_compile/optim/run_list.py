"""All runs of an optimizer's step, which are looked at together: once for each parameter and step, by loops in C alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, sub
from typing import Any

import torch
from torch import Tensor

from ..units.param_state import noted_slice
from .runs import Run, States, is_laid_out_alike

_LOCAL, _GRAD, _SPEC = attrgetter("_local_tensor"), attrgetter("grad"), attrgetter("_spec")


class RunList:
    """The runs of a step.

    Attributes:
        runs: the runs.
    """

    def __init__(self, runs: Sequence[Run]):
        self.runs = list(runs)
        self._params: list[Any] = [param for run in runs for param in run.params]
        self._locals = [local for run in runs for local in run.locals]
        self._addresses = [local.data_ptr() for local in self._locals]
        self._specs = [param._spec for param in self._params]
        ends = list(accumulate(len(run.params) for run in runs))
        self._spans = list(zip(runs, [0, *ends], ends, strict=False))
        # What is kept for parameters, and for runs, as it was published.
        self._entries: list[dict[str, Any] | None] = []
        self._expected: list[Any] = []
        self._published: list[Any] = []
        self._versions: list[int] = []
        self.note()

    def note(self) -> None:
        """Note what is kept for parameters, to tell later on whether it is still that."""
        self._entries = [entry for run in self.runs for entry in run.entries]
        self._expected = _values(self._entries)
        self._published = _values(run.state for run in self.runs)
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [scalar._version for run in self.runs for scalar in run.scalars.values()]

    def holds(self, states: States) -> bool:
        """Whether parameters still lie where they did, and nobody has replaced what is kept for them, or changed a scalar."""
        if not all(map(is_, map(_LOCAL, self._params), self._locals)):
            return False
        if list(map(Tensor.data_ptr, self._locals)) != self._addresses:
            return False
        if not all(map(is_, map(states.get, self._params), self._entries)):
            return False
        return _are(_values(self._entries), self._expected) and self._present_versions() == self._versions

    def load_gradients(self) -> bool:
        """Let the gradients of runs be those of their parameters: the part of a flat buffer that consists of them in the order
        of storage, else a copy. False: one of them is missing, or not laid out as its parameter."""
        try:
            gradients = list(map(_GRAD, self._params))
            pieces = list(map(_LOCAL, gradients))
        except AttributeError:
            # Of None, or of a plain tensor.
            return False
        are_ours = all(map(is_, map(_SPEC, gradients), self._specs))
        if not are_ours and not all(map(is_laid_out_alike, gradients, self._params)):
            return False
        are_contiguous = all(map(Tensor.is_contiguous, pieces))
        # One distance for all of a run: gradients lie as parameters do, one behind the other.
        distances = list(map(sub, map(Tensor.data_ptr, pieces), self._addresses))
        for run, start, end in self._spans:
            distance = distances[start]
            is_in_order = are_contiguous and distances[start:end].count(distance) == end - start
            lies_in = noted_slice(pieces[start]) if is_in_order else None
            if lies_in is None or lies_in.offset + run.numel > lies_in.flat.numel():
                run.flat.grad = torch.cat([piece.reshape(-1) for piece in pieces[start:end]])
            elif lies_in.flat.numel() == run.numel:
                run.flat.grad = lies_in.flat
            else:
                # What begins at an address in the buffer, which is alive, lies in the buffer.
                run.flat.grad = lies_in.flat.narrow(0, lies_in.offset, run.numel)
        return True

    def follow(self, states: States) -> None:
        """After a step: let parameters have what the optimizer keeps for runs now."""
        for run in self.runs:
            run.flat.grad = None
        if _are(_values(run.state for run in self.runs), self._published):
            for run in self.runs:
                run.copy_scalars()
            self._versions = self._present_versions()
            return
        for run in self.runs:
            run.follow(states)
        self.note()


def _values(entries: Iterable[dict[str, Any] | None]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, filter(None, entries))))


def _are(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects, which equal tensors are not."""
    return len(values) == len(others) and all(map(is_, values, others))
