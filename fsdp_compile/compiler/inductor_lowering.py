"""The lowering ``inductor``: a program that calls collectives, and segments of compute that Inductor compiles."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import SymInt
from torch.fx import Graph, GraphModule

from passes.fx.size_guards import Assumptions
from passes.fx.sizes import symbolic_sizes_of
from passes.fx.torch_internals.core import TracingContext
from passes.fx.torch_internals.inductor import (
    CompiledFxGraphConstants,
    FxGraphCache,
    compile_fx,
    compile_fx_inner,
    inductor_config,
)
from passes.fx.torch_internals.objects import cache_folder, cache_key, first_expression, set_cache_key
from passes.lowering.pad_products import pad_products
from passes.lowering.program import Program, write_program
from passes.lowering.segments import Segment, cut_into_segments
from passes.pass_runner import Pass
from passes.pipeline import GraphOfPlan, PartitionedGraph
from passes.transforms.fuse_products import fuse_products
from passes.transforms.pin_layouts import pin_layouts

from ..runtime.planned_graph import BoxedFunction, boxed
from .background_kernels import kernels_in_background, probe_instruction_set, share_among_ranks, split_among_cores
from .cache_folder import ensure_room, without_damaged_files
from .capture import snapshot
from .loop_splits import even_loop_splits
from .lowering import Lowered, Lowering

logger = logging.getLogger(__name__)

#: Called like ``compile_fx_inner``: with a graph without collectives, its fake inputs, and keywords. Returns a function of a
#: list of inputs, which it empties. The function's attribute ``source_code``, if any, becomes part of the program's source.
SegmentCompiler = Callable[..., Any]
# For each segment: the compiled function, and the conditions on sizes that it relies on.
_Kernels = dict[Hashable, tuple[Any, Sequence[Any]]]


class StoredSegment(NamedTuple):
    """A segment in Inductor's cache.

    Attributes:
        key: its key there.
        sizes: the expressions of its inputs that are symbolic sizes, in order. Conditions of the cache are on these.
    """

    key: str
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class StoredProgram:
    """A program whose segments are in Inductor's cache.

    Attributes:
        program: the program.
        segments: its segments, by name.
        groups: segments whose kernels are in one library, in its order. Each has all segments of the library, among them such
            that other programs call.
        in_background: compile kernels in the background, as for the CPU.
    """

    program: Program
    segments: Mapping[str, StoredSegment]
    groups: Sequence[tuple[StoredSegment, ...]]
    in_background: bool


class InductorLowering(Lowering):
    """The lowering that makes a program of each graph, and compiles equal segments of its graphs once.

    Args:
        compile_segment: compiles one segment.
    """

    preparing_passes = (Pass[PartitionedGraph]("fuse_products", lambda on: fuse_products(on.graph), is_rare=True),)
    final_passes = (Pass[GraphOfPlan]("pin_layouts", lambda on: pin_layouts(on.graph)),)

    def __init__(self, compile_segment: SegmentCompiler = compile_fx_inner):
        self._compile_segment = compile_segment
        # A segment has several entries if it was compiled for several sets of sizes.
        self._kernels: dict[Hashable, list[tuple[Any, Sequence[Any]]]] = {}
        # The group of each segment in Inductor's cache, whose kernels are in one library, by the segment's key there.
        self._groups: dict[str, tuple[StoredSegment, ...]] = {}
        self._loaded: dict[str, list[tuple[Any, Sequence[Any]]]] = {}

    def prepare(self, device_types: set[str]) -> None:
        ensure_room()
        if device_types == {"cpu"}:
            probe_instruction_set()

    def compile_unsharded(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return cast("Callable[..., Any]", compile_fx(gm, example_inputs, inner_compile=self._compile_segment))

    def lower(
        self, gm: GraphModule, *, is_backward: bool, inductor_kwargs: Mapping[str, Any], assumptions: Assumptions
    ) -> Lowered:
        outer, segments = cut_into_segments(gm)
        keys: dict[str, Hashable] = {name: (is_backward, segment.key) for name, segment in segments.items()}
        earlier = {key: _admitted(self._kernels.get(key, ()), assumptions) for key in keys.values()}
        kernels = {key: found for key, found in earlier.items() if found is not None}
        new = {keys[name]: segment for name, segment in segments.items() if keys[name] not in kernels}
        in_background = _devices(gm.graph) == {torch.device("cpu")}
        # fuse_products has fused what Inductor would look for here, and Inductor would warn for each segment.
        with inductor_config.patch(_micro_pipeline_tp=False), even_loop_splits():
            # self._kernels changes only after all segments are compiled, so that a failure leaves none.
            made = self._compile(new, inductor_kwargs, assumptions, in_background=in_background)
        for key, (function, conditions) in made.items():
            self._kernels.setdefault(key, []).append((function, conditions))
            kernels[key] = function
        compiled = {name: kernels[key] for name, key in keys.items()}
        program = write_program(outer, gm)
        parts = [f"# {name}\n{kernels.source_code}" for name, kernels in compiled.items() if hasattr(kernels, "source_code")]
        stored = self._stored(program, compiled, in_background=in_background)
        return Lowered(boxed(program.link(compiled)), "\n\n".join([program.source, *parts]), stored)

    def load(
        self, stored: StoredProgram, *, is_backward: bool, inductor_kwargs: Mapping[str, Any], assumptions: Assumptions
    ) -> BoxedFunction | None:
        kernels: dict[str, Any] = {}
        with kernels_in_background() if stored.in_background else contextlib.nullcontext(lambda: None) as end_library:
            for group in stored.groups:
                for segment in group:
                    found = _admitted(self._loaded.get(segment.key, ()), assumptions)
                    if found is None:
                        sizes = [assumptions.size(expression) for expression in segment.sizes]
                        found = _from_cache(segment.key, sizes, inductor_kwargs, is_backward=is_backward)
                        if found is None:
                            return None
                        self._loaded.setdefault(segment.key, []).append((found, assumptions.added()))
                        self._groups[segment.key] = group
                    kernels[segment.key] = found
                end_library()
        return boxed(stored.program.link({name: kernels[segment.key] for name, segment in stored.segments.items()}))

    def _stored(self, program: Program, compiled: Mapping[str, Any], *, in_background: bool) -> StoredProgram | None:
        keys = {name: cache_key(function) for name, function in compiled.items()}
        groups = {name: self._groups[key] for name, key in keys.items() if key in self._groups}
        if len(groups) < len(keys) or not program.is_data:
            return None
        segments = {name: next(each for each in group if each.key == keys[name]) for name, group in groups.items()}
        return StoredProgram(program, segments, list(dict.fromkeys(groups.values())), in_background)

    def _compile(
        self, segments: Mapping[Hashable, Segment], kwargs: Mapping[str, Any], assumptions: Assumptions, *, in_background: bool
    ) -> _Kernels:
        if not in_background:
            return self._compile_together(segments, segments, kwargs, assumptions)
        groups = split_among_cores({key: len(segment.graph_module.graph.nodes) for key, segment in segments.items()})
        with kernels_in_background() as end_library:
            compile_group = functools.partial(
                self._compile_together, segments=segments, kwargs=kwargs, assumptions=assumptions, end_library=end_library
            )
            done = share_among_ranks({group: functools.partial(compile_group, group) for group in groups})
        return {key: kernels for group in done.values() for key, kernels in group.items()}

    def _compile_together(
        self,
        keys: Iterable[Hashable],
        segments: Mapping[Hashable, Segment],
        kwargs: Mapping[str, Any],
        assumptions: Assumptions,
        end_library: Callable[[], None] = lambda: None,
    ) -> _Kernels:
        # The code of a segment also relies on what was decided for earlier segments.
        kernels: _Kernels = {}
        in_cache = []
        for key in keys:
            known = assumptions.on_data()
            sizes = _sizes_of_inputs(segments[key].graph_module)
            compiled = self._compile_one(segments[key], kwargs, assumptions)
            if assumptions.on_data() != known:
                # Inductor's cache keeps only conditions on sizes that do not depend on data.
                _take_out_of_cache(compiled)
            kernels[key] = compiled, assumptions.added()
            stored_as = cache_key(compiled)
            # No other process could make a symbolic size of a number.
            if stored_as is not None and not any(size.is_number for size in sizes):
                in_cache.append(StoredSegment(stored_as, sizes))
        end_library()
        self._groups |= {segment.key: tuple(in_cache) for segment in in_cache}
        return kernels

    def _compile_one(self, segment: Segment, kwargs: Mapping[str, Any], assumptions: Assumptions) -> Any:
        gm = segment.graph_module
        pad_products(gm)
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        sizes = list(symbolic_sizes_of(node.meta.get("val") for node in gm.graph.nodes))
        # Inductor changes the graph that it compiles.
        untouched = snapshot(gm) if sizes else gm
        try:
            compiled = without_damaged_files(lambda: self._compile_segment(gm, inputs, **kwargs))
        except Exception as error:
            # Some code of Inductor needs numbers. From a whole graph, it would know which sizes must be numbers. So a segment
            # that it cannot compile with symbols is compiled for the sizes at hand.
            if not assumptions.fix(sizes):
                raise
            logger.info("A segment is compiled for the sizes at hand alone, as compiling it for others failed: %r", error)
            compiled = self._compile_segment(untouched, inputs, **kwargs)
        context = TracingContext.try_get()
        if context is not None and context.output_strides:
            # Inductor has noted strides of the segment's outputs as those of the graph. The graph's outputs have the traced
            # strides.
            context.output_strides.clear()
        return compiled


def _admitted(found: Sequence[tuple[Any, Sequence[Any]]], assumptions: Assumptions) -> Any | None:
    """Return the first kernels whose conditions hold for the sizes at hand; None: there are none."""
    return next((kernels for kernels, conditions in found if assumptions.admit(conditions)), None)


def _sizes_of_inputs(gm: GraphModule) -> tuple[Any, ...]:
    """Return the expressions of inputs that are symbolic sizes."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return tuple(first_expression(value.node) for value in values if isinstance(value, SymInt))


def _from_cache(key: str, sizes: Sequence[SymInt], kwargs: Mapping[str, Any], *, is_backward: bool) -> Any | None:
    """Return a segment from Inductor's cache, as ``compile_fx_inner`` does; None: it is not there for these sizes."""
    constants = CompiledFxGraphConstants()
    found, _ = without_damaged_files(lambda: FxGraphCache.load_with_key(key, [], sizes, True, None, is_backward, constants))
    if found is not None:
        set_cache_key(found, key)
        found.post_compile(sizes, constants, {**kwargs, "is_backward": is_backward})  # type: ignore[typeddict-item]
    return found


def _take_out_of_cache(compiled: Any) -> None:
    key = cache_key(compiled)
    if key is not None:
        shutil.rmtree(cache_folder(FxGraphCache, key), ignore_errors=True)


def _devices(graph: Graph) -> set[torch.device]:
    values = [node.meta.get("val") for node in graph.nodes]
    return {value.device for value in values if isinstance(value, torch.Tensor)}
