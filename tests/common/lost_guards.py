"""Fails tests in which torch decides about symbolic sizes too late for a guard to check the decision."""

from __future__ import annotations

from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv


def refuse_lost_guards() -> None:
    """Make every ``ShapeEnv`` of this process raise where it would ignore a guard, as the frame's guards have been built.

    Inside of ``suppress_guards()``, where formulae are made of sizes, guards are ignored on purpose.
    """
    ignore = ShapeEnv._check_frozen

    def check(self: ShapeEnv, expr: Any, concrete_val: Any) -> None:
        if self.frozen and not self._suppress_guards_tls():
            raise AssertionError(f"{expr} == {concrete_val} was decided after the guards of the frame were built.")
        ignore(self, expr, concrete_val)

    ShapeEnv._check_frozen = check  # type: ignore[method-assign]
