"""Greedy shrinking of a failing case: simpler in one respect at a time, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .case import Block, Call, Case, Event, Micro, Model, Path, Step


def _without_block(case: Case, index: int) -> Case | None:
    """Return the case without a block of its model and without events of that block; None if no block would be left."""
    path = f"blocks.{index}"

    def renamed(name: str) -> str | None:
        head, _, rest = name.partition(".")
        number, _, inner = rest.partition(".")
        if head != "blocks":
            return name
        if int(number) == index:
            return None
        return ".".join(filter(None, ["blocks", str(int(number) - (int(number) > index)), inner]))

    events: list[Event] = []
    for event in case.events:
        found = getattr(event, "path", "")
        if found == path or found.startswith(f"{path}."):
            continue
        if isinstance(event, Micro):
            skips = tuple(at - (at > index) for at in event.skips if at != index)
            between = tuple(filter(None, (_renamed_call(call, renamed) for call in event.between)))
            events.append(replace(event, skips=skips, between=between))
        elif isinstance(event, Call):
            call = _renamed_call(event, renamed)
            events += [] if call is None else [call]
        elif hasattr(event, "path"):
            name = renamed(event.path)
            events += [] if name is None else [replace(event, path=name)]
        else:
            events.append(event)
    blocks = tuple(block for at, block in enumerate(case.model.blocks) if at != index)
    if not blocks:
        return None
    again = case.model.again
    again = None if again in (None, index) else again - (again > index)  # type: ignore[operator]
    return replace(case, model=replace(case.model, blocks=blocks, again=again), events=tuple(events))


def _renamed_call(call: Call, renamed: Callable[[str], str | None]) -> Call | None:
    path = renamed(call.path)
    if path is None:
        return None
    args = []
    for value in call.args:
        if isinstance(value, tuple):
            names = [renamed(item.path) for item in value if isinstance(item, Path)]
            value = tuple(Path(name) for name in names if name is not None)
        args.append(value)
    return replace(call, path=path, args=tuple(args))


def _simpler_models(model: Model) -> Iterator[Model]:
    default = Model(model.blocks)
    for name in ("tied", "again", "policy", "reshard", "cut_last"):
        if getattr(model, name) != getattr(default, name):
            yield replace(model, **{name: getattr(default, name)})
    for index, block in enumerate(model.blocks):
        simple = Block()
        for name in ("checkpoint", "reshard", "unit", "kind"):
            values = ["", simple.unit] if name == "unit" else [getattr(simple, name)]
            for value in values:
                if getattr(block, name) != value and not (name == "unit" and block.unit == ""):
                    blocks = [*model.blocks]
                    blocks[index] = replace(block, **{name: value})
                    yield replace(model, blocks=tuple(blocks))


def _simpler_micros(micro: Micro) -> Iterator[Micro]:
    if micro.between:
        yield replace(micro, between=())
    if micro.skips:
        yield replace(micro, skips=())
    if micro.forwards > 1:
        yield replace(micro, forwards=1)
    if len(micro.sizes) > 1:
        yield replace(micro, sizes=micro.sizes[:1])
    if micro.sizes != ((2, 2),):
        yield replace(micro, sizes=((2, 2),))


def is_sound(case: Case) -> bool:
    """Return whether the case has a microbatch, and the last one before each step reduces all gradients.

    Otherwise it could not agree with whole parameters, which always have all gradients.
    """
    off: set[tuple[str, str]] = set()
    left = False

    def note(call: Call) -> None:
        if call.method not in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"):
            return
        if not call.args[0]:
            off.add((call.method, call.path))
            return
        found = {one for one in off if one[1] == call.path or (not call.path and dict(call.kwargs).get("recurse", True))}
        # Turning gradient synchronisation of a unit on also turns on its all-reduce over replicas.
        methods = (call.method, "set_requires_all_reduce" if call.method == "set_requires_gradient_sync" else call.method)
        off.difference_update(one for one in found if one[0] in methods)

    for event in case.events:
        if isinstance(event, Call):
            note(event)
        elif isinstance(event, Micro):
            for call in event.between:
                note(call)
            left = bool(off)
        elif isinstance(event, Step) and left:
            return False
    return any(isinstance(event, Micro) for event in case.events)


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases that are simpler in one respect, the largest simplifications first."""
    events = case.events
    half = len(events) // 2
    for part in (events[:half], events[half:]) if half > 1 else ():
        yield replace(case, events=part)
    for index in reversed(range(len(case.model.blocks))):
        found = _without_block(case, index)
        if found is not None:
            yield found
    for index in reversed(range(len(events))):
        yield replace(case, events=events[:index] + events[index + 1 :])
    if case.options:
        yield replace(case, options=())
    for feature in case.features:
        yield replace(case, features=tuple(other for other in case.features if other != feature))
    if case.factor is not None:
        yield replace(case, factor=None)
    if case.optimizer != "sgd":
        yield replace(case, optimizer="sgd")
    for model in _simpler_models(case.model):
        yield replace(case, model=model)
    for index, event in enumerate(events):
        if isinstance(event, Micro):
            for micro in _simpler_micros(event):
                yield replace(case, events=(*events[:index], micro, *events[index + 1 :]))
        elif isinstance(event, Step) and event.clip is not None:
            yield replace(case, events=(*events[:index], Step(), *events[index + 1 :]))


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 200) -> Case:
    """Return the simplest failing case that is found.

    Args:
        case: a case that fails.
        fails: returns whether another case fails in the same way.
        tries: the largest number of cases to try.
    """
    while tries > 0:
        for candidate in simpler(case):
            if not is_sound(candidate):
                continue
            tries -= 1
            if fails(candidate):
                case = candidate
                break
            if tries <= 0:
                break
        else:
            break
    return case
