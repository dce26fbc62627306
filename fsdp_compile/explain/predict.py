"""Predict the time, communication and memory of a training step: of a model without device or weights, or of one that ran."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from passes.collectives.gloo import pretending_gloo
from passes.fx.sizes import UNKNOWN_SIZE, assume_unknown_size, layout
from passes.fx.torch_internals.aot import partitioners
from passes.fx.torch_internals.core import pytree, unset_fake_temporarily
from passes.fx.torch_internals.dynamo import TorchDynamoException
from passes.models.hardware import Hardware

from ..compiler.aot_eager_lowering import AotEagerLowering
from ..compiler.backend import compile_with
from ..compiler.capture import Capture, capture
from ..compiler.captured_graph import CapturedGraph
from ..compiler.lowering import Lowered, Lowering
from ..compiler.options import LOWERINGS, Options
from ..cuda.attention import fused_attention
from ..cuda.pretend import device_of, pretend_cuda
from ..dry_run import MeshShape, check_arguments, dry_step, shard_layers, train
from ..runtime.planned_graph import boxed
from .depth import Cuts
from .exposure import milliseconds
from .formulae import StepDerivation
from .make_report import hardware_of, make_report
from .render import size
from .report import Report
from .rounds import Rounds
from .suggestions import suggestion, with_suggestions
from .symbolic import SymbolicGraph, SymbolicStep, check_is_same, marking, symbolic_inputs

# Graphs hardly depend on the architecture. GPUs that are not listed get that of an H100.
_ARCHS = {"A100": "sm_80", "B200": "sm_100"}
_PREFERRED = "sm_90"


def explain(
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape,
    hardware: Hardware | str | os.PathLike[str],
    *,
    shard: Callable[[Any, DeviceMesh], Any] = shard_layers,
    step: Callable[..., Any] = train,
    options: dict[str, Any] | None = None,
    tokens: int | None = None,
    optimizer: str | float | None = "adamw",
    suggest: bool = True,
    unknown_size: int = UNKNOWN_SIZE,
) -> Report:
    """Report the time, communication and memory of a training step on each rank, without the machine that it is to run on.

    A copy of the model is sharded over simulated ranks, traced, and taken through all passes. The step then runs with fake
    results: nothing is lowered, allocated or computed. Neither a GPU nor Triton is needed. Times are those of
    :mod:`passes.models`; docs/explain.md says what these models leave out.

    The model does not change, but ``torch.compile`` is reset. During the call, no other thread of the process may use
    torch.compile, CUDA or Gloo.

    Args:
        model: a model that is not sharded, on the meta device or any other.
        inputs: the inputs of its forward on one rank: a tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments. Only shapes and dtypes count.
        mesh_shape: ``(shards,)`` for FSDP, or ``(replicas, shards)`` for HSDP, in ranks. Or the sizes of dimensions by name,
            such as ``{"dp": 8, "tp": 4}``; ``shard`` then takes slices of the mesh.
        hardware: "a100", "h100", "h200" or "b200", with NVLink and eight a node; "cpu", with Gloo; the path of a file that
            ``python -m fsdp_compile.calibrate`` wrote; or a :class:`passes.models.hardware.Hardware`.
        shard: called with a copy of the model and the mesh. It calls :func:`~fsdp_compile.fully_shard`, and sets flags and
            hooks. Default: each module in the outermost ``nn.ModuleList`` s is a unit, and the rest is one unit.
        step: called with the compiled model and the inputs. Each forward and backward that it calls counts, with the flags that
            it sets. Default: one forward, and one backward from the sum of all outputs.
        options: the options of the backend, as for ``torch.compile``. With ``schedule="auto"``, the schedule is for
            ``hardware``.
        tokens: tokens of a rank in the step. Default: the elements of the first integer input with two dimensions, if the step
            calls each forward graph once.
        optimizer: "adamw" or "adam" (two moments, in the dtype of shards), "momentum", "sgd", the bytes of state for each
            element of a parameter, or None for a step without an optimizer. Its time is that of reading gradients once, and of
            reading and writing state and shards once.
        suggest: also try ``schedule="auto"`` and ``reshard_after_forward=False``, which takes up to two more traces. Has no
            effect with a memory budget, where the report lists the policies that were tried.
        unknown_size: the assumed value of each size that depends on data, such as the number of tokens that go from one rank to
            the experts of another.

    Raises:
        ValueError, TypeError: an argument is invalid, or the hardware lacks a rate that the step needs.
        RuntimeError: the model cannot be traced; there is a process group already, as a process has one default group; or
            another thread is in ``explain``.

    Example::

        with torch.device("meta"):
            model = Transformer(config)
        report = explain(model, torch.zeros(4, 2048, dtype=torch.long), mesh_shape=(8,), hardware="h100")
        print(report)
        report.timeline("trace.json")
    """
    machine = hardware_of(hardware)
    check_arguments("explain", model, mesh_shape, shard)
    if unknown_size < 1:
        raise ValueError(f"unknown_size={unknown_size!r} must be at least 1.")
    given = {"schedule": "default", **(options or {})}
    has_budget = given.get("memory_budget") is not None

    def run(*, schedule: str, shard: Callable[[Any, DeviceMesh], Any] = shard) -> Report:
        chosen = _for_hardware({**given, "schedule": schedule}, machine)
        if has_budget:
            chosen.setdefault("optimizer", optimizer)
        played = _simulated_step(machine, model, inputs, mesh_shape, shard=shard, step=step, options=chosen)
        with assume_unknown_size(unknown_size), played as captured:
            found = _tokens(inputs, captured) if tokens is None else tokens
            return make_report(captured, machine, tokens=found, optimizer=optimizer)

    @functools.cache
    def derive() -> StepDerivation:
        if has_budget:
            raise ValueError(
                "There are no formulae for a step under options['memory_budget'], as other sizes would have it choose "
                "otherwise: explain it at these sizes."
            )
        if isinstance(mesh_shape, Mapping):
            raise ValueError(
                f"There are formulae for FSDP and HSDP alone, not for a mesh with dimensions of its own, {dict(mesh_shape)!r}: "
                "explain the step anew at other sizes."
            )
        (traced,) = symbolic_steps(model, inputs, mesh_shape, machine, [step], shard=shard, options=given, optimizer=optimizer)
        check_is_same(report, traced)
        told = traced.at(report.tokens, traced.values)
        if (told.time_ns, told.memory.peak_bytes) != (report.time_ns, report.memory.peak_bytes):
            warnings.warn(
                f"Traced with symbols, the step takes {milliseconds(told.time_ns)} and holds {size(told.memory.peak_bytes)}, "
                f"not {milliseconds(report.time_ns)} and {size(report.memory.peak_bytes)}: torch.compile makes other graphs of "
                "it. Formulae, and what at() says, are of those.",
                stacklevel=3,
            )
        return StepDerivation(traced, machine, optimizer, report.tokens, traced.values)

    report = replace(run(schedule=given["schedule"]), _derive=derive)
    if not suggest or has_budget:
        return report

    def keeping(model: Any, mesh: DeviceMesh) -> None:
        shard(model, mesh)
        for module in model.modules():
            if hasattr(module, "set_reshard_after_forward"):
                module.set_reshard_after_forward(False, recurse=False)

    tried = []
    if given["schedule"] != "auto":
        tried.append(suggestion("options={'schedule': 'auto'}", report, lambda: run(schedule="auto")))
    tried.append(suggestion("reshard_after_forward=False", report, lambda: run(schedule=given["schedule"], shard=keeping)))
    return replace(report, suggestions=tried)


def explain_captured(
    captured: Capture,
    hardware: Hardware | str | os.PathLike[str],
    *,
    tokens: int | None = None,
    optimizer: str | float | None = "adamw",
) -> Report:
    """Report the time, communication and memory of the step that ran inside of a capture, on a given machine.

    The step's process groups have to exist.

    Args:
        captured: the step, of which :func:`~fsdp_compile.debug.capture` has to record all graphs.
        hardware, tokens, optimizer: as for :func:`explain`, but without a default for ``tokens``.

    Raises:
        ValueError: a graph ran that was compiled before the capture, or no graph ran; the hardware is not known, or lacks a
            rate that the step needs; the optimizer is not known.

    Example::

        with capture() as captured:
            model(tokens).sum().backward()
        print(explain_captured(captured, "cpu"))
    """
    return with_suggestions(make_report(captured, hardware, tokens=tokens, optimizer=optimizer))


def explain_microbatches(
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape,
    hardware: Hardware,
    step: Callable[[int], Callable[..., Any]],
    microbatches: int,
    few: int,
    *,
    shard: Callable[[Any, DeviceMesh], Any],
    options: dict[str, Any],
    optimizer: str | float | None,
) -> Report:
    """Explain a step of many microbatches by one of a few.

    Args:
        model, inputs, mesh_shape, hardware, shard, options, optimizer: as for :func:`explain`, whose errors are raised too.
        step: makes the function of a step with a number of microbatches.
        microbatches: the number of microbatches to report on.
        few: the number to run, if some of these do the same; else all are run.
    """
    number = min(few, microbatches)
    given: Any = {"shard": shard, "step": step(number), "options": _for_hardware(options, hardware)}
    with _simulated_step(hardware, model, inputs, mesh_shape, **given) as captured:
        rounds = Rounds.find(captured.calls)
        if rounds is not None:
            captured.calls = rounds.with_more(captured.calls, microbatches - number)
        if rounds is not None or number == microbatches:
            return make_report(captured, hardware, tokens=_tokens(inputs, captured), optimizer=optimizer)
    given = {"shard": shard, "options": options, "optimizer": optimizer}
    return explain_microbatches(model, inputs, mesh_shape, hardware, step, microbatches, microbatches, **given)


def symbolic_steps(
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape,
    hardware: Hardware,
    steps: Sequence[Callable[..., Any]],
    *,
    shard: Callable[[Any, DeviceMesh], Any] = shard_layers,
    options: dict[str, Any] | None = None,
    optimizer: str | float | None = "adamw",
    cuts: Cuts | None = None,
) -> list[SymbolicStep]:
    """Trace a model once, with sizes that are expressions, and run training steps of it one after the other.

    Graphs that several steps have in common are made once.

    Args:
        model, inputs, mesh_shape, hardware, shard, options, optimizer: as for :func:`explain`, whose errors are raised too.
        steps: functions as ``step`` of :func:`explain`. Each leaves the flags of the model as it finds them.
        cuts: equal layers are left out of graphs, and listed here. Default: all layers are traced.

    Raises:
        ValueError: a step has no formulae; see :class:`~fsdp_compile.explain.symbolic.SymbolicStep`.
    """
    check_arguments("explain", model, mesh_shape, shard)
    symbolic = symbolic_inputs(inputs)
    captures: list[Capture] = []

    def run(compiled: Any, *args: Any, **kwargs: Any) -> None:
        for step in steps:
            with capture(passes=False) as captured:
                captured.census.copies = {} if cuts is None else cuts.copies
                step(compiled, *args, **kwargs)
            captures.append(captured)
            compiled.zero_grad()

    marked = marking(run, symbolic.traced)
    backend = functools.partial(_backend, cuts=cuts)
    given: Any = {"shard": shard, "step": marked, "options": _for_hardware(options or {}, hardware), "backend": backend}
    with _simulated_step(hardware, model, symbolic.inputs, mesh_shape, **given):
        made: dict[CapturedGraph, SymbolicGraph] = {}
        return [SymbolicStep(captured, symbolic, hardware, optimizer, made) for captured in captures]


def _for_hardware(options: Mapping[str, Any], hardware: Hardware) -> dict[str, Any]:
    """Return options of the backend, with the machine for which it is to schedule or to choose, if it does."""
    chosen = dict(options)
    if chosen.get("schedule") == "auto" or chosen.get("memory_budget") is not None:
        chosen.setdefault("hardware", hardware)
    return chosen


@contextlib.contextmanager
def _simulated_step(
    hardware: Hardware,
    model: nn.Module,
    inputs: Any,
    mesh_shape: MeshShape,
    backend: Callable[..., Any] | None = None,
    **given: Any,
) -> Iterator[Capture]:
    """Run a step on the pretended machine, and yield the capture while the step's process groups exist."""
    is_cpu = hardware.name == "cpu"
    with contextlib.ExitStack() as stack:
        if is_cpu:
            stack.enter_context(pretending_gloo())
        else:
            stack.enter_context(pretend_cuda(device_of(_ARCHS.get(hardware.name, _PREFERRED)), triton=False))
            stack.enter_context(fused_attention())
            stack.enter_context(_without_generators())
        played = dry_step(model, inputs, mesh_shape, "cpu" if is_cpu else "cuda", backend=backend or _backend, **given)
        try:
            captured = stack.enter_context(played)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", None)
            if isinstance(cause, (ValueError, NotImplementedError)):
                # The backend's own error, about an option or something that it cannot shard, says more than Dynamo's.
                raise cause from error
            raise RuntimeError(
                f"explain could not trace the model: {error}\nIt has to run under torch.compile with these inputs: see what "
                "torch.compile(model, backend='eager') says of it, and give shapes and dtypes that its forward takes."
            ) from error
        if not captured.calls:
            raise RuntimeError(
                "explain found nothing in the step that torch.compile traced: forward does not run in it, or is disabled for "
                "Dynamo (torch.compiler.disable), or step= does not call the compiled model that it is given."
            )
        yield captured


