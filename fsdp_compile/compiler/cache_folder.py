"""The folder of Inductor's cache, also where it is full, read-only, or has damaged files.

Inductor compiles in that folder, and raises if it has no room, or if a program in it is cut short. So a job would not start for
want of a cache. Damaged entries of the cache's other kinds are misses for Inductor.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from passes.fx.torch_internals.inductor import cache_dir

#: Room, in bytes, that compiling may take. Inductor's precompiled header for the CPU alone has 150 MiB.
ENOUGH = 256 << 20
#: The end of the names of files that are being written.
PARTIAL = ".partial"
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# The message of Inductor's error for a file that is no Python.
_FAILED_TO_IMPORT = re.compile(r"Failed to import (\S+\.py)$", re.MULTILINE)

T = TypeVar("T")


def ensure_room() -> None:
    """Make Inductor compile in a temporary folder, and warn, if the folder of its cache is full or cannot be written to."""
    reason = _reason_against_cache()
    place = next((place for place in _other_places() if not _reason_against(place)), None) if reason else None
    if place is None:
        # Without another place, Inductor tries the folder, and raises if it fails.
        return
    folder = tempfile.mkdtemp(prefix="fsdp_compile_cache_", dir=place)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    before, os.environ[_VARIABLE] = os.environ.get(_VARIABLE, "Inductor's default"), folder
    warnings.warn(
        f"The folder of Inductor's cache ({before}) cannot be used: {reason}. This process compiles in {folder}, which it "
        f"removes at its end, so the next process compiles again. Make room, or set {_VARIABLE} to another folder.",
        stacklevel=2,
    )


def _reason_against_cache() -> str:
    try:
        return _reason_against(Path(cache_dir()))
    except OSError as error:
        return str(error)


def _reason_against(folder: Path) -> str:
    """Return why a folder cannot hold what is compiled; empty: it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"room")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    return "" if free >= ENOUGH else f"it has {free >> 20} MiB left, and compiling may take {ENOUGH >> 20} MiB"


def _other_places() -> Iterator[Path]:
    yield from (
        place for name in (tempfile.gettempdir(), "/dev/shm", Path.home(), Path.cwd()) if (place := Path(name)).is_dir()
    )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, which others see whole or not at all. Ranks may write the same file at the same time.

    Until it is whole, it lies in the same folder, with a name that ends in :data:`PARTIAL`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(dir=path.parent, suffix=PARTIAL)
    try:
        with open(number, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def without_damaged_files(function: Callable[[], T]) -> T:
    """Call a function that loads programs from Inductor's cache. Remove each program that cannot be read, warn, and call again.

    Args:
        function: the function. Inductor writes a program that is missing anew.
    """
    removed: set[str] = set()
    while True:
        try:
            return function()
        except RuntimeError as error:
            found = _FAILED_TO_IMPORT.search(str(error))
            path = found[1] if found else ""
            if not path or path in removed:
                raise
            removed.add(path)
            Path(path).unlink(missing_ok=True)
            warnings.warn(f"{path}, a program in Inductor's cache, was damaged, and is written anew.", stacklevel=2)
