"""Tiny models, each with one feature that data parallelism with sharded parameters has to get right.

They take any floating-point dtype, so that a float64 copy can serve as the reference. Attributes that the
sharding functions use: ``blocks`` holds the modules that become units of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual feed-forward block.

    Its operators are few and simple, because most of a test's time goes into tracing them. Compilers do not decompose
    them, so that in low precision a compiled model rounds where the eager one does.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class MLP(nn.Module):
    """Blocks, then a bias and a head of the root; ``checkpointed`` recomputes each block in backward."""

    def __init__(self, dim: int = 8, hidden: int = 16, out: int = 4, layers: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.bias = nn.Parameter(torch.randn(dim))
        self.head = nn.Linear(dim, out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x + self.bias)


class Narrow(nn.Module):
    """Layers of three, two and one rows: fewer than ranks.

    There is no normalisation, which is ill-conditioned over so few entries.
    """

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(dim, 3), nn.Linear(3, 2)])
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding.

    No biases: the loss does not depend on a key bias, so its gradient would be rounding noise.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, max_length: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        angles = torch.outer(torch.arange(max_length), 10.0 ** -torch.linspace(0, 1, dim // heads // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = Block(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


class Transformer(nn.Module):
    """A decoder; ``tied`` shares the embedding with the output head."""

    def __init__(
        self,
        vocab: int = 16,
        dim: int = 8,
        heads: int = 2,
        hidden: int = 16,
        layers: int = 2,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CheckpointsInside(nn.Module):
    """Blocks that recompute their own body: the recomputation runs inside the unit, not around it."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner(dim, 2 * dim) for _ in range(2))
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReadsInCheckpoints(nn.Module):
    """Reads inside of checkpointed regions, of parameters whose own module is called twice, or not at all.

    ``Twice`` calls a layer twice, and ties its weight to another one's. ``Held`` reads containers, and the weight of a child,
    without calling them.
    """

    class Twice(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.layer = nn.Linear(dim, dim)
            self.tied = nn.Linear(dim, dim, bias=False)
            self.tied.weight = self.layer.weight

        def forward(self, x: Tensor) -> Tensor:
            return x + self.tied(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    class Held(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.gains = nn.ParameterList(torch.randn(dim) for _ in range(2))
            self.shifts = nn.ParameterDict({"last": torch.randn(dim)})
            self.child = nn.Linear(dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            for gain in self.gains:
                x = torch.tanh(x * gain)
            return F.linear(x, self.child.weight) + self.shifts["last"]

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Twice(dim)])
        self.twice, self.held = self.Twice(dim), self.Held(dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.blocks, self.twice, self.held):
            x = checkpoint(module, x, use_reentrant=False)
        return self.head(x)


class ReadsInOtherWays(nn.Module):
    """Parameters that a forward reads by iteration, by name and by slices: penalties, hypernetworks, weight tying by hand."""

    class Penalised(Block):
        def __init__(self, dim: int) -> None:
            super().__init__(dim, 2 * dim)
            self.tied = nn.Linear(dim, dim, bias=False)
            self.again = nn.Linear(dim, dim, bias=False)
            self.again.weight = self.tied.weight
            self.gains = nn.ParameterList(torch.randn(dim) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for gain in self.gains[1:]:
                x = x * gain
            x = F.linear(x, self.tied._parameters["weight"], self.get_parameter("down.bias"))
            penalty = torch.stack([param.square().mean() for param in self.parameters()]).sum()
            return super().forward(self.again(torch.tanh(x))) + 0.1 * penalty * len(dict(self.named_parameters()))

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Penalised(dim), self.Penalised(dim)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)
        return self.head(x)


class ScalarParameters(nn.Module):
    """A 0-dim parameter in a unit and one in the root."""

    class Scaled(Block):
        def __init__(self, dim: int) -> None:
            super().__init__(dim, 2 * dim)
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Scaled(dim)])
        self.head = nn.Linear(dim, 4)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) / self.temperature


