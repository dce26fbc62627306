"""Text that every machine has: the source code of Python's standard library, in random batches."""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def generator(*key: Any) -> torch.Generator:
    """Return a CPU generator whose seed depends on the key alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def read_text(max_bytes: int) -> tuple[Tensor, Tensor, str]:
    """Return training bytes, held-out bytes and a digest of both."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Not part of the library proper, and not installed everywhere.
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if excluded.isdisjoint(name.split("/"))]

    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left = max_bytes
    for i, name in enumerate(names):
        content = (root / name).read_bytes()[:left]
        left -= len(content)
        # Whole files are held out, evenly spread: the tail of the text would be a different kind of code.
        parts[i % 20 == 10].append(content)
        if not left:
            break
    train, held_out = (b"".join(part) for part in parts)
    digest = hashlib.sha256(len(train).to_bytes(8, "big") + train + held_out).hexdigest()
    return as_tensor(train), as_tensor(held_out), digest


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def check_same_text(digest: str) -> None:
    """Raise on all ranks if they have not all read the same text."""
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        found = ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in enumerate(digests))
        raise RuntimeError(f"the ranks have read different texts (do their Python versions differ?): {found}")


def rows(text: Tensor, length: int, args: argparse.Namespace, device: torch.device, *key: Any) -> Tensor:
    """Return this rank's rows, ``[batch, length]``, of the random global batch that the key names."""
    # The global batch is drawn on every rank, so that it does not depend on how many ranks share it.
    count = args.batch * dist.get_world_size()
    starts = torch.randint(len(text) - length + 1, (count,), generator=generator(*key))
    first = args.batch * dist.get_rank()
    starts = starts[first : first + args.batch]
    return text[starts[:, None] + torch.arange(length)].long().to(device)


def crops(text: Tensor, args: argparse.Namespace, device: torch.device, *key: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of this rank's rows, ``[batch, seq_length]`` each."""
    drawn = rows(text, args.seq_length + 1, args, device, *key)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
