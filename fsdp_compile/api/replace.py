"""Libraries that call torch's ``fully_shard`` shard with this one while :func:`replacing_fsdp2` is in force."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.fsdp

from passes.fx.torch_internals.distributed import NAMESPACES_OF_FULLY_SHARD

from .sharding import fully_shard

_in_force = threading.Lock()


@contextmanager
def replacing_fsdp2() -> Iterator[None]:
    """Put this library's ``fully_shard`` in the place of torch's, for libraries that shard a model for their users.

    Replaced are the function in torch's namespaces and every global name that a loaded module has for it: not what classes and
    closures hold. It is so for the whole process: other threads should not shard meanwhile. A module that is imported for the
    first time meanwhile keeps what it imported. What was sharded before stays as it is.

    Raises:
        RuntimeError: it is in force already.
    """
    if not _in_force.acquire(blocking=False):
        raise RuntimeError("replacing_fsdp2() is in force already: it replaces torch's fully_shard for the whole process.")
    original = torch.distributed.fsdp.fully_shard
    names = _names_of(original)
    try:
        for namespace, name in names:
            namespace[name] = fully_shard
        yield
    finally:
        for namespace, name in names:
            namespace[name] = original
        _in_force.release()


def _names_of(function: Any) -> list[tuple[dict[str, Any], str]]:
    """Where loaded modules have a function of torch's: their namespaces, and the name in each."""
    found = []
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if namespace is None or (module_name.startswith("torch.") and module_name not in NAMESPACES_OF_FULLY_SHARD):
            continue
        found += [(namespace, name) for name, value in list(namespace.items()) if value is function]
    return found
