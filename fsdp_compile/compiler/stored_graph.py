"""Stored graphs: AOTAutograd's cache keeps partitioned graphs, so that the next process neither traces nor partitions them.

The cache is torch's (``torch._functorch._aot_autograd.autograd_cache``). Its key is made of Dynamo's graph, of the inputs'
metadata and of all configuration; :func:`configuration` adds what else the passes depend on. torch stores a kernel for each
graph, which this library cannot have: it lowers a graph for the plans of calls. So a :class:`StoredGraph` takes the place of
the kernel, and holds the graph from which a process makes its variants.

Dynamic sizes are symbols, with the same names in each process. torch stores the conditions on sizes that tracing has relied on,
and takes a graph only for sizes that fulfil them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
from torch import SymInt, Tensor
from torch.fx import GraphModule

import passes
from passes.fx.shape_env import rehint, values_of
from passes.fx.size_guards import InputSizes
from passes.fx.sizes import symbolic_sizes_in
from passes.fx.torch_internals.aot import BypassAOTAutogradCache, FakeScriptObject, GraphPickler, OutputCode, PicklerOptions
from passes.fx.torch_internals.core import FakeTensorMode, TracingContext
from passes.fx.torch_internals.inductor import inductor_config

from ..runtime.graph_inputs import GraphInputs
from ..runtime.planned_graph import BoxedFunction, GraphOutputs, boxed
from .capture import snapshot


@dataclass(frozen=True)
class GraphSummary:
    """The summary of a partitioned graph, which serves calls until a variant has to be lowered.

    Attributes:
        inputs, outputs: its inputs that are shards, and its outputs.
        group_names: the role in the mesh of each of its process groups, by the group's name.
        sizes: its inputs that tell the values of symbolic sizes.
        kwargs: Inductor's keywords for its segments.
        written: for each of its inputs, whether it writes to the input.
    """

    inputs: GraphInputs
    outputs: GraphOutputs
    group_names: Mapping[str, str]
    sizes: InputSizes
    kwargs: Mapping[str, Any]
    written: Sequence[bool]

    @property
    def is_backward(self) -> bool:
        """True if the graph is a backward graph."""
        return bool(self.kwargs.get("is_backward"))


class GraphSource:
    """A partitioned graph after the preparing passes. One that comes from the cache is read when it is first needed.

    Args:
        load: returns the graph.
        key: equal for equal graphs; empty: the graph is not stored.

    Attributes:
        key: as given.
    """

    def __init__(self, load: Callable[[], GraphModule], key: str):
        self._load: Callable[[], GraphModule] | None = load
        self.key = key

    @functools.cached_property
    def graph_module(self) -> GraphModule:
        """The graph."""
        assert self._load is not None
        load, self._load = self._load, None
        return load()


#: Binds a graph to this process.
Bind = Callable[[GraphSource, GraphSummary], BoxedFunction]

# The keys of ``node.meta`` that are stored, besides those that begin with "fsdp".
_KEYS = ("val", "custom", "freed", "original_aten")
# A constant in a graph with more elements is not stored.
_MOST_CONSTANTS = 1 << 16

_bind: ContextVar[Bind] = ContextVar("_bind")


def can_store() -> bool:
    """Return whether the installed torch runs passes over Dynamo's graph after the look into its cache, as 2.12 does."""
    return hasattr(inductor_config, "pre_grad_pass_timing")


@functools.cache
def configuration() -> str:
    """Return a key of the library's source: graphs that another version made are not taken."""
    digest = hashlib.sha256()
    for folder in (Path(passes.__file__).parent, Path(__file__).parent.parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def binding(bind: Bind) -> Iterator[None]:
    """Bind graphs that come from the cache inside of the ``with`` block."""
    token = _bind.set(bind)
    try:
        yield
    finally:
        _bind.reset(token)


@dataclass
class StoredGraph(OutputCode):
    """A forward or backward graph, as AOTAutograd calls and stores it.

    Attributes:
        content: the graph, in bytes. Empty: the graph cannot be stored.
        summary: its summary.
        symbols: the symbols of its dynamic sizes.
    """

    content: bytes
    summary: GraphSummary
    symbols: frozenset[sympy.Symbol] = frozenset()
    _function: BoxedFunction | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        boxed(self)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self._function is not None
        return self._function(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Drop what belongs to this process. AOTAutograd calls it on a copy."""
        self._function = None
        if not self.content:
            raise BypassAOTAutogradCache("a graph of a sharded model has values that cannot be stored")

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Bind the graph, which comes from the cache."""
        fake_mode = TracingContext.get().fake_mode
        assert fake_mode is not None
        known = {} if fake_mode.shape_env is None else values_of(fake_mode.shape_env)
        if not self.symbols <= known.keys():
            raise BypassAOTAutogradCache("a stored graph has other symbols than this process")
        load: Any = functools.partial(_load, self.content, fake_mode)
        self._function = _bind.get()(GraphSource(load, _key(self.content)), self.summary)
        self.content = b""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: segments have bundles of their own."""


def bind_new(gm: GraphModule, summary: GraphSummary, bind: Bind, *, stores: bool) -> StoredGraph:
    """Bind a graph that was compiled in this process.

    Args:
        gm: the graph, after the preparing passes.
        summary: its summary.
        bind: binds it.
        stores: also make the content with which AOTAutograd stores it.
    """
    sizes = list(symbolic_sizes_in(gm)) if stores else []
    symbols = frozenset(symbol for size in sizes for symbol in size.node.expr.free_symbols)
    content = _dump(gm) if stores and _can_be_stored(gm, sizes, summary.sizes) else b""
    # AOTAutograd empties the ``meta`` of a graph that it stores.
    kept = snapshot(gm) if content else gm
    source = GraphSource(lambda: kept, _key(content))
    return StoredGraph(content, summary, symbols, bind(source, summary))


def _key(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if content else ""


def _can_be_stored(gm: GraphModule, sizes: Sequence[SymInt], told: InputSizes) -> bool:
    if any(isinstance(node.meta.get("val"), FakeScriptObject) for node in gm.graph.nodes):
        return False
    # Sizes that depend on data, and the states of random number generators, have symbols of their own in each trace.
    if any(size.node.hint is None or not all(symbol in told for symbol in size.node.expr.free_symbols) for size in sizes):
        return False
    constants = [getattr(gm, str(node.target), None) for node in gm.graph.find_nodes(op="get_attr")]
    return all(type(value) is Tensor and value.numel() <= _MOST_CONSTANTS for value in constants)


def _dump(gm: GraphModule) -> bytes:
    options = PicklerOptions(ops_filter=None, node_metadata_key_filter=lambda key: key in _KEYS or key.startswith("fsdp"))
    try:
        return GraphPickler.dumps(gm, options)
    except Exception:
        return b""


def write_graph(gm: GraphModule) -> bytes:
    """Return a graph in bytes, without metadata."""
    return GraphPickler.dumps(gm, PicklerOptions(ops_filter=None, node_metadata_key_filter=lambda _: False))


def read_graph(content: bytes) -> GraphModule:
    """Return the graph that :func:`write_graph` wrote."""
    gm: Any = GraphPickler.loads(content, FakeTensorMode())
    gm.recompile()
    return gm  # type: ignore[no-any-return]


def _load(content: bytes, fake_mode: Any) -> GraphModule:
    gm: Any = GraphPickler.loads(content, fake_mode)
    if fake_mode.shape_env is not None:
        # A size is stored with the value that it had in the process that traced the graph.
        rehint(fake_mode.shape_env, symbolic_sizes_in(gm))
    return gm  # type: ignore[no-any-return]
