"""What waits on the host: activations by a policy, activations by a budget, and states of an optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp_compile import capture, flat_optimizer, offload_optimizer
from passes.collectives.host_copies import engine_of
from passes.models.hardware import HostLink, known_hardware

from . import parity
from .llama import LlamaSize
from .systems import OFFLOADED_ACTIVATIONS, Setting, System, build

_STEPS = 4
_LARGE = 1 << 40
#: A bus that carries a layer's activations while a layer is computed: there, a budget sends some.
_FAST_BUS = replace(known_hardware("cuda", "H100"), host=HostLink(1e-6, 50e9, 50e9, 50e9), flops_per_s={"float32": 1e11})
#: So few that the states of a small model take many buckets, and parts of runs.
_BYTES_IN_FLIGHT = 64 << 10


class _Done:
    def wait_on_device(self) -> None:
        pass

    def wait_on_host(self) -> None:
        pass


class _AtOnce:
    """Copies at once."""

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, _Done]:
        return torch.cat([*pieces]), _Done()

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> tuple[Tensor, _Done]:
        return value.clone(), _Done()

    def write_back(self, values: Sequence[Tensor], homes: Sequence[Tensor]) -> _Done:
        for value, home in zip(values, homes, strict=True):
            home.copy_(value)
        return _Done()


def memory_of_its_own(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context in which a device has memory that is not the host's: in a dry run, where it is the host, by copies."""
    return engine_of(device, _AtOnce()) if device.type == "cpu" else contextlib.nullcontext()


# ---------------------------------------------------------------------------------------- activations


def policy_parity(setting: Setting) -> dict[str, Any]:
    """Gradients of a model with selective checkpoints that send products to the host, compared with FSDP2's."""
    with memory_of_its_own(setting.device), _copying():
        return parity.compare("fp32", setting, OFFLOADED_ACTIVATIONS)


def budget_parity(setting: Setting) -> dict[str, Any]:
    """Gradients within a budget that sends activations to the host, compared with FSDP2's."""
    # Activations have to be more than what a loss takes, for sending some away to make a step smaller.
    setting = replace(setting, size=replace(parity.SIZE, batch=4, sequence=128))
    options = {"host_budget": _LARGE, "hardware": _FAST_BUS, "optimizer": None}
    with memory_of_its_own(setting.device):
        with capture() as captured:
            torch._dynamo.reset()
            _forward_backward(build("ours", replace(setting, options={**options, "memory_budget": _LARGE})), setting)
        sends = [trial for trial in captured.choices[0].frontier() if trial.policy.offloaded]
        if not sends:
            raise RuntimeError("no budget sends activations of this model to the host")
        with _copying():
            return parity.compare("fp32", replace(setting, options={**options, "memory_budget": sends[0].peak_bytes}))


@contextlib.contextmanager
def _copying() -> Iterator[None]:
    """Raise if no graph that is compiled in the ``with`` block sends an activation to the host."""
    with capture() as captured:
        yield
    if not any("fsdp_host.offload" in graph.readable() for graph in captured.forward):
        raise RuntimeError("nothing was copied to the host")


def _forward_backward(system: System, setting: Setting) -> None:
    assert isinstance(setting.size, LlamaSize)
    system.forward(*setting.size.make_batch(setting.mesh.get_rank(), setting.device)).backward()


# ------------------------------------------------------------------------------------------ optimizer


@dataclass(frozen=True)
class Optimizers:
    """AdamW with states on the device, and on the host, each with parameters of its own.

    Attributes:
        flat, offloaded: the optimizers.
        params, twins: their parameters, in one order.
    """

    flat: Any
    offloaded: Any
    params: list[Any]
    twins: list[Any]

    @staticmethod
    def of(params: Sequence[Any], twins: Sequence[Any], **options: Any) -> Optimizers:
        given = {"lr": 1e-2, "fused": True}
        flat = flat_optimizer(torch.optim.AdamW, params, **given)
        return Optimizers(flat, offload_optimizer(torch.optim.AdamW, twins, **given, **options), [*params], [*twins])

    def share_gradients(self) -> None:
        """Let those of the flat optimizer's parameters be those of the other's, to the bit."""
        for param, twin in zip(self.params, self.twins, strict=True):
            param.grad = torch.zeros_like(param)
            _local(param.grad).copy_(_local(twin.grad))

    def check_host(self) -> None:
        """Check that states are on the host, in memory that the device copies from by itself.

        Raises:
            RuntimeError: they are not.
        """
        for twin in self.twins:
            kept = _local(self.offloaded.state[twin]["exp_avg"])
            if kept.device.type != "cpu" or kept.is_pinned() != (_local(twin).device.type != "cpu"):
                raise RuntimeError(f"states are on {kept.device}, {'' if kept.is_pinned() else 'not '}pinned")


def optimizer_parity(setting: Setting) -> dict[str, Any]:
    """How far what an optimizer with states on the host makes of parameters is from what a flat one does, of how far they went.

    With the same gradients, as a compiled backward leaves them, and kernels that are elementwise: not at all.
    """
    with memory_of_its_own(setting.device):
        torch._dynamo.reset()
        system, other = build("ours", setting), build("ours", setting)
        both = Optimizers.of(
            [*other.model.parameters()], [*system.model.parameters()], pin_memory=True, bytes_in_flight=_BYTES_IN_FLIGHT
        )
        before = [_local(param).clone() for param in both.params]
        for _ in range(_STEPS):
            system.model.zero_grad()
            _forward_backward(system, setting)
            both.share_gradients()
            both.flat.step()
            both.offloaded.step()
        both.check_host()
    off = went = 0.0
    for param, twin, start in zip(both.params, both.twins, before, strict=True):
        off += float((_local(param) - _local(twin)).double().square().sum())
        went += float((_local(param) - start).double().square().sum())
    return {"ours": math.sqrt(off / went), "fsdp2": 0.0}


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.detach()._local_tensor
    return local
