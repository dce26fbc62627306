"""Hardware: the rates and latencies of a machine that the cost model needs.

:func:`known_hardware` is a table of common machines; ``python -m fsdp_compile.calibrate`` measures others and writes a file
that :meth:`Hardware.load` reads. Rates are sustained ones, not those of a data sheet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import nccl
from .group_layout import GroupLayout
from .nccl import Way


@dataclass(frozen=True)
class Link:
    """The cost of one kind of collective.

    It is in flight for ``latency_s + hop_s * (ranks - 2) + traffic / bytes_per_s``, with NCCL also for what its algorithms take
    to start (:attr:`Hardware.library`). Where it hides behind compute, compute still takes ``taken_s + traffic *
    taken_s_per_byte`` longer, and by ``taken_part`` of the time in flight: Gloo's threads run on the cores that compute, NCCL's
    kernels on some of a GPU's multiprocessors.

    The traffic is what every rank sends: of n ranks, (n - 1) / n of the unsharded buffer for an all-gather or a reduce-scatter,
    twice that for an all-reduce. So the rate (nccl-tests call it bus bandwidth) does not depend on the number of ranks.
    """

    latency_s: float
    bytes_per_s: float
    taken_s: float = 0.0
    taken_s_per_byte: float = 0.0
    hop_s: float = 0.0
    taken_part: float = 0.0


@dataclass(frozen=True)
class Links:
    """The collectives of one kind of group."""

    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link


@dataclass(frozen=True)
class HostLink:
    """What connects a device with the memory of its host, pinned there. Each direction is a wire of its own.

    Attributes:
        startup_s: what each copy takes besides.
        to_device_bytes_per_s, to_host_bytes_per_s: of a copy.
        memory_bytes_per_s: of the host's memory, for what the host computes for one rank while it does so for others.
    """

    startup_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    memory_bytes_per_s: float

    def copy_s(self, kind: str, num_bytes: float) -> float:
        """How long a copy takes when its direction is free.

        Args:
            kind: "to_device" or "to_host".
            num_bytes: what it copies.
        """
        rate = self.to_device_bytes_per_s if kind == "to_device" else self.to_host_bytes_per_s
        return self.startup_s + num_bytes / rate


# A copy engine takes some microseconds to begin: assumed. Of 32 GB/s by the standard, copies from and to pinned memory reach 25
# over PCIe 4.0 (https://github.com/NVIDIA/nvbandwidth/issues/53), and of 64 over PCIe 5.0 55
# (https://developer.nvidia.com/blog/?p=115566).
#
# Memory: of two sockets with eight channels each, DDR4-3200 or DDR5-4800, a rank of eight has an eighth, of which four fifths
# are taken to be reached.
_PCIE_4 = HostLink(5e-6, 25e9, 25e9, 0.8 * 2 * 8 * 25.6e9 / 8)
_PCIE_5 = HostLink(5e-6, 55e9, 55e9, 0.8 * 2 * 8 * 38.4e9 / 8)


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
        between_nodes: those of a group with all ranks of several nodes. A group with fewer of each node reaches that part of
            the rate, as other groups use the network of the node at the same time.
        peak_flops_per_s: of matrix products without sparsity, by data sheet, as :attr:`flops_per_s`; empty: not known.
        attention_flops_per_s: of fused attention, as :attr:`flops_per_s`; other dtypes, and all if empty: as products.
        score_s: what attention takes for each score besides its products, by dtype; of others nothing.
        operation_s: what a pointwise operation takes for an element that is in a cache. It counts where it is more than memory.
        segment_s: what the host takes for each segment of a graph, where nothing hides that.
        graph_s: what it takes for each call of a graph that communicates.
        library: "nccl" if its algorithms' time to start adds to the links', which grows with the group; else empty.
        host: copies between the device and its host; if nothing else is known, over 16 lanes of PCIe 4.0.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    kernel_s: float
    ranks_per_node: int
    within_node: Links
    between_nodes: Links
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    attention_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    library: str = ""
    score_s: Mapping[str, float] = field(default_factory=dict)
    operation_s: float = 0.0
    segment_s: float = 0.0
    graph_s: float = 0.0
    host: HostLink = _PCIE_4

    def rate(self, dtype: str, *, attention: bool = False) -> float:
        """The flops a second of matrix products, or of fused attention."""
        products = self.flops_per_s.get(dtype, self.flops_per_s["float32"])
        return self.attention_flops_per_s.get(dtype, products) if attention else products

    def peak(self, dtype: str) -> float:
        """The flops a second of matrix products at best; where the data sheet is not known, those that it sustains."""
        return self.peak_flops_per_s.get(dtype, self.flops_per_s[dtype])

    def transfer_s(self, kind: str, traffic: float, layout: GroupLayout) -> float:
        """How long a collective is in flight when it has its wires for itself.

        Args:
            kind: "all_gather", "reduce_scatter" or "all_reduce".
            traffic: the bytes that each rank sends, as :func:`sent_bytes` counts them.
            layout: of its group. Without other ranks, nothing takes time.
        """
        if layout.size == 1:
            return 0.0
        return min(way.startup_s + traffic / way.bytes_per_s for way in self.ways(kind, layout))

    def taken_s(self, kind: str, traffic: float, layout: GroupLayout) -> float:
        """The time that a collective takes from the compute that hides it."""
        if layout.size == 1:
            return 0.0
        link = self.link(kind, layout)
        in_flight = self.transfer_s(kind, traffic, layout) if link.taken_part else 0.0
        return link.taken_s + traffic * link.taken_s_per_byte + in_flight * link.taken_part

    def ways(self, kind: str, layout: GroupLayout) -> list[Way]:
        """What a collective of two or more ranks takes in the ways that there are, of which the fastest runs."""
        link, nodes = self.link(kind, layout), layout.nodes(self.ranks_per_node)
        part = layout.per_node(self.ranks_per_node) / self.ranks_per_node if nodes > 1 else 1.0
        own = Way(link.latency_s + link.hop_s * (layout.size - 2), link.bytes_per_s * part)
        if not self.library:
            return [own]
        found = nccl.ways(kind, layout.size, nodes, own.bytes_per_s)
        return [Way(own.startup_s + way.startup_s, way.bytes_per_s, way.name) for way in found]

    def knee_bytes(self, kind: str, layout: GroupLayout) -> float:
        """The traffic that takes as long as the start of a collective, in the way for large messages."""
        if layout.size == 1:
            return 0.0
        way = max(self.ways(kind, layout), key=lambda way: way.bytes_per_s)
        return way.startup_s * way.bytes_per_s

    def wire(self, layout: GroupLayout) -> str:
        """What the collectives of a group share with those of other groups: all that is between nodes, or inside of one."""
        return "network" if layout.nodes(self.ranks_per_node) > 1 else "node"

    def link(self, kind: str, layout: GroupLayout) -> Link:
        """The link of a group."""
        links = self.between_nodes if layout.nodes(self.ranks_per_node) > 1 else self.within_node
        return getattr(links, kind)

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
    # Of files that were written before copies were measured, the default.
    host = {"host": HostLink(**values["host"])} if "host" in values else {}
    return Hardware(**{**values, **links, **host})


def sent_bytes(kind: str, unsharded_bytes: Any, size: Any) -> Any:
    """The bytes that each rank sends for a collective, in a ring.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        unsharded_bytes: of the larger of what it takes and what it gives; a number, an array or an expression, as the result.
        size: of the group, likewise.
    """
    traffic = unsharded_bytes * (size - 1) / size
    return 2 * traffic if kind == "all_reduce" else traffic


# Of what a data sheet says of memory, kernels that stream reach nine tenths: 2.18 of the 2.4 TB/s of an H100 with HBM2e
# (https://github.com/meta-pytorch/torchrec/pull/4637).
_MEMORY_PART = 0.9
# What a kernel takes besides, in a stream that always has the next one: assumed, and next to nothing in a large model.
_KERNEL_S = 4e-6
# The largest rate of any shape (https://github.com/stas00/ml-engineering, compute/accelerator: "maximum achievable matmul
# flops", means after a warm-up) is not that of the shapes of a model: cuBLAS reaches 257 of the A100's 271 TFLOP/s for large
# squares of normally distributed numbers (https://www.thonking.ai/p/strangely-matrix-multiplications).
_PRODUCT_PART = 257 / 271
# Thread blocks of NCCL that run while a collective is in flight, one for each channel, taken to keep a multiprocessor each: 16
# on nodes of H100 (https://github.com/NVIDIA/nccl/issues/1218). DeepSeek-V3 communicates with 20 (arXiv:2412.19437).
_CHANNELS = 16
# Of a port of 400 Gbit/s NCCL reaches 46 to 48 GB/s (https://github.com/NVIDIA/nccl-tests/issues/290); of a slower port the
# same part.
_PORT_PART = 47 / 50
_PORTS = 8


@dataclass(frozen=True)
class _Sheet:
    """Numbers of a GPU, in TFLOP/s and GB/s.

    Attributes:
        half, single, double: peaks of products without sparsity, by data sheet; in half precision by tensor cores.
        best_half, best_single: the best measured.
        attention: of fused attention in half precision.
        memory: by data sheet.
        ring: bus bandwidth of a ring of NCCL over NVLink.
        port: of a network adapter, by data sheet.
        multiprocessors: how many it has.
        host: copies between it and its host.
    """

    half: float
    single: float
    double: float
    best_half: float
    best_single: float
    attention: float
    memory: float
    ring: float
    port: float
    multiprocessors: int
    host: HostLink


def _gpu(name: str, sheet: _Sheet) -> Hardware:
    half, single = sheet.best_half * _PRODUCT_PART * 1e12, sheet.best_single * 1e12
    taken = _CHANNELS / sheet.multiprocessors
    near = Link(0.0, sheet.ring * 1e9, taken_part=taken)
    # A ring of all ranks leaves a node through all of its adapters, and visits each rank over NVLink.
    far = Link(0.0, min(sheet.ring, _PORTS * sheet.port * _PORT_PART) * 1e9, taken_part=taken)
    return Hardware(
        name,
        {"bfloat16": half, "float16": half, "float32": single, "float64": single / 2},
        sheet.memory * _MEMORY_PART * 1e9,
        kernel_s=_KERNEL_S,
        ranks_per_node=8,
        within_node=Links(near, near, near),
        between_nodes=Links(far, far, far),
        peak_flops_per_s={
            "bfloat16": sheet.half * 1e12,
            "float16": sheet.half * 1e12,
            "float32": sheet.single * 1e12,
            "float64": sheet.double * 1e12,
        },
        attention_flops_per_s={"bfloat16": sheet.attention * 1e12, "float16": sheet.attention * 1e12},
        library="nccl",
        host=sheet.host,
    )


# Eight GPUs a node, all connected by NVLink, each with one network adapter (InfiniBand HDR for A100, else NDR) and 16 lanes of
# PCIe to the host: 4.0 for A100, else 5.0.
#
# Peaks, memory, multiprocessors: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200.
# Best products in half precision: ml-engineering, as above; H200 is listed as H100.
# In single precision: 51.9 of H100's 67 TFLOP/s (https://github.com/zzc0721/torch-performance-test-data/issues/79); of the
# others, whose kernels we found no measurement of, the same part of the peak.
# Attention: forward together with backward, which has 2.5 times the flops and is slower. FlashAttention-2, which torch has: on
# A100 73 and 63 % of the peak at best (arXiv:2307.08691); on H100 333 and 318 TFLOP/s with heads of 128 and 8k tokens, forward
# causal, backward not (arXiv:2407.08608, figures 5 and 6). On B200 torch's attention reaches 719 forward
# (https://github.com/facebookexperimental/triton/pull/854); backward is taken to be slower as on H100.
# Rings: 16 GiB, measured with nccl-tests and the like: A100 235 GB/s, H200 361 (H100 has the same NVLink), B200 682
# (ml-engineering, network). Four nodes of H200 reach 365 there, four of B200 382, as the model says.
_GPUS = {
    "A100": _gpu("A100", _Sheet(312, 19.5, 9.7, 271.2, 15.1, 205, 2039, 235, 25, 108, _PCIE_4)),
    "H100": _gpu("H100", _Sheet(989, 67, 34, 794.5, 51.9, 322, 3350, 361, 50, 132, _PCIE_5)),
    "H200": _gpu("H200", _Sheet(989, 67, 34, 794.5, 51.9, 322, 4800, 361, 50, 132, _PCIE_5)),
    "B200": _gpu("B200", _Sheet(2250, 75, 37, 1745, 58.1, 695, 8000, 682, 50, 148, _PCIE_5)),
}
# No particular machine: a core or two for each rank, loopback between them. Assumed; what matters is measured by a calibration.
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
