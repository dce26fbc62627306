"""Checkpoints that stay complete even if a rank is killed, and runs that go on from them."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .gpt import GPT


def run_config(args: argparse.Namespace, digest: str) -> dict[str, Any]:
    """Return all that the losses depend on. A resumed run must have the same as the run that it goes on from."""
    names = "layers d_model heads seq_length steps lr warmup weight_decay clip seed bf16"
    config = {name: getattr(args, name) for name in names.split()}
    # Not the batch per rank: a checkpoint may be resumed on another number of ranks.
    return {**config, "global_batch": args.batch * dist.get_world_size(), "text": digest}


def checkpoint_state(model: GPT, optimizer: torch.optim.Optimizer, run: dict[str, Any]) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # As one string, since torch.distributed.checkpoint would store each entry under a key of its own.
    return {"model": model_state, "optimizer": optimizer_state, "run": json.dumps(run)}


def save_checkpoint(
    model: GPT, optimizer: torch.optim.Optimizer, losses: list[float], config: dict[str, Any], out: Path
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
    dcp.save(checkpoint_state(model, optimizer, {"losses": losses, "config": config}), checkpoint_id=written)
    if not (written / ".metadata").exists():  # Rank 0 wrote it.
        raise RuntimeError(f"rank {dist.get_rank()} does not see what rank 0 wrote to {written}: do they share that folder?")
    dist.barrier()
    if first:
        # A folder of an earlier run: it cannot be renamed over, and would look complete while half deleted.
        if path.exists():
            path.rename(replaced)
        written.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)


def newest_checkpoint(out: Path) -> Path | None:
    """Return the newest complete checkpoint that rank 0 sees, or None."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        whole = [path for path in out.glob("step-*/.metadata") if not path.parent.suffix]
        # By time and not by step: an earlier run may have left later steps in the same folder.
        newest = max(whole, key=lambda path: path.stat().st_mtime_ns, default=None)
        found = [newest and newest.parent]
    dist.broadcast_object_list(found)
    return found[0]


def load_checkpoint(
    model: GPT, optimizer: torch.optim.Optimizer, config: dict[str, Any], args: argparse.Namespace
) -> list[float]:
    """Load the checkpoint that --resume asks for. Return the losses so far, which are none with 'auto' and no checkpoint."""
    path = newest_checkpoint(args.out) if args.resume in ("newest", "auto") else Path(args.resume)
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

    state = checkpoint_state(model, optimizer, {})
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if dist.get_rank() == 0:
        print(f"resumed from {path}")
    return loaded["losses"]
