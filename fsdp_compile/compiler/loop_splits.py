"""Even loop splits: Inductor splits a loop of a C++ kernel only into equal parts.

A loop over ``x`` that reads at ``x // n`` becomes two, over ``x // n`` and over ``n`` (``CppScheduling.try_loop_split``). In
torch 2.11 to 2.15, the outer loop ends at ``size // n``. If ``n`` does not divide the size, the last elements are never
written, and keep what was in memory. Shards whose last block of rounded elements is not full are read in this way
(:mod:`passes.collectives.rounded_gather`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from passes.fx.torch_internals.inductor import ComputedBuffer, FloorDiv
from passes.fx.torch_internals.patches import try_loop_split


@contextlib.contextmanager
def even_loop_splits() -> Iterator[None]:
    """Prevent uneven loop splits in what is lowered inside of the ``with`` block.

    Raises:
        RuntimeError: the installed torch splits loops by other means.
    """
    if not try_loop_split.is_known():
        raise RuntimeError(
            "The installed torch splits loops of C++ kernels in a way that is not known to be right. Use a version that "
            'pyproject.toml admits, or compile with options={"lowering": "aot_eager"}.'
        )
    with try_loop_split.replaced(_unless_uneven):
        yield


def _unless_uneven(split: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Callable[[Any, Sequence[Any]], Sequence[Any]]:
    def try_loop_split(scheduling: Any, nodes: Sequence[Any]) -> Sequence[Any]:
        return nodes if any(map(_has_uneven_split, nodes)) else split(scheduling, nodes)

    return try_loop_split


def _has_uneven_split(node: Any) -> bool:
    if not isinstance(node.node, ComputedBuffer):
        return False
    _, body, _ = node.node.get_default_sizes_body()
    divisions = {division for index in body.indexing_exprs.values() for division in index.find(FloorDiv)}
    return any(
        body.var_ranges[variable] % number != 0
        for variable, number in (division.args for division in divisions)
        if variable in body.var_ranges
    )
