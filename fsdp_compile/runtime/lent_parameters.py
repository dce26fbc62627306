"""Full parameters that a forward reads from outside of their unit: what the forward writes to them reaches the shards.

A forward may read, and write to, parameters of units that do not run at that time: a momentum encoder is averaged in the
forward of the model around it. FSDP2 gives shards there, to which such a write goes directly. Here these reads give full
tensors, so that the forward can compute with them. Each is compared with what it was when it was lent, before its unit is
gathered again and when the outermost forward ends. Then a changed tensor is cut, and copied into the shard.

All ranks write the same, as they do to whole parameters. So all see the change, though some hold no row of the parameter, and
all gather the unit anew.

What a forward writes to parameters of its own unit is not kept, as with FSDP2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.collectives.layout import REPLICATED
from passes.fx.torch_internals.core import current_autograd_node, disable_dynamo, is_traceable_wrapper_subclass

from ..units.sharded_param import ShardedParam
from ..units.unit import Scope, Unit

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LentParameter:
    """A full parameter that code outside of the unit has got.

    Args:
        param: the parameter.
        full: the full tensor.
    """

    def __init__(self, param: ShardedParam, full: Tensor):
        self.param = param
        self._full = full
        self._lent = self._content()

    @torch.no_grad()
    def _content(self) -> Tensor | None:
        """Return numbers that a write changes; None: ``reshard()`` has freed the tensor."""
        numbers = [_numbers(tensor) for tensor in plain_tensors(self._full) if tensor.numel()]
        if any(each is None for each in numbers):
            return None
        return torch.cat(numbers) if numbers else torch.empty(0)  # type: ignore[arg-type]

    def write_back(self) -> bool:
        """Copy this rank's part into the shard, if the full tensor was written. Return whether it was.

        Raises:
            RuntimeError: the shard is more precise than the full tensor.
        """
        content = self._content()
        if content is None or self._lent is None or torch.equal(content, self._lent):
            return False
        self._lent = content
        param, (full, *_) = self.param, plain_tensors(self._full)
        if param.extension or param.sent_as or full.dtype != param.local.dtype or full.shape != param.shape:
            raise RuntimeError(
                f"A forward wrote to parameter {param.name}, whose unit was not running: to a full tensor of {full.dtype} and "
                f"shape {list(full.shape)}, which is not as precise as the parameter ({param.local.dtype}, "
                f"{list(param.shape)}), or has another shape. Update the parameter between forwards."
            )
        with torch.inference_mode(False), torch.no_grad():
            # In any case, as it counts the write: ranks without rows have to gather the unit again, too.
            full = full.detach()
            param.local.copy_(full if param.dim == REPLICATED else full.narrow(param.dim, *param.rows))
        return True


def plain_tensors(full: Tensor) -> list[Tensor]:
    """Return a full parameter, or the inner tensors of a tensor subclass."""
    if not is_traceable_wrapper_subclass(full):
        return [full]
    return [tensor for name in full.__tensor_flatten__()[0] for tensor in plain_tensors(getattr(full, name))]


def _numbers(tensor: Tensor) -> Tensor | None:
    """Return sums of the tensor's bits, which a write changes, even one through ``.data`` or one that only moves elements."""
    if tensor.untyped_storage().nbytes() == 0:
        return None
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = bits.view(_INTEGERS[bits.itemsize]).reshape(bits.size(0) if bits.dim() else 1, -1)
    sums = (bits.sum(dim) for dim in (0, 1))
    return torch.stack([(each * torch.arange(1, each.numel() + 1, device=each.device)).sum() for each in sums])


def lend(param: ShardedParam, full: Tensor) -> None:
    """Note that code outside of the parameter's unit has got the full parameter, until the outermost forward ends."""
    lent = param.unit.scope.lent.setdefault(param.unit, {})
    # Kept alive by the value, so that the number names no other tensor.
    if id(full) not in lent:
        lent[id(full)] = LentParameter(param, full)
        if full.grad_fn is not None:
            _metadata(full.grad_fn).setdefault(_LENT, {})[full.output_nr] = param


def _metadata(node: Any) -> dict[str, Any]:
    found: dict[str, Any] = node.metadata
    return found


# In the metadata of an autograd node: the lent parameters that are outputs of the node, by the number of the output.
_LENT = "fsdp_compile: lent parameters"


def inputs_of_running_node() -> list[tuple[Any, int]]:
    """Return the nodes that the inputs of the running autograd node are outputs of, and the number of each output.

    Empty for a checkpoint, whose backward calls ``backward``: that finds the shards, whichever full tensors it computes with.
    """
    running = current_autograd_node()
    if running is None or running.name() == "CheckpointFunctionBackward":
        return []
    return [(node, number) for node, number in running.next_functions if node is not None]


def check_reads_of_running_node(unit: Unit) -> None:
    """Check that no input of the running autograd node, whose backward reads the unit again, is a lent parameter of the unit.

    Raises:
        NotImplementedError: one is. ``autograd.grad`` would find no gradient for this input.
    """
    for node, number in inputs_of_running_node():
        param = _metadata(node).get(_LENT, {}).get(number)
        if param is not None and param.unit is unit:
            function = current_autograd_node().name()
            raise NotImplementedError(
                f"{function} computes with parameter {param.name} again, which its forward got from compiled code, and would "
                "find no gradient. Leave the module that calls it uncompiled: compile the others (module.compile())."
            )


def write_back(unit: Unit) -> bool:
    """Copy into shards what was written to the unit's lent parameters. Return whether any was."""
    written = [lent.write_back() for lent in unit.scope.lent.get(unit, {}).values()]
    return any(written)


@disable_dynamo
def end_loans(scope: Scope, unit: Unit | None = None) -> None:
    """Copy into shards what was written to lent parameters, of all units or of one, and forget these."""
    for each in list(scope.lent) if unit is None else [unit]:
        write_back(each)
        scope.lent.pop(each, None)
