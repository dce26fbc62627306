"""Packed words: round the shards of a bucket and write its message in one kernel, on a GPU.

A message consists of rounded numbers of one byte, and of scales and other numbers of several bytes. A kernel of Inductor's can
write its result straight into a ``cat``, but only in the dtype of the ``cat``. Before Inductor views a value in a dtype of
another size, it writes the value to memory. So one kernel would read the numbers for the scales, and a second kernel would read
them again, with the scales. In words of 32 bits everything has one size: a scale is one word, and four rounded numbers are one.

Before: a ``cat`` of bytes that a collective sends: numbers rounded in groups with a scale each, the scales, and perhaps numbers
        that are not rounded.
After:  a ``cat`` of words, viewed as the same bytes. The largest magnitude of a group is computed from four interleaved parts
        of the group, so that its kernel loops over words, too. The kernel reads each number once, and writes words and scales.
        Numbers that are not rounded become words by one foreach copy (:mod:`passes.transforms.foreach_copies`).

Leaves alone graphs on the CPU; messages without scales; messages that are not whole words (an odd number of 16-bit numbers, a
group that is not a multiple of four); groups of fewer than 32 or more than 256 numbers, for which Inductor writes several
kernels, or words twice; messages with a magnitude of a whole tensor (NVFP4's factor); and stochastic rounding, whose result
Inductor would write first and pack in another kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..fx.emit import emit
from ..fx.graph import is_view
from ..ir.work import Role, role, work
from .foreach_copies import copy_all, is_on_gpu

_aten = torch.ops.aten

#: The group sizes for which one kernel of Inductor's finds the largest magnitudes and writes the words. Inductor unrolls
#: smaller groups, and writes the words of larger ones twice or in a kernel of their own.
GROUPS = range(32, 257)

#: The most operators between a magnitude and the numbers that are rounded with it. Inductor recomputes a number for each of
#: the four places in a word. A number that takes more operators is written to memory first.
MAX_OPERATORS = 8

_WORD = torch.int32
_SENDS = (Role.START_GATHER, Role.START_REDUCE, Role.ALL_REDUCE)
# Views that keep the order of bytes.
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.alias.default, _aten.view.dtype}


def pack_words(graph: Graph) -> set[Node]:
    """Round the numbers that a collective sends, and write its message, with one kernel. In place.

    Returns:
        The ``cat`` nodes of words. The kernels that compute their inputs also write them into the message.
    """
    joined = set()
    for cat in graph.find_nodes(op="call_function", target=_aten.cat.default):
        if role(cat) not in _SENDS or not is_on_gpu(cat) or cat.meta["val"].dtype != torch.uint8:
            continue
        parts: list[Node] = list(cat.args[0])  # type: ignore[arg-type]
        numbers = list(map(_numbers_of, parts))
        magnitudes = {node for node in _own_sources(numbers, cat) if node.target == _aten.amax.default}
        operators = [_operators_behind(magnitudes, _own_sources([source], cat)) for source in numbers]
        if (
            magnitudes
            and all(map(_is_of_quarters, magnitudes))
            and all(map(_are_words, numbers, parts))
            and max(operators) <= MAX_OPERATORS
        ):
            for node in sorted(magnitudes):
                _take_quarters(graph, node)
            as_they_are = [place for place, count in enumerate(operators) if not count]
            joined.add(_join_words(graph, cat, parts, numbers, as_they_are))
    graph.eliminate_dead_code()
    return joined


def _own_sources(nodes: list[Node], cat: Node) -> list[Node]:
    """Return ``nodes`` and the nodes that they are computed from, in graph order, limited to the work that ``cat`` is part of.

    Other work may have magnitudes, too: gradients may depend on parameters that were rounded.
    """
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and work(node) == work(cat):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(found)


def _operators_behind(magnitudes: set[Node], sources: list[Node]) -> int:
    """Count the nodes of ``sources`` that are, or depend on, ``magnitudes``, without views."""
    found: set[Node] = set()
    for node in sources:
        if node in magnitudes or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return sum(not is_view(node) for node in found)


def _numbers_of(part: Node) -> Node:
    """Return the numbers that ``part`` is a view of. The views keep the order of all bytes, whatever their shape and dtype."""
    while part.target in _VIEWS:
        part = part.all_input_nodes[0]
    return part


def _are_words(numbers: Node, part: Node) -> bool:
    """Return whether rows of ``numbers``, and rows of ``part`` in the message, consist of whole words."""
    value = numbers.meta["val"]
    last = value.shape[-1] if value.dim() else 1
    return last * value.dtype.itemsize % _WORD.itemsize == 0 and part.meta["val"].shape[-1] % _WORD.itemsize == 0


def _is_of_quarters(magnitude: Node) -> bool:
    if len(magnitude.args) < 2:
        # The magnitude of a whole tensor, such as NVFP4's factor.
        return False
    values, dims = magnitude.args[:2]
    group = values.meta["val"].shape[-1]  # type: ignore[union-attr]
    return dims == [-1] and magnitude.args[2:] in ((), (False,)) and group % 4 == 0 and group in GROUPS


def _take_quarters(graph: Graph, magnitude: Node) -> None:
    with graph.inserting_before(magnitude):
        magnitude.replace_all_uses_with(emit(graph, largest_of_quarters, magnitude.args[0], work=work(magnitude)))


def _join_words(graph: Graph, cat: Node, parts: list[Node], numbers: list[Node], as_they_are: list[int]) -> Node:
    dim = cat.args[1] if len(cat.args) > 1 else 0
    with graph.inserting_before(cat):
        words = []
        for part, source in zip(parts, numbers, strict=True):
            *rows, last = part.meta["val"].shape
            words.append(emit(graph, words_of, source, work=work(cat), shape=(*rows, last // _WORD.itemsize)))
        if len(as_they_are) > 1:
            for place, copy in zip(as_they_are, copy_all(graph, [words[place] for place in as_they_are], cat), strict=True):
                words[place] = copy
        seen = emit(graph, _joined, words, work=work(cat), dim=dim)
    cat.replace_all_uses_with(seen)
    graph.erase_node(cat)
    return seen.args[0]


def largest_of_quarters(values: Tensor) -> Tensor:
    """Compute ``values.amax(-1)`` from four interleaved parts. The last dimension is a multiple of four."""
    first, second, third, fourth = _interleaved(values, 4)
    return torch.maximum(torch.maximum(first, second), torch.maximum(third, fourth)).amax(-1)


def words_of(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pack the bytes of numbers into words of 32 bits, the lowest byte first.

    Args:
        numbers: of a dtype of 1, 2, or a multiple of 4 bytes. If it has fewer than 4, each row consists of whole words.
        shape: the shape of the words.
    """
    size = numbers.dtype.itemsize
    if size >= _WORD.itemsize:
        return numbers.view(_WORD).view(shape)
    bits = {1: torch.uint8, 2: torch.int16}[size]
    words, *others = (part.view(bits).to(_WORD) for part in _interleaved(numbers, _WORD.itemsize // size))
    if size == 2:
        # The cast has repeated the sign in the bits where the other half belongs.
        words = torch.bitwise_and(words, 0xFFFF)
    for place, part in enumerate(others, start=1):
        words = torch.bitwise_or(words, torch.bitwise_left_shift(part, 8 * size * place))
    return words.view(shape)


def _interleaved(values: Tensor, number: int) -> list[Tensor]:
    """Split ``values`` into ``number`` interleaved parts, ``[..., elements / number]`` each."""
    side_by_side = values.unflatten(-1, (-1, number))
    # Indexing would query the device, which may be a pretended one.
    return [side_by_side.select(-1, place) for place in range(number)]


def _joined(words: list[Tensor], dim: int) -> Tensor:
    return torch.cat(words, dim).view(torch.uint8)
