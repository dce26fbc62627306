"""The interface by which torch's own code uses FSDP2's modules, for modules that this library sharded.

torch's pipelining, its composable APIs and its ``register_fsdp_forward_method`` recognise FSDP2's modules. They go by the
class, by an entry in the registry of composable APIs, and by the state object that ``fully_shard.state(module)`` returns. Here
the state object is a :class:`UnitState`. It has the attributes of torch's ``FSDPState`` that code outside of FSDP2 reads.

Source: torch/distributed/_composable/contract.py, torch/distributed/fsdp/_fully_shard/_fsdp_state.py,
torch/distributed/pipelining/stage.py.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import torch.distributed.fsdp
from torch import nn

from passes.fx.torch_internals.distributed import REGISTRY_KEY, STATE_KEY, RegistryItem
from passes.fx.torch_internals.objects import gradient_hooks

from ..runtime.gradients import call_hooks, collect_unreduced, reduce_pending
from ..runtime.uncompiled import UncompiledForward
from ..units.unit import Unit
from .casts import cast_inputs, cast_output

_torchs_fully_shard: Any = inspect.unwrap(torch.distributed.fsdp.fully_shard)


LEFT_OUT = (
    "A backward of a pipeline has left out gradients of weights in a stage that fully_shard sharded: the schedule computes "
    "them apart from those of inputs (zero bubble: ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV), "
    "and a compiled stage has one graph for both. Pass dw_builder=lambda: lambda: None to PipelineStage, and it computes both "
    "where the schedule has those of inputs; or leave the stage uncompiled."
)


class ParamGroup:
    """A unit as torch's pipelining sees it when it finishes the last microbatch.

    Attributes:
        fsdp_params: empty, so that pipelining unshards and reshards nothing.
        has_reduced: whether the last :meth:`post_backward` had a gradient to reduce.
        took_unreduced: whether the last :meth:`post_backward` found a gradient that ``autograd.grad`` had computed.
    """

    def __init__(self, unit: Unit):
        self._unit = unit
        self.fsdp_params: tuple[()] = ()
        self.has_reduced = False
        self.took_unreduced = False

    def post_backward(self) -> None:
        """Reduce the gradients that wait, and free gathered parameters, as the unit's flags say."""
        self.took_unreduced = bool(collect_unreduced(self._unit))
        stored = reduce_pending(self._unit)
        self.has_reduced = bool(stored)
        call_hooks(stored)
        if self._unit.flags.reshard_after_backward:
            self._unit.drop_full()


class UnitState:
    """The state of a unit, with the attributes of torch's ``FSDPState``.

    Attributes:
        all_states: the states of all units of the tree; the attribute ``_state_ctx`` is the state itself.
    """

    def __init__(self, unit: Unit):
        self._unit = unit
        self._fsdp_param_group = ParamGroup(unit)
        self._fsdp_param_groups = [self._fsdp_param_group]
        self._comm_ctx: Any = None
        self._forwards: list[tuple[bool, UncompiledForward, Any]] = []

    @property
    def _state_ctx(self) -> UnitState:
        return self

    @property
    def all_states(self) -> list[UnitState]:
        return [state for unit in self._unit.scope.units if (state := state_of(unit.modules[0])) is not None]

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make parameters read as full tensors, and cast inputs. Torch's ``register_fsdp_forward_method`` calls this method.

        After an exception before :meth:`_post_forward`, ``reset_iter_state()`` recovers.
        """
        forward = UncompiledForward.begin(self._unit, module)
        args, kwargs = cast_inputs(self._unit.mp_policy, args, kwargs)
        self._forwards.append((self._unit.scope.active, forward, (args, kwargs)))
        self._unit.scope.active = True
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = cast_output(self._unit.mp_policy, output)
        self._unit.scope.active, forward, inputs = self._forwards.pop()
        forward.returns(output, inputs)
        forward.end()
        return output

    def _root_post_backward_final_callback(self) -> None:
        """Check that no gradient is missing. No reduction is in flight after :meth:`ParamGroup.post_backward`.

        Raises:
            RuntimeError: a gradient is missing, as in a compiled stage if the schedule computes the gradients of inputs first;
                or a parameter has a hook (``register_hook``) in a pipeline without bubbles.
        """
        scope = self._unit.scope
        left_out, scope.left_out_gradients = scope.left_out_gradients, False
        trained = [param for unit in scope.units for param in unit.params if param.param.requires_grad]
        hooked = [param.name for param in trained if gradient_hooks(param.param)]
        if hooked and any(state._fsdp_param_group.took_unreduced for state in self.all_states):
            raise RuntimeError(
                f"{', '.join(hooked)}: a parameter with a hook (register_hook) gets no gradient in a pipeline without bubbles. "
                "Take register_post_accumulate_grad_hook, which is called when the gradient is reduced."
            )
        if trained and (left_out or not any(state._fsdp_param_group.has_reduced for state in self.all_states)):
            raise RuntimeError(LEFT_OUT)


def register(modules: list[nn.Module], unit: Unit) -> None:
    """Register the modules of a unit where torch looks for FSDP2's modules."""
    state = UnitState(unit)
    for module in modules:
        module.__dict__.setdefault(STATE_KEY, OrderedDict())[_torchs_fully_shard] = state
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[_torchs_fully_shard.__name__] = RegistryItem()


def state_of(module: nn.Module) -> UnitState | None:
    """Return the state of a module that ``fully_shard`` sharded; None for any other module, also if FSDP2 sharded it."""
    state = module.__dict__.get(STATE_KEY, {}).get(_torchs_fully_shard)
    return state if isinstance(state, UnitState) else None


def is_fsdp2s(module: nn.Module) -> bool:
    """Return whether torch's own ``fully_shard`` sharded a module."""
    state = module.__dict__.get(STATE_KEY, {}).get(_torchs_fully_shard)
    return state is not None and not isinstance(state, UnitState)
