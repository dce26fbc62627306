"""Initial weights that do not depend on the number of ranks."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import distribute_tensor

from .gpt import GPT
from .text import generator


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Initialise each parameter in full, from a generator of its own, and keep this rank's shard.

    So the weights do not depend on the number of ranks, and nothing is sent. Memory holds only one
    full parameter at a time.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norm weights: there are no biases
            full = torch.ones(parameter.shape)
        else:
            # Layers that add to the residual stream start smaller, so that its size does not grow with depth.
            residual = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * len(model.blocks)) if residual else 0.02
            full = torch.randn(parameter.shape, generator=generator("init", seed, name)) * std
        mesh, placements = parameter.device_mesh, parameter.placements
        # src_data_rank=None: every rank slices its own copy, nothing is sent.
        parameter.copy_(distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None))
