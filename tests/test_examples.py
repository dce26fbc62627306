"""The examples run as a user would run them, and their claims hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SIZE = ["--layers", "2", "--d-model", "32", "--heads", "2", "--seq-length", "32", "--batch", "2", "--steps", "6"]
SIZE += ["--val-batches", "2", "--sample-length", "0", "--max-bytes", "200000", "--warmup", "2", "--save-every", "3"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Inductor cache for all runs: they compile the same graphs."""
    return tmp_path_factory.mktemp("inductor")


def train(out: Path, cache: Path, *flags: str) -> dict[str, Any]:
    """Run the main job on two ranks; gives what it wrote to losses.json."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/train_gpt.py"), *SIZE, "--out", str(out), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (out / "loss.png").stat().st_size > 1000
    return json.loads((out / "losses.json").read_text())


def test_train_gpt_equals_fsdp2_and_resumes_exactly(tmp_path: Path, cache: Path) -> None:
    straight = train(tmp_path / "straight", cache)["losses"]
    assert len(straight) == 6

    fsdp2 = train(tmp_path / "fsdp2", cache, "--system", "fsdp2", "--no-compile")["losses"]
    assert [f"{loss:.4f}" for loss in straight] == [f"{loss:.4f}" for loss in fsdp2]

    resumed = train(tmp_path / "resumed", cache, "--resume", str(tmp_path / "straight/step-000003"))["losses"]
    assert resumed == straight
