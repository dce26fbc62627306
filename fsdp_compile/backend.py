"""``fsdp_backend``: the torch.compile backend that runs the passes and lowers their graphs.

AOTAutograd, the partitioner and Inductor do what they do for the ``inductor`` backend; ``compile_fx`` has a hook at each place
where a pass belongs, and nothing of them is patched.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

from passes.keep_order import KeepWaits
from passes.lower import INDUCTOR_CONFIG
from passes.ops import ReduceGrad, Unshard, reduce_grads, unshards, update_args
from passes.pipeline import run_dynamo_passes, run_joint_passes, run_passes

from .capture import CapturedGraph, is_capturing, observer, record, snapshot
from .runtime import BoxedFunction, bind_backward, bind_forward, boxed, gradient_outputs, sharded_param
from .unit import Unit

_LOWERINGS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class Options:
    """``torch.compile(..., options={...})`` for this backend.

    Attributes:
        lowering: "inductor": generated kernels. "aot_eager": the same passes, then aten operators one by one, to debug with.
    """

    lowering: str = "inductor"

    @staticmethod
    def parse(options: dict[str, Any] | None) -> Options:
        known = [field.name for field in fields(Options)]
        for key in options or {}:
            if key not in known:
                raise ValueError(f"fsdp_backend has no option {key!r}; it has: {', '.join(known)}.")
        parsed = Options(**(options or {}))
        if parsed.lowering not in _LOWERINGS:
            raise ValueError(f"options['lowering'] must be one of {_LOWERINGS}, not {parsed.lowering!r}.")
        return parsed


def fsdp_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph of a model that ``fully_shard`` sharded; for ``torch.compile(model, backend=fsdp_backend)``.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs.
        options: see :class:`Options`.
        mode: only None; Inductor's modes are not supported.

    Raises:
        ValueError: an option or mode that the backend does not have.
    """
    parsed = Options.parse(options)
    if mode is not None:
        raise ValueError(f"fsdp_backend does not take mode={mode!r}; leave mode out.")
    run_dynamo_passes(gm, observer())
    shards = _qualify_names(gm.graph, example_inputs)
    if not shards:
        if any(isinstance(value, nn.Parameter) and not hasattr(value, "_fsdp_ignored") for value in example_inputs):
            _warn_once_that_nothing_is_sharded()
        if parsed.lowering == "inductor":
            return cast("Callable[..., Any]", compile_fx(gm, example_inputs))
        return _compile(gm, example_inputs, parsed)
    # compile_fx consumes its graph; this one can still be run operator by operator.
    uncompiled = snapshot(gm)
    return _guard_requires_grad(_compile(gm, example_inputs, parsed), uncompiled, shards)


@functools.cache
def _warn_once_that_nothing_is_sharded() -> None:
    warnings.warn(
        "fsdp_backend compiles a model without a sharded parameter, as plain Inductor would. Call fully_shard on the model "
        "before its first compiled call if it should be sharded.",
        stacklevel=2,
    )


def _qualify_names(graph: Graph, example_inputs: Sequence[Any]) -> list[int]:
    """Write the qualified names of parameters and units into the graph; gives the indices of inputs that are shards.

    The code that Dynamo traces knows parameters by their names within a unit, so that equal blocks can share a graph.
    """
    index_of = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    unit_names: dict[Unit, str] = {}
    indices = []
    for node in unshards(graph.nodes):
        index = index_of[Unshard.of(node).shard]
        sharded = sharded_param(example_inputs[index])
        if sharded.unit not in unit_names:
            unit_names[sharded.unit] = _unique_name(sharded.unit.name, set(unit_names.values()))
        update_args(node, name=sharded.name, unit=unit_names[sharded.unit])
        indices.append(index)
    return indices


