"""``cuda_code``: the code of a sharded model on CUDA, for any number of GPUs, on a machine without a GPU.

Everything up to the generated source is as in a real run: Dynamo, AOTAutograd, the passes, Inductor. Tensors and the process
group are fake, and generated code is not loaded. Instead, its graph computes fake results, so that whole training steps can be
played through, with all their plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Interpreter

from passes.fx.torch_internals.core import unset_fake_temporarily
from passes.fx.torch_internals.inductor import compile_fx_inner, inductor_config

from ..compiler.backend import compile_with
from ..compiler.capture import Capture, snapshot
from ..compiler.inductor_lowering import InductorLowering
from ..compiler.lowering import Lowering
from ..compiler.options import LOWERINGS, Options
from ..dry_run import MeshShape, check_arguments, dry_step, shard_layers, train
from ..runtime.planned_graph import boxed
from .outline import triton_kernels
from .pretend import device_of, pretend_cuda, source_of
from .ptx import compile_kernels


@dataclass(eq=False)
class CudaCode(Capture):
    """The graphs of a sharded model that were lowered for CUDA, each with Inductor's source in ``.code``.

    Attributes:
        arch: the architecture that the source was generated for, such as "sm_90".
    """

    arch: str = ""

    def ptx(self, *archs: str) -> dict[tuple[str, str], str]:
        """Compile every Triton kernel of all graphs to PTX, and the PTX to machine code, which shows that it is valid.

        Args:
            archs: such as "sm_80"; none: the architecture that the code was generated for.

        Returns:
            The PTX, by the kernel's name and architecture. Different kernels of two segments can have one name; then the later
            one is numbered, ``"name#1"``.

        Raises:
            RuntimeError: a kernel does not compile; the message names it and the architecture.
            ValueError: an architecture is not known.
        """
        graphs = (*self.forward, *self.backward)
        return compile_kernels([kernel for graph in graphs for kernel in triton_kernels(graph)], archs or (self.arch,))


class _Segment:
    """A segment that was lowered, but not loaded. A call computes fake results with its graph."""

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
    """Lower a segment by ``compile_fx_inner`` without loading the generated code, which would need a GPU."""
    runnable = snapshot(graph_module)
    return _Segment(source_of(lambda: compile_fx_inner(graph_module, inputs, **kwargs)), runnable)  # type: ignore[arg-type]


_LOWERINGS: Mapping[str, Callable[[], Lowering]] = {
    **LOWERINGS,
    "inductor": functools.partial(InductorLowering, _compile_segment),
}


def _backend(gm: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile as ``fsdp_backend``, without a device. The step's fake mode is off, so that no fake tensors of two modes meet."""
    parsed = Options.parse(options)
    with unset_fake_temporarily():
        return compile_with(_LOWERINGS[parsed.lowering](), gm, inputs, parsed)


# Settings of Inductor without a device.
_INDUCTOR_CONFIG = {
    # Cached code would be loaded, not generated.
    "fx_graph_cache": False,
    # Worker processes that compile kernels do not pretend to have a device.
    "compile_threads": 1,
}


def cuda_code(
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape,
    arch: str = "sm_90",
    *,
    shard: Callable[[Any, DeviceMesh], Any] = shard_layers,
    step: Callable[..., Any] = train,
    options: dict[str, Any] | None = None,
    ptx: Sequence[str] = (),
) -> CudaCode:
    """Lower a model's training step for CUDA, without a GPU, and return its graphs and generated source.

    Nothing is allocated and nothing runs: the model is copied with fake parameters, and ranks are fake. Triton is needed. When
    the function returns or raises, the model and all that it replaced in torch are as before. Only ``torch.compile`` is reset,
    so functions that were compiled before compile again at their next call. During the call, no other thread of the process may
    use torch.compile or CUDA.

    Differences from a real run: Inductor measures nothing, so odd-sized operands of matrix products are not padded. Without a
    device, scaled_dot_product_attention becomes products and a softmax, not a fused kernel.

    Args:
        model: on the meta device or any other; not sharded.
        inputs: the arguments of forward: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
            Only shapes and dtypes of tensors count; tensors may be on any device, also meta.
        mesh_shape: ``(shards,)`` for FSDP, ``(replicas, shards)`` for HSDP, in ranks; or the sizes of mesh dimensions by name,
            such as ``{"dp": 8, "tp": 4}``, of which ``shard`` takes slices.
        arch: "sm_80" (A100), "sm_90" (H100) or "sm_100" (B200).
        shard: called with the copy of the model and the mesh; calls :func:`~fsdp_compile.fully_shard`, and sets flags and
            hooks. By default, each module of the outermost ``nn.ModuleList`` s is a unit, and the rest is one.
        step: called with the compiled model and the inputs; may set flags, and call forward and backward several times, each of
            which lowers the graphs of its plan. By default, one forward, and one backward from the sum of all outputs.
        options: options of the backend, as for ``torch.compile``.
        ptx: architectures to compile all Triton kernels for (see :meth:`CudaCode.ptx`).

    Returns:
        The captured graphs, with their source.

    Raises:
        RuntimeError: Triton is not installed; a default process group exists already; another call that pretends to have a
            device is running (``cuda_code``, ``CudaCode.ptx``, ``explain``); or a kernel does not compile.
        ValueError, TypeError: an argument is invalid.

    Example::

        with torch.device("meta"):
            model = Transformer(config)
        code = cuda_code(model, torch.zeros(4, 2048, dtype=torch.long), mesh_shape=(8,))
        print(cuda_outline(code.forward[0]))
        print(code.backward[0].code)
    """
    device = device_of(arch)
    check_arguments("cuda_code", model, mesh_shape, shard)
    given: dict[str, Any] = {"shard": shard, "step": step, "backend": _backend, "options": options, "passes": True}
    with (
        pretend_cuda(device),
        inductor_config.patch(_INDUCTOR_CONFIG),
        dry_step(model, inputs, mesh_shape, "cuda", **given) as captured,
    ):
        code = CudaCode(**vars(captured), arch=arch)
    if ptx:
        code.ptx(*ptx)
    return code
