"""Train one model with its parameters sharded, beside tensor, context, expert and pipeline parallelism.

    torchrun --nproc-per-node 4 examples/train_nd.py                        # --dp 4: sharded over all ranks
    torchrun --nproc-per-node 4 examples/train_nd.py --dp 2 --tp 2
    torchrun --nproc-per-node 4 examples/train_nd.py --dp 2 --cp 2
    torchrun --nproc-per-node 4 examples/train_nd.py --cp 4 --attention ring
    torchrun --nproc-per-node 4 examples/train_nd.py --dp 2 --pp 2
    torchrun --nproc-per-node 4 examples/train_nd.py --dp 4 --ep 2          # --ep splits --dp
    torchrun --nproc-per-node 8 examples/train_nd.py --dp 2 --tp 2 --pp 2

Every way to split the ranks gives the same losses, up to rounding: weights depend on their names, batches on the step. The
model has a mixture of experts in every second block. Who does what:

- this library shards parameters, over the ranks that see different tokens: those of --dp and --cp;
- torch's ``parallelize_module`` cuts matrix products over --tp, before parameters are sharded;
- the model itself gathers keys and values over --cp, or sends them around a ring, and exchanges tokens over --ep;
- torch's pipelining runs the microbatches over --pp; each stage is sharded and compiled on its own.

A rank's part of the model is one graph (``fullgraph=True``), with the collectives of sharding, --tp, --cp and --ep in it.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS, EXPERTS = 64, 32, 4, 16, 4, 4
BATCH, MICROBATCHES = 8, 4


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, help="ranks that share no sequence; default: what the others leave")
    for name, what in (("tp", "cut a product"), ("cp", "cut a sequence"), ("pp", "follow each other"), ("ep", "split experts")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"ranks that {what}; default 1")
    parser.add_argument("--attention", choices=("gather", "ring"), default="gather", help="how keys meet the queries of --cp")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--system", choices=("fsdp-compile", "fsdp2"), default="fsdp-compile")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--lowering", choices=("inductor", "aot_eager"), default="inductor")
    args = parser.parse_args(argv)
    others = args.tp * args.cp * args.pp
    args.dp = args.dp or int(os.environ["WORLD_SIZE"]) // others
    if args.dp * others != int(os.environ["WORLD_SIZE"]):
        parser.error(f"--dp {args.dp} times the others, {others}, must be the number of ranks, {os.environ['WORLD_SIZE']}")
    if args.dp % args.ep or EXPERTS % args.ep or HEADS % args.tp or LAYERS % args.pp or LENGTH % args.cp or BATCH % args.dp:
        parser.error("--ep must divide --dp, and each what it cuts")
    return args


# ------------------------------------------------------------------------------------------------- model


# Takes queries, keys and values [batch, heads, tokens, width]. Returns the result of causal attention for each query.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=in_the_past(q, 0, k, 0))


def gather_and_attend(q: Tensor, k: Tensor, v: Tensor, cp: DeviceMesh) -> Tensor:
    """Attend with keys and values of the whole sequence, which each rank gathers."""

    def gather(part: Tensor) -> Tensor:
        # Each rank's queries add a summand to the gradient: Partial.
        return DTensor.from_local(part, cp, [Shard(2)], run_check=False).full_tensor(grad_placements=[Partial()])

    k, v = gather(k), gather(v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=in_the_past(q, cp.get_local_rank() * q.shape[2], k, 0))


def attend_in_ring(q: Tensor, k: Tensor, v: Tensor, cp: DeviceMesh) -> Tensor:
    """Attend while keys and values travel from rank to rank. Each rank adds up the results of its queries with each part.

    Softmax weights are relative to the highest score so far, which cancels out in the end.
    """
    ranks, rank, length = cp.size(), cp.get_local_rank(), q.shape[2]
    q = q / math.sqrt(q.shape[-1])
    part = torch.stack([k, v])
    # A rank begins with its own keys. Every query sees at least one of these, so its highest score becomes finite.
    highest = q.new_full((), -math.inf)
    total = weight = q.new_zeros(())
    for step in range(ranks):
        # The next part is on its way while this rank computes.
        arriving = pass_on(part, cp) if step < ranks - 1 else None
        k, v = part.unbind()
        mask = in_the_past(q, rank * length, k, (rank - step) % ranks * length)
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, -math.inf)
        before, highest = highest, torch.maximum(highest, scores.detach().amax(-1, keepdim=True))
        scale, weights = (before - highest).exp(), (scores - highest).exp()
        total, weight = total * scale + weights @ v, weight * scale + weights.sum(-1, keepdim=True)
        if arriving is not None:
            part = wait_tensor(arriving)
    return total / weight


def pass_on(part: Tensor, cp: DeviceMesh) -> Tensor:
    """Send a part to the next rank. Return the previous rank's part, which is yet to be waited for."""
    ranks, rank = cp.size(), cp.get_local_rank()
    sent, received = ([len(part) if other == (rank + hop) % ranks else 0 for other in range(ranks)] for hop in (1, -1))
    return all_to_all_single_autograd(part, received, sent, cp.get_group())


