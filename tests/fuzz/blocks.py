"""Blocks of random models: each maps ``[batch, length, DIM]`` to that shape, with one feature that sharding can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.common.subclasses import Wrapper

from .case import Block, Model

#: The width of hidden states. Only 2, 3 or 6 ranks divide it evenly.
DIM = 6
VOCABULARY = 11
MOST_LENGTH = 12


class MLP(nn.Module):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Convolution(nn.Module):
    """A convolution over the length, then a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.depthwise = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.depthwise(torch.tanh(self.mix(x.transpose(1, 2)))).transpose(1, 2)


class Experts(nn.Module):
    """Experts that all compute, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 3, bias=False)
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., index : index + 1] * expert(x) for index, expert in enumerate(self.experts))


class StackedExperts(nn.Module):
    """The weights of all experts in one parameter of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.randn(3, DIM, DIM) / DIM), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.einsum("bld,edf,e->blf", x, self.weight, self.gate.softmax(0)))


class LoRA(nn.Module):
    """An adapter beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.a, self.b = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


class Gated(nn.Module):
    """A gate that is read only while it is open, which may differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.is_open = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.base(x))
        return x * torch.sigmoid(self.gate(x)) if self.is_open else x


class Tied(nn.Module):
    """Two layers with one weight. Forward asks whether it is one, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        is_one = self.first.weight is self.second.weight and isinstance(self.first.weight, nn.Parameter)
        return x + self.second(torch.tanh(self.first(x))) * (1 if is_one else 2)


class Looped(nn.Module):
    """A layer that is called three times, and whose weight is also read without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.layer(x)) / 2
        return F.linear(x, self.layer.weight.t())


class Gains(nn.Module):
    """A ``ParameterList``, a ``ParameterDict`` and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(torch.randn(DIM) for _ in range(2))
        self.shifts = nn.ParameterDict({"last": torch.randn(DIM), "unused": torch.randn(2)})
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x + torch.tanh(x * gain)
        return x * self.scale + self.shifts["last"]


class Held(nn.Module):
    """Parameters in a container, and the weight of a child that is not called; no others."""

    def __init__(self) -> None:
        super().__init__()
        self.gains, self.child = nn.ParameterList([torch.randn(DIM)]), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x * self.gains[0], self.child.weight))


class Norms(nn.Module):
    """The weight and bias of a norm, which start as ones and zeros, and positions that are cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.positions = nn.LayerNorm(DIM), nn.Parameter(torch.randn(MOST_LENGTH, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.positions[: x.shape[1]]


class Parametrized(nn.Module):
    """A weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Nested(nn.Module):
    """A block in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = MLP(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Pieces(nn.Module):
    """A part that takes a keyword argument, and returns a dict with a number and an entry that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unread = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        return {"value": torch.tanh(self.layer(x)) * scale, "unread": [self.unread(x.detach()), None], "number": 3}


class Structured(nn.Module):
    """A block around :class:`Pieces`, which takes and returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces, self.scale = Pieces(), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        found = self.pieces(x, scale=self.scale)
        return x + found["value"] / found["number"]


class Target(nn.Module):
    """A layer that is called without gradients, and then with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(x)
        return x + torch.tanh(self.layer(x)) * target.sigmoid()


class Parallel(MLP):
    """Two layers that tensor parallelism can cut."""

    def __init__(self) -> None:
        super().__init__(hidden=8)


class Whole(Wrapper):
    """A subclass whose all-gather extension sends the values unchanged."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        return (F.pad(self.held, [0, 0] * (self.held.dim() - 1) + [0, rows - self.held.size(0)]),), outer_size

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        full = gathered[0][: metadata[0]].to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (gathered[0], full)


class Extended(nn.Module):
    """A layer whose weight has an all-gather extension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def extend(self) -> None:
        """Replace the weight by a :class:`Whole`."""
        self.layer.weight = nn.Parameter(Whole(self.layer.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Routed(nn.Module):
    """Two layers that a router weighs, whose parameters have another dtype than the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layers = nn.Linear(DIM, 2), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def change_dtype(self) -> None:
        """Give the router a dtype of its own. Call it when the model has its dtype."""
        self.router.to(torch.float32 if self.router.weight.dtype == torch.float64 else torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x.to(self.router.weight.dtype)).softmax(-1).to(x.dtype)
        return x + sum(torch.tanh(layer(x)) * weights[..., index, None] for index, layer in enumerate(self.layers))


class Ordered(nn.Module):
    """Two weights of one size, which ranks may read in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(DIM, DIM) / 3) for _ in range(2))
        self.is_swapped = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_swapped:
            second = x @ self.second
            first = x @ self.first
        else:
            first = x @ self.first
            second = x @ self.second
        return x + torch.tanh(first) * second


KINDS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "attention": Attention,
    "convolution": Convolution,
    "experts": Experts,
    "stacked experts": StackedExperts,
    "lora": LoRA,
    "gated": Gated,
    "tied": Tied,
    "looped": Looped,
    "gains": Gains,
    "held": Held,
    "norms": Norms,
    "parametrized": Parametrized,
    "nested": Nested,
    "structured": Structured,
    "target": Target,
    "parallel": Parallel,
    "extended": Extended,
    "routed": Routed,
    "ordered": Ordered,
}


class Inside(nn.Module):
    """A block whose forward is recomputed within the module."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Network(nn.Module):
    """The model of a case.

    Attributes:
        skips: the indices of blocks that forward leaves out.
    """

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        self.skips: tuple[int, ...] = ()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(map(_block, spec.blocks))
        self.head = nn.Linear(DIM, VOCABULARY)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        order = [*range(len(self.blocks)), *([] if self.spec.again is None else [self.spec.again])]
        for index in order:
            if index in self.skips:
                continue
            block: Callable[[Tensor], Tensor] = self.blocks[index]
            around = self.spec.blocks[index].checkpoint == "around"
            x = checkpoint(block, x, use_reentrant=False) if around else block(x)
        return self.head(x)


def _block(spec: Block) -> nn.Module:
    block = KINDS[spec.kind]()
    return Inside(block) if spec.checkpoint == "inside" else block


def network(spec: Model) -> Network:
    """Build a model, with the same values on every rank and in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Network(spec).to(getattr(torch, spec.dtype))
    for module in made.modules():
        if isinstance(module, Routed):
            module.change_dtype()
    return made
