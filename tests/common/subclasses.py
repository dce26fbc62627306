"""Tensor subclasses with gathers of their own, as FSDP2 asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Wrapper(torch.Tensor):
    """A subclass that holds one tensor and computes like it. Operators that FSDP2 applies to parameters keep the class."""

    _KEEP = (
        "new_zeros",
        "slice",
        "copy_",
        "view",
        "as_strided",
        "split",
        "clone",
        "detach",
        "empty_like",
        "_to_copy",
        "narrow",
    )

    @staticmethod
    def __new__(cls, held: Tensor, *_: Any) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=held.device, requires_grad=held.requires_grad
        )

    def __init__(self, held: Tensor):
        self.held = held

    def like(self, held: Tensor) -> Wrapper:
        return type(self)(held)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Wrapper:
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Wrapper))
        args, kwargs = pytree.tree_map_only(Wrapper, lambda tensor: tensor.held, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ not in cls._KEEP:
            return result
        return pytree.tree_map_only(Tensor, first.like, result)


class Halved(Wrapper):
    """A subclass that is gathered in bfloat16, and computes in the policy's dtype."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.nn.functional.pad(self.held, [0, 0] * (self.held.dim() - 1) + [0, rows - self.held.size(0)])
        return (padded.bfloat16(),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (full,) = gathered
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full.view(-1)[: out.numel()].view(out.shape))
            return None
        cast = full.to(param_dtype)
        return cast, (full, cast)


class Scaled(Wrapper):
    """A subclass that is gathered as int8, with a scale for each row of a shard. A bound, if set before, clamps the values."""

    def __init__(self, held: Tensor, bound: Tensor | None = None, levels: float = 127.0):
        super().__init__(held)
        self.bound, self.levels = bound, levels

    def like(self, held: Tensor) -> Wrapper:
        return Scaled(held, None, self.levels)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.levels

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Wrapper:
        return cls(inner["held"], None, context)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        held = self.held if self.bound is None else self.held.clamp(-self.bound, self.bound)
        scale = held.abs().amax(1, keepdim=True).clamp(min=1e-12) / self.levels
        return ((held / scale).round().to(torch.int8), scale), held.dtype

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        rounded, scale = gathered
        full = (rounded.to(metadata) * scale).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (rounded, scale, full)


# Checkpoints hold the local tensors.
torch.serialization.add_safe_globals([Halved, Scaled])
