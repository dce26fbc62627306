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
    torchrun --nproc-per-node 2 examples/train_gpt.py --bf16 --no-reshard-after-forward
    torchrun --nproc-per-node 1 examples/train_gpt.py --batch 16            # the same losses on one rank

Weights and batches are pure functions of the seed, the step and the *global* batch size, so a run
gives the same losses (up to floating-point rounding) on any number of ranks, with either system,
and whether or not it was interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from tqdm import tqdm

VOCABULARY = 256  # one token per byte value


# ------------------------------------------------------------------------------------------ command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's standard library; start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    switch = argparse.BooleanOptionalAction

    system = parser.add_argument_group("system")
    system.add_argument(
        "--system",
        choices=["fsdp-compile", "fsdp2"],
        default="fsdp-compile",
        help="who shards: this project, one graph for the whole model; or PyTorch's FSDP2, a graph per block",
    )
    system.add_argument("--compile", action=switch, default=True, help="compile the blocks (fsdp2 only)")
    system.add_argument(
        "--reshard-after-forward",
        action=switch,
        default=True,
        help="free the gathered parameters of a block after its forward and gather them again in backward",
    )
    system.add_argument("--bf16", action=switch, default=False, help="compute in bfloat16, reduce gradients in float32")
    system.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to run")

    size = parser.add_argument_group("model size")
    size.add_argument("--layers", type=int, default=4, help="transformer blocks")
    size.add_argument("--d-model", type=int, default=256, help="width of the residual stream")
    size.add_argument("--heads", type=int, default=8, help="attention heads per block")
    size.add_argument("--seq-length", type=int, default=128, help="context length, in bytes")

    training = parser.add_argument_group("training")
    training.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    training.add_argument("--steps", type=int, default=300, help="length of the learning-rate schedule")
    training.add_argument("--stop-at", type=int, help="end this run early, after that step of the schedule")
    training.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    training.add_argument("--warmup", type=int, default=20, help="steps of linear learning-rate warm-up")
    training.add_argument("--weight-decay", type=float, default=0.1, help="weight decay of the matrices")
    training.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    training.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    training.add_argument("--max-bytes", type=int, default=16_000_000, help="read at most this much text")
    training.add_argument("--val-batches", type=int, default=20, help="batches of the final validation")

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("runs/train_gpt"), help="folder for what is written")
    output.add_argument("--save-every", type=int, default=100, help="steps between checkpoints; 0 for none")
    output.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        metavar="CHECKPOINT",
        help="go on from this checkpoint; without a value, from the newest whole one in --out; "
        "'auto': the same, but start anew where there is none, as torchrun --max-restarts needs",
    )
    output.add_argument("--sample-length", type=int, default=256, help="bytes to generate at the end")
    output.add_argument("--prompt", default="def ", help="what the sample begins with")
    output.add_argument("--temperature", type=float, default=0.8, help="of the sample")

    args = parser.parse_args(argv)
    if args.d_model % args.heads:
        parser.error("--heads must divide --d-model")
    if args.system == "fsdp-compile" and not args.compile:
        parser.error("--no-compile needs --system fsdp2: fsdp-compile works by compiling")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if args.sample_length and not (args.prompt and args.temperature > 0):
        parser.error("a sample needs a --prompt and a --temperature above zero")
    return args


# ------------------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d_model = x.shape
        # (batch, length, 3 * d_model) -> three of (batch, heads, length, d_model / heads)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, d_model))


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model, bias=False)
        self.attention = Attention(d_model, heads)
        self.mlp_norm = nn.LayerNorm(d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, d_model: int, heads: int, seq_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, d_model)
        self.positions = nn.Embedding(seq_length, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.lm_head = nn.Linear(d_model, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits, or with targets the mean loss in nats per byte."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        # Logits and loss in float32 whatever the blocks compute in: bfloat16 is too coarse for a loss.
        logits = self.lm_head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> GPT:
    """A sharded model whose full parameters never existed all at once on any rank."""
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


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Initialise each parameter in full, from a generator of its own, and keep this rank's shard.

    That makes the weights independent of the number of ranks, without any communication, and needs
    memory for only one full parameter at a time.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norm weights: there are no biases
            full = torch.ones(parameter.shape)
        else:
            # Layers that add to the residual stream start smaller, so that its size does not grow with depth.
            residual = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * len(model.blocks)) if residual else 0.02
            full = torch.randn(parameter.shape, generator=generator("init", seed, name)) * std
        mesh, placements = parameter.device_mesh, parameter.placements
        # src_data_rank=None: every rank slices its own copy, nothing is sent.
        parameter.copy_(distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None))


