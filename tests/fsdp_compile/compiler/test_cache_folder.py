"""Inductor's cache in a folder that is full, read-only or no folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_compile.compiler import cache_folder
from fsdp_compile.compiler.cache_folder import ENOUGH, ensure_room, without_damaged_files

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder as Inductor's cache, and another one for temporary files."""
    folder, other = tmp_path / "cache", tmp_path / "temporary"
    folder.mkdir()
    other.mkdir()
    monkeypatch.setenv(_VARIABLE, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    return folder


def _free(free: dict[Path, int], monkeypatch: pytest.MonkeyPatch, default: int = ENOUGH) -> None:
    monkeypatch.setattr(cache_folder.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.get(Path(folder), default)))


def test_a_folder_with_room_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _free({}, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensure_room()
    assert os.environ[_VARIABLE] == str(cache)
    assert not list(cache.iterdir())


def test_a_full_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _free({cache: 3 << 20}, monkeypatch)
    with pytest.warns(UserWarning, match=r"\(\S*/cache\) cannot be used: it has 3 MiB left.* set TORCHINDUCTOR_CACHE_DIR"):
        ensure_room()
    taken = Path(os.environ[_VARIABLE])
    assert taken.parent == tmp_path / "temporary" and taken.is_dir()
    # The next graph finds room.
    ensure_room()
    assert os.environ[_VARIABLE] == str(taken)


def test_a_folder_that_cannot_be_written_to(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _free({}, monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv(_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="cannot be used: .*Not a directory"):
        ensure_room()
    assert Path(os.environ[_VARIABLE]).parent == tmp_path / "temporary"


def test_the_first_place_with_room(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    _free({home: ENOUGH}, monkeypatch, default=0)
    with pytest.warns(UserWarning, match="cannot be used"):
        ensure_room()
    assert Path(os.environ[_VARIABLE]).parent == home


def test_nowhere_is_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor tries its folder, and raises if that fails."""
    _free({}, monkeypatch, default=0)
    ensure_room()
    assert os.environ[_VARIABLE] == str(cache)


def test_damaged_programs_are_removed_one_by_one(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.py", "two.py")]
    for path in paths:
        path.touch()

    def load() -> str:
        for path in paths:
            if path.exists():
                raise RuntimeError(f"Failed to import {path}\nSyntaxError: invalid syntax")
        return "loaded"

    with pytest.warns(UserWarning, match=r"(one|two)\.py, a program in Inductor's cache, was damaged") as warned:
        assert without_damaged_files(load) == "loaded"
    assert len(warned) == 2


@pytest.mark.parametrize("message", ["Failed to import /missing.py\nSyntaxError", "something else"])
def test_other_errors_are_raised(message: str) -> None:
    def load() -> None:
        raise RuntimeError(message)

    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=message.splitlines()[0]):
        warnings.simplefilter("ignore")
        without_damaged_files(load)


@pytest.mark.skipif(shutil.which("mount") is None or os.name != "posix" or os.geteuid() != 0, reason="mounting needs root")
def test_a_file_system_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {small}") != 0:
        pytest.skip("this machine lets nobody mount")
    try:
        monkeypatch.setenv(_VARIABLE, str(small))
        with pytest.warns(UserWarning, match="it has 0 MiB left"):
            ensure_room()
        assert not os.environ[_VARIABLE].startswith(str(small))
    finally:
        os.system(f"umount {small}")
