"""The replacement of torch's ``fully_shard`` by this library's, for libraries that call torch's."""

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
def patch_fsdp2() -> Iterator[None]:
    """Replace torch's ``fully_shard`` by this library's for the duration of the block.

    The block is for libraries that shard a model for their users. The function is replaced in torch's namespaces, and under
    every global name that a loaded module has for it. References in classes and closures stay. The replacement holds for the
    whole process, so other threads should not shard meanwhile.

    A module that is first imported in the block keeps this library's function. Models that were sharded before stay as they
    are.

    Raises:
        RuntimeError: another ``patch_fsdp2`` block runs.
    """
    if not _in_force.acquire(blocking=False):
        raise RuntimeError("patch_fsdp2() is in force already: it replaces torch's fully_shard for the whole process.")
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
    """Find the global names that loaded modules have for a function of torch's: (namespace, name)."""
    found = []
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if namespace is None or (module_name.startswith("torch.") and module_name not in NAMESPACES_OF_FULLY_SHARD):
            continue
        found += [(namespace, name) for name, value in list(namespace.items()) if value is function]
    return found