def compile_model(model: GPT, args: argparse.Namespace) -> Callable[..., Tensor]:
    """The compiled model, to be called instead of the model.

    Checkpoints still go through the model itself: the names in the state dict of what torch.compile
    returns begin with `_orig_mod.`.
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


# -------------------------------------------------------------------------------------------------- text


def generator(*key: Any) -> torch.Generator:
    """A CPU generator that depends on the key alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def read_text(max_bytes: int) -> tuple[Tensor, Tensor, str]:
    """Training bytes, held-out bytes and a digest of both."""
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
    """This rank's rows, of that many tokens, of the random global batch named by the key."""
    # The global batch is drawn on every rank, so that it does not depend on how many ranks share it.
    count = args.batch * dist.get_world_size()
    starts = torch.randint(len(text) - length + 1, (count,), generator=generator(*key))
    first = args.batch * dist.get_rank()
    starts = starts[first : first + args.batch]
    return text[starts[:, None] + torch.arange(length)].long().to(device)


def crops(text: Tensor, args: argparse.Namespace, device: torch.device, *key: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this rank's rows."""
    drawn = rows(text, args.seq_length + 1, args, device, *key)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


# ----------------------------------------------------------------------------------------- communication


def graph_bytes(graph_modules: Iterable[torch.fx.GraphModule], world: int) -> float:
    """Bytes that a rank sends when it runs these graphs, with ring algorithms.

    In a ring, a rank sends a share of (world - 1) / world of what is gathered, and of what is reduced
    and scattered; an all-reduce is one of each.
    """
    ops = torch.ops._c10d_functional
    total = 0
    for graph_module in graph_modules:
        for node in graph_module.graph.nodes:
            if node.target == ops.all_gather_into_tensor.default:
                total += node.meta["val"].nbytes
            elif node.target in (ops.reduce_scatter_tensor.default, ops.all_to_all_single.default):
                total += node.args[0].meta["val"].nbytes
            elif node.target == ops.all_reduce.default:
                total += 2 * node.args[0].meta["val"].nbytes
    return total * (world - 1) / world


def estimated_bytes(model: GPT, args: argparse.Namespace, world: int) -> float:
    """The bytes that a rank sends per step with FSDP2, which has no graph to count in; without padding."""
    total = 0
    gathered_size = 2 if args.bf16 else 4
    for name, parameter in model.named_parameters():
        gathers = 2 if args.reshard_after_forward and name.startswith("blocks.") else 1
        total += parameter.numel() * (gathers * gathered_size + 4)  # gradients are reduced in float32
    return total * (world - 1) / world


@dataclass
class Meter:
    """The duration of this process's steps, without the first, which is mostly compilation."""

    tokens_per_step: int
    bytes_per_step: float = 0.0  # sent by each rank
    estimated: bool = False
    steps: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first_seconds = seconds
        else:
            self.seconds += seconds

    @property
    def speed(self) -> str:
        if self.steps < 2:
            return "? tokens/s"
        return f"{self.tokens_per_step * (self.steps - 1) / self.seconds:.0f} tokens/s"

    @property
    def sent(self) -> str:
        size = tqdm.format_sizeof(self.steps * self.bytes_per_step, "B")
        return f"{size} (estimated)" if self.estimated else size


# ---------------------------------------------------------------------------------------------- training


def make_optimizer(model: GPT, args: argparse.Namespace) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth: a function of the step alone, for --resume's sake."""
    warmup = min(1.0, (step + 1) / max(1, args.warmup))
    progress = max(0, step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * warmup * (0.55 + 0.45 * math.cos(math.pi * progress))


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(
    model: GPT,
    compiled: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    losses: list[float],
    config: dict[str, Any],
    args: argparse.Namespace,
    device: torch.device,
) -> Meter:
    """Train from step len(losses) on, adding to the losses."""
    world = dist.get_world_size()
    meter = Meter(args.batch * world * args.seq_length)
    start, stop = len(losses), min(args.steps, args.stop_at or args.steps)

    def run_step(step: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = crops(text, args, device, "train", args.seed, step)
        loss = compiled(tokens, targets)
        loss.backward()
        # Each rank holds a shard of each gradient; the norm is nevertheless that of the whole gradient.
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss)

    bar = tqdm(total=args.steps, initial=start, disable=dist.get_rank() != 0, desc="compiling", unit="step")
    for step in range(start, stop):
        began = time.perf_counter()
        if step == start:
            loss, meter.bytes_per_step, meter.estimated = count_bytes(lambda: run_step(start), model, args)
            bar.set_description("training")
        else:
            loss = run_step(step)
        meter.add(time.perf_counter() - began)
        losses.append(loss)
        bar.set_postfix_str(f"loss {loss:.3f}, {meter.speed}, {meter.sent} sent per rank", refresh=False)
        bar.update()
        if args.save_every and ((step + 1) % args.save_every == 0 or step + 1 == stop):
            save_checkpoint(model, optimizer, losses, config, args.out)
    bar.close()
    return meter


def count_bytes(first_step: Callable[[], float], model: GPT, args: argparse.Namespace) -> tuple[float, float, bool]:
    """Run the first step: its loss, the bytes a rank sends per step and whether those are an estimate.

    Only what the model itself communicates is counted, not the few scalars of the gradient norm and the loss.
    """
    world = dist.get_world_size()
    if args.system == "fsdp2":
        return first_step(), estimated_bytes(model, args, world), True
    import fsdp_compile

    with fsdp_compile.capture() as captured:
        loss = first_step()
    records = [*captured.forward, *captured.backward]
    return loss, graph_bytes((record.graph_module for record in records), world), False


@torch.no_grad()
def validate(compiled: Callable[..., Tensor], text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss on held-out text; the same batches whatever the seed, so that seeds can be compared."""
    losses = [compiled(*crops(text, args, device, "validation", i)) for i in range(args.val_batches)]
    return mean_over_ranks(torch.stack(losses).mean())


# ------------------------------------------------------------------------------------------- checkpoints


def run_config(args: argparse.Namespace, digest: str) -> dict[str, Any]:
    """All that the losses depend on: what a resumed run must share with the run it goes on with."""
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

    Whatever is killed, and whenever: a folder of that name is whole. It is written under another name, and renamed once
    every rank has written its part.
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
        # An earlier run's: a folder that is not empty cannot be renamed over, and one half deleted would look whole.
        if path.exists():
            path.rename(replaced)
        written.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)


def newest_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint, or None; as rank 0 sees it."""
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
    """Load what --resume asks for and return the losses so far."""
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


# ----------------------------------------------------------------------------------------------- results


@torch.no_grad()
def generate(compiled: Callable[..., Tensor], args: argparse.Namespace, device: torch.device) -> str:
    """Continue the prompt.

    All ranks take part, since each holds a part of every layer, and all draw the same bytes, since
    their generators have the same seed.
    """
    written = list(args.prompt.encode())
    random = generator("sample", args.seed)
    for _ in tqdm(range(args.sample_length), "sampling", disable=dist.get_rank() != 0, leave=False):
        # Always a full window, to compile for one shape only.  The padding is on the right, where causal
        # attention cannot see it.
        context = written[-args.seq_length :]
        window = context + [0] * (args.seq_length - len(context))
        logits = compiled(torch.tensor([window], device=device))[0, len(context) - 1]
        probabilities = torch.softmax(logits.cpu() / args.temperature, dim=-1)
        written.append(int(torch.multinomial(probabilities, 1, generator=random)))
    text = bytes(written).decode(errors="replace")
    # A young model writes any byte, terminal control codes among them.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_results(losses: list[float], val_loss: float, title: str, config: dict[str, Any], args: argparse.Namespace) -> None:
    history = {"system": args.system, "config": config, "losses": losses, "val_loss": val_loss}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "losses.json").write_text(json.dumps(history, indent=1) + "\n")
    plot_losses(losses, val_loss, title, args.out / "loss.png")


def print_summary(losses: list[float], val_loss: float, sample: str, meter: Meter, args: argparse.Namespace) -> None:
    if sample:
        print(f"\n----- sample -----\n{sample}\n------------------\n")
    last = losses[-20:]
    checkpoints = " and checkpoints" if args.save_every else ""
    print(f"final loss:      {losses[-1]:.4f}; mean of the last {len(last)}: {sum(last) / len(last):.4f}")
    print(f"validation loss: {val_loss:.4f} nats per byte")
    print(f"speed:           {meter.speed} over {meter.seconds:.0f} s")
    print(f"first step:      {meter.first_seconds:.0f} s, with compilation, not counted in the speed")
    print(f"communication:   {meter.sent} sent by each rank in {meter.steps} steps")
    print(f"files:           loss.png, losses.json{checkpoints} in {args.out}")


def plot_losses(losses: list[float], val_loss: float, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    steps = range(1, len(losses) + 1)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training loss")
    axes.plot(steps, smooth(losses), color="tab:blue", label="training loss, smoothed")
    axes.plot(len(losses), val_loss, "o", color="tab:red", label=f"validation loss: {val_loss:.3f}")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(values: list[float], reach: int = 10) -> list[float]:
    """Centred moving average; narrower at the start, where the curve is too steep for a lopsided window."""
    smoothed = []
    for i in range(len(values)):
        near = min(reach, i)
        window = values[i - near : i + near + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


# -------------------------------------------------------------------------------------------------- main


def choose_device(args: argparse.Namespace) -> torch.device:
    """Where this rank, which torchrun has started, computes."""
    if "RANK" not in os.environ:
        script = sys.argv[0]
        raise SystemExit(f"{script} runs as one process per rank: start it with torchrun --nproc-per-node 2 {script}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # NCCL refuses two ranks on one GPU, so without one for each rank none is used.
    if args.device == "cpu" or (args.device == "auto" and torch.cuda.device_count() < local_world):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def run(args: argparse.Namespace, device: torch.device) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    train_text, val_text, digest = read_text(args.max_bytes)
    check_same_text(digest)
    if min(len(train_text), len(val_text)) <= args.seq_length:
        raise SystemExit("--max-bytes leaves too little text")
    config = run_config(args, digest)

    model = build_model(args, init_device_mesh(device.type, (world,)), device)
    compiled = compile_model(model, args)
    optimizer = make_optimizer(model, args)
    losses = load_checkpoint(model, optimizer, config, args) if args.resume else []

    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
    where = f"{world} {device.type} {'rank' if world == 1 else 'ranks'}"
    if rank == 0:
        print(
            f"{args.system}: GPT with {size} on {where}; "
            f"{len(train_text) / 1e6:.1f} MB of text, {len(val_text) / 1e6:.1f} MB more held out"
        )

    meter = train(model, compiled, optimizer, train_text, losses, config, args, device)
    val_loss = validate(compiled, val_text, args, device)
    sample = generate(compiled, args, device) if args.sample_length else ""
    if rank == 0:
        write_results(losses, val_loss, f"Byte-level GPT, {size}, {args.system}, {where}", config, args)
        print_summary(losses, val_loss, sample, meter, args)
    return losses


def join_ranks(device: torch.device) -> None:
    """Make the process group of all ranks that torchrun started.

    torchrun --max-restarts keeps one store of addresses for all attempts: ranks would now and then find those of the dead.
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
