"""Time a training step of a Llama on four ranks: tensor parallel over two of them, and sharded over two.

    python benchmarks/parallel_step_time.py --link 2gbit        # between the halves that shard; needs root
    python benchmarks/parallel_step_time.py                     # over loopback

``parallelize_module`` cuts the matrix products, the same for all systems. There is no sequence parallelism: with it, FSDP2 with
compiled blocks trains differently from FSDP2 (torch 2.13). Ranks that cut a product are on the same side of the link. Two ranks
share a core. Everything else is as in ``step_time.py``, also the ratio: what sharding adds to a step of the compiled unsharded
model, relative to what FSDP2 with compiled blocks adds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness import ranks, report
from harness.llama import Llama, LlamaSize
from harness.rounds import ROUND_SECONDS, slowest, warm_and_time
from harness.systems import BASE, SYSTEMS, YARDSTICK, Setting, build
from step_time import print_table, summarize
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

_RANKS = 4
_SYSTEMS = (BASE, YARDSTICK, "ours")
# Relative to a loss; systems sum in different orders.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Parallel:
    """A Llama whose matrix products are cut over the ranks of a mesh."""

    size: LlamaSize
    mesh: DeviceMesh

    def build(self, device: torch.device) -> Llama:
        """Build this rank's part of the model."""
        model: Any = self.size.build(device)
        parallelize_module(model.head, self.mesh, ColwiseParallel(output_layouts=Replicate()))
        for block in model.blocks:
            plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
            plan |= {name: RowwiseParallel() for name in ("attention.out", "feed_forward.down")}
            parallelize_module(block, self.mesh, plan)
        return model


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--steps", type=int, metavar="N", help=f"of a round; default as many as take about {ROUND_SECONDS} s")
    parser.add_argument("--lowering", default="inductor", help="of all systems; default inductor")
    for name, default in {"layers": 8, "width": 512, "batch": 4, "sequence": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument(
        "--link", default="loopback", metavar="RATE", help="between the halves that shard: loopback, 2gbit, ..."
    )
    report.add_flags(parser)
    args = parser.parse_args(argv)
    args.device, args.group = "cpu", "gloo"
    return args


def size_of(args: argparse.Namespace) -> LlamaSize:
    return LlamaSize(
        layers=args.layers,
        width=args.width,
        heads=8,
        kv_heads=4,
        hidden=4 * args.width,
        vocabulary=256,
        batch=args.batch,
        sequence=args.sequence,
        dtype=torch.float32,
        tied=False,
    )


def measure(args: argparse.Namespace, _: DeviceMesh) -> dict[str, Any]:
    """Build, warm up and time all systems, in each rank."""
    device, size = torch.device("cpu"), size_of(args)
    mesh = init_device_mesh("cpu", (2, _RANKS // 2), mesh_dim_names=("dp", "tp"))
    setting = Setting(Parallel(size, mesh["tp"]), mesh["dp"], device, lowering=args.lowering)
    batches = [size.make_batch(mesh.get_local_rank("dp"), device)]
    return warm_and_time(_SYSTEMS, lambda name: build(name, setting), batches, args.rounds, args.steps, device)


def check_losses(results: Sequence[dict[str, Any]]) -> None:
    """Compare the losses of the systems that shard.

    Raises:
        RuntimeError: they train differently.
    """
    for rank, result in enumerate(results):
        theirs, ours = result["losses"][YARDSTICK], result["losses"]["ours"]
        if not all(math.isclose(one, other, rel_tol=_TOLERANCE) for one, other in zip(theirs, ours, strict=True)):
            raise RuntimeError(f"rank {rank} has the losses {ours}, but with {SYSTEMS[YARDSTICK]} {theirs}")


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    results = ranks.run_ranks([__file__, *argv], args, count=_RANKS)
    check_losses(results)
    seconds = {name: slowest([result["seconds"][name] for result in results]) for name in _SYSTEMS}
    summary = summarize(seconds)
    print(f"\n{report.headline()}\n{size_of(args).describe()}\ndp 2 x tp 2, gloo, {args.link}; {args.rounds} rounds\n")
    print_table(summary)
    report.write_json(args.json, summary={name: asdict(one) for name, one in summary.items()}, ranks=results)


if __name__ == "__main__":
    main(sys.argv[1:])
