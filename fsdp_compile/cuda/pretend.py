"""Pretend to have a CUDA device of some architecture, for tracing and code generation on machines that may have none.

Fake tensors on ``cuda`` have shapes and no memory. Nevertheless torch asks about the device, in four places: Python functions
of ``torch.cuda``, C++'s registry of devices, C++'s autograd engine, and Triton's driver. :func:`pretend_cuda` replaces all four
while its ``with`` block runs. On a machine with a device, it replaces only answers about the architecture.

Nothing stays: patches are undone, and caches that hold an answer are emptied, also after an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from passes.fx.torch_internals.aot import UniformValueConstantFolder
from passes.fx.torch_internals.core import FakeTensorMode, TorchDispatchMode, fake_tensor, pytree
from passes.fx.torch_internals.dynamo import device_interface
from passes.fx.torch_internals.inductor import GraphLowering, inductor_config
from passes.fx.torch_internals.objects import replace_driver

from .autograd import run_backward


@dataclass(frozen=True)
class CudaDevice:
    """The properties of a device that Inductor reads, with the names and units of ``torch.cuda.get_device_properties()``.

    Source: CUDA C++ Programming Guide, "Compute Capabilities"; NVIDIA's white papers for the number of multiprocessors.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    total_memory: int
    L2_cache_size: int
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


#: A device for each architecture. Shared memory, memory and cache are in bytes.
DEVICES = {
    "sm_80": CudaDevice("NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 << 10, 80 << 30, 40 << 20),
    "sm_90": CudaDevice("NVIDIA H100 80GB HBM3", 9, 0, 132, 227 << 10, 80 << 30, 50 << 20),
    "sm_100": CudaDevice("NVIDIA B200", 10, 0, 148, 227 << 10, 180 << 30, 126 << 20),
}


def device_of(arch: str) -> CudaDevice:
    """Return the device of :data:`DEVICES` for an architecture, such as "sm_90".

    Raises:
        ValueError: the architecture is not known.
    """
    if arch not in DEVICES:
        raise ValueError(f"arch={arch!r} is not known; known are: {', '.join(DEVICES)}.")
    return DEVICES[arch]


def require_triton() -> None:
    """Raise an error unless Triton is installed.

    Raises:
        RuntimeError: Triton is not installed.
    """
    try:
        importlib.import_module("triton.compiler")
    except ImportError as error:
        raise RuntimeError(
            "Code for CUDA is written in Triton, which is not installed (torch's CPU build comes without it). Install it with: "
            "pip install 'fsdp-compile[cuda-code]', or pip install triton. It needs no GPU."
        ) from error


# Functions that cache answers about devices, by module.
_CACHED = {
    "torch._inductor.codecache": ("CacheBase.get_system",),
    "torch._inductor.utils": (
        "get_gpu_type",
        "is_big_gpu",
        "get_max_num_sms",
        "using_b200",
        "get_device_tflops",
        "get_gpu_dram_gbps",
        "get_gpu_shared_memory",
    ),
    "torch._inductor.comm_analysis": ("_has_nvlink", "get_gpu_type"),
    "torch._inductor.kernel.mm": ("_is_sm7x_or_older_gpu",),
    "torch._inductor.runtime.hints": ("DeviceProperties.create",),
    "torch.utils._triton": (
        "_device_supports_tma",
        "has_datacenter_blackwell_tma_device",
        "has_triton",
        "has_triton_experimental_host_tma",
        "has_triton_stable_tma_api",
        "has_triton_tensor_descriptor_host_tma",
        "has_triton_tma",
        "has_triton_tma_device",
        "triton_backend",
        "triton_hash_with_backend",
    ),
}


def _forget_devices() -> None:
    """Empty torch's caches of answers about devices. Not all of them exist in all versions of torch."""
    for module_name, names in _CACHED.items():
        for name in names:
            found: Any = sys.modules.get(module_name)
            for part in name.split("."):
                found = getattr(found, part, None)
            clear = getattr(found, "cache_clear", None)
            if clear is not None:
                clear()
    device_interface.caching_worker_device_properties.pop("cuda", None)
    device_interface.caching_worker_current_devices.pop("cuda", None)


@contextlib.contextmanager
def _python_functions(device: CudaDevice, has_device: bool) -> Iterator[None]:
    """Replace functions of ``torch.cuda``, and the interface that Dynamo and Inductor use instead of ``torch.cuda``."""
    # Makes torch's own interfaces first, which look for real devices.
    list(device_interface.get_registered_device_interfaces())

    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: device.capability,
        "get_device_name": lambda *_: device.name,
    }
    if not has_device:
        answers |= {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "synchronize": lambda *_: None,
            # For guards that switch devices: there is only one.
            "_exchange_device": lambda _: 0,
            "_maybe_exchange_device": lambda _: 0,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            # Dynamo saves and restores the random state around a trace.
            "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8, device="cpu"),
            "set_rng_state": lambda *_: None,
        }
    # The interface holds references to torch's functions, so patching ``torch.cuda`` is not enough.
    interface = device_interface.CudaInterface
    methods = {name.removeprefix("_"): staticmethod(answer) for name, answer in answers.items()}
    methods["get_compute_capability"] = staticmethod(lambda *_: device.major * 10 + device.minor)
    worker = type("Worker", (interface.Worker,), methods)
    pretended = type("PretendedInterface", (interface,), {**methods, "Worker": worker})
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        if not has_device:
            stack.enter_context(mock.patch.object(torch.distributed, "is_nccl_available", lambda: True))
        interfaces = dict.fromkeys(("cuda", "cuda:0"), pretended)
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, interfaces))
        yield