@contextlib.contextmanager
def _without_generators() -> Iterator[None]:
    """Recompute random operators of checkpoints as if they were not random, for the duration of the ``with`` block.

    torch counts attention as random. On a GPU, the recomputation would take states of the GPU's generator as inputs, a few
    bytes each. Without a GPU, there is no generator.
    """

    def keep(joint: GraphModule, forward: GraphModule, backward: GraphModule, *_: Any) -> tuple[GraphModule, GraphModule]:
        return forward, backward

    with mock.patch.object(partitioners, "functionalize_rng_ops", keep):
        yield


def _backend(
    gm: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, cuts: Cuts | None = None
) -> Callable[..., Any]:
    """Compile as ``fsdp_backend`` does, up to the lowering. As in a real run, no fake mode of the step is active meanwhile."""
    parsed = replace(Options.parse(options), cudagraphs=False)
    with unset_fake_temporarily():
        if cuts is not None:
            cuts.cut(gm, inputs)
        return compile_with(_without_lowering(parsed.lowering), gm, inputs, parsed)


def _without_lowering(name: str) -> Lowering:
    """Make a lowering that leaves graphs as they are, with the passes and settings of the lowering ``name``."""
    other = LOWERINGS[name]()
    names = ("preparing_passes", "final_passes", "config_patches", "fuses")
    return type("WithoutLowering", (_FakeLowering,), {name: getattr(other, name) for name in names})()


