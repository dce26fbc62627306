"""A Llama in plain torch: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, an embedding that may be tied.

The architecture is that of Llama 3 (https://arxiv.org/abs/2407.21783); the defaults of :class:`LlamaSize` are the shape of
Llama 3.2 1B. The model is written here because a machine without a network may have torch alone. Frequencies of the rotary
embedding are not rescaled for long contexts, as Llama 3.2 does; that changes numbers, but no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fresh_module import fresh_module

_ROPE_THETA = 500_000.0


@dataclass(frozen=True)
class LlamaSize:
    """Size of the model, and of the batch of one rank.

    Attributes:
        attention: if False, blocks are feed-forward networks alone. The kernel of attention depends on the device, and is not
            what sharding is about.
        dtype: of parameters and activations.
        tied: if True, the weight of the output projection is that of the embedding.
    """

    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 8192
    vocabulary: int = 128_256
    batch: int = 4
    sequence: int = 2048
    attention: bool = True
    dtype: torch.dtype = torch.bfloat16
    tied: bool = True

    def build(self, device: torch.device) -> Llama:
        """Build the model. Every call gives the same weights, but a new class (see ``fresh_module``)."""
        torch.manual_seed(0)
        with torch.device(device):
            model: Llama = fresh_module(Path(__file__)).Llama(self)
        return model.to(self.dtype)

    def make_batch(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a rank, ``[batch, sequence]`` each, int64."""
        random = torch.Generator().manual_seed(rank + 1)
        tokens = torch.randint(0, self.vocabulary, (self.batch, self.sequence + 1), generator=random).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def describe(self) -> str:
        """Return the size in a line."""
        model = f"Llama, {self.layers} layers, width {self.width}, {self.parameters / 1e6:.1f} M parameters"
        return f"{model}, {str(self.dtype).removeprefix('torch.')}; {self.batch} x {self.sequence} tokens"

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.build(torch.device("meta")).parameters())


class Attention(nn.Module):
    """Causal self-attention with grouped queries: several query heads share a key and a value head."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.head_width = size.width // size.heads
        kv_width = size.kv_heads * self.head_width
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of ``x [batch, heads, sequence, width]`` by position; ``cos`` and ``sin`` are ``[sequence, width / 2]``."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual connection around it."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.attention = Attention(size) if size.attention else None
        self.attention_norm = nn.RMSNorm(size.width, eps=1e-5) if size.attention else None
        self.feed_forward = FeedForward(size)
        self.feed_forward_norm = nn.RMSNorm(size.width, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.attention is not None and self.attention_norm is not None:
            x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """A Llama. Its forward takes tokens and targets, and returns the mean loss in float32; without targets, the logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        if size.tied:
            self.head.weight = self.embed.weight
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(size.sequence), _ROPE_THETA ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        length = tokens.size(1)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
