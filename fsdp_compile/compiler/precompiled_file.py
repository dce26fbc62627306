"""Precompiled files: a part of Inductor's cache folder as one file, for processes that have no such folder.

The file is a zip archive with stored frames, stored variants (:mod:`fsdp_compile.compiler.stored_frame`) and kernels. Its
``manifest.json`` says what these depend on.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from passes.fx.torch_internals.dynamo import PackageError
from passes.fx.torch_internals.inductor import cache_dir

from .cache_folder import PARTIAL, write_whole
from .stored_frame import stored_frames
from .surroundings import RANKS, surroundings

_MANIFEST = "manifest.json"
# Folders of Inductor's cache that a warm start does not read.
_LEFT_OUT = ("locks", "fsdp_compile_locks", "precompiled_headers")
# The files that have been taken into a cache folder, each with the folder.
_taken: set[tuple[str, str]] = set()


class NotPrecompiled(PackageError):
    """A precompiled file does not have what a model needs, so that a forward would have to be compiled."""


def nothing_can_be_taken() -> NotPrecompiled:
    """Return the error for code that has to be precompiled, where stored frames are not even looked for."""
    return NotPrecompiled(
        "A forward would be compiled that has to be in a precompiled file (options['precompiled'], or load_precompiled with "
        "strict=True). Nothing precompiled can be taken of a function without sharded parameters, with torch 2.11, under "
        "torch.export or a torch function mode (as in `with torch.device(...):`), with a pass of the user in Inductor's "
        "configuration, or with the caches off (TORCHINDUCTOR_AUTOGRAD_CACHE, TORCHINDUCTOR_FX_GRAPH_CACHE, "
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES). Compile without the file, or remove what is in its way."
    )


def write_file(path: str | os.PathLike[str], numbers_of_ranks: Sequence[int]) -> str:
    """Write what is in Inductor's cache folder to one file. Return its SHA-256 digest.

    Args:
        path: the path of the file.
        numbers_of_ranks: the numbers of ranks of the runs whose frames are in the folder.

    Raises:
        NotPrecompiled: there is no stored frame.
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
        "surroundings": surroundings() | {RANKS: " or ".join(map(str, sorted(set(numbers_of_ranks))))},
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


def take_file(path: str | os.PathLike[str], sha256: str | None = None) -> None:
    """Put the content of a file into Inductor's cache folder.

    Args:
        path: the path of the file.
        sha256: the digest of the file, or None.

    Raises:
        NotPrecompiled: the file is for other surroundings.
        ValueError: the file is damaged, or not the one with this digest.
    """
    content = Path(path).read_bytes()
    if sha256 is not None and _digest(content) != sha256:
        raise ValueError(f"{path} has the SHA-256 digest {_digest(content)}, not {sha256}. Get the file again.")
    manifest, files = _read(path, content)
    here = surroundings()
    saved: dict[str, str] = manifest["surroundings"]
    if here[RANKS] in saved[RANKS].split(" or "):
        saved[RANKS] = here[RANKS]
    different = [f"{name}: {there}; here: {here.get(name)}" for name, there in saved.items() if there != here.get(name)]
    if different:
        raise NotPrecompiled(f"{path} was saved with another {'; another '.join(different)}. Save it again, as it is here.")
    for name, data in files.items():
        target = Path(cache_dir()) / name
        # The name of a file tells its content.
        if not target.exists():
            write_whole(target, data)


def take_once(path: str | os.PathLike[str]) -> None:
    """Take the file that an option names, unless this process has taken it into the same folder.

    Raises:
        NotPrecompiled: the file is for other surroundings, or cannot be read.
    """
    taken = os.path.realpath(path), cache_dir()
    if taken in _taken:
        return
    try:
        take_file(path)
    except (OSError, ValueError) as error:
        # Dynamo would call another error one of its own.
        raise NotPrecompiled(f"The file that options['precompiled'] names cannot be read: {error}") from error
    _taken.add(taken)


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
