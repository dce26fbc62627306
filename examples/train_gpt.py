"""Train a byte-level GPT with fully sharded parameters, on text that every machine has.

The text is the source code of Python's own standard library.  From the repository root, after
`pip install -e .[examples]`:

    torchrun --nproc-per-node 2 examples/train_gpt.py

This takes a few minutes on two CPU cores (Gloo); where there is a GPU for each process it runs on
those (NCCL).  It leaves checkpoints, `losses.json` and `loss.png` in --out and prints a sample of
what the model has learned to write.  Some variations:

    torchrun --nproc-per-node 2 examples/train_gpt.py --resume              # go on from the newest checkpoint
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --resume auto    # also after a rank has died
    torchrun --nproc-per-node 2 examples/train_gpt.py --system fsdp2        # the same with PyTorch's FSDP2
    torchrun --nproc-per-node 2 examples/train_gpt.py --optimizer muon
    torchrun --nproc-per-node 2 examples/train_gpt.py --bf16 --no-reshard-after-forward
    torchrun --nproc-per-node 1 examples/train_gpt.py --batch 16            # the same losses on one rank

Weights and batches are pure functions of the seed, the step and the *global* batch size, so a run
gives the same losses (up to floating-point rounding) on any number of ranks, with either system,
and whether or not it was interrupted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from helpers.arguments import parse_args
from helpers.checkpoints import load_checkpoint, run_config, save_checkpoint
from helpers.gpt import GPT
from helpers.launch import choose_device, join_ranks, mean_over_ranks
from helpers.learning_rate import learning_rate
from helpers.meter import Meter, bytes_sent
from helpers.results import generate, print_summary, write_results
from helpers.text import check_same_text, crops, read_text
from helpers.weights import init_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm


def build_model(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> GPT:
    """Build a sharded model. No rank ever holds all of its full parameters at once."""
    # Imported here, so that comparing with FSDP2 does not depend on fsdp_compile or its imports.
    if args.system == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from fsdp_compile import fully_shard

    with torch.device("meta"):
        model = GPT(args.layers, args.d_model, args.heads, args.seq_length)

    options: dict[str, Any] = {"mesh": mesh}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=args.reshard_after_forward, **options)
    # The root's parameters are used at both ends of the model, so backward needs them right after
    # forward: resharding them in between would only gather them twice.
    fully_shard(model, reshard_after_forward=False, **options)

    model.to_empty(device=device)
    init_weights(model, args.seed)
    return model


def compile_model(model: GPT, args: argparse.Namespace) -> Callable[..., Tensor]:
    """Return the compiled model, to be called instead of the model.

    Checkpoints still go through the model itself: names in the state dict of the compiled model
    begin with `_orig_mod.`.
    """
    # Each kind of call (training, validation, sampling) has one shape; dynamic=False keeps the
    # second kind from being compiled for shapes that vary.
    if args.system == "fsdp-compile":
        from fsdp_compile import fsdp_backend

        return torch.compile(model, backend=fsdp_backend, dynamic=False)
    if args.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def make_optimizers(model: GPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters; with --optimizer muon, Muon for matrices of blocks, and AdamW for the rest."""
    of_muon = [p for p in model.blocks.parameters() if p.ndim > 1] if args.optimizer == "muon" else []
    others = [p for p in model.parameters() if not any(p is other for other in of_muon)]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    if not of_muon:
        return [adamw]
    make_muon: Callable[..., torch.optim.Optimizer] = torch.optim.Muon
    if args.system == "fsdp-compile":
        from fsdp_compile import flat_optimizer

        make_muon = partial(flat_optimizer, torch.optim.Muon)
    # Its updates are as large as AdamW's, so that one learning rate suits both.
    muon = make_muon(of_muon, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw]


def train(
    model: GPT,
    compiled: Callable[..., Tensor],
    optimizers: list[torch.optim.Optimizer],
    text: Tensor,
    losses: list[float],
    config: dict[str, Any],
    args: argparse.Namespace,
    device: torch.device,
) -> Meter:
    """Train from step len(losses) on, and append the new losses."""
    world = dist.get_world_size()
    meter = Meter(args.batch * world * args.seq_length, bytes_sent(model, args, world))
    start, stop = len(losses), min(args.steps, args.stop_at or args.steps)

    def run_step(step: int) -> float:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, args)
        tokens, targets = crops(text, args, device, "train", args.seed, step)
        loss = compiled(tokens, targets)
        loss.backward()
        # Each rank holds a shard of each gradient; the norm is nevertheless that of the whole gradient.
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return mean_over_ranks(loss)

    bar = tqdm(total=args.steps, initial=start, disable=dist.get_rank() != 0, desc="compiling", unit="step")
    for step in range(start, stop):
        began = time.perf_counter()
        loss = run_step(step)
        bar.set_description("training", refresh=False)
        meter.add(time.perf_counter() - began)
        losses.append(loss)
        bar.set_postfix_str(f"loss {loss:.3f}, {meter.speed}, {meter.sent} sent per rank", refresh=False)
        bar.update()
        if args.save_every and ((step + 1) % args.save_every == 0 or step + 1 == stop):
            save_checkpoint(model, optimizers, losses, config, args.out)
    bar.close()
    return meter


@torch.no_grad()
def validate(compiled: Callable[..., Tensor], text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Return the mean loss on held-out text. Batches are the same for every seed, so that seeds can be compared."""
    losses = [compiled(*crops(text, args, device, "validation", i)) for i in range(args.val_batches)]
    return mean_over_ranks(torch.stack(losses).mean())


def run(args: argparse.Namespace, device: torch.device) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    train_text, val_text, digest = read_text(args.max_bytes)
    check_same_text(digest)
    if min(len(train_text), len(val_text)) <= args.seq_length:
        raise SystemExit("--max-bytes leaves too little text")
    config = run_config(args, digest)

    model = build_model(args, init_device_mesh(device.type, (world,)), device)
    compiled = compile_model(model, args)
    optimizers = make_optimizers(model, args)
    losses = load_checkpoint(model, optimizers, config, args) if args.resume else []

    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
    where = f"{world} {device.type} {'rank' if world == 1 else 'ranks'}"
    if rank == 0:
        print(
            f"{args.system}: GPT with {size} on {where}; "
            f"{len(train_text) / 1e6:.1f} MB of text, {len(val_text) / 1e6:.1f} MB more held out"
        )

    meter = train(model, compiled, optimizers, train_text, losses, config, args, device)
    val_loss = validate(compiled, val_text, args, device)
    sample = generate(compiled, args, device) if args.sample_length else ""
    if rank == 0:
        write_results(losses, val_loss, f"Byte-level GPT, {size}, {args.system}, {where}", config, args)
        print_summary(losses, val_loss, sample, meter, args)
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    """Train as the command line says and return the loss of each step."""
    args = parse_args(argv)
    device = choose_device(args)
    join_ranks(device)
    try:
        return run(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
