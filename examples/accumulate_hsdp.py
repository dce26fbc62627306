"""Accumulate gradients over four microbatches on a 2-D mesh, in each possible way, and measure the cost.

    python examples/accumulate_hsdp.py                                  # starts four CPU ranks by itself
    torchrun --nproc-per-node 4 examples/accumulate_hsdp.py             # the same
    python examples/accumulate_hsdp.py --lowering aot_eager             # the same counts, with less to compile

The first run takes a few minutes on two cores, nearly all of it compilation; later ones find most kernels in a cache.

The mesh is 2 x 2: two replicas of a model that is sharded over two ranks (HSDP). For each way to accumulate, rank 0
prints the collectives of each microbatch. It also prints the memory of gradients, and of kept parameters, between
microbatches: as measured, and as docs/gradient-sync.md predicts. All ways give the same gradients.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import fsdp_backend, fully_shard

REPLICAS, SHARDS, MICROBATCHES = 2, 2, 4
WORLD_SIZE = REPLICAS * SHARDS
VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 64, 32, 2, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# A way is called before each microbatch, as forwards gather the parameters to keep. Flags of gradients can also be set later.


def sharded(model: Any, is_last: bool) -> None:
    """Reduce in every microbatch: the default."""


def partial(model: Any, is_last: bool) -> None:
    """Reduce-scatter in every microbatch, all-reduce over the replicas in the last one."""
    model.set_requires_all_reduce(is_last)


def unsharded(model: Any, is_last: bool) -> None:
    """Reduce in the last microbatch only."""
    model.set_requires_gradient_sync(is_last)


def keep_unsharded(model: Any, is_last: bool) -> None:
    """Reduce in the last microbatch only, and keep gathered parameters until then."""
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


def every_second_block_defers(model: Any, is_last: bool) -> None:
    """Accumulate every second block unsharded, and the others sharded: flags are per unit."""
    for block in model.blocks[1::2]:
        block.set_requires_gradient_sync(is_last)


Way = Callable[[Any, bool], None]
WAYS: list[Way] = [sharded, partial, unsharded, keep_unsharded, every_second_block_defers]


def predict(model: Any, way: Way) -> tuple[int, int]:
    """Predict the bytes of gradients, and of gathered parameters, that the way holds between microbatches."""
    defers: dict[Way, list[nn.Module]] = {unsharded: [model], keep_unsharded: [model]}
    defers[every_second_block_defers] = list(model.blocks[1::2])
    whole = sum(parameter.nbytes for parameter in model.parameters())  # A DTensor's size is that of the full tensor.
    full = sum(parameter.nbytes for module in defers.get(way, []) for parameter in module.parameters())
    return full + (whole - full) // SHARDS, whole if way is keep_unsharded else 0


def collectives(profile: torch.autograd.profiler.profile) -> list[int]:
    """Count the all-gathers, reduce-scatters and all-reduces that ran.

    Over Gloo, a reduce-scatter is an exchange of pieces, which each rank sums.
    """
    count = {event.key: event.count for event in profile.key_averages()}
    return [count.get(name, 0) for name in ("fsdp_compile::all_gather", "fsdp_compile::all_to_all", "fsdp_compile::all_reduce")]


def live_bytes(model: Any) -> int:
    """Count the bytes that plain tensors since the last gc.freeze() hold. Each storage counts once, and shards do not.

    After a backward, the bytes belong to full gradients that wait to be reduced, partial shards that wait to be
    all-reduced, the shards in param.grad, and gathered parameters that were kept.
    """
    shown = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad) if tensor is not None]
    # Gradients share the memory of flat buffers, which count instead.
    aliases = {tensor.to_local().untyped_storage()._cdata for tensor in shown}
    totals: list[int] = []
    while len(totals) < 4 or len(set(totals[-4:])) > 1:
        time.sleep(0.05)  # Gloo's threads let go of a collective's tensors a moment after it is done.
        storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor]
        held = {storage._cdata: storage.nbytes() for storage in storages}
        totals.append(sum(nbytes for storage, nbytes in held.items() if storage not in aliases))
    return totals[-1]


def accumulate(model: Any, forward: Callable[[Tensor], Tensor], way: Way, measure: str) -> list[list[str | int]]:
    """Run the microbatches of one optimizer step. Return a measurement of each.

    ``measure`` is "collectives" to count collectives, "bytes" to count the bytes held after a microbatch, or "nothing".
    """
    measured: list[list[str | int]] = []
    gc.collect()
    gc.freeze()
    for index in range(MICROBATCHES):
        way(model, index == MICROBATCHES - 1)
        generator = torch.Generator().manual_seed(WORLD_SIZE * index + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
        with torch.autograd.profiler.profile(enabled=measure == "collectives") as in_forward:
            loss = F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / MICROBATCHES
        with torch.autograd.profiler.profile(enabled=measure == "collectives") as in_backward:
            loss.backward()
        del tokens, loss
        if measure == "collectives":
            all_gathers, *reductions = collectives(in_backward)
            measured.append([f"{collectives(in_forward)[0]}+{all_gathers}", *reductions])
        elif measure == "bytes":
            held = live_bytes(model)
            for unit in [*model.blocks, model]:
                unit.reshard()  # Then only gradients are held. The next forward gathers the parameters again.
            gradients = live_bytes(model)
            measured.append([gradients, held - gradients])
    return measured


def main(rank: int, lowering: str, init_method: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model: Any = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # min_bucket_bytes=0, as the table counts by unit, and units are small enough to share collectives.
    forward = torch.compile(model, backend=fsdp_backend, options={"lowering": lowering, "min_bucket_bytes": 0})

    rows: list[list[str]] = []
    norms: list[float] = []
    for way in WAYS:
        result = {}
        for measure in ("nothing", "collectives", "bytes"):  # The first time compiles.
            result[measure] = accumulate(model, forward, way, measure)
            norm: Any = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            norms.append(norm.full_tensor().item())
            assert math.isclose(norms[-1], norms[0], rel_tol=1e-5), f"{way.__name__}: the norm of the gradients is {norms[-1]}"
            model.zero_grad()  # In training, after optimizer.step().
        counts = [" ".join(map(str, column)) for column in zip(*result["collectives"], strict=True)]
        gradients, kept = map(max, zip(*result["bytes"], strict=True))
        predicted = predict(model, way)
        rows.append([way.__name__, *counts, f"{gradients} ({predicted[0]})", f"{kept} ({predicted[1]})", f"{norms[-1]:.5f}"])
    if rank == 0:
        print("| way | all-gathers | reduce-scatters | all-reduces | gradients held | parameters kept | gradient norm |")
        print("|---" * 7 + "|", *("| " + " | ".join(row) + " |" for row in rows), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the ways to accumulate gradients, on four CPU ranks.")
    parser.add_argument("--lowering", choices=["inductor", "aot_eager"], default="inductor", help="what compiles the graphs")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Else the profiler reports each start and stop.
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), args.lowering, "env://")
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(main, args=(args.lowering, f"file://{folder}/store"), nprocs=WORLD_SIZE)
