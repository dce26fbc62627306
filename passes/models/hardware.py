"""Hardware: the rates and latencies of a machine that the cost model needs.

:func:`known_hardware` has a table of common machines. ``python -m fsdp_compile.calibrate`` measures others and writes a file
that :meth:`Hardware.load` reads. Rates are sustained rates, not those of a data sheet.
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
from .nccl import CollectiveAlgorithm


@dataclass(frozen=True)
class Link:
    """The cost of one kind of collective.

    A collective is in flight for ``latency_s + hop_s * (ranks - 2) + traffic / bytes_per_s``. With NCCL, the startup of its
    algorithms adds to that (:attr:`Hardware.library`). A collective also slows down the compute that hides it, by ``taken_s +
    traffic * taken_s_per_byte`` and by ``taken_part`` of the time in flight. Gloo's threads run on the cores that compute, and
    NCCL's kernels on some of a GPU's multiprocessors.

    The traffic is the bytes that each rank sends. With n ranks that is (n - 1) / n of the unsharded buffer for an all-gather or
    a reduce-scatter, and twice as much for an all-reduce. So the rate does not depend on the number of ranks; nccl-tests call
    it bus bandwidth.
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
    """The link between a device and pinned memory of its host. Each direction is a wire of its own.

    Attributes:
        startup_s: seconds to start a copy.
        to_device_bytes_per_s, to_host_bytes_per_s: the rate of a copy in each direction.
        memory_bytes_per_s: the rate of the host's memory for one rank, while the host computes for the node's other ranks, too.
    """

    startup_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    memory_bytes_per_s: float

    def copy_s(self, kind: str, num_bytes: float) -> float:
        """Return the seconds that a copy takes when no other goes in its direction.

        Args:
            kind: "to_device" or "to_host".
            num_bytes: the bytes to copy.
        """
        rate = self.to_device_bytes_per_s if kind == "to_device" else self.to_host_bytes_per_s
        return self.startup_s + num_bytes / rate


# A copy engine takes some microseconds to start: assumed. Copies from and to pinned memory reach 25 of the standard's 32 GB/s
# over PCIe 4.0 (https://github.com/NVIDIA/nvbandwidth/issues/53), and 55 of 64 GB/s over PCIe 5.0
# (https://developer.nvidia.com/blog/?p=115566).
#
# Memory: two sockets with eight channels each, of DDR4-3200 with PCIe 4.0 and DDR5-4800 with PCIe 5.0. Each of eight ranks has
# an eighth, and is assumed to reach four fifths of it.
_PCIE_4 = HostLink(5e-6, 25e9, 25e9, 0.8 * 2 * 8 * 25.6e9 / 8)
_PCIE_5 = HostLink(5e-6, 55e9, 55e9, 0.8 * 2 * 8 * 38.4e9 / 8)


