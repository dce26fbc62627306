"""Packed words: round the shards of a bucket and write its message in one kernel, on a GPU.

A message of bytes is made of rounded numbers, a byte each, and of scales and other numbers that take several. Inductor has a
kernel write what it computes into its place in a ``cat``, but only in the dtype of the ``cat``, and it takes a view in a dtype
of another size for memory that has to be there first. So it would read the numbers once for the scales, and again, with the
scales, in a second kernel. In words of 32 bits all of them are of one size: a scale is a word, four rounded numbers are one.

Before: ``cat`` of bytes that a collective sends: of numbers that were rounded in groups with a scale each, of the scales, and
        perhaps of numbers as they are.
After:  ``cat`` of words, seen as bytes: the same. The largest magnitude of a group is that of four interleaved parts of it, so
        that the kernel which finds it goes through words, too: it reads each number once, and writes words and scale.
        What is sent as it is becomes words by one foreach copy (:mod:`passes.transforms.foreach_copies`).

Leaves alone graphs on the CPU; messages in which nothing has a scale, or that are no whole words (numbers of 16 bits in odd
number, a group that is no multiple of four); groups of less than 32 or more than 256 numbers, for which Inductor writes more
than one kernel, or words twice; and rounding by chance, of which it would write the result first and pack it in another kernel.
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

#: The sizes of groups of which Inductor has one kernel find the largest magnitudes and write the words. Smaller ones it
#: unrolls; the words of larger ones it writes twice, or in a kernel of their own.
GROUPS = range(32, 257)

#: The most operators between a magnitude and the numbers that are rounded with it. Inductor computes a number anew for each of
#: its four places in a word, but one that takes many operators it writes to memory first.
MAX_OPERATORS = 8

_WORD = torch.int32
_SENDS = (Role.START_GATHER, Role.START_REDUCE, Role.ALL_REDUCE)
# Views that keep the order of bytes.
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.alias.default, _aten.view.dtype}


def pack_words(graph: Graph) -> set[Node]:
    """Round and copy in what a collective sends with one kernel. In place.

    Returns:
        The ``cat`` nodes of words: what they join, the kernels that compute it write.
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
    """``nodes`` and what they are computed from, in graph order, as far as it is the work that ``cat`` is part of.

    The rest of a graph may hold magnitudes of others: gradients come from parameters that were rounded, too.
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
    """How many of ``sources`` are computed with magnitudes, without views, magnitudes included."""
    found: set[Node] = set()
    for node in sources:
        if node in magnitudes or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return sum(not is_view(node) for node in found)


def _numbers_of(part: Node) -> Node:
    """What bytes are a view of: a view keeps the order of all bytes, whatever its shape and dtype."""
    while part.target in _VIEWS:
        part = part.all_input_nodes[0]
    return part


def _are_words(numbers: Node, part: Node) -> bool:
    """Whether numbers can be packed in rows as they are, and make rows of whole words in the message."""
    value = numbers.meta["val"]
    last = value.shape[-1] if value.dim() else 1
    return last * value.dtype.itemsize % _WORD.itemsize == 0 and part.meta["val"].shape[-1] % _WORD.itemsize == 0


def _is_of_quarters(magnitude: Node) -> bool:
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
    """``values.amax(-1)``, of a multiple of four: of the first, the second, the third and the fourth of each four."""
    first, second, third, fourth = _interleaved(values, 4)
    return torch.maximum(torch.maximum(first, second), torch.maximum(third, fourth)).amax(-1)


def words_of(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The bytes of numbers as words of 32 bits, the lower byte first.

    Args:
        numbers: of any dtype of at least a byte; where it is of less than four, words do not reach into another row.
        shape: of the words.
    """
    size = numbers.dtype.itemsize
    if size >= _WORD.itemsize:
        return numbers.view(_WORD).view(shape)
    bits = {1: torch.uint8, 2: torch.int16}[size]
    words, *others = (part.view(bits).to(_WORD) for part in _interleaved(numbers, _WORD.itemsize // size))
    if size == 2:
        # A wider number repeats the sign in front of it, where the other half belongs.
        words = torch.bitwise_and(words, 0xFFFF)
    for place, part in enumerate(others, start=1):
        words = torch.bitwise_or(words, torch.bitwise_left_shift(part, 8 * size * place))
    return words.view(shape)


def _interleaved(values: Tensor, number: int) -> list[Tensor]:
    """Each element of so many that lie side by side, ``[..., elements / number]``."""
    side_by_side = values.unflatten(-1, (-1, number))
    # Indexing would ask for the device, which may be a pretended one.
    return [side_by_side.select(-1, place) for place in range(number)]


def _joined(words: list[Tensor], dim: int) -> Tensor:
    return torch.cat(words, dim).view(torch.uint8)
