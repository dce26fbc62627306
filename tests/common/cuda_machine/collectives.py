"""Network: collectives among the values of ranks, over Gloo, beside the pretended process groups that graphs name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import _collective_utils

from passes.collectives.functional import resolve_group
from passes.fx.torch_internals.core import unset_fake_temporarily
from passes.fx.torch_internals.objects import undo

from .memory import Memory, new_tensor

_TIMEOUT = timedelta(seconds=120)
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Network:
    """The connections of a rank.

    A collective runs on a stream of its own. Early, it is done when the call returns. Late, it reads its input and writes its
    output only when the program waits for it. Results are the same, if the program waits for each output ahead of reading it,
    and does not write to an input that may still be read.

    Args:
        rank: this rank.
        store: where the ranks meet.
        is_late: whether collectives run late.

    Attributes:
        in_flight: how to finish the collectives that nothing has waited for, by the storages of their outputs.
    """

    def __init__(self, rank: int, store: dist.Store, *, is_late: bool = False):
        self._rank = rank
        self._store = store
        self._groups: dict[str, Any] = {}
        self.is_late = is_late
        self.in_flight: dict[int, Callable[[], object]] = {}

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Run collectives on the CPU by this network while the block runs. Pretended groups would move no values."""
        library = torch.library.Library("_c10d_functional", "IMPL")
        try:
            library.impl("all_gather_into_tensor", self._all_gather, "CPU")
            library.impl("reduce_scatter_tensor", self._reduce_scatter, "CPU")
            library.impl("all_reduce", self._all_reduce, "CPU")
            library.impl("all_reduce_", self._all_reduce_in_place, "CPU")
            library.impl("all_to_all_single", self._all_to_all, "CPU")
            library.impl("broadcast", self._broadcast, "CPU")
            library.impl("wait_tensor", lambda output: self.wait(output), "CPU")
            yield
        finally:
            undo(library)

    @contextlib.contextmanager
    def distributing(self, memory: Memory) -> Iterator[None]:
        """Distribute tensors of the machine while the block runs, for which torch calls functions in the place of operators."""

        def broadcast(tensor: Tensor, *, group: Any, group_src: int, async_op: bool) -> None:
            value = memory.value(tensor)
            with unset_fake_temporarily(), torch.no_grad():
                value.copy_(self.wait(self._broadcast(value, group_src, group.group_name)))

        def scatter(output: Tensor, *, scatter_list: Any, group: Any, group_src: int, async_op: bool) -> None:
            pieces, to = [[memory.value(piece) for piece in scatter_list]] if scatter_list else [], memory.value(output)
            options = dist.ScatterOptions()
            options.rootRank = group_src
            with unset_fake_temporarily(), torch.no_grad():
                self._group(group.group_name).scatter([to], pieces, options).wait()

        with mock.patch.multiple(_collective_utils, broadcast=broadcast, scatter=scatter):
            yield

    def _issue(self, output: Tensor, run: Callable[[], object]) -> Tensor:
        if self.is_late:
            self.in_flight[output.untyped_storage()._cdata] = run
        else:
            run()
        return output

    def wait(self, output: Tensor) -> Tensor:
        """Wait for the collective that writes ``output``."""
        run = self.in_flight.pop(output.untyped_storage()._cdata, None)
        if run is not None:
            run()
        return output

    def finish(self) -> None:
        """Finish the collectives that nothing has waited for."""
        with unset_fake_temporarily():
            while self.in_flight:
                self.in_flight.pop(next(iter(self.in_flight)))()

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(resolve_group(name))
            store = dist.PrefixStore(f"{name} of {ranks}", self._store)
            self._groups[name] = dist.ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), _TIMEOUT)
        return self._groups[name]

    def _all_gather(self, values: Tensor, size: int, name: str) -> Tensor:
        output = _new(values, (size * values.size(0), *values.shape[1:]))
        return self._issue(
            output, lambda: self._group(name).allgather([list(output.chunk(size))], [values.contiguous()]).wait()
        )

    def _reduced(self, values: Tensor, op: str, name: str) -> Tensor:
        # NCCL adds up in the dtype of the tensor, in an order of its own.
        result, group, options = values.clone(memory_format=torch.contiguous_format), self._group(name), dist.AllreduceOptions()
        options.reduceOp = _REDUCTIONS[op]
        group.allreduce([result], options).wait()
        return result / group.size() if op == "avg" else result

    def _all_reduce(self, values: Tensor, op: str, name: str) -> Tensor:
        output = _new(values, values.shape)
        return self._issue(output, lambda: output.copy_(self._reduced(values, op, name)))

    def _all_reduce_in_place(self, values: Tensor, op: str, name: str) -> Tensor:
        return self._issue(values, lambda: values.copy_(self._reduced(values, op, name)))

    def _reduce_scatter(self, values: Tensor, op: str, size: int, name: str) -> Tensor:
        output, rank = _new(values, (values.size(0) // size, *values.shape[1:])), self._group(name).rank()
        return self._issue(output, lambda: output.copy_(self._reduced(values, op, name).chunk(size)[rank]))

    def _all_to_all(self, values: Tensor, received: list[int], sent: list[int], name: str) -> Tensor:
        output = _new(values, (sum(received), *values.shape[1:]))
        group = self._group(name)
        return self._issue(output, lambda: group.alltoall_base(output, values.contiguous(), received, sent).wait())

    def _broadcast(self, values: Tensor, source: int, name: str) -> Tensor:
        output, options = _new(values, values.shape), dist.BroadcastOptions()
        options.rootRank = source

        def run() -> None:
            output.copy_(values)
            self._group(name).broadcast([output], options).wait()

        return self._issue(output, run)


def _new(values: Tensor, shape: Sequence[int]) -> Tensor:
    return new_tensor(shape, torch.empty(shape, device="meta").stride(), values.dtype)
