"""``cuda_outline``: the launches of a lowered graph, step by step, without the bodies of kernels.

The outline is read from the source that Inductor generated, so it shows what will run, not what was intended. Two graphs with
equal outlines do the same launches, whether their source was generated with or without a GPU.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from passes.collectives.host_copies import wait_copy, wait_offload
from passes.fx.graph import group_of, is_collective, is_host_copy, is_view
from passes.fx.torch_internals.core import pytree
from passes.ir.work import bucket

from ..compiler.captured_graph import CapturedGraph

_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b8",
}
# The names of dtypes in Triton's signatures.
_TRITON_DTYPES = {"fp64": "f64", "fp32": "f32", "fp16": "f16", "i1": "b8"}

_KINDS = {"poi": "pointwise kernel", "red": "reduction kernel", "per": "reduction kernel", "for": "foreach kernel"}

# Calls in generated code that launch nothing and wait for nothing.
_SILENT = {
    "assert_size_stride",
    "assert_size_stride_grouped",
    "assert_alignment",
    "get_raw_stream",
    "copy_if_misaligned",
    "copy_misaligned",
    "clear",
    "set_device",
    "_DeviceGuard",
}


@dataclass(frozen=True)
class Value:
    """A tensor that a step reads or writes.

    Attributes:
        dtype: in the short form of printed graphs, such as "f32"; empty if the code does not tell.
        shape: its sizes; None if the code does not tell.
        buffer: the name of the memory that it is a view of, unique in the graph. Memory that is reused for another value gets
            another name.
    """

    dtype: str
    shape: tuple[int, ...] | None
    buffer: str

    def __str__(self) -> str:
        return self.dtype + (str(list(self.shape)) if self.shape is not None else "[?]")

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape or ()).numel())


@dataclass(frozen=True)
class Step:
    """A launch of a kernel, the start of a collective or of a copy between host and device, or a wait for one.

    Attributes:
        name: "pointwise kernel", "reduction kernel", "foreach kernel", the name of a collective, "copy_to_device",
            "copy_to_host", "wait", or the name of the called function.
        label: the bucket of a collective or copy, if any; for a collective also its reduction operator, if any, and its group;
            for a wait, the name and bucket of what it waits for.
        reads, writes: the tensors that it reads and writes.
        source: the Triton source of a kernel; empty for other steps.
    """

    name: str
    label: str = ""
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        text = " ".join(filter(None, [self.name, self.label]))
        if self.name == "wait":
            return text
        return f"{text}: {', '.join(map(str, self.reads))} -> {', '.join(map(str, self.writes))}"


def cuda_steps(captured: CapturedGraph) -> list[Step]:
    """Return the launches of a graph that was lowered for CUDA, in order.

    Raises:
        ValueError: the graph was not lowered with Inductor, so there is no code.
    """
    program, segments = _segments(captured)
    return list(_Program(captured, segments).steps(program))


def triton_kernels(captured: CapturedGraph) -> list[tuple[str, str]]:
    """Return name and source of each Triton kernel of a graph that was lowered for CUDA. Segments may use the same names."""
    segments = _segments(captured)[1].values()
    return [(name, source) for module in segments for name, (source, _) in _triton_kernels(module)]


def _segments(captured: CapturedGraph) -> tuple[ast.Module, dict[str, ast.Module]]:
    """Parse the code of a graph into its program, and its segments by name."""
    if captured.code is None:
        raise ValueError("The graph was lowered with aot_eager; only Inductor generates code.")
    program, *segments = re.split(r"^# (segment_\d+)$", captured.code, flags=re.MULTILINE)
    sources = zip(segments[::2], segments[1::2], strict=True)
    return ast.parse(program), {name: ast.parse(source) for name, source in sources}


def cuda_outline(captured: CapturedGraph) -> str:
    """Return the launches of a graph that was lowered for CUDA as text: one line for each kernel, copy, collective and wait.

    Raises:
        ValueError: the graph was not lowered with Inductor, so there is no code.
    """
    return "".join(f"{step}\n" for step in cuda_steps(captured))


def _find_call(module: ast.Module) -> ast.FunctionDef:
    return next(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a function, also those inside ``with`` blocks."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


def _targets(statement: ast.stmt) -> list[str]:
    """Return the names that a statement assigns to."""
    if not isinstance(statement, ast.Assign):
        return []
    (target,) = statement.targets
    return [ast.unparse(node) for node in getattr(target, "elts", [target])]


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _sizes(node: ast.expr) -> tuple[int, ...]:
    return tuple(element.value if isinstance(element, ast.Constant) else ast.unparse(element) for element in node.elts)  # type: ignore


class _Program:
    """The program of a graph, which calls collectives and segments."""

    def __init__(self, captured: CapturedGraph, segments: dict[str, ast.Module]):
        self.captured = captured
        self.segments = segments
        self.nodes = {node.name: node for node in captured.graph_module.graph.nodes}
        self.values: dict[str, Value] = {}
        self.started: dict[str, str] = {}
        self.fakes: dict[str, Any] = {}
        self.calls = 0

    def steps(self, module: ast.Module) -> Iterator[Step]:
        arguments: list[Value] = []
        for statement in _statements(_find_call(module).body):
            match statement:
                case ast.Assign(value=ast.List(elements)):
                    arguments = [self._value(element) for element in elements]
                case ast.Assign(value=ast.Call() as call) | ast.Expr(value=ast.Call() as call):
                    names = _targets(statement)
                    if _called(call) in self.segments:
                        yield from self._segment(names, call, arguments)
                    elif names:
                        yield from self._operator(names[0], call)

    def _segment(self, names: list[str], call: ast.Call, arguments: list[Value]) -> Iterator[Step]:
        self.calls += 1
        segment = _Segment(self.segments[_called(call)], arguments, f"call {self.calls}")
        yield from segment.steps()
        self.values.update(zip(names, segment.results, strict=True))

    def _value(self, node: ast.expr) -> Value:
        name = ast.unparse(node)
        if name not in self.values:
            self.values[name] = self._of_node(name, name)
        return self.values[name]

    def _of_node(self, name: str, buffer: str) -> Value:
        """Return the value of the node ``name``: variables of the program have the names of nodes."""
        return _described(self.nodes[name].meta.get("val") if name in self.nodes else None, buffer)

    def _operator(self, name: str, call: ast.Call) -> Iterator[Step]:
        called = _called(call)
        node = self.nodes.get(name)
        source = self._value(call.args[0]) if call.args else None
        if node is not None:
            self.fakes[name] = node.meta.get("val")
        if called.endswith("wait_tensor.default") or (node is not None and node.target in (wait_copy, wait_offload)):
            assert source is not None
            self.values[name] = self._of_node(name, source.buffer)
            started = self.started.pop(ast.unparse(call.args[0]), None)
            # A model may wait again for the result of a wait. Only the first wait counts.
            if started is not None:
                yield Step("wait", started)
        elif called == "__operator_getitem":
            # The program has names of its own for items of a result.
            assert source is not None
            self.fakes[name] = self.fakes[ast.unparse(call.args[0])][ast.literal_eval(call.args[1])]
            self.values[name] = _described(self.fakes[name], source.buffer)
        elif node is not None and is_host_copy(node):
            label = str(bucket(node) or "")
            self.started[name] = f"{called.split('.')[-2]} {label or name}"
            self.values[name] = self._of_node(name, name)
            reads = tuple(self._value(argument) for argument in _tensors(call.args))
            yield Step(called.split(".")[-2], label, reads, (self.values[name],))
        elif node is not None and is_collective(node):
            kind = called.split(".")[-2].rstrip("_").removesuffix("_into_tensor").removesuffix("_tensor")
            self.started[name] = " ".join(map(str, filter(None, [kind, bucket(node)])))
            self.values[name] = self._of_node(name, name)
            reads = tuple(self._value(argument) for argument in _tensors(call.args))
            writes = tuple(_described(part, name) for part in pytree.tree_leaves(self.fakes[name]))
            yield Step(kind, _label(node, self.captured.group_names), reads, writes)
        elif source is not None and node is not None and is_view(node):
            self.values[name] = self._of_node(name, source.buffer)
        else:
            self.values[name] = self._of_node(name, name)
            yield Step(called.removeprefix("torch.ops."), "", (source,) if source else (), (self.values[name],))


def _tensors(arguments: list[ast.expr]) -> Iterator[ast.expr]:
    """Yield the arguments that are names, also those inside lists."""
    for argument in arguments:
        if isinstance(argument, ast.Name):
            yield argument
        elif isinstance(argument, ast.List):
            yield from _tensors(argument.elts)


def _described(value: Any, buffer: str) -> Value:
    if not isinstance(value, torch.Tensor):
        return Value("", None, buffer)
    return Value(_DTYPES.get(str(value.dtype).removeprefix("torch."), str(value.dtype)), tuple(value.shape), buffer)


def _seen_as(value: Value, dtype: str) -> Value:
    """Return the value as a view in another dtype, given by torch's name."""
    seen = replace(value, dtype=_DTYPES.get(dtype, dtype), shape=None)
    if not value.dtype or not value.shape or not isinstance(value.shape[-1], int):
        return seen
    *rows, last = value.shape
    return replace(seen, shape=(*rows, last * _itemsize(value.dtype) // _itemsize(seen.dtype)))


def _itemsize(dtype: str) -> int:
    names = {short: name for name, short in _DTYPES.items()}
    found: torch.dtype = getattr(torch, names.get(dtype, dtype))
    return found.itemsize


def _label(node: Node, group_names: dict[str, str]) -> str:
    operators = [argument for argument in node.args if argument in ("sum", "avg", "max", "min", "product")]
    group = group_of(node)
    return " ".join(filter(None, [str(bucket(node) or ""), *map(str, operators), f"over {group_names.get(group, group)}"]))


class _Segment:
    """One call of a segment."""

    def __init__(self, module: ast.Module, arguments: list[Value], prefix: str):
        self.kernels = dict(_triton_kernels(module))
        self.body = list(_statements(_find_call(module).body))
        self.arguments = arguments
        self.prefix = prefix
        self.values: dict[str, Value] = {}
        # Names that took over the memory of others, to continue with its values or to overwrite them.
        self.reusing: set[str] = set()
        self.results: list[Value] = []

    def steps(self) -> Iterator[Step]:
        lines = {statement.lineno for statement in self.body if isinstance(statement, ast.Delete)}
        for statement in self.body:
            if isinstance(statement, ast.Assign) and statement.lineno in lines:
                self.reusing.add(ast.unparse(statement.targets[0]))
            if isinstance(statement, ast.Assign):
                yield from self._assign(statement.targets[0], statement.value)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                yield from self._call(statement.value, None)
            elif isinstance(statement, ast.Return):
                assert isinstance(statement.value, ast.Tuple)
                self.results = [self._value(element) for element in statement.value.elts]

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Call) and _called(node) == "reinterpret_tensor":
            return replace(self._value(node.args[0]), shape=_sizes(node.args[1]))
        name = ast.unparse(node)
        return self.values.setdefault(name, Value("", None, f"{self.prefix}.{name}"))

    def _overwrite(self, written: list[ast.expr], read: list[ast.expr]) -> None:
        """Give reused memory a new buffer name if a kernel writes it without reading it."""
        kept = {_base(node) for node in read}
        for name in {_base(node) for node in written} & self.reusing:
            if name not in kept:
                self.values[name] = replace(self.values[name], buffer=f"{self.prefix}.{name}")
        self.reusing -= kept | {_base(node) for node in written}

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[Step]:
        name = ast.unparse(target)
        if ast.unparse(value) == "args":
            assert isinstance(target, (ast.Tuple, ast.List))
            for element, argument in zip(target.elts, self.arguments, strict=True):
                self.values[ast.unparse(element)] = argument
        elif isinstance(value, ast.Call):
            called = _called(value)
            if re.match(r"empty_strided_\w+", called):
                dtype = ast.unparse(value.args[2]).removeprefix("torch.")
                buffer = f"{self.prefix}.{name}"
                self.values[name] = Value(_DTYPES.get(dtype, dtype), _sizes(value.args[0]), buffer)
            elif called == "reinterpret_tensor":
                self.values[name] = self._value(value)
            elif called == "torch.ops.aten.view.dtype":
                self.values[name] = _seen_as(self._value(value.args[0]), ast.unparse(value.args[1]).removeprefix("torch."))
            else:
                yield from self._call(value, name)
        elif isinstance(value, ast.Name) and value.id in self.values:
            self.values[name] = self.values[value.id]
        elif isinstance(value, ast.Subscript) and ast.unparse(value.value) in self.values:
            self.values[name] = Value("", None, f"{self.prefix}.{name}")

    def _call(self, call: ast.Call, result: str | None) -> Iterator[Step]:
        called = _called(call)
        short = called.rpartition(".")[2]
        if short in _SILENT:
            return
        if short == "run" and called.removesuffix(".run") in self.kernels:
            yield self._kernel(called.removesuffix(".run"), call)
            return
        read = [argument for argument in call.args if _is_tensor(argument)]
        written = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
        self._overwrite(written, read)
        reads, writes = [self._value(node) for node in read], [self._value(node) for node in written]
        if result is not None:
            self.values[result] = Value("", None, f"{self.prefix}.{result}")
            writes.append(self.values[result])
        yield Step(called.removeprefix("extern_kernels.").removeprefix("torch.ops."), "", tuple(reads), tuple(writes))

    def _kernel(self, name: str, call: ast.Call) -> Step:
        source, signature = self.kernels[name]
        tensors = {
            parameter: argument
            for parameter, argument in zip(signature, call.args, strict=False)
            if signature[parameter].startswith("*")
        }
        # An ``in_out_ptr`` need not be both read and written, so the source decides.
        names = {parameter: _names_in(source, parameter) for parameter in tensors}
        read = [parameter for parameter in tensors if re.search(rf"tl\.load\({names[parameter]}\b", source)]
        written = [parameter for parameter in tensors if re.search(rf"tl\.(store|atomic_\w+)\({names[parameter]}\b", source)]
        self._overwrite([tensors[parameter] for parameter in written], [tensors[parameter] for parameter in read])

        def value(parameter: str) -> Value:
            found = self._value(tensors[parameter])
            dtype = signature[parameter].removeprefix("*")
            return found if found.dtype else replace(found, dtype=_TRITON_DTYPES.get(dtype, dtype))

        reads, writes = map(value, read), map(value, written)
        found = re.match(r"triton_(\w{3})_", name)
        return Step(_KINDS.get(found[1], name) if found else name, "", tuple(reads), tuple(writes), source)


def _names_in(source: str, parameter: str) -> str:
    """Return a pattern for the names of ``parameter`` in a kernel.

    With torch 2.15, a kernel that treats several tensors alike assigns the parameter of each to ``foreach_arg0`` and the like.
    """
    others = re.findall(rf"^ *(\w+) = {parameter}$", source, re.MULTILINE)
    return f"(?:{'|'.join(dict.fromkeys([parameter, *others]))})"


def _base(node: ast.expr) -> str:
    """Return the name of a tensor, also of one inside a ``reinterpret_tensor`` call."""
    return ast.unparse(node.args[0] if isinstance(node, ast.Call) else node)


def _is_tensor(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Call) and _called(node) == "reinterpret_tensor")


def _triton_kernels(module: ast.Module) -> Iterator[tuple[str, tuple[str, dict[str, str]]]]:
    """Yield the Triton kernels of a segment: name, source, and types of the parameters in order."""
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Call(args=[_, ast.Constant(str(source)), *_]) as call):
                if _called(call) == "async_compile.triton":
                    yield name, (source, _signature(source))


def _signature(source: str) -> dict[str, str]:
    """Return the types of a kernel's parameters, from ``triton_meta``, without constants."""
    found = re.search(r"'signature': (\{[^}]*\})", source)
    assert found, source
    signature: dict[str, Any] = ast.literal_eval(found[1])
    return {name: kind for name, kind in signature.items() if kind != "constexpr"}
