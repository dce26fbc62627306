"""Compile generated Triton kernels to PTX, for any architecture and without a GPU.

Triton needs a GPU only to launch kernels. Inductor's code that loads a kernel does the rest: it chooses the number of elements
of a block and the number of warps, and hands the kernel to Triton.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from passes.fx.torch_internals.inductor import inductor_config
from passes.fx.torch_internals.objects import compiled_kernel

from .pretend import device_of, pretend_cuda


def compile_kernels(kernels: Iterable[tuple[str, str]], archs: Iterable[str]) -> dict[tuple[str, str], str]:
    """Compile kernels to PTX, and the PTX to machine code, which shows that the PTX is valid.

    Args:
        kernels: name and Triton source of each.
        archs: such as "sm_80".

    Returns:
        The PTX, by name and architecture. If different kernels have one name, the later ones are numbered: ``"name#1"``.

    Raises:
        RuntimeError: a kernel does not compile; the message names it and the architecture.
        ValueError: an architecture is not known.
    """
    named: dict[str, tuple[str, str]] = {}
    for name, source in dict.fromkeys(kernels):
        taken = sum(other == name for other, _ in named.values())
        named[f"{name}#{taken}" if taken else name] = (name, source)
    compiled = {}
    for arch in archs:
        with pretend_cuda(device_of(arch)), _loading() as folder:
            for label, (name, source) in named.items():
                try:
                    compiled[label, arch] = _compile(name, source, folder, arch)
                except Exception as error:
                    raise RuntimeError(f"The kernel {label} does not compile for {arch}: {error}") from error
    return compiled


@contextlib.contextmanager
def _loading() -> Iterator[str]:
    """Yield a folder for generated source, and have Inductor keep the PTX of loaded kernels for the duration of the block."""
    # Inductor's static launchers keep only machine code, not the PTX.
    launchers = ("use_static_triton_launcher", "use_static_cuda_launcher")
    settings = {name: False for name in launchers if hasattr(inductor_config, name)}
    with inductor_config.patch(settings), tempfile.TemporaryDirectory() as folder:
        yield folder


def _compile(name: str, source: str, folder: str, arch: str) -> str:
    # Triton reads the source of a kernel from its file.
    path = os.path.join(folder, "kernel.py")
    with open(path, "w") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: Any = getattr(module, name)
    device = device_of(arch)
    kernel.device_props = kernel.device_props._replace(
        cc=device.major * 10 + device.minor, major=device.major, multi_processor_count=device.multi_processor_count
    )
    return compiled_kernel(kernel).asm["ptx"]
