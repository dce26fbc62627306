"""The options of ``fsdp_backend``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from passes.auto import small_units
from passes.auto.auto_schedule import AutoSchedule
from passes.models.hardware import Hardware
from passes.pass_runner import Pass
from passes.pipeline import FOLDING_PASSES, SCHEDULING_PASSES

from . import inductor_options
from .aot_eager_lowering import AotEagerLowering
from .byte_sizes import bytes_of, is_size
from .cuda_graphs import RECORDERS
from .inductor_lowering import InductorLowering
from .lowering import Lowering
from .machine import find_hardware
from .optimizer_state import Optimizer

#: Makers of lowerings, by the names that users give. Each is called once for each Dynamo graph.
LOWERINGS: Mapping[str, Callable[[], Lowering]] = {"inductor": InductorLowering, "aot_eager": AotEagerLowering}
_SCHEDULES = ("default", "auto")
_PASSES: Sequence[Pass[Any]] = (*FOLDING_PASSES, *SCHEDULING_PASSES)
#: The passes without which results are right, too.
OPTIONAL_PASSES = tuple(each.name for each in _PASSES if each.is_optional)


@dataclass(frozen=True)
class Options:
    """``torch.compile(..., options={...})`` for this backend.

    Attributes:
        lowering: "inductor": generated kernels. "aot_eager": the same passes, then aten operators one by one, for debugging.
        schedule: "default": units are buckets, and each prefetches the next unit, or the units of its list. "auto": a cost
            model chooses buckets and issue points.
        memory_limit: only with "auto": the most bytes that may live at once in a graph, as ``CapturedGraph.live_bytes()``
            counts them.
        memory_budget: the most bytes that may live at once in a whole step, shards and optimizer included: an int, text such as
            "80GB" or "74.5GiB", or a part of the device's memory, a float up to 1.0 (see :mod:`passes.auto.memory_budget`).
        host_budget: only with ``memory_budget``: the most bytes of pinned host memory, for each rank, in which activations may
            wait for backward if that makes a step faster: an int, or text as above. None or 0: no activation waits.
        optimizer: only with ``memory_budget``: the optimizer whose state counts: "adamw", "adam", "momentum", "sgd", bytes of
            state for each element of a parameter, or None.
        hardware: only with "auto" or ``memory_budget``: hardware numbers, or the path of a file that ``fsdp_compile.calibrate``
            wrote. None: the file that a calibration left, or a table.
        min_bucket_bytes: units with fewer bytes of parameters share collectives; 0: no unit does. None: the default,
            :data:`passes.auto.small_units.MIN_BUCKET_BYTES`.
        disable_passes: names of passes to leave out, to find the one that makes a number wrong: of :data:`OPTIONAL_PASSES`.
        cudagraphs: record forward and backward as CUDA graphs (see :mod:`fsdp_compile.compiler.cuda_graphs`).
        precompiled: the path of a file of :func:`fsdp_compile.save_precompiled` or :func:`fsdp_compile.precompile`, which is
            loaded in the first call. A forward that is not in the file raises :class:`fsdp_compile.NotPrecompiled`.
        inductor: settings of Inductor by their names in its configuration, given among the other options or as a mode. With
            "aot_eager", which generates no code, most have no effect.
    """

    lowering: str = "inductor"
    schedule: str = "default"
    memory_limit: int | None = None
    memory_budget: int | float | str | None = None
    host_budget: int | str | None = None
    optimizer: str | float | None = "adamw"
    hardware: Hardware | str | os.PathLike[str] | None = None
    min_bucket_bytes: int | None = None
    disable_passes: Sequence[str] = ()
    cudagraphs: bool = False
    # Not in the text that keys are made of, as compiled code does not depend on it.
    precompiled: str | os.PathLike[str] | None = field(default=None, repr=False)
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Parse the options and the mode that a user gave to ``torch.compile``.

        Args:
            options: options of this class and of Inductor, in one dictionary.
            mode: a name for some options of Inductor.

        Raises:
            ValueError: a key, a value or the mode is unknown, or contradicts what this backend does.
        """
        own, inductors = _split(options or {})
        if mode is not None:
            inductors = inductor_options.of_mode(mode) | inductors
        settings = inductor_options.checked(inductors)
        if inductor_options.asks_for_cudagraphs(settings) and not own.setdefault("cudagraphs", True):
            raise ValueError(
                f"options['cudagraphs'] is False, but options[{inductor_options.CUDAGRAPHS!r}] or Inductor's configuration is "
                "True: leave one out."
            )
        parsed = Options(**own, inductor=settings)
        for name, choices in (("lowering", tuple(LOWERINGS)), ("schedule", _SCHEDULES)):
            if getattr(parsed, name) not in choices:
                raise ValueError(f"options[{name!r}] must be one of {choices}, not {getattr(parsed, name)!r}.")
        parsed._check_schedule()
        parsed._check_budget()
        below = parsed.min_bucket_bytes
        if below is not None and (not isinstance(below, int) or isinstance(below, bool) or below < 0):
            raise ValueError(
                f"options['min_bucket_bytes'] must be a number of bytes, an int, 0 to merge no units, not {below!r}."
            )
        unknown = [name for name in parsed.disable_passes if name not in OPTIONAL_PASSES]
        if isinstance(parsed.disable_passes, str) or unknown:
            raise ValueError(
                f"options['disable_passes'] must be a list of passes that can be left out, {', '.join(OPTIONAL_PASSES)}, not "
                f"{parsed.disable_passes!r}."
            )
        if not isinstance(parsed.cudagraphs, bool):
            raise ValueError(f"options['cudagraphs'] must be True or False, not {parsed.cudagraphs!r}.")
        if parsed.precompiled is not None and not isinstance(parsed.precompiled, (str, os.PathLike)):
            raise ValueError(
                "options['precompiled'] must be the path of a file of save_precompiled or precompile, not "
                f"{parsed.precompiled!r}."
            )
        return parsed

    def records_on(self, device: torch.device | None) -> bool:
        """Return whether to record graphs with parameters on a device as CUDA graphs.

        On a device where nothing can be recorded, Inductor's option is ignored. ``cudagraphs`` without it is an error there,
        which :class:`~fsdp_compile.compiler.cuda_graphs.Recorders` raises.
        """
        if inductor_options.asks_for_cudagraphs(self.inductor) and device is not None and device.type not in RECORDERS:
            return False
        return self.cudagraphs

    def _check_schedule(self) -> None:
        limit = self.memory_limit
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0):
            raise ValueError(f"options['memory_limit'] must be a positive number of bytes, an int, not {limit!r}.")
        if self.hardware is not None and not isinstance(self.hardware, (Hardware, str, os.PathLike)):
            raise ValueError(f"options['hardware'] must be a Hardware or the path of a file, not {self.hardware!r}.")
        if limit is not None and self.schedule != "auto":
            raise ValueError("options['memory_limit'] means something only with options['schedule'] = 'auto'.")
        if self.hardware is not None and self.schedule != "auto" and self.memory_budget is None:
            raise ValueError(
                "options['hardware'] means something only with options['schedule'] = 'auto' or options['memory_budget']."
            )

    def _check_budget(self) -> None:
        budget = self.memory_budget
        if budget is None:
            for name, default in (("optimizer", "adamw"), ("host_budget", None)):
                if getattr(self, name) != default:
                    raise ValueError(f"options[{name!r}] means something only with options['memory_budget'].")
            return
        Optimizer.of(self.optimizer)
        if self.cudagraphs:
            raise ValueError(
                "options['memory_budget'] does not count the memory that CUDA graphs keep: leave options['cudagraphs'] out."
            )
        host = self.host_budget
        if host not in (None, 0) and not is_size(host):
            raise ValueError(
                "options['host_budget'] must be a number of bytes (an int) or text such as '80GB' or '74.5GiB', 0 or None to "
                f"send nothing to the host, not {host!r}."
            )
        is_sensible = 0 < budget <= 1 if isinstance(budget, float) else is_size(budget)
        if not is_sensible:
            raise ValueError(
                "options['memory_budget'] must be a number of bytes (an int), text such as '80GB' or '74.5GiB', or a part of "
                f"the device's memory (a float above 0 and up to 1), not {budget!r}."
            )

    def budget_bytes(self, device: torch.device) -> int:
        """Return the memory budget on a device, in bytes.

        Raises:
            ValueError: the budget is a part of the device's memory, and the device is a CPU.
        """
        budget = self.memory_budget
        assert budget is not None
        if not isinstance(budget, float):
            return bytes_of(budget)
        if device.type == "cpu":
            raise ValueError(
                f"options['memory_budget'] = {budget!r} is a part of the device's memory, but the parameters are on the CPU, "
                "whose memory is not this rank's alone: give bytes, such as '16GB'."
            )
        return int(budget * torch.get_device_module(device).get_device_properties(device).total_memory)

    @property
    def host_budget_bytes(self) -> int:
        """The most bytes of activations that the budget may send to the host."""
        return bytes_of(self.host_budget or 0)

    @property
    def small_unit_bytes(self) -> int:
        """The bytes of parameters from which on a unit has collectives of its own."""
        return small_units.MIN_BUCKET_BYTES if self.min_bucket_bytes is None else self.min_bucket_bytes

    def auto_schedule(self, device: torch.device) -> AutoSchedule | None:
        """Return the machine and limit for scheduling graphs on a device; None: the default schedule.

        Raises:
            ValueError: the device is not in the table, or a file does not hold hardware numbers.
        """
        if self.schedule != "auto":
            return None
        return AutoSchedule(find_hardware(self.hardware, device.type), self.memory_limit)


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of this backend and those of Inductor."""
    known = [field.name for field in fields(Options) if field.name != "inductor"]
    own: dict[str, Any] = {}
    inductors: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known and not inductor_options.is_inductors(key):
            raise ValueError(
                f"fsdp_backend has no option {key!r}; it has: {', '.join(known)}; and those of Inductor "
                "(torch._inductor.list_options())."
            )
        (own if key in known else inductors)[key] = value
    return own, inductors