def _unique_name(name: str, taken: set[str]) -> str:
    """Units have names within the outermost sharded module; one graph may hold several of those, whose names can be equal."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name or 'root'}_{number}"
    return candidate


def _guard_requires_grad(compiled: Callable[..., Any], uncompiled: GraphModule, shards: list[int]) -> Callable[..., Any]:
    """Notice parameters that were frozen or unfrozen since the graph was traced.

    Dynamo guards on the shards, which follow their parameters here: this call runs operator by operator, with the gradients
    that are now asked for, and the next call compiles anew.
    """

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled():
            changed = [sharded_param(args[index]).sync_requires_grad() for index in shards]
            if any(changed):
                return uncompiled(*args)
        return compiled(*args)

    return call


class _JointPass(CustomGraphPass):
    """Inductor's hook for a pass over the joint graph."""

    def __init__(self, users_passes: Any):
        as_list = users_passes if isinstance(users_passes, (list, tuple)) else [users_passes]
        self._following: list[Callable[[Graph], None]] = [function for function in as_list if function is not None]

    def __call__(self, graph: Graph) -> None:
        run_joint_passes(graph, observer())
        for function in self._following:
            function(graph)

    def uuid(self) -> Any:
        # Inductor's cache is keyed by the graphs that come of this pass anyhow; None would turn the cache off, which is for
        # passes of the user's that do not say what they are.
        uuids = [getattr(function, "uuid", lambda: None)() for function in self._following]
        return None if None in uuids else ["fsdp_compile.reshard_after_forward", *uuids]


def _compile(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    def inner_compile(graph_module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> BoxedFunction:
        return _lower(graph_module, inputs, options, **kwargs)

    config_patches = {
        **INDUCTOR_CONFIG,
        "joint_custom_post_pass": _JointPass(inductor_config.joint_custom_post_pass),
        # Parameters that are frozen into the code could not be sharded.
        "freezing": False,
    }
    # The cache of AOTAutograd stores Inductor's own output; what inner_compile returns is bound to this process.
    with functorch_config.patch(enable_autograd_cache=False):
        compiled = compile_fx(
            gm,
            example_inputs,
            inner_compile=inner_compile,  # type: ignore[arg-type]
            config_patches=config_patches,
        )
    return cast("Callable[..., Any]", compiled)


def _lower(gm: GraphModule, inputs: Sequence[Any], options: Options, **kwargs: Any) -> BoxedFunction:
    """Run the passes over a forward or backward graph and lower it; the ``inner_compile`` of ``compile_fx``."""
    is_backward = bool(kwargs.get("is_backward"))
    for_inductor = options.lowering == "inductor"
    gradients = gradient_outputs(gm.graph) if is_backward else []
    group_names = _group_names(gm.graph)
    runs = run_passes(gm, is_backward=is_backward, for_inductor=for_inductor, observer=observer())
    captured = snapshot(gm) if is_capturing() else None
    if for_inductor:
        extra = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(inputs) :]]
        with V.set_choices_handler(KeepWaits()):
            lowered: Any = compile_fx_inner(gm, [*inputs, *extra], **kwargs)
        code = getattr(lowered, "source_code", None)
    else:
        lowered = boxed(lambda args: gm(*_emptied(args)))
        code = None
    if captured is not None:
        record(CapturedGraph(captured, code, group_names), is_backward)
    return bind_backward(lowered, runs, gradients) if is_backward else bind_forward(lowered, runs)


def _emptied(args: list[Any]) -> list[Any]:
    taken = list(args)
    args.clear()
    return taken


def _group_names(graph: Graph) -> dict[str, str]:
    """What the process groups of a graph are in the mesh. To be asked before the passes replace the operators."""
    names: dict[str, str] = {}
    specs: list[Unshard | ReduceGrad] = [Unshard.of(node) for node in unshards(graph.nodes)]
    specs += [ReduceGrad.of(node) for node in reduce_grads(graph.nodes)]
    for spec in specs:
        names[spec.group] = "shard"
        names[spec.replicate_group] = "replicate"
        names[getattr(spec, "post_forward_group", "")] = "post_forward"
    names.pop("", None)
    return names
