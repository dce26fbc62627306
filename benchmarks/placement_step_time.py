"""Time a training step on two nodes of two ranks: parameters and optimizer states replicated over nodes, or states sharded.

    python benchmarks/placement_step_time.py --link 500mbit --link-within 4gbit       # needs root
    python benchmarks/placement_step_time.py --microbatches 4                         # over loopback

A node is a network namespace. ``--link`` is the link between nodes, in each direction, which the ranks of a node share;
``--link-within`` is all traffic between the ranks of one node. Two ranks share a core. In a step of several microbatches,
gradients are reduced over nodes in the last one. Everything else is as in ``step_time.py``, also the ratio: what sharding adds
to a step of the compiled unsharded model, relative to what FSDP2's HSDP with compiled blocks adds. All have to train alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from harness import ranks, report
from harness.gpt import Size, make_batches
from harness.link import LOOPBACK
from harness.rounds import ROUND_SECONDS, slowest, warm_and_time
from harness.systems import BASE, LOWERINGS, YARDSTICK, Setting, System, build
from step_time import print_table, summarize
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_NODES, _RANKS_PER_NODE = 2, 2
#: The systems, each with its placement.
_SYSTEMS = {BASE: None, YARDSTICK: None, "hsdp": "hsdp", "hybrid": "hybrid"}
# Relative to a loss; systems sum in different orders.
_TOLERANCE = 1e-4


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--steps", type=int, metavar="N", help=f"of a round; default as many as take about {ROUND_SECONDS} s")
    parser.add_argument("--lowering", default="inductor", choices=LOWERINGS, help="of all systems; default inductor")
    parser.add_argument("--microbatches", type=int, default=1, metavar="N", help="of a step; default 1")
    parser.add_argument("--link", default=LOOPBACK, metavar="RATE", help="between nodes: loopback, 500mbit, ...")
    parser.add_argument("--link-within", default=LOOPBACK, metavar="RATE", help="within a node; only with --link")
    Size.add_flags(parser)
    report.add_flags(parser)
    args = parser.parse_args(argv)
    if args.link_within != LOOPBACK and args.link == LOOPBACK:
        parser.error("--link-within needs --link")
    args.device, args.group = "cpu", "gloo"
    return args


def _build(name: str, setting: Setting) -> System:
    placement = _SYSTEMS[name]
    system = build("ours" if placement else name, dataclasses.replace(setting, placement=placement))
    model: Any = system.model

    def before_microbatch(last: bool) -> None:
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)

    if name != BASE:
        system.before_microbatch = before_microbatch
    return system


def measure(args: argparse.Namespace, _: DeviceMesh) -> dict[str, Any]:
    """Build, warm up and time all systems, in each rank."""
    device, size = torch.device("cpu"), Size.parse(args)
    mesh = init_device_mesh("cpu", (_NODES, _RANKS_PER_NODE), mesh_dim_names=("replicate", "shard"))
    setting = Setting(size, mesh, device, lowering=args.lowering)
    batches = make_batches(size, dist.get_rank(), args.microbatches, device)
    return warm_and_time(_SYSTEMS, lambda name: _build(name, setting), batches, args.rounds, args.steps, device)


def check_losses(results: Sequence[dict[str, Any]]) -> None:
    """Compare the losses of the systems that shard.

    Raises:
        RuntimeError: they train differently.
    """
    for rank, result in enumerate(results):
        theirs = result["losses"][YARDSTICK]
        for name in _SYSTEMS:
            ours = result["losses"][name]
            if name != BASE and not all(
                math.isclose(one, other, rel_tol=_TOLERANCE) for one, other in zip(theirs, ours, strict=True)
            ):
                raise RuntimeError(f"rank {rank} has the losses {ours} with {name}, but {theirs} with {YARDSTICK}")


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    results = ranks.run_ranks([__file__, *argv], args, count=_NODES * _RANKS_PER_NODE)
    check_losses(results)
    seconds = {name: slowest([result["seconds"][name] for result in results]) for name in _SYSTEMS}
    summary = summarize(seconds)
    micro = f", {args.microbatches} microbatches" if args.microbatches > 1 else ""
    links = f"{args.link} between nodes, {args.link_within} within"
    print(
        f"\n{report.headline()}\n{Size.parse(args).describe()}{micro}\n2 nodes x 2 ranks, gloo, {links}; {args.rounds} rounds\n"
    )
    print_table(summary)
    report.write_json(args.json, summary={name: asdict(one) for name, one in summary.items()}, ranks=results)


if __name__ == "__main__":
    main(sys.argv[1:])
