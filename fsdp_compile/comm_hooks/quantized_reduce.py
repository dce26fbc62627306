"""Reductions of gradients that are sent in low precision."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from passes.collectives.block_formats import LARGEST, SCALE, restore_groups, round_groups
from passes.collectives.layout import padding_to
from passes.collectives.rounded_gather import reinterpret
from passes.collectives.stochastic_rounding import round_groups_by_chance
from passes.fx.torch_internals.distributed import DefaultState

from ..torch_versions import all_gather

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class QuantizedReduce:
    """A hook that averages gradients and sends fewer bytes: ``register_comm_hook(DefaultState(group), QuantizedReduce())``.

    Each rank sends to each other rank the piece that is reduced there, rounded. The receiving rank sums in float32, whereas a
    reduce-scatter in low precision would round every partial sum. An infinity or NaN makes its whole block NaN on the rank that
    reduces it.

    Attributes:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, with a scale for each block; or
            ``torch.bfloat16`` or ``torch.float16``, without.
        block: the number of elements that share a scale.
        stochastic_rounding: round up or down by chance, so that many reductions have the mean of the gradients. The hook has
            its own random numbers, which differ between ranks.

    Raises:
        ValueError: ``dtype`` or ``block`` has no such value; or stochastic rounding is to a dtype without scales.

    Source: "qgZ" of ZeRO++ (Wang et al. 2023), without its hierarchy.
    """

    dtype: torch.dtype = torch.int8
    block: int = 128
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (*LARGEST, *_HALVES):
            known = ", ".join(map(str, (*LARGEST, *_HALVES)))
            raise ValueError(f"QuantizedReduce(dtype=...) takes one of {known}, not {self.dtype!r}.")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"QuantizedReduce(block=...) takes a positive number of elements, not {self.block!r}.")
        if self.stochastic_rounding and self.dtype in _HALVES:
            known = ", ".join(map(str, LARGEST))
            raise ValueError(f"QuantizedReduce(stochastic_rounding=True) takes one of {known}, not {self.dtype!r}.")

    def __call__(self, state: DefaultState, grad: Tensor, output: Tensor | None = None) -> None:
        """Fill ``output`` with this rank's shard of the average; without one, leave the average in ``grad``.

        Args:
            state: has the process group.
            grad: flat gradient of this rank's batch, ``[ranks * n]``. Without an output, it has any size ``[n]``, and each
                rank then sends the average of its piece to the others, rounded once more.
            output: flat shard, ``[n]``.
        """
        self.send(state, grad, output)

    def _all_reduce(self, state: DefaultState, grad: Tensor) -> Tensor:
        padded = pad(grad, (0, padding_to(state.world_size, grad.numel())))
        own = padded.new_empty(padded.numel() // state.world_size)
        said = self.send(state, padded, own)
        sent = self._sent(own.unsqueeze(0))
        gathered = sent.new_empty(state.world_size * sent.numel())
        all_gather(gathered, sent.view(-1), group=state.process_group)
        # A rank reads its own piece from the gathered bytes, too, so that averages are equal on all ranks.
        averages = self._values(gathered.view(state.world_size, -1), own.numel())
        grad.copy_(averages.reshape(-1)[: grad.numel()])
        return said[: grad.numel()]

    def send(self, state: DefaultState, grad: Tensor, output: Tensor | None = None) -> Tensor:
        """Reduce as :meth:`__call__`, and return ``grad`` as this rank's first messages round it: same shape, float32."""
        if output is None:
            return self._all_reduce(state, grad)
        pieces = grad.view(state.world_size, -1)
        sent = self._sent(pieces)
        said = self._values(sent, pieces.size(1)).reshape(-1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=state.process_group)
        output.copy_(self._values(received, pieces.size(1)).sum(0) / state.world_size)
        return said

    def _sent(self, pieces: Tensor) -> Tensor:
        return pieces.to(self.dtype) if self.dtype in _HALVES else self._encode(pieces)

    def _values(self, sent: Tensor, numel: int) -> Tensor:
        return sent.to(SCALE) if self.dtype in _HALVES else self._decode(sent, numel)

    def _encode(self, pieces: Tensor) -> Tensor:
        """Round pieces, and return the bytes of each piece followed by those of its scales: ``[ranks, bytes]``."""
        padded = pad(pieces, (0, padding_to(self.block, pieces.size(1))))
        round_all = round_groups_by_chance if self.stochastic_rounding else round_groups
        rounded, scales = round_all(padded.unflatten(1, (-1, self.block)), self.dtype)
        return torch.cat([rounded.flatten(1).view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def _decode(self, received: Tensor, numel: int) -> Tensor:
        """Restore the pieces from received bytes: ``[ranks, numel]`` in float32."""
        padded = numel + padding_to(self.block, numel)
        rounded, scales = received.split([padded, padded // self.block * SCALE.itemsize], dim=1)
        groups = rounded.view(self.dtype).unflatten(1, (-1, self.block))
        return restore_groups(groups, reinterpret(scales, SCALE)).flatten(1)[:, :numel]
