"""Parity of steps that keep tensors on the host: activations (by a policy, or by a budget), and states of an optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp_compile import flat_optimizer, offload_optimizer
from fsdp_compile.debug import capture
from passes.collectives.host_copies import engine_of
from passes.models.hardware import HostLink, known_hardware

from . import parity
from .llama import LlamaSize
from .systems import OFFLOADED_ACTIVATIONS, Setting, System, build

_STEPS = 4
_LARGE = 1 << 40
#: Its bus carries a layer's activations while a layer is computed, so that a budget sends some to the host.
_FAST_BUS = replace(known_hardware("cuda", "H100"), host=HostLink(1e-6, 50e9, 50e9, 50e9), flops_per_s={"float32": 1e11})
#: Small enough that the states of a small model take many buckets, some of which hold a part of a run.
_BYTES_IN_FLIGHT = 64 << 10


class _Done:
    def wait_on_device(self) -> None:
        pass

    def wait_on_host(self) -> None:
        pass


class _AtOnce:
    """A copy engine whose copies are done when the call returns."""

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, _Done]:
        return torch.cat([*pieces]), _Done()

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> tuple[Tensor, _Done]:
        return value.clone(), _Done()

    def write_back(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> _Done:
        for value, target in zip(values, targets, strict=True):
            target.copy_(value)
        return _Done()


def memory_of_its_own(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``device`` offloads to the host as an accelerator does.

    In a dry run, ``device`` is the CPU, and copies stay in its memory.
    """
    return engine_of(device, _AtOnce()) if device.type == "cpu" else contextlib.nullcontext()


# ---------------------------------------------------------------------------------------- activations


def policy_parity(setting: Setting) -> dict[str, Any]:
    """Compare gradients with FSDP2's. Selective checkpoints of the model send matrix products to the host."""
    with memory_of_its_own(setting.device), _copying():
        return parity.compare("fp32", setting, OFFLOADED_ACTIVATIONS)


def budget_parity(setting: Setting) -> dict[str, Any]:
    """Compare gradients with FSDP2's, within a budget that sends activations to the host."""
    # Sending activations to the host makes a step smaller only if they take more memory than the loss.
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
    """Two AdamW optimizers, with states on the device and on the host, and with parameters of their own.

    Attributes:
        flat, offloaded: the optimizers.
        params, twins: the parameters of ``flat`` and of ``offloaded``, in the same order.
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
        """Copy the gradients of ``twins`` to ``params``, bit for bit."""
        for param, twin in zip(self.params, self.twins, strict=True):
            param.grad = torch.zeros_like(param)
            _local(param.grad).copy_(_local(twin.grad))

    def check_host(self) -> None:
        """Check that states are on the host, in pinned memory if the device is not the CPU.

        Raises:
            RuntimeError: a state is in other memory.
        """
        for twin in self.twins:
            kept = _local(self.offloaded.state[twin]["exp_avg"])
            if kept.device.type != "cpu" or kept.is_pinned() != (_local(twin).device.type != "cpu"):
                raise RuntimeError(f"states are on {kept.device}, {'' if kept.is_pinned() else 'not '}pinned")


def optimizer_parity(setting: Setting) -> dict[str, Any]:
    """Step an optimizer with states on the host beside a flat one, with the same gradients, and compare the parameters.

    Returns:
        "ours": the distance between the parameters of both, relative to the distance that the parameters moved. It is expected
        to be 0, as gradients are those that a compiled backward leaves, and kernels are elementwise. "fsdp2": 0.
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
