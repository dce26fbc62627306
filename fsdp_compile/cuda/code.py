"""``cuda_code``: what a sharded model becomes on CUDA, for any number of GPUs, on a machine that has none.

Everything up to the generated source is what a real run does: Dynamo, AOTAutograd, the passes, Inductor. Tensors are fake, the
process group is fake, and generated code is not loaded: where it would run, its graph computes fake results, so that whole
training steps can be played through, with all their plans.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule, Interpreter

from passes.collectives.functional import forget_factors
from passes.fx.torch_internals.core import FakeCopyMode, FakeTensorMode, pytree, unset_fake_temporarily
from passes.fx.torch_internals.distributed import FakeStore
from passes.fx.torch_internals.inductor import compile_fx_inner, inductor_config

from ..api.sharding import fully_shard
from ..compiler.backend import compile_with
from ..compiler.capture import Capture, capture, snapshot
from ..compiler.inductor_lowering import InductorLowering
from ..compiler.lowering import Lowering
from ..compiler.options import LOWERINGS, Options
from ..runtime.planned_graph import boxed
from .outline import triton_kernels
from .pretend import device_of, pretend_cuda, source_of
from .ptx import compile_kernels


@dataclass(eq=False)
class CudaCode(Capture):
    """The graphs of a sharded model that were lowered for CUDA, each with Inductor's source in ``.code``.

    Attributes:
        arch: the architecture that the source is for.
    """

    arch: str = ""

    def ptx(self, *archs: str) -> dict[tuple[str, str], str]:
        """Compile every Triton kernel of all graphs to PTX (and on to machine code, to see that it can be).

        Args:
            archs: such as "sm_80"; none: the one that the code was generated for.

        Returns:
            The PTX, by the kernel's name and architecture. Different kernels of two segments can have one name; then the later
            one's is numbered, ``"name#1"``.

        Raises:
            RuntimeError: a kernel does not compile; the message names it and the architecture.
            ValueError: an architecture is not known.
        """
        graphs = (*self.forward, *self.backward)
        return compile_kernels([kernel for graph in graphs for kernel in triton_kernels(graph)], archs or (self.arch,))


class _Segment:
    """A segment that was lowered, but is not loaded: it computes fake results with its graph."""

    def __init__(self, source_code: str, graph_module: GraphModule):
        self.source_code = source_code
        self._interpreter = Interpreter(graph_module)
        boxed(self)

    def __call__(self, args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        with torch.no_grad():
            return self._interpreter.run(*inputs)


def _compile_segment(graph_module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> _Segment:
    """In the place of ``compile_fx_inner``, whose result could not be loaded without a GPU."""
    runnable = snapshot(graph_module)
    return _Segment(source_of(lambda: compile_fx_inner(graph_module, inputs, **kwargs)), runnable)  # type: ignore[arg-type]


_LOWERINGS: Mapping[str, Callable[[], Lowering]] = {
    **LOWERINGS,
    "inductor": functools.partial(InductorLowering, _compile_segment),
}


def _backend(gm: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """``fsdp_backend`` without a device. As for real, its fake tensors do not meet those of the step."""
    parsed = Options.parse(options)
    with unset_fake_temporarily():
        return compile_with(_LOWERINGS[parsed.lowering](), gm, inputs, parsed)


# Settings of Inductor for when there is no device.
_INDUCTOR_CONFIG = {
    # Cached code would be loaded instead of generated.
    "fx_graph_cache": False,
    # Processes that compile ahead pretend nothing.
    "compile_threads": 1,
    # Whether to pad the operands of a product is measured.
    "shape_padding": False,
}


def _forget() -> None:
    """Drop compiled code and caches, so that none of fake tensors is used outside, and none from outside here."""
    torch.compiler.reset()
    forget_factors()


def _fake_like(tensor: Tensor) -> Tensor:
    """A fake tensor on ``cuda`` that looks like another."""
    size, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cuda:0", requires_grad=tensor.requires_grad)


def _fake_copy(model: nn.Module, fake_mode: FakeTensorMode) -> nn.Module:
    """A copy of a model with fake parameters and buffers on ``cuda``. To be called in the fake mode."""
    copies: dict[int, Any] = {
        id(param): nn.Parameter(_fake_like(param.detach()), requires_grad=param.requires_grad) for param in model.parameters()
    }
    copies.update((id(buffer), _fake_like(buffer)) for buffer in model.buffers())
    # For tensors that are neither.
    with FakeCopyMode(fake_mode):
        return copy.deepcopy(model, copies)


def _shard_layers(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """A unit for each module of the outermost module lists, and one for the rest."""

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                for layer in child:
                    fully_shard(layer, mesh=device_mesh)
            else:
                visit(child)

    visit(model)
    fully_shard(model, mesh=device_mesh)


def _train(compiled: Any, *args: Any, **kwargs: Any) -> None:
    """Forward, and backward from the sum of all outputs."""
    outputs = [value for value in pytree.tree_leaves(compiled(*args, **kwargs)) if isinstance(value, Tensor)]
    losses = [value.sum() for value in outputs if value.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def _check_arguments(model: nn.Module, mesh_shape: Sequence[int]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"cuda_code takes an nn.Module, not a {type(model).__name__}. Build it on the meta device, if it is large."
        )
    if len(mesh_shape) not in (1, 2) or not all(isinstance(size, int) and size > 0 for size in mesh_shape):
        raise ValueError(
            f"mesh_shape={mesh_shape!r} must be (shards,) for FSDP or (replicas, shards) for HSDP, in ranks, each at least 1."
        )
    if any(hasattr(module, "_fsdp_unit") for module in model.modules()):
        raise ValueError("cuda_code takes a model that is not sharded yet, and shards a copy of it: see its argument shard.")


@contextlib.contextmanager
def _world(mesh_shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """A mesh of pretended ranks, of which this process is the first."""
    if dist.is_initialized():
        raise RuntimeError(
            "cuda_code makes a default process group of pretended ranks, but there is one already, and a process has only one. "
            "Call it ahead of init_process_group(), after destroy_process_group(), or in a process of its own."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(mesh_shape))
    try:
        names = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
        yield init_device_mesh("cuda", tuple(mesh_shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def cuda_code(
    model: nn.Module,
    inputs: Any,
    mesh_shape: Sequence[int],
    arch: str = "sm_90",
    *,
    shard: Callable[[Any, DeviceMesh], Any] = _shard_layers,
    step: Callable[..., Any] = _train,
    options: dict[str, Any] | None = None,
    ptx: Sequence[str] = (),
) -> CudaCode:
    """Lower a model's training step for CUDA, without a GPU, and return its graphs and generated source.

    Nothing is allocated and nothing runs: the model is copied with fake parameters, the ranks are pretended. It needs Triton.
    The model, and what torch believes of the machine, are as before when it returns or raises; ``torch.compile`` is reset, so
    what was compiled before compiles anew when it is next called. While it runs, no other thread of the process may use
    torch.compile or CUDA.

    Not as in a real run: Inductor measures nothing, so odd operands of matrix products are not padded; and without a device,
    scaled_dot_product_attention becomes products and a softmax, not a fused kernel.

    Args:
        model: on the meta device or any other; not sharded.
        inputs: what its forward takes: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
            Only shapes and dtypes of tensors count; they may be on any device, meta too.
        mesh_shape: ``(shards,)`` for FSDP, ``(replicas, shards)`` for HSDP, in ranks.
        arch: "sm_80" (A100), "sm_90" (H100) or "sm_100" (B200).
        shard: called with the copy of the model and the mesh; calls :func:`~fsdp_compile.fully_shard`, flags and hooks. Unless
            given, modules in the outermost ``nn.ModuleList`` s are units, and the rest is one.
        step: called with the compiled model and the inputs; as often as it calls forward and backward, with whatever flags,
            graphs are lowered. Unless given, one forward, and one backward from the sum of all outputs.
        options: of the backend, as for ``torch.compile``.
        ptx: architectures that all Triton kernels are to be compiled for (see :meth:`CudaCode.ptx`).

    Raises:
        RuntimeError: Triton is not installed; a process group exists already, as a process has one default group; another
            thread is in here; or a kernel does not compile.
        ValueError, TypeError: an argument makes no sense.

    Example::

        with torch.device("meta"):
            model = Transformer(config)
        code = cuda_code(model, torch.zeros(4, 2048, dtype=torch.long), mesh_shape=(8,))
        print(cuda_outline(code.forward[0]))
        print(code.backward[0].code)
    """
    device = device_of(arch)
    _check_arguments(model, mesh_shape)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend_cuda(device))
        stack.callback(_forget)
        _forget()
        stack.enter_context(inductor_config.patch(_INDUCTOR_CONFIG))
        device_mesh = stack.enter_context(_world(mesh_shape))
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(fake_mode)
        copied = _fake_copy(model, fake_mode)
        shard(copied, device_mesh)
        args = pytree.tree_map_only(Tensor, _fake_like, inputs)
        compiled: Any = torch.compile(copied, backend=_backend, options=options)
        captured = stack.enter_context(capture())
        if isinstance(args, dict):
            step(compiled, **args)
        else:
            step(compiled, *(args if isinstance(args, (tuple, list)) else (args,)))
    code = CudaCode(captured.forward, captured.backward, captured.passes, arch)
    if ptx:
        code.ptx(*ptx)
    return code