def in_the_past(q: Tensor, first_query: int, k: Tensor, first_key: int) -> Tensor:
    """Return a mask, ``[queries, keys]``, of the keys that each query may see. Numbers are places in the sequence."""
    queries, keys = (torch.arange(part.shape[2], device=part.device) for part in (q, k))
    return first_query + queries[:, None] >= first_key + keys[None, :]


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        # With tensor parallelism, a rank has some of the heads.
        q, k, v = (
            product(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for product in (self.query, self.key, self.value)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """The weights of all experts. With expert parallelism they are DTensors, of which a rank has some experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor, expert: Tensor) -> Tensor:
        """Run each of the tokens ``[n, WIDTH]`` through its expert ``[n]``, a number that counts from this rank's first."""
        up, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down))
        # Two products of all experts side by side. For a token, hidden values of all experts but its own are set to zero.
        # torch's grouped_mm saves that work, but compiles in bfloat16 only.
        hidden = F.gelu(tokens @ up.transpose(0, 1).flatten(1)).unflatten(1, (len(up), -1))
        return (hidden * F.one_hot(expert, len(up))[:, :, None]).flatten(1) @ down.flatten(0, 1)


class MixtureOfExperts(nn.Module):
    """A layer that sends each token to the expert that the router prefers. Experts take any number of tokens."""

    def __init__(self, ep: DeviceMesh | None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.ep = ep

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        results = self.experts(tokens, expert) if self.ep is None else self._exchange(tokens, expert, self.ep)
        return (results * weight[:, None]).view_as(x)

    def _exchange(self, tokens: Tensor, expert: Tensor, ep: DeviceMesh) -> Tensor:
        """Send each token to the rank of its expert, and get the result back."""
        group, ranks, own = ep.get_group(), ep.size(), EXPERTS // ep.size()
        order = expert.argsort(stable=True)
        leaving = F.one_hot(expert // own, ranks).sum(0)
        arriving = all_to_all_single(leaving, None, None, group)
        # Sizes that depend on data: in a graph they are unbacked symbols.
        sent, received = leaving.tolist(), wait_tensor(arriving).tolist()
        here = wait_tensor(all_to_all_single_autograd(tokens[order], received, sent, group))
        expert_here = wait_tensor(all_to_all_single(expert[order] % own, received, sent, group))
        done = self.experts(here, expert_here)
        return wait_tensor(all_to_all_single_autograd(done, sent, received, group))[order.argsort()]


class Block(nn.Module):
    def __init__(self, mixes: bool, attend: Attend, ep: DeviceMesh | None) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attention = Attention(attend)
        self.mlp: nn.Module = MixtureOfExperts(ep) if mixes else MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.norm(x))


class Stage(nn.Module):
    """A pipeline stage: some blocks of a decoder. The first stage also has the embedding, the last one norm and head."""

    def __init__(self, number: int, stages: int, attend: Attend, ep: DeviceMesh | None) -> None:
        super().__init__()
        own = range(number * LAYERS // stages, (number + 1) * LAYERS // stages)
        self.blocks = nn.ModuleDict({str(index): Block(index % 2 == 1, attend, ep) for index in own})
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.norm = nn.LayerNorm(WIDTH, bias=False) if number == stages - 1 else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if number == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


# ------------------------------------------------------------------------------------------- parallelism


def build(args: argparse.Namespace, mesh: DeviceMesh) -> Stage:
    """Build this rank's part of the model, laid out over all dimensions of the mesh."""
    if args.system == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from fsdp_compile import fully_shard
    attend: Attend = attend_alone
    if args.cp > 1:
        attend = functools.partial(attend_in_ring if args.attention == "ring" else gather_and_attend, cp=mesh["cp"])
    ep = mesh["ep"] if args.ep > 1 else None
    model = Stage(mesh["pp"].get_local_rank(), args.pp, attend, ep)
    init_weights(model)
    if args.tp > 1:
        cut_products(model, mesh["tp"])
    # Ranks that see different tokens shard parameters: a dense parameter over all of these ranks, an expert over those that
    # have it.
    dense, sparse = mesh["edp", "cp", "ep"]._flatten("dense"), mesh["edp", "cp"]._flatten("sparse")
    for block in model.blocks.values():
        if isinstance(block.mlp, MixtureOfExperts):
            if ep is not None:
                split_experts(block.mlp.experts, ep)
            # With fewer experts on a rank of ep than ranks to shard them over, each expert is cut.
            dim = 0 if EXPERTS // args.ep >= sparse.size() else 1
            fully_shard(block.mlp.experts, mesh=sparse, shard_placement_fn=lambda _, dim=dim: Shard(dim))
            # An expert also sees the tokens of the other ranks of ep. Its gradient is a sum over all ranks, like a dense
            # parameter's, and has to be divided by the same number.
            block.mlp.experts.set_gradient_divide_factor(float(dense.size()))
            if args.system == "fsdp2":
                # Gloo has no reduction that scales.
                block.mlp.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(block, mesh=dense)
    fully_shard(model, mesh=dense)
    return model


def init_weights(model: nn.Module) -> None:
    """Initialise each parameter, with values that depend on its name alone."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            if param.ndim == 1:
                param.fill_(1.0)
            else:
                param.normal_(0.0, 1 / math.sqrt(WIDTH), generator=generator)


def cut_products(model: Stage, tp: DeviceMesh) -> None:
    """Apply tensor parallelism: a rank gets some heads, and some of the width of the feed-forward layers."""
    for block in model.blocks.values():
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan["attention.out"] = RowwiseParallel()
        if isinstance(block.mlp, MLP):
            plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, tp, plan)
    if model.head is not None:
        parallelize_module(model.head, tp, ColwiseParallel(output_layouts=Replicate()))


def split_experts(experts: Experts, ep: DeviceMesh) -> None:
    """Apply expert parallelism: a rank gets some experts whole."""
    for name, param in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), ep, [Shard(0)])))


# ---------------------------------------------------------------------------------------------- training


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a step for all ranks, ``[BATCH, LENGTH]`` each."""
    tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    for _ in range(LENGTH):
        # Each token follows from the one before it, which can be learned.
        tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 3) % VOCABULARY], 1)
    return tokens[:, :-1], tokens[:, 1:]


