"""Numbers of bytes as users give them: an int, or text such as "80GB" or "74.5GiB"."""

from __future__ import annotations

import re
from typing import Any

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) *(?P<unit>[KMGT]?i?B)", re.IGNORECASE)
_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("B", 1000), ("IB", 1024))
    for power, prefix in enumerate("KMGT")
}


def is_size(given: Any) -> bool:
    """Return whether a value is a positive number of bytes, as an int or as text."""
    if isinstance(given, str):
        size = _SIZE.fullmatch(given.strip())
        return size is not None and float(size["number"]) > 0
    return isinstance(given, int) and not isinstance(given, bool) and given > 0


def bytes_of(given: int | str) -> int:
    """Return the number of bytes that an int, or text accepted by :func:`is_size`, stands for."""
    if isinstance(given, int):
        return given
    size = _SIZE.fullmatch(given.strip())
    assert size is not None
    return int(float(size["number"]) * _UNITS[size["unit"].upper()])
