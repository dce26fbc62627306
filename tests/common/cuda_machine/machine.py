"""``machine``: one rank of a training run on pretended CUDA devices, which computes."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fsdp_compile.compiler.backend import compile_with
from fsdp_compile.compiler.inductor_lowering import InductorLowering
from fsdp_compile.compiler.options import Options
from fsdp_compile.cuda.code import _INDUCTOR_CONFIG
from fsdp_compile.cuda.pretend import DEVICES, pretend_cuda, source_of
from fsdp_compile.dry_run import _forget, _meshes_of_numbers
from fsdp_compile.runtime.planned_graph import boxed
from passes.fx.torch_internals.core import FakeTensor, unset_fake_temporarily
from passes.fx.torch_internals.distributed import FakeStore
from passes.fx.torch_internals.inductor import compile_fx_inner, inductor_config
from tests.common.parity import Batch, Place

from . import kernels, seat
from .collectives import Network
from .copies import CopyEngine
from .graphs import Recorder
from .memory import Memory, tensors_in

_CUDA = torch.device("cuda", 0)
# Ranks enter machines in the same order.
_numbers = itertools.count()


class _Segment:
    """A generated segment. A call runs its code on the values of its inputs."""

    def __init__(self, source_code: str, memory: Memory):
        self.source_code = source_code
        self._memory = memory
        self._call = kernels.load(source_code)
        boxed(self)

    def __call__(self, args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        with unset_fake_temporarily(), torch.no_grad():
            values = [self._memory.value(value) if isinstance(value, Tensor) else value for value in inputs]
            self._memory.note_inputs(values)
            outputs = self._call(list(values))
        found = self._memory.tensors_of(outputs, [value for value in inputs if isinstance(value, Tensor)], _CUDA)
        self._memory.record(lambda: tensors_in(self._call(list(values))), tensors_in(found))
        return found


class Machine(Place):
    """One rank. Inside of :func:`machine`, torch makes and computes tensors on it.

    Attributes:
        rank: this rank.
        memory: the values of tensors.
        network: collectives.
        copies: copies between host and device.
        recorder: records CUDA graphs.
        sources: the source of each segment that was generated.
    """

    device = "cuda"

    def __init__(self, late: Collection[str]) -> None:
        self.rank, self.world_size, store = seat()
        self.memory = Memory()
        self.network = Network(self.rank, dist.PrefixStore(f"machine {next(_numbers)}", store), is_late="collectives" in late)
        self.recorder = Recorder(self.memory)
        self.copies = CopyEngine(self.memory, is_late="copies" in late)
        self.sources: list[str] = []

    def backend(self, gm: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
        """Compile as ``fsdp_backend`` does on a device, with the machine's segments."""

        def compile_segment(graph_module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> _Segment:
            self.sources.append(source_of(lambda: compile_fx_inner(graph_module, inputs, **kwargs)))  # type: ignore[arg-type]
            return _Segment(self.sources[-1], self.memory)

        with unset_fake_temporarily():
            return compile_with(InductorLowering(compile_segment), gm, inputs, Options.parse(options))

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        # A mesh holds a tensor of ranks.
        with unset_fake_temporarily():
            return init_device_mesh("cuda", shape, mesh_dim_names=names)

    def module(self, build: Callable[[], nn.Module]) -> nn.Module:
        with unset_fake_temporarily():
            model = build()
        if any(value.is_meta for value in model.parameters()):
            # Its fake twin, which has no values either.
            return build()
        copies: dict[int, Any] = {}
        for value in (*model.parameters(), *model.buffers()):
            there = self.tensor(value.detach())
            copies[id(value)] = nn.Parameter(there, value.requires_grad) if isinstance(value, nn.Parameter) else there
        return copy.deepcopy(model, copies)

    def batch(self, make: Callable[[], Batch]) -> Batch:
        with unset_fake_temporarily():
            inputs, targets = make()
        return self.tensor(inputs), self.tensor(targets)

    def average(self, tensor: Tensor) -> None:
        ops, group = torch.ops._c10d_functional, dist.group.WORLD
        assert group is not None
        tensor.copy_(ops.wait_tensor(ops.all_reduce(tensor, "avg", group.group_name)))

    def off(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which tensors are the CPU's."""
        return unset_fake_temporarily()

    def tensor(self, value: Tensor) -> Tensor:
        """Copy a tensor to the device."""
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CUDA)
        self.memory.write(there, value)
        return there

    def values(self, results: Any) -> Any:
        """Replace all tensors of the machine in a tree by copies on the CPU; DTensors by their local tensors."""

        def value(tensor: Tensor) -> Tensor:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            with unset_fake_temporarily():
                return self.memory.value(local.detach()).clone() if isinstance(local, FakeTensor) else local

        return pytree.tree_map_only(Tensor, value, results)


@contextlib.contextmanager
def machine(arch: str = "sm_90", *, late: Collection[str] = ()) -> Iterator[Machine]:
    """Run the block on this rank of the machine. All ranks call this, in processes for which :func:`~.join` was called.

    Args:
        arch: the architecture to generate code for: "sm_80", "sm_90" or "sm_100".
        late: what runs as late as the program permits, instead of at once: "collectives", "copies" between host and device.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend_cuda(DEVICES[arch]))
        made = Machine(late)
        stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", lambda: 0))
        stack.enter_context(inductor_config.patch(_INDUCTOR_CONFIG))
        stack.enter_context(kernels.running())
        stack.callback(_forget)
        _forget()
        dist.init_process_group("fake", store=FakeStore(), rank=made.rank, world_size=made.world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(made.network.in_use())
        stack.enter_context(made.network.distributing(made.memory))
        stack.enter_context(made.copies.in_use())
        stack.enter_context(made.recorder.in_use())
        stack.enter_context(_meshes_of_numbers())
        stack.enter_context(made.memory.in_use())
        yield made
