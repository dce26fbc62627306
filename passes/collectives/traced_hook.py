"""Traced hooks: gradient communication hooks as functional tensor code.

Users' hooks write in place and call ``torch.distributed``. In the backward graph, a hook has to be operators that Inductor can
fuse and a schedule can move: no in-place operators, and functional collectives instead of ``c10d`` operators.

Hooks import functions of ``torch.distributed`` under any name, so replacing these functions would miss some. All of them end in
a ``c10d`` operator, which a dispatch mode sees. The same mode answers random operators (:mod:`.random_numbers`). Tensors that
the hook owns (:mod:`.stateful_hook`) are inputs of the traced code, and their new values are outputs.
"""

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode

from ..fx.torch_internals.core import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    TorchDispatchMode,
    _disable_current_modes,
    dispatch_functionalize,
    from_functional_tensor,
    functionalize_has_data_mutation,
    pytree,
    sync_functional_tensor,
)
from ..fx.torch_internals.distributed import REDUCE_OP_TO_STR, create_work_from_future
from ..fx.torch_internals.operators import select_decomp_table
from .group_names import name_of
from .random_numbers import KNOWN, AnsweringRandomOperators, Draws
from .stateful_hook import HookParameter, StatefulHook, tensors_of_hook

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
_WRITE_VALUES = "Write values into the tensor, with copy_(); its memory, dtype and shape are the graph's to choose."


class HookNotTraceable(RuntimeError):
    """The error for a communication hook that does something that a graph cannot contain.

    The message names the operation, and says what to write instead.
    """


