from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from passes.fx.size_guards import Assumptions, InputSizes, SizeGuard, deciding_by, taking_guards


class Compilation:
    """A graph whose frame already has its guards. Its inputs ``[batch, length]`` and ``length`` were traced with 3 and 5."""

    def __init__(self) -> None:
        self.shape_env = ShapeEnv()
        mode = FakeTensorMode(shape_env=self.shape_env)
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
        tensor = mode.from_tensor(torch.zeros(3, 5), symbolic_context=context)
        self.batch, self.length = tensor.shape
        graph = Graph()
        graph.placeholder("x").meta["val"] = tensor
        graph.placeholder("length").meta["val"] = self.length
        with mode:
            graph.call_function(torch.ops.aten.view.default, (next(iter(graph.nodes)), [-1])).meta["val"] = tensor.view(-1)
        graph.output(())
        self.gm = GraphModule(torch.nn.Module(), graph)
        self.sizes = InputSizes(graph)
        self.shape_env.freeze()

    @property
    def flat(self) -> Any:
        """The size of the flat view, ``batch * length``."""
        return next(node.meta["val"] for node in self.gm.graph.nodes if node.op == "call_function").shape[0]

    def lower(self, args: tuple[Any, ...], decide: Callable[[], Any]) -> tuple[Any, list[Any]]:
        """Run ``decide`` as in a late lowering for a call. Return its result, and the conditions that no guard checks yet."""
        with taking_guards(self.shape_env):
            assumptions = Assumptions(self.shape_env, is_late=True)
            with deciding_by(self.sizes.of(args), self.gm, self.shape_env):
                decided = decide()
            return decided, assumptions.unchecked(self.sizes)


def call(batch: int, length: int) -> tuple[Tensor, int]:
    return torch.zeros(batch, length), length


def test_late_decisions_are_guards_of_the_call() -> None:
    compilation = Compilation()
    fits, conditions = compilation.lower(call(3, 5), lambda: bool(compilation.flat <= 20))
    guard = SizeGuard(conditions, compilation.sizes)
    assert fits and guard(call(3, 5)) and guard(call(4, 5)) and not guard(call(3, 7))
    assert str(guard) == f"({compilation.batch}*{compilation.length} <= 20)"


def test_decides_by_the_sizes_of_the_call() -> None:
    compilation = Compilation()
    found = [compilation.lower(call(2, length), lambda: int(compilation.length))[0] for length in (5, 8, 5)]
    assert found == [5, 8, 5]
    fits, conditions = compilation.lower(call(3, 7), lambda: bool(compilation.flat <= 20))
    guard = SizeGuard(conditions, compilation.sizes)
    assert not fits and guard(call(3, 7)) and not guard(call(3, 5))


def test_a_late_lowering_leaves_no_trace() -> None:
    compilation = Compilation()
    before = {
        name: str(value)
        for name, value in vars(compilation.shape_env).items()
        if not name.endswith(("version_counter", "_sloc"))
    }

    def specialise() -> tuple[int, bool]:
        return int(compilation.length), bool(compilation.flat > 14)

    assert compilation.lower(call(2, 8), specialise)[0] == (8, True)
    # Sizes of the graph remember their simplified form; that is undone as well.
    assert isinstance(compilation.length, SymInt) and not compilation.flat.node.expr.is_number
    assert (compilation.length.node.hint, compilation.flat.node.hint) == (5, 15)
    after = {name: str(value) for name, value in vars(compilation.shape_env).items() if name in before}
    assert after == before
    assert len(compilation.lower(call(2, 8), specialise)[1]) == 1, "one decision follows from the other"


def test_guards_of_the_frame_are_not_checked_again() -> None:
    compilation = Compilation()
    compilation.shape_env.frozen = False
    assumptions = Assumptions(compilation.shape_env, is_late=False)
    assert compilation.length < 16
    assert assumptions.added() and not assumptions.unchecked(compilation.sizes)
    compilation.shape_env.freeze()
    assert compilation.lower(call(3, 5), lambda: bool(compilation.length < 16)) == (True, [])


def test_code_is_used_again_where_its_conditions_hold() -> None:
    compilation = Compilation()
    _, conditions = compilation.lower(call(3, 5), lambda: int(compilation.length))
    admitted = {}
    for length in (5, 6):
        with taking_guards(compilation.shape_env):
            assumptions = Assumptions(compilation.shape_env, is_late=True)
            with deciding_by(compilation.sizes.of(call(4, length)), compilation.gm, compilation.shape_env):
                admitted[length] = assumptions.admit(conditions), assumptions.unchecked(compilation.sizes)
    assert admitted == {5: (True, conditions), 6: (False, [])}


def test_conditions_that_inputs_tell_are_found() -> None:
    compilation = Compilation()
    length, other = compilation.length.node.expr, sympy.Symbol("other", integer=True)
    assert compilation.sizes.about([length < 16, other < 3]) == [length < 16]
    assert compilation.sizes.about([other < length]) is None


def test_what_no_input_tells_is_refused() -> None:
    compilation = Compilation()
    with pytest.raises(RuntimeError, match=r"sizes with \(other == 5\), and its inputs do not tell other"):
        SizeGuard([sympy.Eq(sympy.Symbol("other", integer=True), 5)], compilation.sizes)


def test_conditions_of_all_kinds_are_checked() -> None:
    compilation = Compilation()
    batch, length = compilation.batch.node.expr, compilation.length.node.expr
    from torch.utils._sympy.functions import FloorDiv, Mod

    conditions = [
        sympy.Or(sympy.Lt(batch, 3), sympy.Gt(length, 10)),
        sympy.Eq(Mod(length, 4), 0),
        sympy.Ne(FloorDiv(length, 4), 5),
        sympy.Not(sympy.Eq(batch, 7)),
        sympy.Le(sympy.Max(batch, length), 100),
    ]
    guard = SizeGuard(conditions, compilation.sizes)
    cases = {(2, 8): True, (3, 8): False, (3, 12): True, (2, 9): False, (2, 20): False, (7, 12): False, (2, 104): False}
    assert {case: guard(call(*case)) for case in cases} == cases