class UnusedParameter(MLP):
    """A parameter in a unit and one in the root that no forward reads: neither has a gradient."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.blocks[0].register_parameter("unused", nn.Parameter(torch.randn(4, 4)))
        self.unused = nn.Parameter(torch.randn(4))


class Recurrent(nn.Module):
    """A unit called several times per forward, in which one parameter is used twice."""

    class Cell(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(dim, dim) / dim)
            self.bias = nn.Parameter(torch.zeros(dim))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight.t())

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Cell(dim)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(x)


class SharedWeight(nn.Module):
    """One parameter read twice by the module that owns it, next to a unit."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim)
        self.blocks = nn.ModuleList([Block(dim, 2 * dim)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](F.linear(x, self.weight))
        return self.head(F.linear(x, self.weight.t()))


class Buffers(nn.Module):
    """Buffers that forward updates: a step counter that the output depends on, and a running mean.

    Nothing reads the mean of the input: every rank keeps the mean of its own batches, and only the average over
    the ranks is the mean of the global batch. The counter is added to the output and not multiplied with it:
    torch.compile's own backends (torch 2.13, "inductor" and "aot_eager") compute a wrong backward if backward
    needs the value that an updated buffer had in forward.
    """

    steps: Tensor
    mean: Tensor

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, 2 * dim)])
        self.head = nn.Linear(dim, 4)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.head(self.blocks[0](x)) + 0.1 * self.steps


class Containers(nn.Module):
    """Parameters in a ParameterList and a ParameterDict, in a unit and in the root."""

    class Experts(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.experts = nn.ParameterList(torch.randn(dim, dim) / dim for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.experts:
                x = x + torch.tanh(x @ weight)
            return x

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Experts(dim)])
        self.heads = nn.ParameterDict({"weight": torch.randn(4, dim) / dim, "bias": torch.zeros(4)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.heads["weight"], self.heads["bias"])


class ReadsChild(nn.Module):
    """A parent that applies its child's weight without calling the child."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, 2 * dim)])
        self.child = nn.Linear(dim, dim, bias=False)
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](F.linear(x, self.child.weight))
        return self.head(torch.tanh(self.child(x)))


class GraphBreaks(nn.Module):
    """Graph breaks inside a unit and between units."""

    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x))
            torch._dynamo.graph_break()
            return x + self.down(hidden)

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Broken(dim, 2 * dim), nn.Linear(dim, dim)])
        self.bias = nn.Parameter(torch.randn(dim))
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x + self.bias)
        torch._dynamo.graph_break()
        return self.head(torch.tanh(self.blocks[1](x)) + self.bias)


class KeywordsAndTuples(nn.Module):
    """A unit that takes keyword arguments and returns a tuple, one element of which is not a tensor."""

    class Gated(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.block = Block(dim, 2 * dim)

        def forward(self, x: Tensor, *, gate: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
            y = self.block(x)
            return (y if gate is None else y * gate), y.mean(-1, keepdim=True), y.shape[-1]

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Gated(dim) for _ in range(2))
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, mean, width = self.blocks[0](x)
        y, _, _ = self.blocks[1](y, gate=torch.sigmoid(mean * width))
        return self.head(y)


class KeepsInputPrecision(nn.Module):
    """Centres its input in the input's own precision, then computes in the parameters' dtype.

    The inputs are far from zero, so casting them before the subtraction loses most of what they carry.
    """

    offset = 64.0

    class Centred(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x - KeepsInputPrecision.offset).to(self.up.weight.dtype))

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Centred(dim, 2 * dim)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x).to(self.head.weight.dtype))


class TwoModels(nn.Module):
    """Two models that are sharded (and compiled) separately and trained by one loss.

    This class itself is no unit: it only calls them, as a training loop would.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = MLP(dim=8, out=6, layers=1)
        self.critic = MLP(dim=6, hidden=12, out=4, layers=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(torch.tanh(self.generator(x)))


class Twins(nn.Module):
    """Two equal blocks; this class itself is no unit."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first, self.second = Block(dim, 2 * dim), Block(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))
