"""Checkpoints of the tensors of communication hooks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..runtime.hook_tensors import tensors_to_save
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit


class HookTensors:
    """The tensors of a model's communication hooks, to be saved together with its parameters::

        dcp.save({"model": get_model_state_dict(model), "comm_hooks": HookTensors(model)}, checkpoint_id=path)

    Keys are ``<parameter>.<tensor>``, with the parameter's qualified name. Each rank has tensors of its own, so a value is a
    DTensor ``[ranks, *shape]``, sharded into one row a rank. The class is a ``Stateful`` of ``torch.distributed.checkpoint``.

    Args:
        model: the outermost sharded module, with hooks registered.

    Raises:
        ValueError: the model is not sharded.
    """

    def __init__(self, model: nn.Module):
        if not hasattr(model, "_fsdp_unit"):
            raise ValueError(f"HookTensors takes a sharded model; {type(model).__name__} is none.")
        self._unit: Unit = cast(Any, model)._fsdp_unit

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors, in the memory that the hooks use. Parameters that were not reduced yet have initial tensors."""
        return {key: _rows(param, tensor) for key, (param, tensor) in self._tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved tensors into the tensors of the hooks.

        Raises:
            ValueError: keys differ; or a tensor has another number of ranks, dtype or shape. Nothing is loaded.
        """
        ours = self._tensors()
        if ours.keys() != state_dict.keys():
            differ = sorted(ours.keys() ^ state_dict.keys())
            raise ValueError(
                f"The saved tensors of communication hooks are not those of this model: {differ} are only in one of them. "
                "Register the same hooks; or do not load them, and they begin anew."
            )
        for key, (param, tensor) in ours.items():
            _check(key, state_dict[key], _rows(param, tensor))
        for key, (_, tensor) in ours.items():
            tensor.copy_(state_dict[key].to_local()[0])

    def _tensors(self) -> dict[str, tuple[ShardedParam, Tensor]]:
        units = self._unit.scope.units
        found = [(param, tensors) for unit in units for param, tensors in tensors_to_save(unit)]
        return {f"{param.name}.{name}": (param, tensor) for param, tensors in found for name, tensor in tensors.items()}


def _rows(param: ShardedParam, tensor: Tensor) -> DTensor:
    mesh = cast(DTensor, param.param).device_mesh
    return DTensor.from_local(tensor.unsqueeze(0), mesh, [Shard(0)] * mesh.ndim, run_check=False)


def _check(key: str, saved: Any, ours: DTensor) -> None:
    if not isinstance(saved, DTensor):
        raise ValueError(f"{key} of the communication hooks is to be a DTensor with a row for each rank, not {type(saved)}.")
    if saved.shape[0] != ours.shape[0]:
        raise ValueError(
            f"{key} of the communication hooks was saved by {saved.shape[0]} ranks, and the model is on {ours.shape[0]}: what "
            "a hook keeps belongs to a rank. Do not load it, and it begins anew."
        )
    if saved.shape != ours.shape or saved.dtype != ours.dtype:
        raise ValueError(
            f"{key} of the communication hooks was saved as {saved.dtype} {list(saved.shape)}, and is to be {ours.dtype} "
            f"{list(ours.shape)}. Register the same hook; or do not load it, and it begins anew."
        )
