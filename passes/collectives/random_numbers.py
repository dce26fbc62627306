"""Random numbers of a communication hook: a function of a key, a count and an element's index, in integer operators.

The numbers do not come from a generator's state. So graphs of any lowering and uncompiled code draw the same numbers. The
model's own draws (dropout) are the same as without the hook. A checkpoint with key and count continues where it stopped.
The key differs between ranks and between parameters; each reduction increments the count.

Source: the constants of :func:`_mixed` are of the family "lowbias32" (Wellons's hash-prospector), whose products fit into 64
bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..fx.torch_internals.core import TorchDispatchMode

_aten = torch.ops.aten
_MASK = 0xFFFFFFFF
#: The random functions that a hook may call, as text for messages.
KNOWN = "torch.rand, rand_like, randn, randn_like, randint, bernoulli, and the methods uniform_, normal_ and bernoulli_"


def new_key(seed: int, rank: int, name: str, device: torch.device) -> Tensor:
    """Make the key and count of a parameter's random numbers on a rank, before the first reduction.

    Returns:
        ``[3]`` of int64: two parts of the key, each of 32 bits, and the count, 0.
    """
    digest = hashlib.sha256(f"{seed}/{rank}/{name}".encode()).digest()
    parts = [int.from_bytes(digest[place : place + 4], "little") for place in (0, 4)]
    return torch.tensor([*parts, 0], dtype=torch.int64, device=device)


def _mixed(bits: Tensor) -> Tensor:
    """Permute the 32-bit numbers. Bits are in int64, so that products do not overflow."""
    bits = bits & _MASK
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD & _MASK
    bits = (bits ^ (bits >> 15)) * 0x735A2D97 & _MASK
    bits = bits ^ (bits >> 15)
    # Inductor evaluates a value for each of its readers, here two each time, unless it has a buffer of its own. Without one,
    # nested calls take a minute to compile. Only an as_strided is sure to give one; fusion takes it away again.
    return bits.as_strided(bits.shape, bits.stride())


class Draws:
    """The random numbers of one call of a hook.

    Args:
        key: key and count, as of :func:`new_key`.

    Attributes:
        number: the number of tensors drawn so far.
    """

    def __init__(self, key: Tensor):
        self._key = key
        self.number = 0

    def counted(self) -> Tensor:
        """Return the key and count of the hook's next call."""
        return torch.cat([self._key[:2], self._key[2:] + 1])

    def bits(self, shape: Sequence[int], device: torch.device | None) -> Tensor:
        """Draw 32-bit numbers, in int64, from 0 to 2**32 - 1."""
        low, high, count = self._key.to(device or self._key.device).unbind()
        place = torch.arange(math.prod(shape), device=low.device)
        first = _mixed(low ^ _mixed(count))
        second = _mixed(high ^ _mixed(first + self.number))
        self.number += 1
        return _mixed(_mixed(place ^ first) ^ second).view(list(shape))

    def uniform(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """Draw from the uniform distribution over [0, 1), in float32."""
        return (self.bits(shape, device) >> 8).to(torch.float32) * 2.0**-24

    def normal(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """Draw from the normal distribution of mean 0 and variance 1, in float32."""
        radius = (-2 * (1 - self.uniform(shape, device)).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(shape, device)).cos()

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute the result of a random operator.

        Returns:
            The result; ``NotImplemented`` if the operator has a generator, or is not one of :data:`KNOWN`.
        """
        answers = _ANSWERS.get(func)
        if answers is None or kwargs.get("generator") is not None:
            return NotImplemented
        return answers(self, *args, **{name: value for name, value in kwargs.items() if name in ("dtype", "device", "to")})


class AnsweringRandomOperators(TorchDispatchMode):
    """A mode in which eager code draws its random numbers from ``draws``.

    Args:
        draws: the random numbers.
        refusal: makes the error for an operator that ``draws`` cannot answer.
    """

    def __init__(self, draws: Draws, refusal: Callable[[Any], Exception]):
        super().__init__()
        self._draws = draws
        self._refusal = refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        answer = self._draws.answer(func, args, kwargs or {})
        if answer is NotImplemented:
            raise self._refusal(func)
        return answer


def _factory(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def answer(draws: Draws, size: Sequence[int], dtype: Any = None, device: Any = None) -> Tensor:
        return draw(draws, size, device).to(dtype or torch.get_default_dtype())

    return answer


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def answer(draws: Draws, like: Tensor, dtype: Any = None, device: Any = None) -> Tensor:
        return draw(draws, like.shape, device or like.device).to(dtype or like.dtype)

    return answer


def _uniform_(draws: Draws, tensor: Tensor, low: float = 0.0, to: float = 1.0) -> Tensor:
    return tensor.copy_(draws.uniform(tensor.shape, tensor.device) * (to - low) + low)


def _normal_(draws: Draws, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return tensor.copy_(draws.normal(tensor.shape, tensor.device) * std + mean)


def _bernoulli(draws: Draws, tensor: Tensor, chance: Any = None) -> Tensor:
    chance = tensor if chance is None else chance
    return (draws.uniform(tensor.shape, tensor.device) < chance).to(tensor.dtype)


def _bernoulli_(draws: Draws, tensor: Tensor, chance: Any = 0.5) -> Tensor:
    return tensor.copy_(_bernoulli(draws, tensor, chance))


def _integers(draws: Draws, low: int, high: int, size: Sequence[int], dtype: Any = None, device: Any = None) -> Tensor:
    return (draws.bits(size, device) % (high - low) + low).to(dtype or torch.int64)


def _integers_below(draws: Draws, high: int, size: Sequence[int], dtype: Any = None, device: Any = None) -> Tensor:
    return _integers(draws, 0, high, size, dtype, device)


_ANSWERS: dict[Any, Callable[..., Tensor]] = {
    _aten.rand.default: _factory(Draws.uniform),
    _aten.randn.default: _factory(Draws.normal),
    _aten.rand_like.default: _like(Draws.uniform),
    _aten.randn_like.default: _like(Draws.normal),
    _aten.randint.default: _integers_below,
    _aten.randint.low: _integers,
    _aten.uniform_.default: _uniform_,
    _aten.normal_.default: _normal_,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli_.float: _bernoulli_,
    _aten.bernoulli_.Tensor: _bernoulli_,
}
