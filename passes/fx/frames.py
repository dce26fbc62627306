"""Frames that Dynamo has traced: their guards, sources and symbols, to make the same result again without a trace."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, SimpleNamespace
from typing import Any

from torch import SymInt, Tensor
from torch.fx import GraphModule

from .torch_internals.core import Guard, enable_python_dispatcher
from .torch_internals.dynamo import (
    CallMethodItemSource,
    CheckFunctionManager,
    CodeId,
    DynamoOutput,
    DynamoTracerOutput,
    GlobalSource,
    GlobalStateGuard,
    GuardBuilder,
    OutputGraph,
    TrackedFake,
    _get_closure_vars,
    _get_error_on_graph_break,
    convert_frame,
    convert_to_concrete_values,
    get_code_state,
)


@dataclass(frozen=True)
class StoredGuard:
    """A guard without the objects of its process.

    Attributes:
        source: where the frame finds the value.
        kind: the name of the method of Dynamo's ``GuardBuilder`` that makes the guard.
        args, kwargs: further arguments of the method.
    """

    source: Any
    kind: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(guard: Guard) -> StoredGuard:
        """Return the guard without its objects."""
        create = guard.create_fn
        args, keywords = (create.args, create.keywords) if isinstance(create, functools.partial) else ((), {})
        # The value of a tensor guard is a weak reference. Without it, the method looks the value up.
        kwargs = {name: value for name, value in keywords.items() if name != "value"}
        return StoredGuard(guard.originating_source, guard.create_fn_name(), args, kwargs)

    def guard(self) -> Guard:
        """Return a guard that takes its expected value from the frame that it is built for."""
        create: Any = getattr(GuardBuilder, self.kind)
        return Guard(self.source, functools.partial(create, *self.args, **self.kwargs) if self.args or self.kwargs else create)


class FrameOutput(DynamoOutput):
    """A result of a trace with other guards than those that torch makes of it.

    Attributes:
        build: returns the guards, given torch's keywords, the hooks and cache entries among them.
    """

    build: Callable[..., CheckFunctionManager]

    @staticmethod
    def of(output: DynamoOutput, build: Callable[..., CheckFunctionManager]) -> FrameOutput:
        """Return the same result, with guards by ``build``."""
        result = FrameOutput(**{name: getattr(output, name) for name in DynamoOutput.__dataclass_fields__})
        result.build = build
        return result

    def build_guards(self, code: CodeType, *args: Any, **kwargs: Any) -> CheckFunctionManager:
        """Return the guards of the frame."""
        return self.build(code, *args, **kwargs)


def sorted_guards(output: OutputGraph) -> list[Guard]:
    """Return the guards of a frame in the order in which they are made."""
    return sorted(output.guards, key=Guard.sort_key)


def output_of(traced: DynamoOutput) -> OutputGraph:
    """Return what a trace has collected: guards, sources, names of globals."""
    output = traced.tracer_output.output_graph
    assert output is not None
    return output


def tensor_sizes(output: OutputGraph, source: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the size and stride that the guard of a tensor compares; None in the place of a dynamic one."""
    found = output.input_source_to_sizes_strides[source]
    return convert_to_concrete_values(found["size"]), convert_to_concrete_values(found["stride"])


class _SourcesPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, renamed: Collection[str]):
        super().__init__(file)
        self._renamed = renamed

    def persistent_id(self, value: Any) -> str | None:
        return value.global_name if type(value) is GlobalSource and value.global_name in self._renamed else None


class _SourcesUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, renamed: Mapping[str, str]):
        super().__init__(file)
        self._renamed = renamed

    def persistent_load(self, name: str) -> GlobalSource:
        return GlobalSource(self._renamed[name])


def dump_sources(value: Any, renamed: Collection[str]) -> bytes:
    """Return a value with sources of a frame in bytes.

    Args:
        value: the value.
        renamed: names of globals that have another name in each process.
    """
    file = io.BytesIO()
    _SourcesPickler(file, renamed).dump(value)
    return file.getvalue()


def load_sources(content: bytes, renamed: Mapping[str, str]) -> Any:
    """Return the value that :func:`dump_sources` wrote, with new names of globals in the place of ``renamed`` ones."""
    return _SourcesUnpickler(io.BytesIO(content), renamed).load()


def builtins_of(output: OutputGraph) -> str:
    """Return the name of a frame's global with Python's builtins."""
    return output.name_of_builtins_dict_key_in_fglobals or ""


