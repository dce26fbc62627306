"""All runs of an optimizer's step, which are looked at together: once for each parameter and step, by loops in C alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, itemgetter, sub
from typing import Any

import torch
from torch import Tensor

from passes.fx.torch_internals.core import foreach_copy_

from ..units.gradient_buffer import KeptGradients, buffer_of
from ..units.param_state import is_laid_out_alike, noted_slice
from .clip import Found, look_at
from .runs import Run, States

_LOCAL, _GRAD, _SPEC = attrgetter("_local_tensor"), attrgetter("grad"), attrgetter("_spec")


def _references_alone() -> int:
    """How many references are counted to what is in one dictionary and in one list."""
    lists: list[dict[str, Any]] = [{}]
    within = {"": lists[0]}
    assert within
    return next(map(sys.getrefcount, chain(lists)))


_ALONE = _references_alone()


class RunList:
    """The runs of a step.

    Attributes:
        runs: the runs.
    """

    def __init__(self, runs: Sequence[Run], states: States):
        self.runs = list(runs)
        self._params: list[Any] = [param for run in runs for param in run.params]
        self._locals = [local for run in runs for local in run.locals]
        self._addresses = [local.data_ptr() for local in self._locals]
        self._specs = [param._spec for param in self._params]
        ends = list(accumulate(len(run.params) for run in runs))
        self._spans = list(zip(runs, [0, *ends], ends, strict=False))
        # What is kept for parameters, and for runs, as it was published.
        self._owners: list[Any] = []
        self._entries: list[dict[str, Any]] = []
        self._expected: list[Any] = []
        self._published: list[Any] = []
        self._versions: list[int] = []
        # Gradients that buffers keep, and of these the parts that belong to runs.
        self._kept: KeptGradients | None = None
        self._parts: list[Any] = []
        self._found: Found | None = None
        self._note(states)

    def _note(self, states: States) -> None:
        """Note what is kept for parameters, to tell later on whether it is still that."""
        # All of it, in its order: to find a tensor in a dictionary is a call of Python's.
        self._states = [states]
        self._owners, self._entries = list(states), list(states.values())
        self._expected = _values(self._entries)
        self._published = _values(run.state for run in self.runs)
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [scalar._version for run in self.runs for scalar in run.scalars.values()]

    def holds(self, states: States, *, was_lent: bool) -> bool:
        """Whether parameters still lie where they did, and nobody has replaced what is kept for them, or changed a scalar.

        Args:
            states: what the optimizer keeps.
            was_lent: whether anybody can have changed its dictionaries.
        """
        if not all(map(is_, map(_LOCAL, self._params), self._locals)):
            return False
        if list(map(Tensor.data_ptr, self._locals)) != self._addresses or self._present_versions() != self._versions:
            return False
        if not was_lent and states is self._states[0]:
            return True
        is_same = _are(list(states), self._owners) and _are(list(states.values()), self._entries)
        return is_same and _are(_values(self._entries), self._expected)

    def is_alone(self) -> bool:
        """Whether only the optimizer holds what it keeps, and the dictionaries in it."""
        return set(map(sys.getrefcount, chain(self._states, self._entries))) <= {_ALONE}

    def load_kept_gradients(self) -> bool:
        """Let the gradients of runs be those that buffers keep. False: some are others than those of the last step."""
        if self._kept is None or not self._kept.are(list(map(_GRAD, self._params))):
            return False
        for run, part in zip(self.runs, self._parts, strict=True):
            run.flat.grad = part
        return True

    def find_kept_gradients(self) -> Found | None:
        """Load them, and say what there is of them to clip. None: some are others than those of the last step."""
        if not self.load_kept_gradients():
            return None
        if self._found is None:
            found, has_summands = look_at(list(map(_GRAD, self._params)))
            self._found = None if has_summands else found
        return self._found

    def load_gradients(self) -> bool:
        """Let the gradients of runs be those of their parameters: the part of a flat buffer that consists of them in the order
        of storage, else a copy. False: one of them is missing, or not laid out as its parameter."""
        self._kept = self._found = None
        gradients = list(map(_GRAD, self._params))
        try:
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
        # By buffer: the runs whose gradients are parts of it, and where these begin.
        parts: dict[int, tuple[Tensor, list[tuple[int, Run]]]] = {}
        has_copies = False
        for run, start, end in self._spans:
            is_in_order = are_contiguous and distances[start:end].count(distances[start]) == end - start
            lies_in = noted_slice(pieces[start]) if is_in_order else None
            if lies_in is None or lies_in.offset + run.numel > lies_in.flat.numel():
                has_copies = True
                run.flat.grad = torch.cat([piece.reshape(-1) for piece in pieces[start:end]])
            else:
                # What begins at an address in the buffer, which is alive, lies in the buffer.
                parts.setdefault(id(lies_in.flat), (lies_in.flat, []))[1].append((lies_in.offset, run))
        for flat, found in parts.values():
            for run, part in _cut(flat, found):
                run.flat.grad = part
        if gradients and not has_copies and buffer_of(gradients[0]) is not None:
            self._kept, self._parts = KeptGradients.of(gradients), [run.flat.grad for run in self.runs]
        return True

    def follow(self, states: States) -> None:
        """After a step: let parameters have what the optimizer keeps for runs now."""
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
    """Parts of a buffer, by where they begin, and whose they are."""
    found.sort(key=itemgetter(0))
    starts = [start for start, _ in found]
    ends = [start + run.numel for start, run in found]
    if starts == [0, *ends[:-1]] and ends[-1] == flat.numel():
        # One call costs less than one for each.
        pieces: Sequence[Tensor] = flat.split([run.numel for _, run in found]) if len(found) > 1 else [flat]
    else:
        pieces = [flat.narrow(0, start, run.numel) for start, run in found]
    return zip((run for _, run in found), pieces, strict=True)


def _values(entries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, entries)))


def _are(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects, which equal tensors are not."""
    return len(values) == len(others) and all(map(is_, values, others))
