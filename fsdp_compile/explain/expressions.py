"""The expressions of a step, and how they are written: as text and as LaTeX, where S divides the rows of each parameter."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy

from .exposure import milliseconds
from .render import size

#: The meanings of the symbols in formulae.
MEANINGS = {
    "S": "ranks that a parameter is sharded over",
    "R": "replicas",
    "B": "batch of a rank",
    "T": "sequence",
    "M": "microbatches",
}
#: The symbols in formulae, by name.
SYMBOLS = {name: sympy.Symbol(name, integer=True, positive=True) for name in MEANINGS}

_FIELDS = {
    "shard_bytes": ("shards", "bytes"),
    "gathered_bytes": ("gathers send", "bytes"),
    "scattered_bytes": ("reduce-scatters send", "bytes"),
    "all_reduced_bytes": ("all-reduces send", "bytes"),
    "flops": ("flops", ""),
    "compute_s": ("compute", "s"),
    "communication_s": ("in flight", "s"),
}

_WIDTH = 124
# Padding is not printed if it takes less than this part of a step.
_LITTLE = 1e-3
# Symbols for (S - 1) / S and (R - 1) / R: the part of a gathered or reduced buffer that each rank sends.
_OTHERS = {SYMBOLS[name]: sympy.Symbol(f"({name}-1)/{name}", positive=True) for name in ("S", "R")}


@dataclass(frozen=True)
class UnitFormulae:
    """The expressions of one unit in a step; see :class:`~fsdp_compile.explain.parts.UnitReport`. Times are in seconds."""

    name: str
    shard_bytes: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    gathered_bytes: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    scattered_bytes: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    all_reduced_bytes: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    flops: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    compute_s: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    communication_s: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))


@dataclass(frozen=True)
class Formulae:
    """Expressions of sympy for a step. Times are in seconds.

    Attributes:
        units: the expressions of each unit.
        memory: the bytes of each category, at the moment with the most live bytes at the report's sizes.
        step_s: the time of the step, along its critical path at the report's sizes.
        meanings: the meaning of each symbol, sizes first.
        values: the value of each symbol, in the report or on its machine.
    """

    units: Sequence[UnitFormulae]
    memory: Mapping[str, sympy.Expr]
    step_s: sympy.Expr
    meanings: Mapping[sympy.Symbol, str]
    values: Mapping[sympy.Symbol, float]

    @cached_property
    def total(self) -> UnitFormulae:
        """The sums over all units."""
        names = [name for name in UnitFormulae.__dataclass_fields__ if name != "name"]
        return UnitFormulae("total", **{name: sympy.Add(*(getattr(unit, name) for unit in self.units)) for name in names})

    @cached_property
    def peak_bytes(self) -> sympy.Expr:
        """All live bytes, at the moment with the most of them at the report's sizes."""
        return sympy.Add(*self.memory.values())

    def __str__(self) -> str:
        return _text_of(self)

    def latex(self) -> str:
        """Format the formulae as an ``align*`` of LaTeX, for a document with ``amsmath``."""
        return _latex_of(self)


def even(expression: Any) -> Any:
    """Simplify an expression for numbers of ranks that divide the rows of each parameter."""
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


def _text_of(formulae: Formulae) -> str:
    """Format formulae as lines of text."""
    lines = ["Of a step, on each rank, where S divides the rows of each parameter. Bytes, flops and seconds.", "", "step"]
    lines += _columns(_step_terms(formulae))
    lines.append("with")
    lines += _columns([(_name(symbol), f"{formulae.values[symbol]:,.6g}", what) for symbol, what in formulae.meanings.items()])
    for name, rows in filter(_has_rows, _sections(formulae)):
        lines += [name, *_columns([(what, _text(value, kind)) for what, value, kind in rows])]
    return "\n".join(lines)


def _has_rows(section: tuple[str, Sequence[object]]) -> bool:
    """Return whether a section has rows. A unit without parameters of its own, such as a root made of other units, has none."""
    return bool(section[1])


