"""Stored frames: what Dynamo and AOTAutograd made of a compiled forward, so that the next process traces nothing.

A file holds Dynamo's bytecode and guards, and AOTAutograd's entry with the partitioned graphs
(:mod:`fsdp_compile.compiler.stored_graph`). Dynamo's guards compare objects of their process. So a file has a *fact* for each
guard (:mod:`fsdp_compile.compiler.frame_facts`), and a digest of each file of source that Dynamo read. When Dynamo is about to
trace a frame, the guards of a file are built for the objects of this process. If their facts are those in the file, the guards
are what Dynamo would make, and the frame is not traced.

Stored are frames with a whole forward in one graph, whose graphs AOTAutograd stores.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes.fx.frames import StoredGuard
from passes.fx.torch_internals.inductor import cache_dir

from .cache_folder import PARTIAL, write_whole

logger = logging.getLogger(__name__)

# A folder keeps so many frames, the newest.
_MOST_FRAMES = 8
# The names of files with symbolic sizes begin so.
_SYMBOLIC = "symbolic_"


@dataclass(frozen=True)
class StoredBackend:
    """The compiled graph of a frame.

    Attributes:
        sources: where the frame finds each input of the graph; empty in a file.
        shards: (unit name, parameter name) in the graph for each input that is a shard, by the input's index.
        lent: the index of the shard among the inputs, for each output that shares memory with a full parameter, where the graph
            is a part of a forward.
        key: what the compilation depends on, besides the graph.
        content: the entry of AOTAutograd's cache.
        uncompiled: the graph, to be run operator by operator.
        numbers: the integers in the graph.
    """

    sources: Sequence[Any]
    shards: Mapping[int, tuple[str, str]]
    lent: Mapping[int, int]
    key: str
    content: bytes
    uncompiled: bytes
    numbers: frozenset[int]


#: Stands for the function of the graph, and for the dictionary of Python's builtins, in :attr:`StoredFrame.installed`.
COMPILED, BUILTINS = "compiled", "builtins"


@dataclass(frozen=True)
class Module:
    """Stands for a module of Python, which has no pickle."""

    name: str


@dataclass(frozen=True)
class StoredFrame:
    """A frame, as Dynamo and the backend have compiled it.

    Attributes:
        bytecode: the code that runs in the place of the frame's.
        imports: the modules that bytecode and guards read, by the name of a global.
        installed: the objects that Dynamo made globals for bytecode and guards, under names that differ between processes:
            modules, functions and classes, or :data:`COMPILED` or :data:`BUILTINS`.
        tables: a :class:`FrameTables`, as :func:`passes.fx.frames.dump_sources` writes it.
        facts: a fact for each guard, then for each input of the graph.
        names: the names of attributes that the traced code may read.
        files: the digest of each file with traced source, by the name of its module.
        environment: the environment variables that traced code may have read; None: one was not set.
        observed: the sizes that Dynamo has seen, by source.
        backend: what the backend made of the graph.
    """

    bytecode: Any
    imports: Mapping[str, str]
    installed: Mapping[str, Any]
    tables: bytes
    facts: Sequence[str]
    names: frozenset[str]
    files: Mapping[str, str]
    environment: Mapping[str, str | None]
    observed: Mapping[str, Any]
    backend: StoredBackend


@dataclass(frozen=True)
class FrameTables:
    """The parts of a stored frame that hold sources.

    Attributes:
        guards: the guards.
        sizes: size and stride that the guard of a tensor compares, by source.
        ordered: the dictionaries whose order of keys is guarded on.
        inputs: where the frame finds each input of the graph.
        symbolic: where it finds tensors with symbolic sizes, and how their symbols are made.
        conditions: the sympy conditions on symbols that the graph relies on.
    """

    guards: Sequence[StoredGuard]
    sizes: Mapping[Any, Any]
    ordered: Sequence[Any]
    inputs: Sequence[Any]
    symbolic: Sequence[tuple[Any, Any]]
    conditions: Sequence[Any]


# Takes what the backend makes of the graphs of the frame that Dynamo traces.
_made: ContextVar[list[StoredBackend | None] | None] = ContextVar("_made", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[StoredBackend | None]]:
    """Collect what the backend makes of the graphs of a frame; None for a graph that cannot be stored."""
    made: list[StoredBackend | None] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


def record(make: Callable[[], StoredBackend | None]) -> None:
    """Record what ``make`` returns of a graph, where a frame is recorded."""
    made = _made.get()
    if made is not None:
        made.append(make())


def load_frames(key: str) -> Iterator[StoredFrame]:
    """Load the stored frames with a key, those without symbolic sizes first. Damaged files are left out."""
    for path in sorted(_newest_first(_folder(key)), key=lambda path: path.name.startswith(_SYMBOLIC)):
        try:
            frame: StoredFrame = pickle.loads(path.read_bytes())
        except Exception as error:
            logger.info("A stored frame cannot be read: %r", error)
            continue
        yield frame


def store_frame(key: str, frame: StoredFrame, *, is_symbolic: bool) -> None:
    """Store a frame. If that fails, as on a full disk, the next process traces it again."""
    folder = _folder(key)
    digest = hashlib.sha256(repr((frame.facts, sorted(frame.files.items()))).encode()).hexdigest()
    name = (_SYMBOLIC if is_symbolic else "") + digest
    try:
        write_whole(folder / name, pickle.dumps(frame))
        for path in _newest_first(folder)[_MOST_FRAMES:]:
            path.unlink(missing_ok=True)
    except Exception as error:
        logger.info("A frame is not stored: %r", error)


def stored_frames() -> list[dict[str, Any]]:
    """Return the name of the code, and the number of facts and files, of each stored frame."""
    found = []
    for path in sorted(_folder("").glob("*/*")):
        frame: StoredFrame = pickle.loads(path.read_bytes())
        name = frame.bytecode.co_name
        found.append(
            {"name": name, "symbolic": path.name.startswith(_SYMBOLIC), "facts": len(frame.facts), "files": len(frame.files)}
        )
    return found


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("*") if path.suffix != PARTIAL]
    return sorted(found, key=_written_at, reverse=True)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        # Another rank has removed it.
        return 0.0


def _folder(key: str) -> Path:
    return Path(cache_dir()) / "fsdp_compile" / "frames" / key
