"""Time a step of Muon: by torch on FSDP2's parameters, and by owners of matrices.

    python benchmarks/muon_step.py                       # two ranks, a core each
    python benchmarks/muon_step.py --ranks 4             # two ranks share a core
    python benchmarks/muon_step.py --ranks 4 --replicas 2
    python benchmarks/muon_step.py --link 2gbit          # between the halves of the ranks; needs root

Both systems step the matrices of a GPT's blocks, with the same gradients, which stay. They take turns: in each round each one
steps once, after a barrier, and the round counts as long as its slowest rank takes. The table has medians over the rounds. The
ratio is the median of the rounds' ratios. After the first step, parameters are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from harness import ranks, report
from harness.gpt import Size
from harness.rounds import slowest
from harness.systems import shard_blocks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_compile

_FSDP2, _OURS = "fsdp2, torch.optim.Muon", "flat_optimizer(Muon)"
# Relative to the norm of an update: torch's iterations are in bfloat16, and its DTensor operators round elsewhere.
_TOLERANCE = 0.05


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="HSDP with so many replicas; default 1")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default 10")
    Size.add_flags(parser, layers=4, width=512)
    ranks.add_flags(parser)
    report.add_flags(parser)
    args = parser.parse_args(argv)
    ranks.check_flags(parser, args)
    if args.ranks % args.replicas:
        parser.error("--replicas has to divide --ranks")
    if args.device != "cpu" or args.group != "gloo":
        parser.error("this script is for CPUs and Gloo")
    return args


def matrices_of(model: Any, seed: int) -> list[nn.Parameter]:
    """Return the matrices of a model's blocks, each with a gradient that is the same for equal seeds."""
    found = [param for param in model.blocks.parameters() if param.ndim == 2]
    generator = torch.Generator().manual_seed(seed)
    for param in found:
        local = param.to_local()
        param.grad = torch.zeros_like(param)
        param.grad.to_local().copy_(torch.randn(local.shape, generator=generator))
    return found


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Step with both systems in turns, in each rank."""
    if args.replicas > 1:
        shape = args.replicas, args.ranks // args.replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    size, cpu = Size.parse(args), torch.device("cpu")
    steppers: dict[str, torch.optim.Optimizer] = {}
    updated = {}
    for name, fully_shard in ((_FSDP2, torch.distributed.fsdp.fully_shard), (_OURS, fsdp_compile.fully_shard)):
        model = size.build(cpu)
        shard_blocks(model, fully_shard, mesh=mesh)
        params = matrices_of(model, mesh.get_local_rank(mesh.ndim - 1))
        before = [param.to_local().clone() for param in params]
        if name == _OURS:
            steppers[name] = fsdp_compile.flat_optimizer(torch.optim.Muon, params, lr=0.02)
        else:
            steppers[name] = torch.optim.Muon(params, lr=0.02)
        steppers[name].step()
        updated[name] = [param.to_local() - old for param, old in zip(params, before, strict=True)]
        ranks.progress(f"{name}: warm")
    apart = max(
        ((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(updated[_OURS], updated[_FSDP2], strict=True)
    )
    ranks.pin_to_core()
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(args.rounds):
        for name, optimizer in steppers.items():
            dist.barrier()
            began = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - began)
    return {"seconds": seconds, "apart": apart}


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    results = ranks.run_ranks([__file__, *argv], args, count=args.ranks)
    apart = max(result["apart"] for result in results)
    if apart > _TOLERANCE:
        raise RuntimeError(f"An update differs from that with FSDP2 by {apart:.3f} of its norm.")
    seconds = {name: slowest([result["seconds"][name] for result in results]) for name in (_FSDP2, _OURS)}
    rows = []
    for name, rounds in seconds.items():
        ratio = statistics.median(own / other for own, other in zip(rounds, seconds[_FSDP2], strict=True))
        rows.append(
            [name, *(f"{1e3 * value:.0f}" for value in (statistics.median(rounds), min(rounds), max(rounds))), f"{ratio:.2f}"]
        )
    print(
        f"\n{report.headline()}\n{Size.parse(args).describe()}\n"
        f"{args.ranks} ranks, replicas: {args.replicas}, gloo, {args.link}; {args.rounds} rounds\n"
    )
    print(report.table(["optimizer", "step ms", "least", "most", "ratio"], rows))
    report.write_json(args.json, seconds=seconds, ranks=results)


if __name__ == "__main__":
    main(sys.argv[1:])
