"""CUDA graphs: record the kernels that a lowered graph launches, and replay them with one call of the host.

A CUDA graph reads and writes the memory that it was recorded with. This module handles inputs and outputs of each program by
itself, so that results are the same as without CUDA graphs:

- **Inputs** are read in place while they do not move: shards, and outputs of other recordings. An input that moves with each
  call, such as a batch, is copied to fixed memory before a replay. If the program writes to it, it is copied back.
- **Outputs** are lent: they lie in memory of the recording. While one of them is referenced, the next call launches its kernels
  one by one, into new memory. Examples are a second forward before the first one's backward, and gradients that stay. Small
  outputs that the user sees, such as a loss, are copied: holding them prevents no replay.
- **The first call** is not recorded: kernels are loaded in it, and libraries allocate their workspaces.

The recordings of a model share a pool of memory. Each holds its outputs there for good, so activations and gradients take
memory between steps, too. Values that live only within a program share memory with those of other programs.

The purpose is that of torch's CUDA graph trees (torch/_inductor/cudagraph_trees.py). Those tell steps apart, and overwrite
outputs of an earlier step that are still held. Here, memory that is still referenced is never written to.
"""

from __future__ import annotations

import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node

from passes.collectives.gloo import backend_of
from passes.fx.graph import memory_of, placeholder_index
from passes.fx.torch_internals.core import OpOverload, construct_storage_from_data_pointer, foreach_copy_
from passes.fx.torch_internals.objects import id_of_storage, schema_of, storage_id

logger = logging.getLogger(__name__)

#: Outputs that the user sees are copied up to this many bytes, and lent above.
SMALL_BYTES = 1 << 20

# The most recordings of a program while lent inputs still move. After that, an input that moves is copied.
_MOST_SETTLING = 4

#: A program takes its arguments as a list, which it may empty.
Program = Callable[[list[Any]], Sequence[Any]]


class Recorder(Protocol):
    """A recorder of kernel launches. Its recordings never run at the same time."""

    def is_recording(self) -> bool:
        """Return whether launches are being recorded at present."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of ``run``, which leave memory as it is. Return a function that replays them."""
        ...


