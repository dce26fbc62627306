"""Where Dynamo is about to trace a frame: takes a stored one, or stores the one that Dynamo makes.

:mod:`fsdp_compile.compiler.stored_frame` says what is stored, and when it is taken.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from passes.fx import frames
from passes.fx.shape_env import facts as conditions_of
from passes.fx.shape_env import suppose, values_of
from passes.fx.torch_internals.core import tracing
from passes.fx.torch_internals.dynamo import (
    SerializedCode,
    innermost_backend,
    maybe_disable_inference_mode,
    torch_function_mode_stack_state_mgr,
)
from passes.fx.torch_internals.inductor import inductor_config
from passes.fx.torch_internals.patches import trace_frame

from .backend import fsdp_backend, restore
from .capture import is_capturing
from .frame_facts import WITHOUT_CODE, Describer, NotPortable, code_digest, guard_fact, input_fact, tensor_fact
from .frame_sources import changed_files, changed_variables, digests_of_files, environment_of, names_in
from .options import Options
from .precompiled_file import NotPrecompiled, nothing_can_be_taken, take_once
from .stored_frame import (
    BUILTINS,
    COMPILED,
    FrameTables,
    Module,
    StoredBackend,
    StoredFrame,
    load_frames,
    recording,
    store_frame,
)
from .stored_graph import can_store
from .surroundings import caches_are_on, surroundings

logger = logging.getLogger(__name__)

# Globals with the results of functions of this library that Dynamo calls while it traces.
_OWN_CONSTANTS = re.compile(r"sub_(begin_traced_forward|traces_recomputation)(_\d+)?")

# Inductor's settings for passes of the user, which are not in the text of its configuration.
_USERS_PASSES = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "pre_grad_custom_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "custom_partitioner_fn",
)

#: Modules whose forwards raise if they have to be traced.
must_be_stored: weakref.WeakSet[Any] = weakref.WeakSet()


def install(begin: Callable[[], None]) -> None:
    """Make Dynamo take stored frames, until ``patches.uninstall()``.

    Args:
        begin: called before a frame is looked up. It makes guarded values what they are in a trace.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def trace(
            code: CodeType,
            frame_globals: dict[str, Any],
            frame_locals: dict[str, Any],
            builtins: dict[str, Any],
            closure: Any,
            compiler_fn: Any,
            one_graph: bool,
            restart_reasons: set[str],
            **others: Any,
        ) -> Any:
            run = functools.partial(
                original,
                code,
                frame_globals,
                frame_locals,
                builtins,
                closure,
                compiler_fn,
                one_graph,
                restart_reasons,
                **others,
            )
            options = _options_of(compiler_fn)
            if options is None or is_capturing():
                return run()
            frame = _Frame(code, frame_globals, frame_locals, closure, compiler_fn, one_graph, options)
            is_special = any(others.get(name) for name in ("export", "distributed_state", "package"))
            is_special = is_special or bool(torch_function_mode_stack_state_mgr.stack)
            key = frame.key() if _uses_caches() and not is_special else ""
            owner = frame_locals.get("self")
            is_strict = options.precompiled is not None or (isinstance(owner, nn.Module) and owner in must_be_stored)
            if not key:
                if is_strict:
                    raise nothing_can_be_taken()
                return run()
            if options.precompiled is not None:
                take_once(options.precompiled)
            begin()
            differences: list[str] = []
            taken = frame.take(load_frames(key), differences)
            if taken is not None:
                return taken
            if is_strict:
                raise NotPrecompiled(_message_of(code, differences))
            with recording() as made:
                traced = run()
            # Dynamo empties the locals of the frame.
            return replace(frame, locals=dict(frame_locals)).storing(traced, made, key)

        return trace

    trace_frame.install(make)


def _message_of(code: CodeType, differences: Sequence[str]) -> str:
    found = (
        "".join(f"\n  - {difference}" for difference in differences) or " nothing is stored for this code and these options."
    )
    return (
        f"{code.co_name} would be compiled, but its module was given to load_precompiled(..., strict=True), or the model is "
        f"compiled with options['precompiled']. What is stored differs:{found}\nSave it again, or load it with "
        "load_precompiled(..., strict=False), which compiles what is missing."
    )


