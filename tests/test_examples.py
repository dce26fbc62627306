"""The examples run as a user would run them, and their claims hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from harness.link import Link, LinkError, make_link
from helpers.arguments import parse_args
from helpers.checkpoints import load_checkpoint, save_checkpoint
from helpers.launch import join_ranks
from torch import nn, optim
from torch.distributed.checkpoint.api import CheckpointException

from tests.common.distributed import RankPools

pytestmark = pytest.mark.example

ROOT = Path(__file__).parent.parent
SIZE = ["--layers", "2", "--d-model", "32", "--heads", "2", "--seq-length", "32", "--batch", "2", "--steps", "6"]
SIZE += ["--val-batches", "2", "--sample-length", "0", "--max-bytes", "200000", "--warmup", "2", "--save-every", "3"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, rank_pools: RankPools) -> Path:
    """The folder of an uninterrupted run, with checkpoints after steps 3 and 6."""
    out = tmp_path_factory.mktemp("straight")
    rank_pools[2].run(train, flags=[*SIZE, "--out", str(out)])
    assert len(losses(out)) == 6
    return out


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def torchrun(*command: str) -> str:
    """Run a script on two ranks and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [*TORCHRUN, "--standalone", *command]
    done = subprocess.run(start, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train(flags: list[str]) -> None:
    """Run the main job on ranks that are there already: ``.ci/wheel`` runs it by torchrun. Every rank calls this."""
    import train_gpt

    train_gpt.run(parse_args(flags), torch.device("cpu"))


def losses(out: Path) -> list[float]:
    assert (out / "loss.png").stat().st_size > 1000
    return json.loads((out / "losses.json").read_text())["losses"]


def test_train_gpt_equals_fsdp2_and_resumes_exactly(tmp_path: Path, straight: Path, rank_pools: RankPools) -> None:
    for name, *flags in (
        ("fsdp2", "--system", "fsdp2", "--no-compile"),
        ("resumed", "--resume", str(straight / "step-000003")),
    ):
        rank_pools[2].run(train, flags=[*SIZE, "--out", str(tmp_path / name), *flags])
    fsdp2, resumed = losses(tmp_path / "fsdp2"), losses(tmp_path / "resumed")
    assert [f"{loss:.4f}" for loss in losses(straight)] == [f"{loss:.4f}" for loss in fsdp2]
    assert resumed == losses(straight)


def test_train_gpt_with_muon(tmp_path: Path, rank_pools: RankPools) -> None:
    """Owners' updates are those of one rank, which has whole matrices, and a run goes on exactly."""
    muon = [*SIZE, "--optimizer", "muon"]
    for name, ranks, *flags in (
        ("two", 2),
        ("one", 1, "--batch", "4"),
        ("resumed", 2, "--resume", str(tmp_path / "two" / "step-000003")),
    ):
        rank_pools[ranks].run(train, flags=[*muon, "--out", str(tmp_path / name), *flags])
    # Gradients round otherwise, and iterations in bfloat16 enlarge that.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=2e-3)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "two")


def test_only_whole_checkpoints_count(tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)

    def save(losses: list[float]) -> None:
        save_checkpoint(model, [optim.AdamW(model.parameters())], losses, {}, tmp_path)

    def resume(how: str) -> list[float]:
        flags = ["--resume", how, "--out", str(tmp_path)]
        return load_checkpoint(model, [optim.AdamW(model.parameters())], {}, parse_args(flags))

    assert resume("auto") == []
    with pytest.raises(SystemExit, match="there is no checkpoint"):
        resume("newest")
    save([1.0, 2.0])
    save([3.0])  # From a later run.
    assert resume("auto") == resume("newest") == [3.0]

    for whole in (0, 1):  # Completed renames: first torch's file of metadata, which it writes last, then the folder.
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


def test_a_damaged_checkpoint_is_left_out(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)

    def save(losses: list[float]) -> None:
        save_checkpoint(model, [optim.AdamW(model.parameters())], losses, {}, tmp_path)

    def resume(how: str) -> list[float]:
        return load_checkpoint(
            model, [optim.AdamW(model.parameters())], {}, parse_args(["--resume", how, "--out", str(tmp_path)])
        )

    save([1.0])
    save([1.0, 2.0])
    newest = tmp_path / "step-000002"
    written = newest / "__0_0.distcp"
    contents = bytearray(written.read_bytes())
    contents[len(contents) // 2] ^= 1
    written.write_bytes(contents)
    with pytest.raises(SystemExit, match=r"step-000002 is damaged: __0_0\.distcp"):
        resume(str(newest))
    assert resume("auto") == [1.0]
    assert f"{newest} is damaged, and is left out: __0_0.distcp" in capsys.readouterr().out
    written.unlink()
    assert resume("newest") == [1.0]

    # A disk that is full when the last file is written.
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(
            RuntimeError, match=r"step-000003 was not saved, and those before are untouched: rank 0: .*No space"
        ):
            save([1.0, 2.0, 3.0])
    assert resume("auto") == [1.0]


@pytest.mark.night
def test_train_gpt_goes_on_after_ranks_were_killed(tmp_path: Path, straight: Path) -> None:
    command = [str(ROOT / "tests/common/killed_ranks.py"), str(ROOT / "examples/train_gpt.py"), *SIZE, "--out", str(tmp_path)]
    printed = torchrun("--max-restarts", "3", *command, "--resume", "auto")
    # The first kill leaves an incomplete checkpoint, so the first restart has nothing to resume from.
    assert printed.count("resumed from") == 1
    assert f"resumed from {tmp_path}/step-000003" in printed
    assert losses(tmp_path) == losses(straight)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003", "step-000006"]


@pytest.mark.night
def test_train_gpt_on_two_nodes_goes_on_after_ranks_were_killed(tmp_path: Path, straight: Path) -> None:
    try:
        with make_link("1gbit") as link:
            printed = train_on_nodes(link, tmp_path)
    except LinkError as error:
        pytest.skip(f"two nodes are two network namespaces: {error}")
    assert f"resumed from {tmp_path}/step-000003" in printed
    # Four ranks sum in another order than two.
    assert losses(tmp_path) == pytest.approx(losses(straight), abs=1e-4)


def train_on_nodes(link: Link, out: Path) -> str:
    """Run the main job on two ranks in each network namespace, as docs/launching.md says, and return their output."""
    script = [str(ROOT / "tests/common/killed_ranks.py"), str(ROOT / "examples/train_gpt.py"), *SIZE, "--batch", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": link.interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes: list[subprocess.Popen[bytes]] = []
    logs = [out / "node-0.log", out / "node-1.log"]
    try:
        for index, log in enumerate(logs):
            rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29500", "--max-restarts", "3"]
            # In a namespace the host's name does not belong to its address, so torchrun cannot tell which node is the host.
            rendezvous += ["--rdzv-conf", f"is_host={1 - index}", "--local-addr", f"10.0.0.{index + 1}"]
            command = link.command(index, [*TORCHRUN, *rendezvous, *script, "--resume", "auto", "--out", str(out)])
            with log.open("wb") as file:
                nodes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file))
        codes = [node.wait(timeout=800) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # Kill would leave the node's ranks running.
            node.wait()
    printed = "".join(log.read_text(errors="replace") for log in logs)
    assert codes == [0, 0], printed[-6000:]
    return printed


def test_restarts_on_several_nodes_want_a_store_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_sets = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    for name, value in torchrun_sets.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d"):
        join_ranks(torch.device("cpu"))