def local_batch(step: int, args: argparse.Namespace, mesh: DeviceMesh) -> list[Tensor]:
    """Return this rank's part of the global batch: tokens and targets."""
    rank = mesh["edp"].get_local_rank() * args.ep + mesh["ep"].get_local_rank()
    part = mesh["cp"].get_local_rank()
    return [whole.chunk(args.dp)[rank].chunk(args.cp, dim=1)[part].contiguous() for whole in global_batch(step)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stepper(args: argparse.Namespace, model: nn.Module, mesh: DeviceMesh) -> Callable[[int], Tensor]:
    """Return a function that runs forward and backward of a step, given its number.

    The function returns the loss over the whole batch, the same on all ranks.
    """
    run = whole_model(model) if args.pp == 1 else pipeline(args, model, mesh["pp"])

    def step(number: int) -> Tensor:
        loss = run(*local_batch(number, args, mesh))
        dist.all_reduce(loss)
        # All ranks of tp have the same loss. Of those of pp, only the last has one, and the others add 0.
        return loss / (args.dp * args.cp * args.tp)

    return step


def whole_model(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return run


def pipeline(args: argparse.Namespace, model: nn.Module, pp: DeviceMesh) -> Callable[[Tensor, Tensor], Tensor]:
    stage = PipelineStage(model, pp.get_local_rank(), args.pp, torch.device("cpu"), group=pp.get_group())
    schedule = Schedule1F1B(stage, min(MICROBATCHES, BATCH // args.dp), loss_fn=loss_of)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = [tokens] if stage.is_first else []
        schedule.step(*inputs, **({"target": targets, "losses": losses} if stage.is_last else {}))
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return run


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def make_mesh(args: argparse.Namespace) -> DeviceMesh:
    shape = (args.pp, args.dp // args.ep, args.cp, args.ep, args.tp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "edp", "cp", "ep", "tp"))


def train(args: argparse.Namespace) -> list[float]:
    """Train the model. Return the loss of each step."""
    mesh = make_mesh(args)
    model = build(args, mesh)
    if args.compile and args.system == "fsdp-compile":
        # Capture sizes of exchanges between experts in the graph, instead of a graph break at each.
        torch._dynamo.config.capture_scalar_outputs = True
        model.compile(backend="fsdp", options={"lowering": args.lowering}, fullgraph=True)
    optimizer, step, losses = optimizer_of(model), stepper(args, model, mesh), []
    for number in range(args.steps):
        losses.append(step(number).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    dist.init_process_group("gloo")
    losses = train(args)
    if dist.get_rank() == 0:
        split = " ".join(f"{name} {getattr(args, name)}" for name in ("dp", "tp", "cp", "pp", "ep"))
        print(f"{split}: " + " ".join(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
