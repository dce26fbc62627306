"""Formulae to be read: as text and as LaTeX, as they are where all ranks have equally many rows of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import sympy

from .render import size
from .symbolic import SYMBOLS

if TYPE_CHECKING:
    from .formulae import Formulae, UnitFormulae

_FIELDS = {
    "shard_bytes": ("shards", "bytes"),
    "gathered_bytes": ("gathers send", "bytes"),
    "scattered_bytes": ("reduce-scatters send", "bytes"),
    "all_reduced_bytes": ("all-reduces send", "bytes"),
    "flops": ("flops", ""),
    "compute_s": ("compute", "s"),
    "communication_s": ("in flight", "s"),
}


# What a rank sends of what is gathered or reduced.
_OTHERS = {SYMBOLS[name]: sympy.Symbol(f"({name}-1)/{name}", positive=True) for name in ("S", "R")}


def even(expression: Any) -> Any:
    """An expression as it is if the number of ranks divides the rows of each parameter."""
    ranks = SYMBOLS["S"]
    for symbol, part in _OTHERS.items():
        expression = sympy.sympify(expression).subs(symbol - 1, symbol * part)

    def without_rounding(argument: sympy.Expr) -> sympy.Expr:
        return argument if argument.has(ranks) else sympy.floor(argument)

    expression = sympy.sympify(expression).replace(sympy.floor, without_rounding)
    expression = expression.replace(
        sympy.ceiling, lambda argument: argument if argument.has(ranks) else sympy.ceiling(argument)
    )
    return sympy.expand(expression)


def formulae_text(formulae: Formulae) -> str:
    """Formulae as lines of text."""
    lines = ["Of a step, on each rank, where S divides the rows of each parameter:", ""]
    lines += [f"{what}{' ' * (22 - len(what))} {text}" for what, text in _lines(formulae, _text)]
    lines += ["", "with"]
    for symbol, meaning in formulae.meanings.items():
        value = formulae.values[symbol]
        lines.append(f"{_name(symbol)}{' ' * max(1, 14 - len(_name(symbol)))}{meaning}: {value:,.6g}")
    return "\n".join(lines)


def formulae_latex(formulae: Formulae) -> str:
    """Formulae as an ``align*`` of LaTeX."""
    rows = [rf"  \text{{{what}}} &= {text} \\" for what, text in _lines(formulae, _latex)]
    return "\n".join([r"\begin{align*}", *rows, r"\end{align*}"])


def _lines(formulae: Formulae, write: Callable[[Any, str], str]) -> Iterator[tuple[str, str]]:
    yield "step", write(formulae.step_s, "s")
    yield from _unit_lines("total", formulae.total, write)
    for name, value in formulae.memory.items():
        yield f"memory: {name}", write(value, "bytes")
    for names, unit in _alike(formulae):
        yield from _unit_lines(names, unit, write)


def _unit_lines(name: str, unit: UnitFormulae, write: Callable[[Any, str], str]) -> Iterator[tuple[str, str]]:
    for attribute, (what, kind) in _FIELDS.items():
        value = getattr(unit, attribute)
        if value != 0:
            yield f"{name}: {what}", write(value, kind)


def _alike(formulae: Formulae) -> Iterator[tuple[str, UnitFormulae]]:
    """Units, those with the same formulae as one."""
    groups: dict[Any, list[UnitFormulae]] = {}
    for unit in formulae.units:
        groups.setdefault(tuple(getattr(unit, attribute) for attribute in _FIELDS), []).append(unit)
    for units in groups.values():
        names = units[0].name if len(units) == 1 else f"{units[0].name} ... {units[-1].name} (each of {len(units)})"
        yield names, units[0]


def _text(expression: Any, kind: str) -> str:
    """Terms, the largest powers first, each with a number that is easy to read."""
    terms = []
    for symbols, number in _terms(expression):
        read = size(float(number)) if kind == "bytes" else f"{float(number):.4g}"
        # As B is the batch.
        read = f"{read[:-1]}bytes" if read.endswith(" B") else read
        written = "" if symbols == 1 else _name(symbols)
        if not written or written.startswith("/"):
            terms.append(read + written)
        else:
            terms.append(written if read == "1" else f"{read}*{written}")
    return " + ".join(terms).replace("+ -", "- ") or "0"


def _latex(expression: Any, kind: str) -> str:
    parts = [sympy.Mul(sympy.Float(float(number), 4), symbols, evaluate=False) for symbols, number in _terms(expression)]
    return sympy.latex(sympy.Add(*parts, evaluate=False)) if parts else "0"


def _terms(expression: Any) -> list[tuple[Any, Any]]:
    """The terms of an expression: products of symbols, with their numbers."""
    found = even(expression).as_coefficients_dict()
    return sorted(found.items(), key=lambda term: sympy.default_sort_key(term[0]), reverse=True)


def _name(expression: Any) -> str:
    return str(expression).replace("**", "^").replace("{", "(").replace("}", ")").replace("1/", "/")