def hook_name(hook: Callable[..., Any]) -> str:
    """Return the name of a hook for messages: the name of the function, or of a callable object's class."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__name__", type(hook).__name__)


def apply_reduce_hook(hook: Callable[[Tensor, Tensor], None], flat: Tensor, world_size: int) -> Tensor:
    """Call ``hook(flat, output)``, and return the output, a gradient shard.

    With a fake ``flat``, or while ``make_fx`` traces, the hook is traced with fake tensors. Its functional operators then run
    on ``flat``. Otherwise the hook just runs.

    Args:
        hook: fills its second argument, of ``flat.numel() // world_size`` elements, and may overwrite both arguments. The
            objects that it holds (of a ``functools.partial``, method or callable object) must not change during tracing.
        flat: flat gradient; not changed, as the hook gets a copy.
        world_size: number of shards of the gradient.

    Raises:
        HookNotTraceable: the hook cannot be written as operators.
    """
    (output,) = _apply(hook, _reducing(hook, world_size), [flat])
    return output


def apply_in_place_hook(hook: Callable[[Tensor], None], flat: Tensor) -> Tensor:
    """Call ``hook`` on a copy of ``flat``, and return the copy, which the hook has changed; see :func:`apply_reduce_hook`."""

    def run(grad: Tensor) -> list[Tensor]:
        _check_returned(hook, hook(grad), grad)  # type: ignore[func-returns-value]
        return [grad]

    (result,) = _apply(hook, run, [flat])
    return result


def apply_stateful_hook(
    hook: StatefulHook,
    flat: Tensor,
    parameters: Sequence[HookParameter],
    tensors: Sequence[Tensor],
    names: Sequence[tuple[int, str]],
) -> tuple[Tensor, list[Tensor]]:
    """Call a hook with copies of its tensors, and return the gradient shard; see :func:`apply_reduce_hook`.

    Args:
        hook: the hook.
        flat: flat gradient; not changed.
        parameters: the parameters whose gradients ``flat`` holds.
        tensors: if the hook draws, the key and count of its random numbers; then its tensors. Not changed.
        names: for each of the hook's tensors, the index of its parameter, and its name; without the random numbers.

    Returns:
        The gradient shard, and the new values of ``tensors``.

    Raises:
        HookNotTraceable: the hook cannot be written as operators.
    """
    run = _with_tensors(hook, parameters, names)
    output, *left = _apply(hook.reduce, run, [flat, *tensors], is_drawing=hook.draws)
    return output, left


def draws_random_numbers(hook: Callable[..., None] | StatefulHook, bucket: Sequence[HookParameter]) -> bool:
    """Trace a hook for a bucket, and return whether it draws random numbers.

    Args:
        hook: a stateful hook, or a function ``hook(grad, output)``.
        bucket: the parameters of the bucket.

    Raises:
        HookNotTraceable: the hook cannot be written as operators.
    """
    drawing = replace(hook, draws=True) if isinstance(hook, StatefulHook) else StatefulHook(hook, draws=True)
    found = tensors_of_hook(drawing, bucket)
    names = [(place, name) for place, name, _ in found[1:]]
    with FakeTensorMode():
        numel = sum(parameter.ranks * parameter.numel for parameter in bucket)
        flat = torch.empty(numel, dtype=bucket[0].dtype, device=bucket[0].device)
        fakes = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for *_, tensor in found]
    run = _with_tensors(drawing, bucket, names)
    return bool(_trace(drawing.reduce, run, [flat, *fakes], is_drawing=True).meta["draws"])


def _reducing(hook: Callable[..., None], world_size: int) -> Callable[..., list[Tensor]]:
    def run(grad: Tensor, *others: Any) -> list[Tensor]:
        output = grad.new_empty(grad.numel() // world_size)
        _check_returned(hook, hook(grad, output, *others), grad, output)  # type: ignore[func-returns-value]
        if isinstance(output, FunctionalTensor) and not _is_written(output):
            raise _refusal(hook, "it never wrote its output", "Fill output in place, for example with output.copy_().")
        return [output]

    return run


def _reducing_in_place(hook: StatefulHook) -> Callable[..., list[Tensor]]:
    def run(grad: Tensor, *bucket: Any) -> list[Tensor]:
        arguments = (grad, None, *bucket) if bucket else (grad,)
        _check_returned(hook.reduce, hook.reduce(*arguments), grad)  # type: ignore[func-returns-value]
        return [grad]

    return run


def _with_tensors(
    hook: StatefulHook, parameters: Sequence[HookParameter], names: Sequence[tuple[int, str]]
) -> Callable[..., list[Tensor]]:
    reduce = _reducing_in_place(hook) if hook.in_place else _reducing(hook.reduce, parameters[0].ranks)

    def run(grad: Tensor, *owned: Tensor) -> list[Tensor]:
        if hook.init is None:
            return reduce(grad)
        bucket = hook.bucket(parameters, owned, names)
        found = reduce(grad, bucket)
        for tensor, (place, name) in zip(owned, names, strict=True):
            if bucket.tensors[place].get(name) is not tensor:
                raise _refusal(hook.reduce, f"it put another tensor in the place of its tensor {name!r}", _WRITE_VALUES)
        return [*found, *owned]

    return run


def _apply(
    hook: Callable[..., Any], run: Callable[..., list[Tensor]], inputs: Sequence[Tensor], *, is_drawing: bool = False
) -> list[Tensor]:
    """Return the results of ``run`` for copies of the inputs.

    Args:
        hook: the hook that ``run`` calls, for messages.
        run: returns the reduced gradient, then the new values of the hook's tensors.
        inputs: the flat gradient, then the hook's tensors.
        is_drawing: the second input is the key and count of the random numbers, and the second result those of the next call.
    """
    flat = inputs[0]
    with torch.no_grad():
        if get_proxy_mode() is None and not isinstance(flat, FakeTensor):
            copies = [given.clone() for given in inputs]
            draws = Draws(copies.pop(1)) if is_drawing else None
            with contextlib.nullcontext() if draws is None else AnsweringRandomOperators(draws, _cannot_draw(hook)):
                return _with_count(run(*copies), draws)
        # Trace into a separate graph first, which drops dead code, such as the output's allocation, before the second trace.
        traced = Interpreter(_trace(hook, run, inputs, is_drawing=is_drawing))
        # Tensors that the hook creates have to be fake in the same mode as the inputs.
        with flat.fake_mode if isinstance(flat, FakeTensor) else contextlib.nullcontext():
            return list(traced.run(*inputs))


def _with_count(results: list[Tensor], draws: Draws | None) -> list[Tensor]:
    return results if draws is None else [results[0], draws.counted(), *results[1:]]


def _trace(
    hook: Callable[..., Any], run: Callable[..., list[Tensor]], inputs: Sequence[Tensor], *, is_drawing: bool
) -> torch.fx.GraphModule:
    flat = inputs[0]
    mode = flat.fake_mode if isinstance(flat, FakeTensor) else FakeTensorMode()
    fakes = [given if isinstance(given, FakeTensor) else mode.from_tensor(given) for given in inputs]
    number_of_draws = 0

    def observed(grad: Tensor, *others: Tensor) -> list[Tensor]:
        nonlocal number_of_draws
        draws = Draws(others[0]) if is_drawing else None
        with mode, _NoDataAssignment(hook), _FunctionalCollectives(hook, draws):
            results = _with_count(run(grad, *others[is_drawing:]), draws)
        number_of_draws = draws.number if draws is not None else 0
        return results

    before = _state(hook)
    # The backward graph has been decomposed before, and Inductor relies on decomposed operators.
    trace = make_fx(dispatch_functionalize(observed, FunctionalTensorMode()), decomposition_table=select_decomp_table())
    try:
        # A recording around the hook (emit) is to get the operators of the finished trace, not those that tracing runs.
        with _disable_current_modes():
            traced = trace(*fakes)
    except HookNotTraceable:
        raise
    except Exception as error:
        reason = f"tracing it raised {type(error).__name__}: {error}"
        raise _refusal(hook, reason, "Write it with tensor operators and torch.distributed collectives only.") from error
    after = _state(hook)
    missing = object()
    changed = sorted({key[1] for key in before | after if before.get(key, missing) is not after.get(key, missing)})
    if changed:
        advice = "Change it outside of the hook: the traced hook runs once, not in every backward."
        raise _refusal(hook, f"it changed {', '.join(changed)}", advice)
    result, *left = (node.meta["val"] for node in traced.graph.output_node().args[0])  # type: ignore[union-attr]
    if result.dtype != flat.dtype or result.dim() != 1:
        raise _refusal(hook, f"it made its result {result.dtype} {list(result.shape)}", _WRITE_VALUES)
    for tensor, given in zip(left, inputs[1:], strict=False):
        if tensor.dtype != given.dtype or tensor.shape != given.shape:
            raise _refusal(hook, f"it made a tensor of its own {tensor.dtype} {list(tensor.shape)}", _WRITE_VALUES)
    traced.graph.eliminate_dead_code()
    traced.meta["draws"] = number_of_draws
    return traced


def _cannot_draw(hook: Callable[..., Any]) -> Callable[[Any], HookNotTraceable]:
    return lambda func: _refusal(hook, f"it draws random numbers with {func}", f"Draw them with {KNOWN}, without a generator.")


def _refusal(hook: Callable[..., Any], reason: str, advice: str) -> HookNotTraceable:
    return HookNotTraceable(f"The communication hook {hook_name(hook)!r} is not supported: {reason}. {advice}")


def _check_returned(hook: Callable[..., Any], returned: Any, *arguments: Tensor) -> None:
    """Refuse a returned value, which would be lost. An argument is allowed: a hook may return an in-place operator's result."""
    if returned is not None and not any(returned is argument for argument in arguments):
        advice = "What a hook returns is ignored: write the result in place, and wait for work that is in flight."
        kind = "tensor" if isinstance(returned, Tensor) else type(returned).__name__
        raise _refusal(hook, f"it returned a {kind}", advice)