class CudaRecorder:
    """A recorder of CUDA graphs, which share a pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


#: Functions that make recorders, by type of device.
RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": CudaRecorder}


class Recorders:
    """The recorders for the programs of a model, one for each type of device.

    Args:
        device: the device of the parameters; None: no parameter is sharded.

    Raises:
        ValueError: nothing can be recorded on the device.
    """

    def __init__(self, device: torch.device | None):
        if device is not None and device.type not in RECORDERS:
            raise ValueError(
                f"options['cudagraphs'] = True, and the model's parameters are on {device.type}, where there are no CUDA "
                "graphs. Compile without the option."
            )
        self._recorders: dict[str, Recorder] = {}

    def recorded(self, program: Program, graph: Graph, *, is_backward: bool, groups: Iterable[str]) -> Program:
        """Wrap a program so that it is recorded. If that is impossible, warn why, and return the program itself.

        Args:
            program: the function made of the graph.
            graph: the graph.
            is_backward: whether it is a backward graph.
            groups: names of the process groups that the graph communicates over.

        Raises:
            ValueError: a group's collectives cannot be recorded.
        """
        title = _title(graph, is_backward)
        device, reason = find_device(graph)
        if device is None:
            warnings.warn(f"options['cudagraphs']: {title} does not become a CUDA graph, because {reason}.", stacklevel=2)
            return program
        for group in groups if device.type == "cuda" else ():
            if backend_of(group, device) == "gloo":
                raise ValueError(
                    f"options['cudagraphs'] = True, and {title} communicates over Gloo, for which the host copies. Use NCCL, "
                    "or compile without the option."
                )
        if device.type not in self._recorders:
            self._recorders[device.type] = RECORDERS[device.type]()
        return RecordedProgram(program, self._recorders[device.type], graph, title)


def _title(graph: Graph, is_backward: bool) -> str:
    """Describe a graph for messages, by its first input."""
    first = next((node.name for node in graph.find_nodes(op="placeholder")), "nothing")
    return f"the {'backward' if is_backward else 'forward'} graph that takes {first} first"


def find_device(graph: Graph) -> tuple[torch.device | None, str]:
    """Find the device to record a graph on. Return it and "", or None and the reason why there is none."""
    devices: dict[torch.device, str] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(graph.owning_module)
        elif value is None and node.op == "call_function":
            return None, f"nothing is known of {node.name}"
        if isinstance(value, (SymInt, SymFloat, SymBool)) or (isinstance(value, Tensor) and _is_dynamic(value)):
            return None, f"the size or value of {node.name} is only known when it runs"
        if isinstance(value, Tensor):
            devices.setdefault(value.device, node.name)
    if len(devices) == 1 and next(iter(devices)).type in RECORDERS:
        return next(iter(devices)), ""
    return None, "; ".join(f"{name} is on {device}" for device, name in devices.items()) or "it computes nothing"


def _is_dynamic(value: Tensor) -> bool:
    return any(isinstance(size, SymInt) for size in (*value.shape, *value.stride(), value.storage_offset()))


class _Loan:
    """A token for the outputs of a replay: it lives as long as a tensor in the memory of one of them.

    Only that memory references the loan. The loan references the recording, which owns the memory.
    """

    def __init__(self, recording: _Recording):
        self.recording = recording


def _is_lent(tensor: Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), "_fsdp_loan")


@dataclass
class _Input:
    """A tensor that a recording reads.

    Attributes:
        address: its address when the recording was made.
        is_lent: whether it lay in memory of another recording.
        copy: memory of its own that the recording reads instead, in one dimension; None: the input is read in place.
    """

    address: int
    is_lent: bool
    copy: Tensor | None = None


@dataclass
class _Output:
    """The location of a recording's output.

    Attributes:
        size, stride, dtype: of the output.
        offset: bytes from the beginning of the recording's memory, or from the first element of an input.
        owner: a tensor of the recording in whose memory the output lies; None: it lies in the memory of an input.
        of_input: the index of that input; -1: none.
        is_input: whether the output is that input itself.
        is_copied: whether the output is copied rather than lent.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    owner: Tensor | None = None
    of_input: int = -1
    is_input: bool = False
    is_copied: bool = False

    def within(self, storage: torch.UntypedStorage, start: int = 0) -> Tensor:
        """Make the output as a tensor in ``storage``, at :attr:`offset` bytes after ``start``."""
        found = torch.empty(0, dtype=self.dtype, device=storage.device)
        return found.set_(storage, (start + self.offset) // self.dtype.itemsize, self.size, self.stride)  # type: ignore[call-overload, no-any-return]


@dataclass(eq=False)
class _Recording:
    """The recorded launches of a program.

    Attributes:
        replay: launches the kernels again.
        inputs: the program's inputs.
        outputs: the program's outputs: an :class:`_Output` for each tensor, other values as they are.
        latest_loan: returns the loan of the latest replay; None: the loan is over, or there was no replay.
    """

    replay: Callable[[], None]
    inputs: list[_Input]
    outputs: list[Any]
    latest_loan: Callable[[], _Loan | None] = lambda: None

    def is_held(self) -> bool:
        """Return whether an output of the latest replay is still referenced."""
        return self.latest_loan() is not None

    def moved(self, args: Sequence[Tensor]) -> list[int]:
        """Return the indices of inputs that the recording reads in place and that are elsewhere now."""
        pairs = enumerate(zip(self.inputs, args, strict=True))
        return [index for index, (entry, arg) in pairs if entry.copy is None and entry.address != arg.data_ptr()]


class RecordedProgram:
    """A program that is recorded in its second call and replayed in later ones, if its results do not change by that.

    Args:
        program: takes and returns tensors on one device, of fixed sizes.
        recorder: makes the recording.
        graph: the graph that the program was made of.
        title: describes the graph in messages.
    """

    def __init__(self, program: Program, recorder: Recorder, graph: Graph, title: str):
        self._program = program
        self._recorder = recorder
        self._title = title
        self._written = _written_inputs(graph)
        self._seen_by_user = set(graph.output_node().meta.get("user_visible_output_idxs", ()))
        self._first_addresses: list[int] | None = None
        self._to_copy: set[int] = set()
        self._recording: _Recording | None = None
        self._times_recorded = 0
        self._warned = False

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._recorder.is_recording():
            return self._program(args)
        if self._first_addresses is None:
            self._first_addresses = [arg.data_ptr() for arg in args]
            return self._program(args)
        recording = self._recording
        if recording is None:
            moved = [index for index, arg in enumerate(args) if arg.data_ptr() != self._first_addresses[index]]
        elif recording.is_held():
            return self._run_unrecorded(args, "an output of its latest call is still held")
        else:
            moved = recording.moved(args)
            if any(recording.inputs[index].is_lent and not _is_lent(args[index]) for index in moved):
                return self._run_unrecorded(args, "so did the graph that it takes tensors from")
        settling = self._times_recorded < _MOST_SETTLING
        self._to_copy.update(index for index in moved if not (settling and _is_lent(args[index])))
        inputs = list(args)
        args.clear()
        if recording is None or moved:
            self._recording = None
            recording = self._recording = self._record(inputs)
        return self._replay(recording, inputs)

    def _run_unrecorded(self, args: list[Any], reason: str) -> Sequence[Any]:
        if not self._warned:
            self._warned = True
            logger.warning("%s launched its kernels one by one rather than as a CUDA graph: %s.", self._title, reason)
        return self._program(args)

    def _record(self, inputs: Sequence[Tensor]) -> _Recording:
        self._times_recorded += 1
        entries = [_Input(tensor.data_ptr(), _is_lent(tensor)) for tensor in inputs]
        read = list(inputs)
        for index in self._to_copy:
            copy = entries[index].copy = _span(inputs[index]).clone()
            read[index] = _like(inputs[index], copy)
        results: list[Any] = []
        try:
            replay = self._recorder.record(lambda: results.extend(self._program(list(read))))
        except RuntimeError as error:
            raise RuntimeError(
                f"options['cudagraphs']: {self._title} cannot be recorded as a CUDA graph: {error}\n"
                "Compile without the option, or keep out of the compiled function what needs the host."
            ) from error
        return _Recording(replay, entries, [self._locate(index, result, read) for index, result in enumerate(results)])

    def _locate(self, index: int, result: Any, read: Sequence[Tensor]) -> Any:
        if not isinstance(result, Tensor):
            return result
        memory = result.untyped_storage()
        output = _Output(result.shape, result.stride(), result.dtype, result.data_ptr() - memory.data_ptr())
        same = [position for position, tensor in enumerate(read) if tensor is result]
        around = [position for position, tensor in enumerate(read) if storage_id(tensor) == id_of_storage(memory)]
        if around:
            # An index, as a reference would prolong the loan of a tensor that is lent.
            output.of_input = (same or around)[0]
            output.is_input = bool(same)
            output.offset = result.data_ptr() - read[output.of_input].data_ptr()
        else:
            output.owner = result
            output.is_copied = index in self._seen_by_user and memory.nbytes() <= SMALL_BYTES
        return output

    def _replay(self, recording: _Recording, inputs: list[Tensor]) -> list[Any]:
        copies = [
            (entry.copy, _span(arg)) for entry, arg in zip(recording.inputs, inputs, strict=True) if entry.copy is not None
        ]
        if copies:
            foreach_copy_([copy for copy, _ in copies], [source for _, source in copies])
        recording.replay()
        for index in self._to_copy & self._written:
            copy = recording.inputs[index].copy
            assert copy is not None
            # Only the elements of the tensor, not the gaps between them.
            inputs[index].copy_(_like(inputs[index], copy))
        loan = _Loan(recording)
        recording.latest_loan = weakref.ref(loan)
        storages: dict[int, Any] = {}
        return [_give(output, loan, inputs, storages) for output in recording.outputs]


def _give(output: Any, loan: _Loan, inputs: Sequence[Tensor], storages: dict[int, Any]) -> Any:
    """Make an output of the latest replay. Outputs in one memory of the recording share a storage in ``storages``."""
    if not isinstance(output, _Output):
        return output
    if output.owner is None:
        source = inputs[output.of_input]
        return source if output.is_input else output.within(source.untyped_storage(), _start(source))
    if output.is_copied:
        return output.owner.clone()
    memory = output.owner.untyped_storage()
    if id_of_storage(memory) not in storages:
        lent: Any = construct_storage_from_data_pointer(memory.data_ptr(), memory.device, memory.nbytes())
        lent._fsdp_loan = loan
        storages[id_of_storage(memory)] = lent
    return output.within(storages[id_of_storage(memory)])


def _start(tensor: Tensor) -> Any:
    """Return the bytes from the beginning of a tensor's memory to its first element."""
    return tensor.storage_offset() * tensor.element_size()


def _span(tensor: Tensor) -> Tensor:
    """View the memory from a tensor's first element to its last in one dimension. Elements may overlap."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def _like(tensor: Tensor, span: Tensor) -> Tensor:
    """View ``span``, a copy of a tensor's span, with the shape and strides of the tensor."""
    return span.as_strided(tensor.shape, tensor.stride())


def _written_inputs(graph: Graph) -> set[int]:
    """Return the indices of the inputs that a graph writes to."""
    written: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            for argument, value in zip(schema_of(node.target).arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    values = value if isinstance(value, (list, tuple)) else [value]
                    written.update(memory_of(one) for one in values if isinstance(one, Node))
    return {index for node, index in placeholder_index(graph).items() if node in written}
