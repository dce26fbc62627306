"""Checkpoints that stay complete even if a rank is killed, and runs that go on from them."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .gpt import GPT


def run_config(args: argparse.Namespace, digest: str) -> dict[str, Any]:
    """Return all that the losses depend on. A resumed run must have the same as the run that it goes on from."""
    names = "layers d_model heads seq_length steps optimizer lr warmup weight_decay clip seed bf16"
    config = {name: getattr(args, name) for name in names.split()}
    # Not the batch per rank: a checkpoint may be resumed on another number of ranks.
    return {**config, "global_batch": args.batch * dist.get_world_size(), "text": digest}


def checkpoint_state(model: GPT, optimizers: list[torch.optim.Optimizer], run: dict[str, Any]) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizers)
    # As one string, since torch.distributed.checkpoint would store each entry under a key of its own.
    return {"model": model_state, "optimizer": optimizer_state, "run": json.dumps(run)}


def save_checkpoint(
    model: GPT, optimizers: list[torch.optim.Optimizer], losses: list[float], config: dict[str, Any], out: Path
) -> None:
    """Save as step-N, a folder that all ranks must share.

    A folder of that name is always complete, whatever is killed and whenever. It is written under another name, and
    renamed once every rank has written its part.
    """
    path = out / f"step-{len(losses):06d}"
    written, replaced = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.replaced")
    first = dist.get_rank() == 0
    if first:
        for leftover in (written, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    # Files of a save that was cut short must be gone before another rank adds its own.
    dist.barrier()
    dcp.save(checkpoint_state(model, optimizers, {"losses": losses, "config": config}), checkpoint_id=written)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, _failure(lambda: _write_checksums(written)))
    outcome = ["; ".join(filter(None, failures))]
    if first and not outcome[0]:
        outcome = [_failure(lambda: _put_in_place(written, path, replaced))]
    # All ranks go on, or none.
    dist.broadcast_object_list(outcome)
    if outcome[0]:
        raise RuntimeError(f"the checkpoint {path} was not saved, and those before are untouched: {outcome[0]}")


def _failure(do: Callable[[], None]) -> str:
    """Return the error that a function raises, as text, or an empty string."""
    try:
        do()
    except OSError as error:
        return f"rank {dist.get_rank()}: {error}"
    return ""


def _write_checksums(folder: Path) -> None:
    """Write the checksums of the files that this rank has written. The first rank writes the metadata."""
    rank = dist.get_rank()
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(f"does not see what rank 0 wrote to {folder}: do they share that folder?")
    written = sorted(folder.glob(f"__{rank}_*")) + [folder / ".metadata"] * (rank == 0)
    (folder / f"{rank}.sha256").write_text("".join(f"{_checksum(path)}  {path.name}\n" for path in written))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(written: Path, path: Path, replaced: Path) -> None:
    # A folder of an earlier run: it cannot be renamed over, and would look complete while half deleted.
    if path.exists():
        path.rename(replaced)
    written.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def newest_checkpoint(out: Path) -> Path | None:
    """Return the newest complete and undamaged checkpoint that rank 0 sees, or None. Every rank calls this."""
    found: list[list[Path]] = [[]]
    if dist.get_rank() == 0:
        whole = [path for path in out.glob("step-*/.metadata") if not path.parent.suffix]
        # By time and not by step: an earlier run may have left later steps in the same folder.
        found = [[path.parent for path in sorted(whole, key=lambda path: path.stat().st_mtime_ns, reverse=True)]]
    dist.broadcast_object_list(found)
    for path in found[0]:
        damages = damages_of(path)
        if not damages:
            return path
        if dist.get_rank() == 0:
            print(f"{path} is damaged, and is left out: {damages}")
    return None


def damages_of(path: Path) -> str:
    """Return which files of a checkpoint are not as they were written; empty: all are. Every rank calls this, and reads a part.

    The files with the checksums are as ``sha256sum --check *.sha256`` reads them.
    """
    sums = sorted(path.glob("*.sha256"), key=lambda file: int(file.stem))
    expected = [line.split("  ") for file in sums for line in file.read_text().splitlines()]
    damages = []
    for checksum, name in expected[dist.get_rank() :: dist.get_world_size()]:
        file = path / name
        if not file.exists() or _checksum(file) != checksum:
            damages.append(name)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, damages)
    return ", ".join(sorted(name for names in gathered for name in names))


def load_checkpoint(
    model: GPT, optimizers: list[torch.optim.Optimizer], config: dict[str, Any], args: argparse.Namespace
) -> list[float]:
    """Load the checkpoint that --resume asks for. Return the losses so far, which are none with 'auto' and no checkpoint."""
    if args.resume in ("newest", "auto"):
        path = newest_checkpoint(args.out)
    else:
        path = Path(args.resume)
        if damages := damages_of(path):
            raise SystemExit(f"--resume: {path} is damaged: {damages}")
    if path is None:
        if args.resume == "auto":
            return []
        raise SystemExit(f"--resume: there is no checkpoint in {args.out}")

    # dcp.load fills the tensors of the state in place and replaces its other values.
    run = {"run": ""}
    dcp.load(run, checkpoint_id=path)
    loaded = json.loads(run["run"])
    theirs = loaded["config"]
    differing = [f"{key} {theirs.get(key)}, not {config[key]}" for key in config if theirs.get(key) != config[key]]
    if differing:
        raise SystemExit(f"--resume: {path} is of a run with other settings: {'; '.join(differing)}")

    state = checkpoint_state(model, optimizers, {})
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if dist.get_rank() == 0:
        print(f"resumed from {path}")
    return loaded["losses"]
