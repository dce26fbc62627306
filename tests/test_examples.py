"""The examples run as a user would run them, and their claims hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from harness.fresh_module import fresh_module
from torch import nn, optim
from torch.distributed.checkpoint.api import CheckpointException

ROOT = Path(__file__).parent.parent
SIZE = ["--layers", "2", "--d-model", "32", "--heads", "2", "--seq-length", "32", "--batch", "2", "--steps", "6"]
SIZE += ["--val-batches", "2", "--sample-length", "0", "--max-bytes", "200000", "--warmup", "2", "--save-every", "3"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Inductor cache for all runs: they compile the same graphs."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder of a run that nothing interrupted, with a checkpoint after steps 3 and 6."""
    out = tmp_path_factory.mktemp("straight")
    assert len(train(out, cache)) == 6
    return out


def torchrun(*command: str, cache: Path, nodes: tuple[str, ...] = ("--standalone",)) -> str:
    """Run a script on two ranks; gives what it printed."""
    start = [sys.executable, "-m", "torch.distributed.run", *nodes, "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run([*start, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train(out: Path, cache: Path, *flags: str) -> list[float]:
    """Run the main job on two ranks; gives its losses."""
    torchrun(str(ROOT / "examples/train_gpt.py"), *SIZE, "--out", str(out), *flags, cache=cache)
    return losses(out)


def losses(out: Path) -> list[float]:
    assert (out / "loss.png").stat().st_size > 1000
    return json.loads((out / "losses.json").read_text())["losses"]


def test_train_gpt_equals_fsdp2_and_resumes_exactly(tmp_path: Path, straight: Path, cache: Path) -> None:
    fsdp2 = train(tmp_path / "fsdp2", cache, "--system", "fsdp2", "--no-compile")
    assert [f"{loss:.4f}" for loss in losses(straight)] == [f"{loss:.4f}" for loss in fsdp2]

    resumed = train(tmp_path / "resumed", cache, "--resume", str(straight / "step-000003"))
    assert resumed == losses(straight)


def test_only_whole_checkpoints_count(tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    train_gpt = fresh_module(ROOT / "examples/train_gpt.py")
    model = nn.Linear(2, 2)

    def save(losses: list[float]) -> None:
        train_gpt.save_checkpoint(model, optim.AdamW(model.parameters()), losses, {}, tmp_path)

    def resume(how: str) -> list[float]:
        flags = ["--resume", how, "--out", str(tmp_path)]
        return train_gpt.load_checkpoint(model, optim.AdamW(model.parameters()), {}, train_gpt.parse_args(flags))

    assert resume("auto") == []
    with pytest.raises(SystemExit, match="there is no checkpoint"):
        resume("newest")
    save([1.0, 2.0])
    save([3.0])  # Of a later run.
    assert resume("auto") == resume("newest") == [3.0]

    for whole in (0, 1):  # How much is renamed: torch's file of metadata, which it writes last, then the folder.
        renames = [os.rename] * whole + [Mock(side_effect=KeyboardInterrupt)]
        with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, CheckpointException)):
            patched.setattr(os, "rename", lambda *paths, renames=renames: renames.pop(0)(*paths))
            save([4.0, 5.0, 6.0])
        assert resume("auto") == [3.0]
    (tmp_path / "step-000004").mkdir()
    assert resume("auto") == [3.0]

    save([7.0])
    assert resume("auto") == [7.0]
    save([4.0, 5.0, 6.0])
    assert resume("auto") == [4.0, 5.0, 6.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-00000{step}" for step in (1, 2, 3, 4)]


@pytest.mark.exhaustive
def test_train_gpt_goes_on_after_ranks_were_killed(tmp_path: Path, straight: Path, cache: Path) -> None:
    command = [str(ROOT / "tests/common/killed_ranks.py"), str(ROOT / "examples/train_gpt.py"), *SIZE, "--out", str(tmp_path)]
    printed = torchrun("--max-restarts", "3", *command, "--resume", "auto", cache=cache)
    # Nothing to resume from after the first death, which left a checkpoint all but whole.
    assert printed.count("resumed from") == 1
    assert f"resumed from {tmp_path}/step-000003" in printed
    assert losses(tmp_path) == losses(straight)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003", "step-000006"]
