"""Hardware: the rates and latencies of a machine that the cost model needs.

:func:`known_hardware` is a table of common machines; ``python -m fsdp_compile.calibrate`` measures others and writes a file
that :meth:`Hardware.load` reads. Rates are sustained ones, not those of a data sheet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Link:
    """The cost of one kind of collective.

    It is in flight for ``latency_s + traffic / bytes_per_s``. Where it hides behind compute, compute still takes
    ``taken_s + traffic * taken_s_per_byte`` longer: Gloo's threads run on the cores that compute, NCCL's kernels on some of a
    GPU's multiprocessors.

    The traffic is what every rank sends: of n ranks, (n - 1) / n of the unsharded buffer for an all-gather or a reduce-scatter,
    twice that for an all-reduce. So the rate (nccl-tests call it bus bandwidth) does not depend on the number of ranks.
    """

    latency_s: float
    bytes_per_s: float
    taken_s: float = 0.0
    taken_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Links:
    """The collectives of one kind of group."""

    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link


@dataclass(frozen=True)
class Hardware:
    """A machine, seen from one rank.

    Attributes:
        name: what to call it.
        flops_per_s: of matrix products, by the name of the dtype; other dtypes count as float32.
        bytes_per_s: of memory.
        kernel_s: what each kernel and each start of a collective costs besides.
        ranks_per_node: ranks that share a node.
        within_node: collectives of a group inside a node.
        between_nodes: those of a group that spans more ranks than a node has.
        peak_flops_per_s: of matrix products without sparsity, by data sheet, as :attr:`flops_per_s`; empty: not known.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    kernel_s: float
    ranks_per_node: int
    within_node: Links
    between_nodes: Links
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """The flops a second of matrix products at best; where the data sheet is not known, those that it sustains."""
        return self.peak_flops_per_s.get(dtype, self.flops_per_s[dtype])

    def links(self, ranks: Sequence[int]) -> Links:
        """The links of a group. The span decides, which is the same for all groups of a mesh dimension."""
        return self.between_nodes if max(ranks) - min(ranks) >= self.ranks_per_node else self.within_node

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the numbers to a JSON file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """Read a file that :meth:`save` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            return _from_dict(json.loads(Path(path).read_text()))
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold the numbers of a machine ({type(error).__name__}: {error}). "
                "Write it anew with python -m fsdp_compile.calibrate."
            ) from error


def _from_dict(values: dict[str, Any]) -> Hardware:
    links = {
        key: Links(**{kind: Link(**link) for kind, link in values[key].items()}) for key in ("within_node", "between_nodes")
    }
    return Hardware(**{**values, **links})


def _gpu(
    name: str, half: float, single: float, memory: float, nvlink: float, nic: float, peaks: tuple[float, float, float]
) -> Hardware:
    peak_half, peak_single, peak_double = peaks
    near, far = Link(15e-6, nvlink), Link(30e-6, nic)
    return Hardware(
        name,
        {"bfloat16": half, "float16": half, "float32": single, "float64": single / 2},
        memory,
        kernel_s=4e-6,
        ranks_per_node=8,
        within_node=Links(near, near, near),
        between_nodes=Links(far, far, far),
        peak_flops_per_s={
            "bfloat16": peak_half,
            "float16": peak_half,
            "float32": peak_single,
            "float64": peak_double,
        },
    )


# Eight GPUs a node, all connected by NVLink, and one network adapter for each. Peaks, in half precision by tensor cores without
# sparsity, in float32 and float64 without them: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200.
_GPUS = {
    "A100": _gpu("A100", 220e12, 17e12, 1.6e12, 230e9, 23e9, (312e12, 19.5e12, 9.7e12)),
    "H100": _gpu("H100", 600e12, 50e12, 2.7e12, 360e9, 45e9, (989e12, 67e12, 34e12)),
    "H200": _gpu("H200", 600e12, 50e12, 3.9e12, 360e9, 45e9, (989e12, 67e12, 34e12)),
    "B200": _gpu("B200", 1400e12, 60e12, 6.4e12, 700e9, 45e9, (2250e12, 75e12, 37e12)),
}
_GLOO_LINK = Link(300e-6, 0.7e9, taken_s=300e-6, taken_s_per_byte=1.2e-9)
_GLOO = Links(_GLOO_LINK, _GLOO_LINK, _GLOO_LINK)
_CPU = Hardware("cpu", {"float32": 50e9, "float64": 25e9}, 10e9, 5e-6, 8, _GLOO, _GLOO)


def known_hardware(device_type: str, device_name: str) -> Hardware:
    """The table's entry for a device.

    Args:
        device_type: "cpu" (any, with Gloo) or "cuda".
        device_name: what ``torch.cuda.get_device_name()`` says.

    Raises:
        ValueError: the table does not have it.
    """
    if device_type == "cpu":
        return _CPU
    for name, hardware in _GPUS.items():
        # GH200 is another machine than H200, and a card in a PCIe slot has no NVLink.
        if re.search(rf"\b{name}\b", device_name) and "PCI" not in device_name.upper():
            return hardware
    raise ValueError(
        f"options['schedule'] = 'auto' does not know the device {device_name or device_type!r}; it knows {', '.join(_GPUS)} "
        "with NVLink. Measure it: torchrun --nproc-per-node <ranks> -m fsdp_compile.calibrate"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as :class:`Hardware` spells it."""
    return str(dtype).removeprefix("torch.")
