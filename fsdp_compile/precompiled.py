"""Precompiled files: what a run, or one process in its place, has compiled, as one file for runs on other machines.

:mod:`fsdp_compile.compiler.precompiled_file` says what is in the file.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from passes.collectives.gloo import pretending_gloo
from passes.fx.torch_internals.core import pytree
from passes.fx.torch_internals.inductor import fresh_cache

from .compiler.backend import fsdp_backend
from .compiler.frame_cache import must_be_stored
from .compiler.precompiled_file import NotPrecompiled, take_file, write_file
from .dry_run import MeshShape, check_arguments, num_ranks, pretended_ranks, run_step, shard_layers, train


def precompile(
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape | Sequence[MeshShape],
    path: str | os.PathLike[str],
    *,
    shard: Callable[[Any, DeviceMesh], Any] = shard_layers,
    step: Callable[..., Any] = train,
    options: dict[str, Any] | None = None,
) -> str:
    """Compile a training step on one process, for ranks on the CPU over Gloo, and write one file for :func:`load_precompiled`.

    The process stands for one rank, and communicates with nobody. It runs the step once, with all parameters zero. So it needs
    one rank's memory, and neither weights nor data. It needs as many threads as a rank has (``OMP_NUM_THREADS``).

    Args:
        model: on the meta device or any other; not sharded, and not changed.
        inputs: the arguments of forward: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
            Tensors on the meta device become zeros.
        mesh_shape: ``(shards,)`` for FSDP, ``(replicas, shards)`` for HSDP, in ranks; or the sizes of mesh dimensions by name,
            of which ``shard`` takes slices. Or a list of these: then the file serves runs of any of these shapes.
        path: the path of the file.
        shard: called with a copy of the model and the mesh; shards the copy as the run does. By default, each module of the
            outermost ``nn.ModuleList`` s is a unit, and the rest is one.
        step: called with the compiled model and the inputs; may set flags, and call forward and backward several times, also
            with other sizes. The file has the graphs of all of these calls. By default, one forward, and one backward from the
            sum of all outputs.
        options: options of the backend, as for ``torch.compile``. ``precompiled`` is left out.

    Returns:
        The SHA-256 digest of the file.

    Raises:
        NotPrecompiled: no forward of the model can be stored; see :func:`save_precompiled`.
        RuntimeError: there is a default process group already.
        ValueError, TypeError: an argument is invalid.

    Example::

        with torch.device("meta"):
            model = Transformer(config)
        fsdp_compile.precompile(model, torch.zeros(4, 2048, dtype=torch.long), [(8,), (16,)], "model.zip")
    """
    shapes = _shapes(mesh_shape)
    for shape in shapes:
        check_arguments("precompile", model, shape, shard)
    options = {name: value for name, value in (options or {}).items() if name != "precompiled"}
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder):
        for shape in shapes:
            with pretended_ranks(shape, "cpu") as mesh, pretending_gloo():
                copied = _copy_without_memory(model)
                shard(copied, mesh)
                _give_memory(copied, like=model)
                given = pytree.tree_map_only(Tensor, _on_cpu, inputs)
                run_step(step, torch.compile(copied, backend=fsdp_backend, options=options), given)
        return write_file(path, [num_ranks(shape) for shape in shapes])


def _shapes(mesh_shape: MeshShape | Sequence[MeshShape]) -> Sequence[MeshShape]:
    is_list = isinstance(mesh_shape, Sequence) and any(isinstance(size, (Sequence, Mapping)) for size in mesh_shape)
    return cast("Sequence[MeshShape]", mesh_shape if is_list else [mesh_shape])


def _copy_without_memory(model: nn.Module) -> nn.Module:
    """Copy a model with parameters on the meta device, as all of them may not fit into memory."""
    copies: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    return copy.deepcopy(model, copies)


def _give_memory(model: nn.Module, like: nn.Module) -> None:
    """Make the shards of a copy of ``like`` zeros, and give its buffers their values."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        for buffer, original in zip(model.buffers(), like.buffers(), strict=True):
            buffer.copy_(_on_cpu(original))


def _on_cpu(tensor: Tensor) -> Tensor:
    on_cpu = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().to("cpu")
    return on_cpu.requires_grad_(tensor.requires_grad)


def save_precompiled(path: str | os.PathLike[str]) -> str:
    """Write what is in Inductor's cache folder (``TORCHINDUCTOR_CACHE_DIR``) to one file.

    Call it on one rank, after the steps whose graphs are to be in the file. Use a folder of its own for that run, as all of the
    folder is written. The file serves all ranks of runs with as many ranks, torch and Python in the same place, and the same
    processor.

    Args:
        path: the path of the file.

    Returns:
        The SHA-256 digest of the file, for :func:`load_precompiled`.

    Raises:
        NotPrecompiled: no forward of a sharded model was stored. The logger ``fsdp_compile.compiler.frame_cache`` says at level
            ``INFO`` why.
    """
    return write_file(path, [dist.get_world_size() if dist.is_initialized() else 1])


def load_precompiled(path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True, sha256: str | None = None) -> None:
    """Put what :func:`save_precompiled` has written into Inductor's cache folder, for the first call of a model.

    ``options={"precompiled": path}`` of ``torch.compile`` does so in the first call, with ``strict``.

    The file holds code that the model's calls run: load a file that you trust, or give ``sha256``.

    Args:
        path: the path of the file.
        model: the sharded model, before its first compiled call.
        strict: raise where a forward of the model would have to be compiled, instead of compiling it.
        sha256: what :func:`save_precompiled` returned.

    Raises:
        NotPrecompiled: the file is for other surroundings, such as another version of torch, and ``strict``. Without it, a
            warning says so.
        ValueError: the file is damaged, or not the one with this digest.
    """
    try:
        take_file(path, sha256)
    except NotPrecompiled as error:
        if strict:
            raise
        warnings.warn(f"{error} The model is compiled.", stacklevel=2)
        return
    if strict:
        must_be_stored.update(model.modules())
