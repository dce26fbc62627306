"""Fails tests in which Inductor compiles, here or on a rank, without a mark that allows it (tests/conftest.py lists them)."""

from __future__ import annotations

from typing import Any

from torch._inductor import compile_fx

#: The running test's permission to use Inductor.
is_allowed = True


def refuse_unless_allowed() -> None:
    """Make Inductor raise in this process while ``is_allowed`` is false."""
    compile_inner = compile_fx._compile_fx_inner

    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_allowed:
            raise AssertionError("This test has Inductor compile: mark it inductor, or use options={'lowering': 'aot_eager'}.")
        return compile_inner(*args, **kwargs)

    compile_fx._compile_fx_inner = checked