def _latex_of(formulae: Formulae) -> str:
    """Format formulae as an ``align*`` of LaTeX."""
    sections = [("step", [("time", formulae.step_s, "s")]), *_sections(formulae)]
    rows = [rf"  \text{{{name}, {what}}} &= {_latex(value)} \\" for name, rows in sections for what, value, _ in rows]
    return "\n".join([r"\begin{align*}", *rows, r"\end{align*}"])


def _step_terms(formulae: Formulae) -> list[tuple[str, str]]:
    """Format the terms of the step's time, the longest first, each with its milliseconds."""
    values = {**formulae.values, **{part: 1 - 1 / formulae.values[symbol] for symbol, part in _parts(formulae)}}
    terms = [(number * symbols, _text(number * symbols, "s")) for symbols, number in _terms(formulae.step_s)]
    timed = sorted(((float(term.subs(values)), text) for term, text in terms), reverse=True)
    padding = float(formulae.step_s.subs(formulae.values)) - sum(seconds for seconds, _ in timed)
    if abs(padding) > _LITTLE * sum(seconds for seconds, _ in timed):
        timed.append((padding, "as S divides not all rows"))
    return [(text, milliseconds(seconds * 1e9)) for seconds, text in timed]


def _parts(formulae: Formulae) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    return ((symbol, part) for symbol, part in _OTHERS.items() if symbol in formulae.values)


def _sections(formulae: Formulae) -> Iterator[tuple[str, list[tuple[str, Any, str]]]]:
    """Yield the sections after the step's: memory, the sums over all units, and each group of equal units."""
    yield "memory", [(name, value, "bytes") for name, value in formulae.memory.items()]
    yield "total", _rows(formulae.total)
    groups: dict[Any, list[UnitFormulae]] = {}
    for unit in formulae.units:
        groups.setdefault(tuple(getattr(unit, attribute) for attribute in _FIELDS), []).append(unit)
    for units in groups.values():
        names = units[0].name if len(units) == 1 else f"{units[0].name} ... {units[-1].name}, each of {len(units)}"
        yield names, _rows(units[0])


def _rows(unit: UnitFormulae) -> list[tuple[str, Any, str]]:
    found = [(what, getattr(unit, attribute), kind) for attribute, (what, kind) in _FIELDS.items()]
    return [row for row in found if row[1] != 0]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows in columns, and wrap the last column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        before = "  " + "".join(f"{cell.ljust(width)}  " for cell, width in zip(row[:-1], widths, strict=True))
        lines += textwrap.wrap(before + row[-1], _WIDTH, subsequent_indent=" " * len(before), break_long_words=False)
    return lines


def _text(expression: Any, kind: str) -> str:
    """Format the terms of an expression, the largest powers first, each with a number that is easy to read."""
    terms = []
    for symbols, number in _terms(expression):
        read = size(float(number)) if kind == "bytes" else f"{float(number):.4g}"
        # In formulae, B is the batch.
        read = f"{read[:-1]}bytes" if read.endswith(" B") else read
        written = "" if symbols == 1 else _name(symbols)
        if not written or written.startswith("/"):
            terms.append(read + written)
        else:
            terms.append(written if read == "1" else f"{read}*{written}")
    return " + ".join(terms).replace("+ -", "- ") or "0"


def _latex(expression: Any) -> str:
    parts = [sympy.Mul(sympy.Float(float(number), 4), symbols, evaluate=False) for symbols, number in _terms(expression)]
    return sympy.latex(sympy.Add(*parts, evaluate=False)) if parts else "0"


def _terms(expression: Any) -> list[tuple[Any, Any]]:
    """Split an expression into terms: products of symbols, each with its number."""
    found = even(expression).as_coefficients_dict()
    return sorted(found.items(), key=lambda term: sympy.default_sort_key(term[0]), reverse=True)


def _name(expression: Any) -> str:
    return str(expression).replace("**", "^").replace("{", "(").replace("}", ")").replace("1/", "/")
