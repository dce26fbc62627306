"""Precompiled files: what a run, or one process in its place, has compiled, as one file for runs on other machines.

The file is a zip archive with a part of Inductor's cache folder: stored frames and variants
(:mod:`fsdp_compile.compiler.stored_frame`), and kernels. Its ``manifest.json`` says what these depend on.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from passes.collectives.gloo import pretending_gloo
from passes.fx.torch_internals.core import pytree
from passes.fx.torch_internals.inductor import cache_dir, fresh_cache

from .compiler.backend import fsdp_backend
from .compiler.cache_folder import PARTIAL, write_whole
from .compiler.frame_cache import NotPrecompiled, must_be_stored, surroundings
from .compiler.stored_frame import stored_frames
from .dry_run import MeshShape, check_arguments, pretended_ranks, run_step, shard_layers, train

_MANIFEST = "manifest.json"
# Folders of Inductor's cache that a warm start does not read.
_LEFT_OUT = ("locks", "fsdp_compile_locks", "precompiled_headers")


def precompile(
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape,
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
            of which ``shard`` takes slices.
        path: the path of the file.
        shard: called with a copy of the model and the mesh; shards the copy as the run does. By default, each module of the
            outermost ``nn.ModuleList`` s is a unit, and the rest is one.
        step: called with the compiled model and the inputs; may set flags, and call forward and backward several times, also
            with other sizes. The file has the graphs of all of these calls. By default, one forward, and one backward from the
            sum of all outputs.
        options: options of the backend, as for ``torch.compile``.

    Returns:
        The SHA-256 digest of the file.

    Raises:
        NotPrecompiled: no forward of the model can be stored; see :func:`save_precompiled`.
        RuntimeError: there is a default process group already.
        ValueError, TypeError: an argument is invalid.

    Example::

        with torch.device("meta"):
            model = Transformer(config)
        fsdp_compile.precompile(model, torch.zeros(4, 2048, dtype=torch.long), (8,), "model.zip")
    """
    check_arguments("precompile", model, mesh_shape, shard)
    with (
        pretended_ranks(mesh_shape, "cpu") as mesh,
        pretending_gloo(),
        tempfile.TemporaryDirectory() as folder,
        fresh_cache(dir=folder),
    ):
        copied = _copy_without_memory(model)
        shard(copied, mesh)
        _give_memory(copied, like=model)
        given = pytree.tree_map_only(Tensor, _on_cpu, inputs)
        run_step(step, torch.compile(copied, backend=fsdp_backend, options=options), given)
        return save_precompiled(path)


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
    folder = Path(cache_dir())
    frames = stored_frames()
    if not frames:
        raise NotPrecompiled(
            f"{folder} has no stored forward of a sharded model. Train a step before. If there was one, set the level of the "
            "logger fsdp_compile.compiler.frame_cache to INFO: it says what cannot be stored."
        )
    files = {str(each.relative_to(folder)): each for each in sorted(folder.rglob("*")) if each.is_file()}
    files = {name: each for name, each in files.items() if Path(name).parts[0] not in _LEFT_OUT and each.suffix != PARTIAL}
    manifest = {
        "surroundings": surroundings(),
        "forwards": frames,
        "files": {name: _digest(each.read_bytes()) for name, each in files.items()},
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        for name, each in files.items():
            opened.write(each, name)
    write_whole(Path(path), archive.getvalue())
    return _digest(archive.getvalue())


def load_precompiled(path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True, sha256: str | None = None) -> None:
    """Put what :func:`save_precompiled` has written into Inductor's cache folder, for the first call of a model.

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
    content = Path(path).read_bytes()
    if sha256 is not None and _digest(content) != sha256:
        raise ValueError(f"{path} has the SHA-256 digest {_digest(content)}, not {sha256}. Get the file again.")
    manifest, files = _read(path, content)
    here = surroundings()
    saved: dict[str, str] = manifest["surroundings"]
    different = [f"{name}: {there}; here: {here.get(name)}" for name, there in saved.items() if there != here.get(name)]
    if different:
        message = f"{path} was saved with another {'; another '.join(different)}. Save it again, as it is here."
        if strict:
            raise NotPrecompiled(message)
        warnings.warn(f"{message} The model is compiled.", stacklevel=2)
        return
    for name, data in files.items():
        target = Path(cache_dir()) / name
        # The name of a file tells its content.
        if not target.exists():
            write_whole(target, data)
    if strict:
        must_be_stored.update(model.modules())


def _read(path: str | os.PathLike[str], content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            manifest = json.loads(archive.read(_MANIFEST))
            files = {name: archive.read(name) for name in manifest["files"]}
    except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged, or not a file of save_precompiled: {error}. Save it again.") from error
    for name, data in files.items():
        if _digest(data) != manifest["files"][name] or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} is damaged: {name} is not as it was saved. Save it again.")
    return manifest, files


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