def symbolic_inputs(output: OutputGraph) -> list[tuple[Any, Any]]:
    """Return where a frame finds the tensors with symbolic sizes, each with how its symbols were made, in their order.

    Raises:
        ValueError: a symbol is of another value than a tensor.
    """
    found = []
    for tracked in output.tracked_fakes:
        fake = tracked.fake
        if isinstance(fake, Tensor):
            sizes = (*fake.shape, *fake.stride(), fake.storage_offset())
            if getattr(fake, "item_memo", None) is not None or any(isinstance(size, SymInt) for size in sizes):
                found.append((tracked.source, _without_symbols(tracked.symbolic_context)))
        elif not isinstance(tracked.source, CallMethodItemSource):
            raise ValueError(f"{tracked.source.name}, a symbolic number")
    return found


def _without_symbols(context: Any) -> Any:
    changes: dict[str, Any] = {"view_base_context": context.view_base_context and _without_symbols(context.view_base_context)}
    if hasattr(context, "shape_env_to_source_to_symbol_cache"):
        changes["shape_env_to_source_to_symbol_cache"] = {}
    return replace(context, **changes)


def make_symbols(output: OutputGraph, inputs: Sequence[tuple[Any, Any]], values: Sequence[Tensor]) -> None:
    """Make the symbols of a frame, given what :func:`symbolic_inputs` returned and the tensors."""
    fake_mode = output.tracing_context.fake_mode
    assert fake_mode is not None
    for (source, context), value in zip(inputs, values, strict=True):
        with enable_python_dispatcher():
            fake = fake_mode.from_tensor(value, source=source, symbolic_context=context)
        item = fake.item_memo
        if item is not None:
            output.tracked_fakes.append(TrackedFake(item, CallMethodItemSource(source), context))
        output.tracked_fakes.append(TrackedFake(fake, source, context))
        output.tracked_fakes_id_to_source[id(value)].append(source)


def value_of(source: Any, frame_locals: Mapping[str, Any], frame_globals: Mapping[str, Any]) -> Any:
    """Return the value that a frame finds at a source."""
    return eval(source.name, {"L": frame_locals, "G": frame_globals}, _get_closure_vars())


def state_of_process() -> str:
    """Return what a frame's guard on the state of the process compares, such as the grad mode and autocast."""
    state = convert_frame.initial_global_state or GlobalStateGuard()
    return str(state.__getstate__())


def empty_output(
    code: CodeType, frame_locals: dict[str, Any], frame_globals: dict[str, Any], compiler_fn: Any, *, one_graph: bool
) -> OutputGraph:
    """Return an output of a frame before its trace."""
    names = ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_consts", "co_name", "co_filename", "co_firstlineno")
    return OutputGraph(
        {name: getattr(code, name) for name in names},  # type: ignore[arg-type]
        compiler_fn,
        None,  # type: ignore[arg-type]
        export=False,
        export_constraints=(),
        frame_state=None,
        local_scope=frame_locals,
        global_scope=frame_globals,
        f_code=code,
        torch_function_mode_stack=[],
        package=None,
        one_graph=one_graph,
    )


def guards_manager(code: CodeType, output: OutputGraph) -> CheckFunctionManager:
    """Make the guards of an output. It raises if a source is missing, or if a guard fails for the frame itself."""
    return CheckFunctionManager(code, output)


def traced(
    output: OutputGraph, bytecode: CodeType, closure: Any, frame_globals: dict[str, Any], guards: CheckFunctionManager
) -> FrameOutput:
    """Return an output as the result of a trace."""

    def build(code: CodeType, hooks: Any = None, **__: Any) -> CheckFunctionManager:
        if hooks and hooks.guard_filter_fn:
            return CheckFunctionManager(code, output, guard_fail_fn=hooks.guard_fail_fn, guard_filter_fn=hooks.guard_filter_fn)
        guards.guard_manager.guard_fail_fn = hooks.guard_fail_fn if hooks else None
        return guards

    tracer: Any = SimpleNamespace(
        error_on_graph_break=_get_error_on_graph_break(),
        is_tracing_resume_prologue=False,
        closure=closure,
        f_globals=frame_globals,
        output=output,
    )
    result = FrameOutput(DynamoTracerOutput(tracer), bytecode, [], None)
    result.build = build
    return result


def observed_sizes(code: CodeType, closure: Any) -> dict[str, Any]:
    """Return the sizes that inputs of frames of a function have had, by source. Changes to it change what Dynamo knows."""
    return get_code_state()[CodeId.make(code, closure)].automatic_dynamic


def merged(known: Any, other: Any) -> Any:
    """Return what Dynamo knows of a size after it has seen two sets of sizes."""
    result = copy.copy(known)
    result |= other
    return result


def input_sources(gm: GraphModule) -> list[Any]:
    """Return where a frame finds the inputs of its graph; None for an input that is in no frame."""
    arguments = (node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder"))
    return [getattr(argument, "source", None) for argument in arguments]
