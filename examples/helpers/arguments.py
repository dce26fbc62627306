"""The command line of ``train_gpt.py``."""

from __future__ import annotations

import argparse
from pathlib import Path


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
    training.add_argument(
        "--optimizer",
        choices=["adamw", "muon"],
        default="adamw",
        help="of all parameters; muon is for the matrices of the blocks, beside AdamW for the rest",
    )
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
