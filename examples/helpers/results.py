"""Results of a run: a text sample, files and a summary."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from .meter import Meter
from .text import generator


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
    """Return the centred moving average. It is narrower at the start: the curve is too steep there for a lopsided window."""
    smoothed = []
    for i in range(len(values)):
        near = min(reach, i)
        window = values[i - near : i + near + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed
