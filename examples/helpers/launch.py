"""Ranks that torchrun starts."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def choose_device(args: argparse.Namespace) -> torch.device:
    """Return the device on which this rank computes. torchrun must have started it."""
    if "RANK" not in os.environ:
        script = sys.argv[0]
        raise SystemExit(f"{script} runs as one process per rank: start it with torchrun --nproc-per-node 2 {script}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # NCCL refuses two ranks on one GPU, so GPUs are used only if there is one for each rank.
    if args.device == "cpu" or (args.device == "auto" and torch.cuda.device_count() < local_world):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def join_ranks(device: torch.device) -> None:
    """Make the process group of all ranks that torchrun started.

    torchrun --max-restarts keeps one store of addresses for all attempts. Each attempt gets a prefix of its own in that
    store, since ranks would otherwise now and then find the addresses of dead ranks.
    """
    group: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        group = {"backend": "nccl", "device_id": device}
    attempts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if attempts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if os.environ["GROUP_WORLD_SIZE"] != "1":
            # Nodes may count attempts differently.
            wanted = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d ..."
            raise SystemExit(f"--max-restarts on several nodes: {wanted}")
        store, rank, world = next(dist.rendezvous("env://"))
        attempt = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        group |= {"store": attempt, "rank": rank, "world_size": world}
    dist.init_process_group(**group)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
