"""The runs of an optimizer's step, checked together: every step checks all parameters, so those loops run in C."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, itemgetter, sub
from typing import Any

import torch
from torch import Tensor

from passes.fx.torch_internals.core import foreach_copy_
from passes.fx.torch_internals.objects import local_tensor, spec_of, version_of

from ..units.gradient_buffer import KeptGradients, buffer_of
from ..units.param_state import is_laid_out_alike, noted_slice
from .clip import GradientGroups, group_gradients
from .runs import Run, States

_GRAD = attrgetter("grad")


def _references_alone() -> int:
    """Return the count of ``sys.getrefcount`` for an object that only one dictionary and one list hold."""
    lists: list[dict[str, Any]] = [{}]
    within = {"": lists[0]}
    assert within
    return next(map(sys.getrefcount, chain(lists)))


_ALONE = _references_alone()


class RunList:
    """The runs of a step, with the memory, state and gradients that they were made for.

    Attributes:
        runs: the runs.
    """

    def __init__(self, runs: Sequence[Run], states: States):
        self.runs = list(runs)
        self._params: list[Any] = [param for run in runs for param in run.params]
        self._locals = [local for run in runs for local in run.locals]
        self._addresses = [local.data_ptr() for local in self._locals]
        self._specs = [spec_of(param) for param in self._params]
        ends = list(accumulate(len(run.params) for run in runs))
        self._spans = list(zip(runs, [0, *ends], ends, strict=False))
        # The state of parameters and of runs as :meth:`_note` found it, to notice changes.
        self._owners: list[Any] = []
        self._entries: list[dict[str, Any]] = []
        self._expected: list[Any] = []
        self._published: list[Any] = []
        self._versions: list[int] = []
        # Gradients in buffers that stay between steps, and the part of a buffer for each run.
        self._kept: KeptGradients | None = None
        self._parts: list[Any] = []
        self._found: GradientGroups | None = None
        self._note(states)

    def _note(self, states: States) -> None:
        """Record the present state of parameters and runs, with which :meth:`holds` compares later."""
        # Lists of all entries, in the dictionary's order: looking up a tensor would call Python code (``Tensor.__hash__``).
        self._states = [states]
        self._owners, self._entries = list(states), list(states.values())
        self._expected = _values(self._entries)
        self._published = _values(run.state for run in self.runs)
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [version_of(scalar) for run in self.runs for scalar in run.scalars.values()]

    def holds(self, states: States, *, was_lent: bool) -> bool:
        """Return whether parameters lie where they did, no state has been replaced, and no scalar has been written to.

        Args:
            states: the optimizer's state.
            was_lent: whether other code may have changed the dictionaries of ``states``.
        """
        if not all(map(is_, map(local_tensor, self._params), self._locals)):
            return False
        if list(map(Tensor.data_ptr, self._locals)) != self._addresses or self._present_versions() != self._versions:
            return False
        if not was_lent and states is self._states[0]:
            return True
        is_same = _are(list(states), self._owners) and _are(list(states.values()), self._entries)
        return is_same and _are(_values(self._entries), self._expected)

    def is_alone(self) -> bool:
        """Return whether only the optimizer holds its state and the dictionaries in it."""
        return set(map(sys.getrefcount, chain(self._states, self._entries))) <= {_ALONE}

    def load_kept_gradients(self) -> bool:
        """Set the gradients of runs to their parts of buffers. Return False if a parameter has a new gradient object."""
        if self._kept is None or not self._kept.are(list(map(_GRAD, self._params))):
            return False
        for run, part in zip(self.runs, self._parts, strict=True):
            run.flat.grad = part
        return True

    def find_kept_gradients(self) -> GradientGroups | None:
        """Load kept gradients, and group them for clipping. None: a parameter has a new gradient object, or a Partial one."""
        if not self.load_kept_gradients():
            return None
        if self._found is None:
            found, has_summands = group_gradients(list(map(_GRAD, self._params)))
            self._found = None if has_summands else found
        return self._found

    def load_gradients(self) -> bool:
        """Set the gradients of runs from those of their parameters.

        A run gets a view of a flat buffer in which its gradients lie in storage order, else a copy. Return False if a gradient
        is missing, or is not laid out as its parameter.
        """
        self._kept = self._found = None
        gradients = list(map(_GRAD, self._params))
        try:
            pieces = list(map(local_tensor, gradients))
        except AttributeError:
            # A gradient is None or a plain tensor.
            return False
        are_ours = all(map(is_, map(spec_of, gradients), self._specs))
        if not are_ours and not all(map(is_laid_out_alike, gradients, self._params)):
            return False
        are_contiguous = all(map(Tensor.is_contiguous, pieces))
        # Gradients of a run lie in storage order if all have one distance from their parameters.
        distances = list(map(sub, map(Tensor.data_ptr, pieces), self._addresses))
        # For each buffer, the runs whose gradients are parts of it, with their storage offsets.
        parts: dict[int, tuple[Tensor, list[tuple[int, Run]]]] = {}
        has_copies = False
        for run, start, end in self._spans:
            is_in_order = are_contiguous and distances[start:end].count(distances[start]) == end - start
            lies_in = noted_slice(pieces[start]) if is_in_order else None
            if lies_in is None or lies_in.offset + run.numel > lies_in.flat.numel():
                has_copies = True
                run.flat.grad = torch.cat([piece.reshape(-1) for piece in pieces[start:end]])
            else:
                # The buffer is alive, so gradients at addresses inside it are parts of it.
                parts.setdefault(id(lies_in.flat), (lies_in.flat, []))[1].append((lies_in.offset, run))
        for flat, found in parts.values():
            for run, part in _cut(flat, found):
                run.flat.grad = part
        if gradients and not has_copies and buffer_of(gradients[0]) is not None:
            self._kept, self._parts = KeptGradients.of(gradients), [run.flat.grad for run in self.runs]
        return True

    def follow(self, states: States) -> None:
        """Publish the state of runs to their parameters after a step, and drop the gradients of runs."""
        for run in self.runs:
            run.flat.grad = None
        if not _are(_values(run.state for run in self.runs), self._published):
            for run in self.runs:
                run.follow(states)
            self._note(states)
            return
        scalars = [(scalar, run.state[name]) for run in self.runs for name, scalar in run.scalars.items()]
        if scalars:
            foreach_copy_([scalar for scalar, _ in scalars], [kept for _, kept in scalars])
        self._versions = self._present_versions()


def _cut(flat: Tensor, found: list[tuple[int, Run]]) -> Iterator[tuple[Run, Tensor]]:
    """Cut a buffer into the gradients of runs, given as pairs of storage offset and run."""
    found.sort(key=itemgetter(0))
    starts = [start for start, _ in found]
    ends = [start + run.numel for start, run in found]
    if starts == [0, *ends[:-1]] and ends[-1] == flat.numel():
        # One ``split`` costs less than a ``narrow`` for each run.
        pieces: Sequence[Tensor] = flat.split([run.numel for _, run in found]) if len(found) > 1 else [flat]
    else:
        pieces = [flat.narrow(0, start, run.numel) for start, run in found]
    return zip((run for _, run in found), pieces, strict=True)


def _values(entries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, entries)))


def _are(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both hold the same objects in the same order. Equal tensors may be different objects."""
    return len(values) == len(others) and all(map(is_, values, others))