def _state(hook: Callable[..., Any]) -> dict[tuple[int, str], Any]:
    """Collect attributes and items of the objects that a hook holds, and items of these attributes, by owner's id and name."""
    found: dict[tuple[int, str], Any] = {}
    for owner in _held(hook):
        name = type(owner).__name__
        for attribute, value in _contents(owner, name):
            found[id(owner), attribute] = value
            if isinstance(value, (Mapping, list, tuple, deque)):
                found.update({(id(owner), item): content for item, content in _contents(value, attribute)})
    return found


def _held(hook: Callable[..., Any]) -> Iterator[Any]:
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values(), *_held(hook.func))
    elif inspect.ismethod(hook):
        yield hook.__self__
    elif not inspect.isfunction(hook):
        yield hook


def _contents(owner: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, Mapping):
        yield from ((f"{name}[{key!r}]", value) for key, value in owner.items())
    elif isinstance(owner, (list, tuple, deque)):
        yield from ((f"{name}[{index}]", value) for index, value in enumerate(owner))
    for attribute, value in getattr(owner, "__dict__", {}).items():
        yield f"{name}.{attribute}", value
    for cls in type(owner).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot != "__dict__" and hasattr(owner, slot):
                yield f"{name}.{slot}", getattr(owner, slot)


class _NoDataAssignment(TorchFunctionMode):
    """A mode that refuses an assignment to ``.data``, which is no operator, so that tracing would miss it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.hook = hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise _refusal(self.hook, "it assigns to .data", _WRITE_VALUES)
        return func(*args, **(kwargs or {}))


class _FunctionalCollectives(TorchDispatchMode):
    """A mode on top of functionalization that replaces ``c10d`` operators by functional collectives.

    It also answers random operators, and refuses operators that a graph cannot contain.
    """

    def __init__(self, hook: Callable[..., Any], draws: Draws | None) -> None:
        super().__init__()
        self.hook = hook
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.lift_fresh.default and args[0].dim() == 0:
            # A Python number as a tensor, as in grad[mask] = 0. Larger constants would have to be attributes of the graph.
            with _disable_current_modes():
                number = args[0].item()
            return torch.full((), number, dtype=args[0].dtype, device=args[0].device)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(isinstance(tensor, FunctionalTensor) for tensor in tensors):
            advice = "Keep numbers in the state, and build tensors with torch.full or from the arguments."
            raise _refusal(self.hook, "it uses a tensor other than its arguments and what it computes from them", advice)
        if func.namespace == "c10d":
            return self._collective(func, args)
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            advice = "Use operators that return tensors of known shape: torch.where, torch.clamp, a division by a tensor."
            raise _refusal(self.hook, f"it asks for values of a tensor ({func})", advice)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs or {})
        if func.overloadpacket in (_aten.set_, _aten.resize_):
            raise _refusal(self.hook, f"it calls {func.overloadpacket}", _WRITE_VALUES)
        if func is _aten.copy_.default and args[0].is_contiguous():
            # Functionalization would write a copy(), which keeps the overwritten tensor as an operand only for its shape.
            _assign(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Inductor replaces random operators in the joint graph, and fails on random operators that are traced in later.
        if self.draws is None:
            advice = (
                "Use deterministic operators, or a hook of register_comm_hook that takes an output, and draws for every bucket."
            )
            raise _refusal(self.hook, f"it draws random numbers ({func})", advice)
        answer = self.draws.answer(func, args, kwargs)
        if answer is NotImplemented:
            raise _cannot_draw(self.hook)(func)
        return answer

    def _collective(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Write the functional collective's result into the output, and return what the ``c10d`` operator would return.

        The traced wait follows at once, as the schedule moves it later. A hook's own ``wait()`` does nothing.
        """
        match func.overloadpacket.__name__, *args:
            case "allreduce_", [tensor], group, op, None, *_:
                value = _c10d.all_reduce(tensor.contiguous(), self._op(op), _name(group))
                return [tensor], _finish(tensor, value)
            case "_reduce_scatter_base_", output, grad, group, op, *_:
                value = _c10d.reduce_scatter_tensor(_flat(grad), self._op(op), _size(group), _name(group))
                return output, _finish(output, value)
            case "_allgather_base_", output, shard, group, *_:
                return output, _finish(output, _c10d.all_gather_into_tensor(_flat(shard), _size(group), _name(group)))
            case "alltoall_base_", output, source, group, output_splits, input_splits, *_:
                # Empty splits mean an equal split of the first dimension.
                size = _size(group)
                output_splits = output_splits or [output.size(0) // size] * size
                input_splits = input_splits or [source.size(0) // size] * size
                return _finish(output, _c10d.all_to_all_single(source.contiguous(), output_splits, input_splits, _name(group)))
            case "broadcast_", [tensor], group, root, 0, *_:
                return [tensor], _finish(tensor, _c10d.broadcast(tensor.contiguous(), root, _name(group)))
        advice = "Use all_reduce, reduce_scatter_tensor, all_gather_into_tensor, all_to_all_single or broadcast."
        raise _refusal(self.hook, f"it calls {func.overloadpacket}, which has no functional form", advice)

    def _op(self, op: Any) -> str:
        kind = dist.ReduceOp.RedOpType(op.op())
        for known, name in REDUCE_OP_TO_STR.items():
            if known == kind:
                return name
        raise _refusal(self.hook, f"it reduces with {kind.name}", "Multiply the gradient, and reduce with SUM or AVG.")


def _is_written(tensor: FunctionalTensor) -> bool:
    return functionalize_has_data_mutation(tensor.elem)


def _flat(tensor: Tensor) -> Tensor:
    # The c10d operators ignore shapes and cut memory; functional collectives cut the first dimension.
    return tensor.contiguous() if tensor.dim() == 1 else tensor.reshape(-1)


def _group(group: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(group)


def _name(group: Any) -> str:
    return name_of(_group(group))


def _size(group: Any) -> int:
    return _group(group).size()


def _finish(target: Tensor, started: Tensor) -> Any:
    value = _c10d.wait_tensor(started)
    _assign(target, value if value.shape == target.shape else value.view(target.shape))
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result([target])
    return create_work_from_future(done).boxed()


def _assign(target: Any, value: Tensor) -> None:
    """Replace the value of a functional tensor, also in all of its views."""
    value = value.to(target.device).to(target.dtype)
    if value.shape != target.shape:
        value = value.expand(target.shape)
    value = value.contiguous()
    sync_functional_tensor(value)
    target.replace_(from_functional_tensor(value.elem))  # type: ignore[attr-defined]
    target.commit_update()
    target.sync()