def _options_of(compiler_fn: Any) -> Options | None:
    """Return the options of the backend that compiles a frame; None: it is another backend, or will refuse them."""
    backend = innermost_backend(compiler_fn)
    if getattr(backend, "compiler_fn", backend) is not fsdp_backend:
        return None
    given: Mapping[str, Any] = getattr(backend, "kwargs", {})
    try:
        return Options.parse(given.get("options"), given.get("mode"))
    except ValueError:
        # The backend raises it again, where Dynamo does not call it an error of its own.
        return None


@contextlib.contextmanager
def _no_errors_of_guards() -> Iterator[None]:
    """Suppress torch's log of guards that cannot be made: the stored frame does not fit the objects at hand."""
    log = logging.getLogger("torch._guards")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _uses_caches() -> bool:
    """Return whether torch's caches are on, and Inductor runs no pass of the user."""
    return can_store() and caches_are_on() and not any(getattr(inductor_config, name) for name in _USERS_PASSES)


class _Differs(Exception):
    """A frame differs from a stored one."""


@dataclass(frozen=True)
class _Frame:
    """A frame that Dynamo is to compile.

    Attributes:
        code, globals, locals, closure: of the frame.
        compiler_fn: the backend, as Dynamo has wrapped it.
        one_graph: whether the frame has to become one graph.
        options: the backend's options.
    """

    code: CodeType
    globals: dict[str, Any]
    locals: dict[str, Any]
    closure: Any
    compiler_fn: Any
    one_graph: bool
    options: Options

    def key(self) -> str:
        """Return what a stored frame depends on, besides its facts; empty: it cannot be told."""
        options = self.options, getattr(innermost_backend(self.compiler_fn), "dynamic", None), self.one_graph
        # Each rank has a device of its own.
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
        text = repr((self.code.co_name, code_digest(self.code), surroundings(), options, device))
        return "" if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()

    def value(self, source: Any) -> Any:
        """Return the value at a source."""
        return frames.value_of(source, self.locals, self.globals)

    def facts(
        self, installed: Iterable[str], guards: Sequence[Any], tables: FrameTables, names: Collection[str]
    ) -> tuple[list[str], Describer]:
        """Return a fact for each guard, once the guards are made, and for each input of the graph.

        Args:
            installed: the names of the globals that Dynamo has made.
            guards: the guards.
            tables: the tables, with the same guards.
            names: the names of attributes that the traced code may read.

        Raises:
            NotPortable: there is no such fact.
        """
        to, values = Describer(names), dict[str, Any]()

        def value(source: Any) -> Any:
            if source.name not in values:
                values[source.name] = self.value(source)
            return values[source.name]

        found = [frames.state_of_process()]
        for guard, stored in zip(guards, tables.guards, strict=True):
            codes, source = guard.code_list or (), stored.source
            if stored.kind == "TENSOR_MATCH":
                size, stride = tables.sizes[source]
                found.append(tensor_fact(source.name, value(source), size, stride, codes, to))
            else:
                found.append(guard_fact(stored.kind, source.name, codes, stored.kwargs, functools.partial(value, source), to))
        found += [f"{source.name} {to.describe(list(value(source)))}" for source in tables.ordered]
        for source in tables.inputs:
            given = value(source)
            if isinstance(given, Tensor):
                # A guard compares the sizes, unless the input has none.
                sizes = "" if source in tables.sizes else f"{list(given.shape)} {given.stride()}"
                found.append(f"{source.name} {sizes} {input_fact(given)}")
            elif type(given) is not int:
                raise NotPortable(f"{source.name}, an input of {type(given)}")
        for index, name in enumerate(installed):
            found = [fact.replace(name, f"global {index}") for fact in found]
        return found, to

    # ------------------------------------------------------------------------------------------------ storing

    def storing(self, traced: Any, made: Sequence[StoredBackend | None], key: str) -> Any:
        """Return the result of a trace, which is stored once its guards are made."""
        original = traced.build_guards

        def build(*args: Any, **kwargs: Any) -> Any:
            manager = original(*args, **kwargs)
            try:
                backend = made[0] if len(made) == 1 else None
                if backend is None:
                    raise NotPortable("its graph, or graphs")
                store_frame(key, self._stored(traced, backend), is_symbolic=bool(frames.output_of(traced).shape_env.guards))
            except Exception as error:
                logger.info("A frame of %s is not stored: %s", self.code.co_name, error)
            return manager

        return frames.FrameOutput.of(traced, build)

    def _stored(self, traced: Any, backend: StoredBackend) -> StoredFrame:
        output = frames.output_of(traced)
        if any(source is None for source in backend.sources) or output.aotautograd_guards:
            raise NotPortable("an input of its graph, or a guard on memory that inputs share")
        telling = [guard for guard in frames.sorted_guards(output) if guard.code_list or guard.create_fn_name() in WITHOUT_CODE]
        # Guards that differ by the stack of their reader alone are one.
        guards = list({str(frames.StoredGuard.of(guard)): guard for guard in telling}.values())
        tensors = [guard.originating_source for guard in guards if guard.create_fn_name() == "TENSOR_MATCH"]
        tables = FrameTables(
            [frames.StoredGuard.of(guard) for guard in guards],
            {source: frames.tensor_sizes(output, source) for source in tensors},
            sorted(output.guard_on_key_order, key=lambda source: source.name),
            backend.sources,
            frames.symbolic_inputs(output),
            conditions_of(output.shape_env),
        )
        installed = self._installed(traced.bytecode, output)
        names = names_in(output.traced_code)
        facts, described = self.facts(installed, guards, tables, names)
        numbers = backend.numbers | _numbers_in(traced.bytecode)
        if not numbers.isdisjoint(described.names):
            raise NotPortable("code with the id of an object")
        return StoredFrame(
            SerializedCode.from_code_object(traced.bytecode),
            dict(output.import_sources),
            installed,
            frames.dump_sources(tables, installed),
            facts,
            names,
            digests_of_files(output.traced_code, described.codes, facts),
            environment_of(output.traced_code, facts),
            dict(frames.observed_sizes(self.code, self.closure)),
            replace(backend, sources=()),
        )

    def _installed(self, bytecode: CodeType, output: Any) -> dict[str, Any]:
        """Return the objects that Dynamo has made globals of the frame, by name."""
        found: dict[str, Any] = {}
        for name in sorted(output.installed_globals):
            value = self.globals[name]
            if name == frames.builtins_of(output):
                found[name] = BUILTINS
            elif name.startswith("__compiled_fn_"):
                found[name] = COMPILED
            elif isinstance(value, ModuleType):
                found[name] = Module(value.__name__)
            elif isinstance(value, (FunctionType, type)):
                found[name] = value
            else:
                raise NotPortable(f"the global {name}, an object of {type(value)}")
        # Such as the result of a function under ``torch.compiler.assume_constant_result``, which may be another one next time.
        others = {name for name in bytecode.co_names if name in self.globals and not _OWN_CONSTANTS.fullmatch(name)}
        others -= {*self.code.co_names, *output.import_sources, *found}
        if others or list(found.values()).count(COMPILED) != 1:
            raise NotPortable(f"the globals {sorted(others)}, or several graphs")
        return found

    # ------------------------------------------------------------------------------------------------- taking

    def take(self, stored_frames: Iterable[StoredFrame], differences: list[str]) -> Any | None:
        """Return the result of a trace, made of the first stored frame that fits; None: none does.

        Args:
            stored_frames: the stored frames.
            differences: gets a text for each that does not fit.
        """
        for stored in stored_frames:
            try:
                with _no_errors_of_guards():
                    result, lower_ahead = self._restored(stored)
            except Exception as error:
                # Dynamo says that a guard which fails at once is a bug.
                difference = str(error).rpartition("Guard fail reason: ")[2]
                logger.info("A stored frame of %s does not fit: %s", self.code.co_name, difference)
                differences.append(difference)
                continue
            for name, entry in stored.observed.items():
                frames.observed_sizes(self.code, self.closure)[name] |= entry
            with maybe_disable_inference_mode():
                lower_ahead()
            logger.info("A stored frame of %s is taken", self.code.co_name)
            return result
        return None

    def _restored(self, stored: StoredFrame) -> tuple[Any, Callable[[], None]]:
        """Return the result of a trace, made of a stored frame, and what lowers its graph.

        Raises:
            Exception: the frame differs from the stored one.
        """
        self._check_surroundings(stored)
        for alias, module in stored.imports.items():
            value = import_module(module)
            if self.globals.setdefault(alias, value) is not value:
                raise _Differs(f"the global {alias}")
        output = frames.empty_output(self.code, self.locals, self.globals, self.compiler_fn, one_graph=self.one_graph)
        try:
            return self._restored_in(output, stored)
        except Exception:
            # Remove globals.
            for cleanup in output.cleanups:
                cleanup()
            raise

    def _restored_in(self, output: Any, stored: StoredFrame) -> tuple[Any, Callable[[], None]]:
        renamed = {name: self._install(output, name, value) for name, value in stored.installed.items()}
        tables: FrameTables = frames.load_sources(stored.tables, renamed)
        guards = self._add_guards(output, tables)
        with tracing(output.tracing_context):
            self._make_symbols(output, tables)
            manager = frames.guards_manager(self.code, output)
        facts, _ = self.facts(renamed.values(), guards, tables, stored.names)
        for here, there in zip(facts, stored.facts, strict=True):
            if here != there:
                raise _Differs(f"{here}; stored: {there}")
        inputs = [self.value(source) for source in tables.inputs]
        with maybe_disable_inference_mode():
            restored = restore(stored.backend, inputs, self.options, output.tracing_context)
        if restored is None:
            raise _Differs("the ranks of a group, or an option")
        compiled, lower_ahead = restored
        code = SerializedCode.to_code_object(stored.bytecode)
        bytecode = code.replace(co_names=tuple(renamed.get(name, name) for name in code.co_names))
        (name,) = (renamed[name] for name, value in stored.installed.items() if value == COMPILED)
        output.install_global_unsafe(name, torch.compiler.disable(compiled))
        return frames.traced(output, bytecode, self.closure, self.globals, manager), lower_ahead

    def _check_surroundings(self, stored: StoredFrame) -> None:
        """Check that traced source and the environment are as they were, and that Dynamo would not make more sizes symbols.

        Raises:
            _Differs: one is not so.
        """
        changed = changed_files(stored.files) or changed_variables(stored.environment)
        if changed:
            raise _Differs(changed)
        known = frames.observed_sizes(self.code, self.closure)
        for name, entry in stored.observed.items():
            if name in known and frames.merged(known[name], entry) != entry:
                raise _Differs(f"the size of {name} has changed")

    def _make_symbols(self, output: Any, tables: FrameTables) -> None:
        with maybe_disable_inference_mode():
            frames.make_symbols(output, tables.symbolic, [self.value(source) for source, _ in tables.symbolic])
        known = values_of(output.shape_env)
        for condition in tables.conditions:
            if not bool(condition.xreplace(known)):
                raise _Differs(f"{condition} does not hold for {known}")
            suppose(output.shape_env, condition)

    def _add_guards(self, output: Any, tables: FrameTables) -> list[Any]:
        guards = [stored.guard() for stored in tables.guards]
        output.guards.clear()
        for guard in guards:
            output.guards.add(guard, collect_debug_stack=False)
        for source, (size, stride) in tables.sizes.items():
            output.input_source_to_sizes_strides[source] = {"size": size, "stride": stride}
        output.guard_on_key_order.update(tables.ordered)
        return guards

    @staticmethod
    def _install(output: Any, name: str, value: Any) -> str:
        """Make an object a global of the frame. Return its name. That of the graph is installed when it is made."""
        if value == COMPILED:
            return f"__compiled_fn_{uuid.uuid4().hex}"
        if value == BUILTINS:
            return frames.builtins_of(output)
        found = import_module(value.name) if isinstance(value, Module) else value
        return str(output.install_global_by_id(name, found))


def _numbers_in(code: CodeType) -> set[int]:
    nested = [_numbers_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {constant for constant in code.co_consts if type(constant) is int}.union(*nested)