class _FakeLowering(AotEagerLowering):
    """A lowering for fake tensors: a graph that ran with such inputs before gives results like those, and runs nothing."""

    def lower(self, gm: GraphModule, **given: Any) -> Lowered:
        lowered = super().lower(gm, **given)
        known: dict[Hashable, list[Any]] = {}

        def run(args: list[Any]) -> Any:
            inputs, key = [*args], tuple(map(_description, args))
            if key not in known:
                results = lowered.function(args)
                places = {id(value): index for index, value in enumerate(inputs)}
                known[key] = [_description(value, places) for value in results]
                return results
            args.clear()
            return [inputs[made] if isinstance(made, int) else _made(*made) for made in known[key]]

        return Lowered(boxed(run))


def _description(value: Any, places: Mapping[int, int] = MappingProxyType({})) -> Any:
    """Describe a fake tensor, or another value by itself. A tensor that is an input is described by its place among them."""
    if not isinstance(value, Tensor):
        return None, value
    if id(value) in places:
        return places[id(value)]
    return (*layout(value), value.dtype, value.device), None


def _made(tensor: tuple[Any, ...] | None, value: Any) -> Any:
    if tensor is None:
        return value
    size, stride, dtype, device = tensor
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _tokens(inputs: Any, captured: Capture) -> int | None:
    calls = Counter(call.compilation for call in captured.calls if not call.is_backward)
    values = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
    integers = [value.numel() for value in values if value.dim() == 2 and value.dtype in (torch.int32, torch.int64)]
    return integers[0] if integers and max(calls.values()) == 1 else None
