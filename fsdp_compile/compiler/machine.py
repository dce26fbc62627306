"""Hardware numbers of this machine: given ones, measured ones, or those of the table in :mod:`passes.models.hardware`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from passes.models.hardware import Hardware, known_hardware

#: The environment variable with the path of a file that ``python -m fsdp_compile.calibrate`` wrote.
HARDWARE_VARIABLE = "FSDP_COMPILE_HARDWARE"


def device_name(device_type: str) -> str:
    """Return the name of this process's CUDA device; for other types of device, the type."""
    return torch.cuda.get_device_name() if device_type == "cuda" else device_type


def default_path(device_type: str) -> Path:
    """Return the path of a device's calibration, in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fsdp_compile" / f"hardware-{re.sub(r'[^A-Za-z0-9]+', '-', device_name(device_type))}.json"


def find_hardware(given: Hardware | str | os.PathLike[str] | None, device_type: str) -> Hardware:
    """Find the hardware numbers to schedule with.

    Returns the first of: ``given``, numbers or the file with them; the file that ``FSDP_COMPILE_HARDWARE`` names; the file of a
    calibration in the user's cache folder; the table.

    Raises:
        ValueError: a file does not hold hardware numbers, or the device is not in the table.
        FileNotFoundError: a file that was named does not exist.
    """
    if isinstance(given, Hardware):
        return given
    named = given or os.environ.get(HARDWARE_VARIABLE)
    if named:
        return Hardware.load(named)
    measured = default_path(device_type)
    return Hardware.load(measured) if measured.exists() else known_hardware(device_type, device_name(device_type))