@dataclass(frozen=True)
class Hardware:
    """A machine, seen from one rank.

    Attributes:
        name: the name of the machine.
        flops_per_s: flops per second of matrix products, by the name of the dtype. Other dtypes count as float32.
        bytes_per_s: bytes per second of the device's memory.
        kernel_s: seconds to launch a kernel or to start a collective.
        ranks_per_node: the number of ranks that share a node.
        within_node: the collectives of a group inside one node.
        between_nodes: the collectives of a group with all ranks of several nodes. A group with a part of each node's ranks
            reaches that part of the rate, as other groups use the node's network at the same time.
        peak_flops_per_s: like :attr:`flops_per_s`, the peaks of the data sheet without sparsity; empty: not known.
        attention_flops_per_s: like :attr:`flops_per_s`, of fused attention. Dtypes that it lacks have the rate of products.
        score_s: seconds that attention takes for each score besides its products, by dtype. Other dtypes have 0.
        operation_s: seconds of a pointwise operation for an element in a cache. They count if memory takes less time.
        segment_s: seconds of the host for each segment of a graph, if nothing hides them; else 0.
        graph_s: seconds of the host for each call of a graph that communicates, if nothing hides them; else 0.
        library: "nccl" if the startup of its algorithms, which grows with the group, adds to the links' latency; else empty.
        host: copies between the device and its host. The default is 16 lanes of PCIe 4.0.
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
        """Return the flops per second of matrix products, or of fused attention."""
        products = self.flops_per_s.get(dtype, self.flops_per_s["float32"])
        return self.attention_flops_per_s.get(dtype, products) if attention else products

    def peak(self, dtype: str) -> float:
        """Return the peak flops per second of matrix products; without a data sheet, the sustained ones."""
        return self.peak_flops_per_s.get(dtype, self.flops_per_s[dtype])

    def transfer_s(self, kind: str, traffic: float, layout: GroupLayout) -> float:
        """Return the seconds that a collective is in flight when it has its wire for itself.

        Args:
            kind: "all_gather", "reduce_scatter" or "all_reduce".
            traffic: the bytes that each rank sends, as :func:`sent_bytes` counts them.
            layout: the layout of its group. A group of one rank takes no time.
        """
        if layout.size == 1:
            return 0.0
        return min(way.startup_s + traffic / way.bytes_per_s for way in self.algorithms(kind, layout))

    def taken_s(self, kind: str, traffic: float, layout: GroupLayout) -> float:
        """Return the seconds by which a collective slows down the compute that hides it (see :meth:`transfer_s`)."""
        if layout.size == 1:
            return 0.0
        link = self.link(kind, layout)
        in_flight = self.transfer_s(kind, traffic, layout) if link.taken_part else 0.0
        return link.taken_s + traffic * link.taken_s_per_byte + in_flight * link.taken_part

    def algorithms(self, kind: str, layout: GroupLayout) -> list[CollectiveAlgorithm]:
        """List the ways to run a collective of two or more ranks, of which the fastest counts."""
        link, nodes = self.link(kind, layout), layout.nodes(self.ranks_per_node)
        part = layout.per_node(self.ranks_per_node) / self.ranks_per_node if nodes > 1 else 1.0
        own = CollectiveAlgorithm(link.latency_s + link.hop_s * (layout.size - 2), link.bytes_per_s * part)
        if not self.library:
            return [own]
        found = nccl.algorithms(kind, layout.size, nodes, own.bytes_per_s)
        return [CollectiveAlgorithm(own.startup_s + way.startup_s, way.bytes_per_s, way.name) for way in found]

    def knee_bytes(self, kind: str, layout: GroupLayout) -> float:
        """Return the bytes of traffic that take as long as the startup of a collective, in the way with the highest rate."""
        if layout.size == 1:
            return 0.0
        way = max(self.algorithms(kind, layout), key=lambda way: way.bytes_per_s)
        return way.startup_s * way.bytes_per_s

    def wire(self, layout: GroupLayout) -> str:
        """Return the name of the wire that a group's collectives share with other groups'.

        Groups on several nodes share the network of their nodes, and groups inside of a node its links.
        """
        return "network" if layout.nodes(self.ranks_per_node) > 1 else "node"

    def link(self, kind: str, layout: GroupLayout) -> Link:
        """Return the cost of a kind of collective for a group of this layout."""
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
            ValueError: the file does not hold the numbers of a machine.
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
    # Files from before copies were measured have no rates of them, and get the default.
    host = {"host": HostLink(**values["host"])} if "host" in values else {}
    return Hardware(**{**values, **links, **host})


def sent_bytes(kind: str, unsharded_bytes: Any, size: Any) -> Any:
    """Return the bytes that each rank sends for a collective in a ring.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        unsharded_bytes: the bytes of the larger of its input and output: a number, an array or an expression, like the result.
        size: the number of ranks of the group, likewise.
    """
    traffic = unsharded_bytes * (size - 1) / size
    return 2 * traffic if kind == "all_reduce" else traffic


# Kernels that stream reach nine tenths of the memory rate in a data sheet: 2.18 of the 2.4 TB/s of an H100 with HBM2e
# (https://github.com/meta-pytorch/torchrec/pull/4637).
_MEMORY_PART = 0.9
# Overhead of a kernel in a stream that always has the next one: assumed, and negligible in a large model.
_KERNEL_S = 4e-6
# Shapes of a model do not reach the largest rate of any shape (https://github.com/stas00/ml-engineering, compute/accelerator:
# "maximum achievable matmul flops", means after a warm-up). cuBLAS reaches 257 of the A100's 271 TFLOP/s for large squares of
# normally distributed numbers (https://www.thonking.ai/p/strangely-matrix-multiplications).
_PRODUCT_PART = 257 / 271
# NCCL runs a thread block for each channel while a collective is in flight, assumed to occupy a multiprocessor each: 16 on
# nodes of H100 (https://github.com/NVIDIA/nccl/issues/1218). DeepSeek-V3 communicates with 20 (arXiv:2412.19437).
_CHANNELS = 16
# NCCL reaches 46 to 48 GB/s over a port of 400 Gbit/s (https://github.com/NVIDIA/nccl-tests/issues/290). A slower port is
# assumed to reach the same part.
_PORT_PART = 47 / 50
_PORTS = 8


@dataclass(frozen=True)
class _Sheet:
    """The numbers of a GPU, in TFLOP/s and GB/s.

    Attributes:
        half, single, double: peaks of products without sparsity, by data sheet; in half precision by tensor cores.
        best_half, best_single: the highest measured rates of products.
        attention: the rate of fused attention in half precision.
        memory: the rate of its memory, by data sheet.
        ring: the bus bandwidth of a ring of NCCL over NVLink.
        port: the rate of a network adapter, by data sheet.
        multiprocessors: the number of its multiprocessors.
        host: copies between the GPU and its host.
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
# Best products in single precision: 51.9 of H100's 67 TFLOP/s
# (https://github.com/zzc0721/torch-performance-test-data/issues/79). We found no measurement for the kernels of other GPUs,
# which get the same part of their peak. Attention: the rate of forward and backward together. Backward has 2.5 times the flops
# of forward, and a lower rate. torch has FlashAttention-2. On A100, its forward and backward reach 73 and 63 % of the peak at
# best (arXiv:2307.08691). On H100, they reach 333 and 318 TFLOP/s with heads of 128 and 8k tokens, forward causal, backward not
# (arXiv:2407.08608, figures 5 and 6). On B200, torch's attention reaches 719 TFLOP/s forward
# (https://github.com/facebookexperimental/triton/pull/854); backward is assumed to be slower as on H100. Rings: 16 GiB,
# measured with nccl-tests and the like: A100 235 GB/s, H200 361 (H100 has the same NVLink), B200 682 (ml-engineering, network).
# Four nodes of H200 reach 365 GB/s there, four of B200 382, as the model predicts.
_GPUS = {
    "A100": _gpu("A100", _Sheet(312, 19.5, 9.7, 271.2, 15.1, 205, 2039, 235, 25, 108, _PCIE_4)),
    "H100": _gpu("H100", _Sheet(989, 67, 34, 794.5, 51.9, 322, 3350, 361, 50, 132, _PCIE_5)),
    "H200": _gpu("H200", _Sheet(989, 67, 34, 794.5, 51.9, 322, 4800, 361, 50, 132, _PCIE_5)),
    "B200": _gpu("B200", _Sheet(2250, 75, 37, 1745, 58.1, 695, 8000, 682, 50, 148, _PCIE_5)),
}
# No particular machine: a core or two for each rank, and loopback between ranks. All assumed; a calibration measures real ones.
_GLOO_LINK = Link(300e-6, 0.7e9, taken_s=300e-6, taken_s_per_byte=1.2e-9)
_GLOO = Links(_GLOO_LINK, _GLOO_LINK, _GLOO_LINK)
_CPU = Hardware("cpu", {"float32": 50e9, "float64": 25e9}, 10e9, 5e-6, 8, _GLOO, _GLOO)


def known_hardware(device_type: str, device_name: str) -> Hardware:
    """Look a device up in the table of known machines.

    Args:
        device_type: "cpu" (any, with Gloo) or "cuda".
        device_name: the result of ``torch.cuda.get_device_name()``.

    Raises:
        ValueError: the table does not have the device.
    """
    if device_type == "cpu":
        return _CPU
    for name, hardware in _GPUS.items():
        # GH200 is another machine than H200, so names match as whole words. A card in a PCIe slot has no NVLink.
        if re.search(rf"\b{name}\b", device_name) and "PCI" not in device_name.upper():
            return hardware
    raise ValueError(
        f"options['schedule'] = 'auto' does not know the device {device_name or device_type!r}; it knows {', '.join(_GPUS)} "
        "with NVLink. Measure it: torchrun --nproc-per-node <ranks> -m fsdp_compile.calibrate"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as :class:`Hardware` spells it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
