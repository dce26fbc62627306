"""``cuda_code``: what a sharded model becomes on CUDA, for any number of GPUs, on a machine that has none.

Everything up to the generated source is what a real run does: Dynamo, AOTAutograd, the passes, Inductor. Tensors are fake, the
process group is fake, and generated code is not loaded: where it would run, its graph computes fake results, so that whole
training steps can be played through, with all their plans.
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
from ..dry_run import MeshShape, check_arguments, played_step, shard_layers, train
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
        mesh_shape: ``(shards,)`` for FSDP, ``(replicas, shards)`` for HSDP, in ranks; or the sizes of dimensions by name, such
            as ``{"dp": 8, "tp": 4}``, of which ``shard`` takes slices.
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
    check_arguments("cuda_code", model, mesh_shape, shard)
    given: dict[str, Any] = {"shard": shard, "step": step, "backend": _backend, "options": options, "passes": True}
    with (
        pretend_cuda(device),
        inductor_config.patch(_INDUCTOR_CONFIG),
        played_step(model, inputs, mesh_shape, "cuda", **given) as captured,
    ):
        code = CudaCode(**vars(captured), arch=arch)
    if ptx:
        code.ptx(*ptx)
    return code
