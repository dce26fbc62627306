"""Placement: an order for the nodes of a graph in which communication hides behind compute and memory stays within a limit.

Communication moves; compute keeps its order. A collective is put before other communication, so that it cuts no segment
(:mod:`passes.lowering.segments`): each further segment costs a call, and compile time. Only to keep a memory limit, a
collective may also stand before a node that is not fusible, such as a matrix product. A kernel ends there in any case.
Collectives of one group keep their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..fx.graph import with_sources
from ..ir.work import BucketName, Role, Work, nodes_of, work
from ..models.cost_model import is_free, is_fusible
from ..models.hardware import Hardware
from ..models.memory_model import LiveBytes, MemoryModel
from ..models.timeline import Costs, Timeline, simulate

_wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Result:
    """The figures of a schedule, estimated by the models.

    Attributes:
        total_ns: the nanoseconds until the graph is done.
        exposed_ns: the nanoseconds within ``total_ns`` in which compute waits for communication.
        collectives: the number of collectives.
        peak_bytes: the most bytes that live at once.
    """

    total_ns: int
    exposed_ns: int
    collectives: int
    peak_bytes: int


@dataclass(eq=False)
class _Block:
    """Nodes that stay together.

    Attributes:
        nodes: the nodes in their order.
        work: the work of the nodes for a bucket; None: they compute.
        may_follow: whether communication may stand directly before the block without cutting a kernel.
    """

    nodes: list[Node]
    work: Work | None = None
    may_follow: bool = True

    @property
    def role(self) -> Role | None:
        return None if self.work is None else self.work.role


@dataclass(eq=False)
class _InFlight:
    """A transfer, between the block that starts it and the block that waits for it."""

    start: _Block
    wait: _Block


class Placement:
    """The blocks of a graph, and the order found for them so far."""

    def __init__(self, graph: Graph, hardware: Hardware):
        self._graph = graph
        self._costs = Costs.of(graph, hardware)
        self._memory = MemoryModel(graph)
        self._inputs = graph.find_nodes(op="placeholder")
        self._order = _cut_into_blocks(graph)
        at_work = {block.work: block for block in self._order if block.work is not None}
        self._gathers: list[_InFlight] = []
        self._reductions: list[_InFlight] = []
        for block in self._order:
            if block.work is None:
                continue
            name = block.work.bucket
            if block.role is Role.FINISH_GATHER:
                self._gathers.append(_InFlight(at_work[Work(Role.START_GATHER, name)], block))
            if block.role is Role.START_REDUCE:
                chain = [block, *(at_work.get(Work(role, name)) for role in (Role.ALL_REDUCE, Role.FINISH_REDUCE))]
                stages = [stage for stage in chain if stage is not None]
                self._reductions += [_InFlight(start, wait) for start, wait in itertools.pairwise(stages) if _waits(wait)]

    def place(self, limit: int | None) -> Result:
        """Find an order.

        Args:
            limit: the most bytes that may live at once; None: no limit. The order before the call must keep it.

        Returns:
            The figures of the order.
        """
        self._start_gathers_in_time()
        self._start_gathers_when_links_are_free()
        self._wait_for_reductions_when_they_are_over()
        if limit is not None:
            self._fit(limit)
        timeline = self._simulate()
        return Result(timeline.total, timeline.exposed, self._costs.collectives, self.live_bytes().peak)

    def write(self) -> None:
        """Put the nodes of the graph into the order that was found."""
        output = self._graph.output_node()
        for block in self._order[:-1]:
            for node in block.nodes:
                output.prepend(node)

    def live_bytes(self) -> LiveBytes:
        """Count the live bytes in the order that was found last."""
        return self._memory.live_bytes(self._nodes())

    def largest_at_peak(self) -> BucketName | None:
        """Return the bucket that holds the most bytes at the peak; None if no bucket holds any."""
        totals = [total for total, _ in self.live_bytes().timeline]
        return self._memory.largest_bucket(self._nodes(), totals.index(max(totals)))

    def _nodes(self) -> list[Node]:
        return [*self._inputs, *(node for block in self._order for node in block.nodes)]

    def _simulate(self) -> Timeline:
        return simulate(self._nodes(), self._costs)

    def _positions(self) -> dict[_Block, int]:
        return {block: index for index, block in enumerate(self._order)}

    def _move(self, anchors: Mapping[_Block, _Block]) -> None:
        """Put blocks directly before their anchors, which do not move."""
        ahead: dict[_Block, list[_Block]] = {}
        for block, anchor in anchors.items():
            ahead.setdefault(anchor, []).append(block)
        staying = [block for block in self._order if block not in anchors]
        self._order = [one for block in staying for one in (*ahead.get(block, ()), block)]

    def _collective(self, block: _Block) -> Node:
        return next(node for node in reversed(block.nodes) if node in self._costs.transfer)

    def _start_gathers_in_time(self) -> None:
        """Start gathers as late as possible, but early enough to hide them if each link carries one gather at a time."""
        self._move({reduction.wait: self._order[-1] for reduction in self._reductions})
        starts = {gather.start for gather in self._gathers}
        others = [block for block in self._order if block not in starts]
        clock = self._compute_clock(others)
        reductions = [reduction.start for reduction in self._reductions]
        needed: dict[str, int] = {}
        anchors: dict[_Block, _Block] = {}
        for gather in reversed(self._gathers):
            collective = self._collective(gather.start)
            link, duration = self._costs.link[collective], self._costs.transfer[collective]
            latest = min(clock[gather.wait], needed.get(link, clock[gather.wait])) - _with_margin(duration)
            for reduction in reductions:
                other = self._collective(reduction)
                # The reduction would keep the link busy. The gather goes first, as compute waits for it.
                if (
                    self._costs.link[other] == link
                    and clock[reduction] < latest < clock[reduction] + self._costs.transfer[other]
                ):
                    latest = clock[reduction]
                    break
            needed[link] = latest
            anchors[gather.start] = _last_by(latest, others, clock, gather.wait)
        self._move(dict(reversed(anchors.items())))

    def _compute_clock(self, blocks: Sequence[_Block]) -> dict[_Block, int]:
        """Return for each block when it runs, if compute never waits."""
        clock, now = {}, 0
        for block in blocks:
            clock[block] = now
            now += sum(self._costs.compute[node] for node in block.nodes)
        return clock

    def _start_gathers_when_links_are_free(self) -> None:
        """Start gathers no earlier than their links are free, as a buffer in a queue only takes memory."""
        timeline = self._simulate()
        position = self._positions()
        starts = {gather.start for gather in self._gathers}
        anchors: dict[_Block, _Block] = {}
        for gather in sorted(self._gathers, key=lambda gather: position[gather.start]):
            collective = self._collective(gather.start)
            anchor = None
            for block in self._order[position[gather.start] + 1 : position[gather.wait] + 1]:
                if block in starts:
                    continue
                if timeline.arrives[block.nodes[0]] > timeline.begins[collective]:
                    break
                if block.role:
                    anchor = block
                if any(self._costs.link.get(node) == self._costs.link[collective] for node in block.nodes):
                    break
            if anchor is not None:
                anchors[gather.start] = anchor
        self._move(anchors)

    def _wait_for_reductions_when_they_are_over(self) -> None:
        """Wait for reductions when they should have ended.

        Waits that start an all-reduce are placed first, as the end of the all-reduce depends on them.
        """
        for stage in (Role.ALL_REDUCE, Role.FINISH_REDUCE):
            timeline = self._simulate()
            position = self._positions()
            anchors: dict[_Block, _Block] = {}
            for reduction in self._reductions:
                if reduction.wait.role is not stage:
                    continue
                collective = self._collective(reduction.start)
                over = timeline.begins[collective] + _with_margin(self._costs.transfer[collective])
                behind = self._order[position[reduction.start] + 1 :]
                waits = {other.wait for other in self._reductions}
                anchors[reduction.wait] = next(
                    block
                    for block in behind
                    if (block.role and block not in waits and timeline.arrives[block.nodes[0]] >= over)
                    or block is self._order[-1]
                )
            self._move(anchors)

    def _fit(self, limit: int) -> None:
        """Delay gathers and hasten waits until the live bytes stay within the limit.

        Positions over the limit are relieved from the end to the front. A gather that moves after the last of them was already
        live at all later positions until its wait, so none of these gets over the limit.
        """
        while True:
            over = self._blocks_over(limit)
            if not over:
                return
            if not self._delay_a_gather(over[-1]) and not self._hasten_a_wait(over):
                raise AssertionError(f"more than {limit} bytes live at {self._order[over[-1]].nodes}, and nothing is in flight")

    def _blocks_over(self, limit: int) -> list[int]:
        """Find the positions of the blocks during which more bytes live than the limit."""
        totals = [total for total, _ in self.live_bytes().timeline]
        over, index = [], len(self._inputs)
        for place, block in enumerate(self._order):
            if max(totals[index : index + len(block.nodes)]) > limit:
                over.append(place)
            index += len(block.nodes)
        return over

    def _delay_a_gather(self, place: int) -> bool:
        """Start one gather in flight at position ``place`` after it: the one that is needed last. Return False if none can."""
        position = self._positions()
        in_flight = [gather for gather in self._gathers if position[gather.start] <= place < position[gather.wait]]
        for gather in sorted(in_flight, key=lambda gather: position[gather.wait], reverse=True):
            first = max(place, position[gather.start] + 1) + 1
            for block in self._order[first : position[gather.wait] + 1]:
                if block.may_follow:
                    self._move({gather.start: block})
                    return True
        return False

    def _hasten_a_wait(self, over: Sequence[int]) -> bool:
        """Wait earlier for the oldest reduction in flight at the last of the positions ``over`` the limit.

        The wait moves before the first of these positions that is after the start. If the wait itself needs the most, as where
        pieces of other ranks are summed after it, it moves by one block. Return False if no reduction is in flight.
        """
        position = self._positions()
        for reduction in sorted(self._reductions, key=lambda reduction: position[reduction.start]):
            start, wait = position[reduction.start], position[reduction.wait]
            if not start < over[-1] <= wait:
                continue
            first = min(wait - 1, next(place for place in over if place > start))
            if first > start:
                self._move({reduction.wait: self._order[first]})
                return True
        return False


def _cut_into_blocks(graph: Graph) -> list[_Block]:
    """Cut a graph into blocks, without its inputs. The last block is its output."""
    starts = {
        source: Work(Role.START_GATHER, name)
        for name, nodes in nodes_of(graph, Role.START_GATHER).items()
        for source in with_sources(nodes)
    }
    blocks: list[_Block] = []
    gathers: dict[Work, _Block] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        done = starts.get(node) or work(node)
        if done in gathers:
            gathers[done].nodes.append(node)
        elif done is not None and blocks and blocks[-1].work == done:
            blocks[-1].nodes.append(node)
        else:
            computes = is_free(node) or is_fusible(node) or node.op == "get_attr"
            blocks.append(_Block([node], done, done is not None or node.op == "output" or not computes))
            if done is not None and done.role is Role.START_GATHER:
                gathers[done] = blocks[-1]
    return blocks


def _waits(block: _Block) -> bool:
    return any(node.target == _wait for node in block.nodes)


def _with_margin(duration: int) -> int:
    """Add a quarter to the duration of a transfer, as the model is not exact."""
    return duration + duration // 4


def _last_by(latest: int, blocks: Sequence[_Block], clock: Mapping[_Block, int], until: _Block) -> _Block:
    """Return the last communication up to ``until`` that compute reaches by the time ``latest``, else the first block."""
    found = blocks[0]
    for block in blocks:
        if block.role and clock[block] <= latest:
            found = block
        if block is until:
            break
    return found