_CUDA, _META, _NUM_DEVICE_TYPES = 1, 14, 21  # c10/core/DeviceType.h


def _not_meta(value: Any) -> Any:
    return torch.device("cuda", 0) if isinstance(value, torch.device) and value.type == "meta" else value


@contextlib.contextmanager
def _device_registry() -> Iterator[None]:
    """Give ``cuda`` the device guard of the meta device, which does nothing, unless it has one.

    C++ asks the guard for the current device when Python indexes a tensor, and for the stream when autograd records an
    operator. A CUDA build without a device gives fake tensors a guard that does nothing, too (``ensureCUDADeviceGuardSet``).
    The CPU build has no guard, and fails.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    if before is None:
        guards[_CUDA] = guards[_META]
    dispatch = FakeTensorMode.dispatch
    moves = (torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default)

    def dispatch_on_cuda(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in moves:
            # ``tensor.to("cuda")`` asks the guard for the current device, which is meta.
            args, kwargs = pytree.tree_map(_not_meta, (args, kwargs or {}))
        return dispatch(mode, func, types, args, kwargs)

    try:
        # Fake modes also ask torch.cuda.is_available(). They must not compute constants on the device, nor initialise it.
        with (
            mock.patch.object(FakeTensorMode, "avoid_device_init", True),
            mock.patch.object(FakeTensorMode, "dispatch", dispatch_on_cuda),
            mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None),
        ):
            yield
    finally:
        guards[_CUDA] = before


@contextlib.contextmanager
def _autograd_engine() -> Iterator[None]:
    """Run backwards in Python: torch's engine asks for the stream of each gradient, which fails without a device."""
    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", run_backward),
    ):
        yield


class _ConstantsOnCpu(TorchDispatchMode):
    """A mode that makes tensors on the CPU instead of on the device that the call names."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = pytree.tree_map(moved, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _constant_folding() -> Iterator[None]:
    """Fold uniform constants on the CPU: Inductor makes real tensors of one element for them, on the device in the graph."""
    fold = UniformValueConstantFolder.run

    def run(folder: Any, *args: Any, **kwargs: Any) -> Any:
        with _ConstantsOnCpu():
            return fold(folder, *args, **kwargs)

    with mock.patch.object(UniformValueConstantFolder, "run", run):
        yield


@contextlib.contextmanager
def _triton_driver(device: CudaDevice) -> Iterator[None]:
    """Set a driver of Triton that gives ``device`` as the target of code generation. The real driver needs libcuda."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from passes.fx.torch_internals.triton import triton_helpers

    target = GPUTarget("cuda", device.major * 10 + device.minor, device.warp_size)
    pretended = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    active = replace_driver(driver, pretended)
    try:
        # Generated source would set the real driver when it is loaded.
        with mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
            yield
    finally:
        replace_driver(driver, active)


_pretending = threading.Lock()


@contextlib.contextmanager
def pretend_cuda(device: CudaDevice, *, triton: bool = True) -> Iterator[None]:
    """Pretend to torch and Triton that ``cuda:0`` is ``device``, for the duration of the block.

    Args:
        device: the device, such as one of :data:`DEVICES`.
        triton: whether code is to be generated. With False, Triton need not be installed.

    Raises:
        RuntimeError: Triton is needed and not installed, or another call in this process is pretending.
    """
    if triton:
        require_triton()
    if not _pretending.acquire(blocking=False):
        raise RuntimeError(
            "This process pretends to have a CUDA device already, in another thread, or further up in this one. What is "
            "replaced meanwhile is replaced for all threads: call one of cuda_code(), CudaCode.ptx(), explain() at a time."
        )
    has_device = torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        # Registered first, so that they run last.
        stack.callback(_pretending.release)
        stack.callback(_forget_devices)
        stack.enter_context(_python_functions(device, has_device))
        # Inductor would measure whether to pad operands of a product.
        stack.enter_context(inductor_config.patch(shape_padding=False))
        if triton:
            stack.enter_context(_triton_driver(device))
        if not has_device:
            stack.enter_context(_device_registry())
            stack.enter_context(_autograd_engine())
            stack.enter_context(_constant_folding())
        _forget_devices()
        yield


class _Generated(BaseException):
    """Carries source out of Inductor before it is loaded. A BaseException, as Inductor wraps each Exception."""


def source_of(lower: Callable[[], object]) -> str:
    """Return the source that Inductor generates in ``lower``, without loading it.

    Args:
        lower: makes Inductor lower a graph.
    """

    def stop(source: str) -> None:
        raise _Generated(source)

    try:
        with mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)):
            lower()
    except _Generated as generated:
        return generated.args[0]
    raise AssertionError("Inductor gave no source.")
