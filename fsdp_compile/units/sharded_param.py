"""A parameter of a unit, and the memory of its shard.

Each parameter has three tensors in the same memory:

- the *parameter*: a DTensor, which modules register, optimizers step and checkpoints save;
- the *shard*: a plain leaf tensor that a forward reads and a graph takes, padded so that all ranks have the same shape;
- a run of the unit's *flat storage*, which a bucket gathers in place: one buffer for each dtype, in registration order.

Each has a version counter of its own, so that a step on one parameter is no write to another. The shard is a view. The
parameter's local tensor, which users save, copy and pass to compiled optimizers, has a storage of its own
(:mod:`.own_storage`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from passes.collectives.layout import REPLICATED, padded_shard_numel, padded_shard_shape
from passes.collectives.rounded_gather import GatherPolicy
from passes.fx.torch_internals.core import is_traceable_wrapper_subclass
from passes.fx.torch_internals.distributed import DTensorSpec, TensorMeta
from passes.fx.torch_internals.objects import as_local, id_of_storage, local_tensor, own_parameters, spec_of, storage_id
from passes.ir.ops import UNSHARD_DEFAULTS, unshard, unshard_extension

from ..torch_versions import reduce_dtype
from .extension import ParamExtension, attributes_of, check_functions, is_extension
from .mesh import ShardingMesh
from .model_parallel import ModelParallel
from .own_storage import has_memory, with_own_storage
from .param_state import ParamState, set_local

if TYPE_CHECKING:
    from .unit import Unit
    from .updater import Updater


def shard_attribute(name: str) -> str:
    """Return the name of the attribute that traced forwards read on a table, for one parameter.

    The attribute's value is a tuple: the shard, and the arguments of ``unshard`` that follow it (:class:`UnshardArgs`). With an
    extension, or another parallelism, the tuple goes on:

    - the :class:`~.model_parallel.ModelParallel` layout, or None;
    - the attributes of the local tensor, if it has an extension, or None;
    - the names of those attributes that may be tensors.

    While the parameter has no memory, the value is None. While a tensor stands in the parameter's place, it is that tensor.
    """
    return f"_fsdp_shard_{name}"


class UnshardArgs(NamedTuple):
    """The arguments of ``unshard`` that follow the shard.

    Attributes:
        args: the positional arguments: the parameter's name, its shape, and the name of the shard group.
        kwargs: the keyword arguments, without those that have their default.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> UnshardArgs:
        """Return the same object for equal arguments, so that one guard, on its identity, stands for all of them."""
        return _unshard_args(args, tuple(kwargs.items()))


@functools.cache
def _unshard_args(args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> UnshardArgs:
    return UnshardArgs(args, dict(kwargs))


class ShardedParam:
    """One parameter of a unit.

    Attributes:
        unit: the unit that it belongs to.
        mesh: the mesh that it is sharded on; parameters of one unit may have different ones.
        owners: the modules that register it, with its name in each; several for a tied parameter.
        name: qualified name, from the outermost sharded module.
        local_name: name within the unit; equal for the same parameter of equal blocks.
        shape: the gathered shape: the full one, or with another parallelism that of this rank's piece.
        model_parallel: the layout by another parallelism; None: there is none.
        param_dtype: the dtype that it computes in, if it is of floating point; None: its own.
        dim: the dimension that is cut, or ``REPLICATED`` for a scalar.
        padded_shape, padded_numel: shape and number of elements of every rank's padded shard.
        rows: first index and number of indices along ``dim`` of this rank's shard, without padding.
        param: the DTensor parameter.
        shard: the padded shard, a leaf.
        offset: first element of the shard in the unit's storage of its dtype.
        unshard_args: the arguments of ``unshard`` that follow the shard.
        extension: the all-gather extension of its local tensor; None: the local tensor is plain.
        state: gathered values and gradients between microbatches.
        updater: the optimizer that steps it in backward; None: none does.
    """

    def __init__(
        self,
        unit: Unit,
        owners: list[tuple[nn.Module, str]],
        local_name: str,
        param: nn.Parameter,
        dim: int,
        mesh: ShardingMesh,
        model_parallel: ModelParallel | None,
        param_dtype: torch.dtype | None,
    ):
        self.unit = unit
        self.mesh = mesh
        self.owners = owners
        self.name = self.local_name = local_name
        self.model_parallel = model_parallel
        self.param_dtype = param_dtype
        piece = as_local(param)
        self.shape = piece.shape
        self.dim = dim
        self.padded_shape = padded_shard_shape(self.shape, dim, mesh.shard_size)
        self.padded_numel = padded_shard_numel(self.shape, dim, mesh.shard_size)
        self.rows = (0, 0) if dim == REPLICATED else self._rows_of_rank(mesh.shard_rank)
        self.offset = 0
        self.extension: ParamExtension | None = None
        self.updater: Updater | None = None
        self.param = self._make_param(param, piece)
        self.shard: nn.Parameter
        self._bound: Tensor | None = None
        self._noted: bool | None = None
        self._own_storage: torch.UntypedStorage
        self.unshard_args: UnshardArgs
        self.state = ParamState()

    def _make_param(self, full: nn.Parameter, piece: Tensor) -> nn.Parameter:
        local = piece.detach()
        if is_extension(local):
            self.check_extension(local)
            local = self._piece_of_extension(local)
        elif self.dim != REPLICATED:
            local = local.narrow(self.dim, *self.rows).contiguous()
        if self.unit.offload is not None and not local.is_meta:
            local = local.cpu()
        if self.model_parallel is None:
            meta = TensorMeta(full.shape, full.stride(), full.dtype)
            spec = DTensorSpec(self.mesh.mesh, self.mesh.placements(self.dim), tensor_meta=meta)
        else:
            spec = self.model_parallel.sharded_spec(self.mesh, self.dim, full)  # type: ignore[arg-type]
        return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=full.requires_grad)

    def _piece_of_extension(self, full: Tensor) -> Tensor:
        """Cut this rank's shard of a tensor subclass, with the operators that FSDP2 calls on it.

        Raises:
            NotImplementedError: the subclass lacks such an operator.
        """
        start, rows = self.rows
        try:
            padded = full.new_zeros(self.padded_shape)
            if rows:
                piece = torch.chunk(full, self.mesh.shard_size, dim=0)[start // self.padded_shape[0]]
                padded.narrow(0, 0, rows).copy_(piece)
            return padded.narrow(0, 0, rows)
        except Exception as error:
            raise NotImplementedError(
                f"Parameter {self.name} is a {type(full).__name__}, a tensor subclass that cannot be cut: {error!r}. It has to "
                "support new_zeros, split, narrow and copy_. Or add the parameter to ignored_params, which leaves it whole on "
                "every rank, or convert the model after sharding."
            ) from error

    def _rows_of_rank(self, rank: int) -> tuple[int, int]:
        size, rows = self.shape[self.dim], self.padded_shape[self.dim]
        start = min(rows * rank, size)
        return start, min(rows, size - start)

    @property
    def local(self) -> Tensor:
        """This rank's unpadded shard, the DTensor's local tensor."""
        return local_tensor(self.param)

    def unpad(self, padded: Tensor) -> Tensor:
        """Cut the padding off a padded shard, or off the gradient of one."""
        if self.dim == REPLICATED or padded.size(self.dim) == self.rows[1]:
            return padded
        return padded.narrow(self.dim, 0, self.rows[1])

    def bind(self, storage: Tensor, offset: int) -> None:
        """Copy the local tensor into ``storage``, from element ``offset`` on, and make parameter and shard lie there."""
        self.extension = None
        self.offset = offset
        padded = storage.narrow(0, offset, self.padded_numel).view(self.padded_shape)
        with torch.no_grad():
            self.unpad(padded).copy_(self.local)
        local = with_own_storage(self.unpad(padded))
        self._own_storage = local.untyped_storage()
        set_local(self.param, local)
        self._set_shard(padded.data)

    def bind_extension(self) -> None:
        """Make the extension and the shard of a local tensor that has one. The local tensor keeps the values."""
        local = self._bound = self.local
        if not is_traceable_wrapper_subclass(local):
            # Else the flat storage that it lies in would live as long as it does.
            with torch.no_grad():
                local.data = local.clone()
        module, policy = self.owners[0][0], self.unit.mp_policy
        self.extension = ParamExtension.of(
            local, self.shape, self.padded_shape, self.mesh, module, policy, self.param_dtype or local.dtype
        )
        # The shard only identifies the parameter: nobody reads its values.
        self._set_shard(torch.zeros((), dtype=local.dtype, device=local.device).expand(self.padded_shape))

    def extension_changed(self) -> bool:
        """Return whether the local tensor has got or lost functions of an extension since the unit was laid out."""
        if self.extension is None:
            return hasattr(self.local, "fsdp_pre_all_gather")
        return not self.extension.has_functions_of(self.local)

    def check_extension(self, local: Tensor) -> None:
        """Check that the parameter may have a local tensor that is gathered by an extension.

        Raises:
            TypeError: one of the functions is missing.
            ValueError: ``fsdp_pre_all_gather`` has neither of the signatures that FSDP2 knows.
            NotImplementedError: the parameter, or its unit, is of a kind that may have no extension.
        """
        if hasattr(local, "fsdp_pre_all_gather"):
            check_functions(local, self.name)
        is_plain = not is_traceable_wrapper_subclass(local)
        tensors = [key for key, value in vars(local).items() if isinstance(value, Tensor)] if is_plain else []
        reasons = {
            f"may have no attributes that are tensors ({', '.join(tensors)}): shard a tensor subclass instead": bool(tensors),
            "is sharded along dimension 0 only: shard_placement_fn may not return another dimension than 0": self.dim != 0,
            "may not be a DTensor, which another parallelism has laid out": self.model_parallel is not None,
            f"is not kept in a smaller group (reshard_after_forward={self.unit.post_forward_size}): use True or False": bool(
                self.unit.post_forward_size
            ),
            "may not be kept on the host (offload_policy=CPUOffloadPolicy())": self.unit.copies,
            "is not stepped in backward (optimizer_in_backward)": self.updater is not None,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            raise NotImplementedError(
                f"Parameter {self.name} is a {type(local).__name__}, which fsdp_pre_all_gather gathers, and so {reason}."
            )

    def _set_shard(self, padded: Tensor) -> None:
        self.shard = nn.Parameter(padded, requires_grad=self.param.requires_grad)
        self.shard._fsdp_sharded_param = self  # type: ignore[attr-defined]
        if has_memory(self.shard):
            _params_by_memory[self.shard.data_ptr()] = self
        self.unit.abandon_gathers()
        self.state.drop_full()
        self.state.drop_node_shard()
        self.unit.attach(self)
        self.update_operator_args()

    @property
    def is_whole(self) -> bool:
        """True if this rank's shard is the whole parameter."""
        return self.dim == REPLICATED or self.mesh.shard_size == 1

    @property
    def partial_numel(self) -> int:
        """The number of elements of a gradient that is reduced within a node only, or not over replicas."""
        return self.padded_numel * self.mesh.nodes

    @property
    def post_forward_group(self) -> str:
        """Name of the smaller group that the parameter is resharded to after forward; empty: there is none."""
        size = self.unit.post_forward_size
        return self.mesh.post_forward_group(size) if size else ""

    @property
    def summand_placements(self) -> list[Placement]:
        """The placements of an unreduced gradient: Partial over the mesh of ``fully_shard``, elsewhere as the parameter's."""
        dtensor: Any = self.param
        layout, count = self.model_parallel, self.mesh.mesh.ndim
        if layout is None or not layout.shard:
            return [Partial()] * count + list(dtensor.placements[count:])
        own = {*layout.shard, *layout.replicate, *(self.mesh.mesh.mesh_dim_names or ())}
        placed = zip(dtensor.device_mesh.mesh_dim_names, dtensor.placements, strict=True)
        return [Partial() if name in own else placement for name, placement in placed]

    @property
    def other_groups(self) -> dict[str, str]:
        """The process groups of another parallelism, by name, with the names of their mesh dimensions; empty without one."""
        return {} if self.model_parallel is None else self.model_parallel.groups

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that a forward reads the parameter in."""
        return self._cast_dtype or self.shard.dtype

    @property
    def _cast_dtype(self) -> torch.dtype | None:
        """The dtype that the parameter is cast to for a forward; None: no cast."""
        return self.param_dtype if self.param.is_floating_point() else None

    @property
    def compute_device(self) -> torch.device:
        """The device on which a forward reads the parameter, and its gradient is reduced."""
        return self.mesh.device if self.unit.copies else self.shard.device

    @property
    def sent_as(self) -> GatherPolicy | None:
        """The policy that rounds the parameter for its gather; None: it is not rounded, or not sent."""
        if self.extension is not None:
            return None
        return None if self.is_whole or not self.param.is_floating_point() else self.unit.gather_policy

    @property
    def is_packed(self) -> bool:
        """True if its gather may include tensors of other dtypes, as bytes.

        That is so in units with extensions, or with several dtypes. Not if the parameter is rounded, or copied from the host
        for its gather: such a copy has one dtype.
        """
        unit = self.unit
        return (unit.has_extensions or unit.has_several_dtypes) and self.sent_as is None and not unit.copies

    @property
    def alignment(self) -> int:
        """The number of elements that its shard's part of the storage is a multiple of."""
        return 1 if self.sent_as is None else self.sent_as.alignment

    def end_forward(self) -> None:
        """Free the parameter that ``unshard()`` gathered, if the unit reshards after forward.

        With ``set_reshard_after_backward(False)``, keep it for later forwards, but do not show it to users any more.
        """
        if self.state.is_unsharded and self.unit.reshards_after_forward:
            if self.unit.flags.reshard_after_backward:
                self.state.drop_full()
            else:
                self.state.is_unsharded = False

    def meta_message(self) -> str:
        """Return the error message for a forward that reads the parameter while it has no memory."""
        return (
            f"Parameter {self.name} is on the meta device in a forward. Give it memory and values first: "
            "model.to_empty(device=...), then initialise, or load a state dict."
        )

    def is_bound(self) -> bool:
        """Return whether the local tensor still lies in the memory of the shard, or is still the one of the extension."""
        if self.extension is not None:
            return self.local is self._bound
        return storage_id(self.local) == id_of_storage(self._own_storage) and self.local.storage_offset() == 0

    def owns_memory_of(self, value: Any) -> bool:
        """Return whether a tensor, or the local tensor of a DTensor, begins in the memory of this parameter."""
        if value is self.param:
            return True
        local = as_local(value)
        if self.extension is not None:
            return local is self.local or any(local is tensor for tensor in self.extension.tensors_of(self.local).values())
        if not isinstance(local, Tensor) or not has_memory(local) or not has_memory(self.shard):
            return False
        start = self.shard.data_ptr()
        return start <= local.data_ptr() < start + self.shard.nbytes

    def check_replacement(self, param: Any) -> None:
        """Check that ``param`` can replace this parameter.

        Raises:
            ValueError: ``param`` is None, or no DTensor of the same mesh, placements and shape.
        """
        if param is None:
            raise ValueError(self._removed_message())
        spec, own = spec_of(param) if isinstance(param, DTensor) else None, spec_of(self.param)
        if spec is None or spec.mesh != own.mesh or spec.placements != own.placements or spec.shape != own.shape:
            raise ValueError(
                f"Parameter {self.name} is sharded and cannot be replaced by a {type(param).__name__} that is not sharded "
                "alike. Load a sharded state dict (DTensors), or a full one with "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict."
            )

    def _removed_message(self) -> str:
        return (
            f"Parameter {self.name} is sharded and cannot be removed by setting it to None. Do that before fully_shard; or "
            "fill the parameter with zeros and freeze it: param.requires_grad_(False)."
        )

    def check_is_no_other(self, value: Any) -> None:
        """Check that ``value``, which is to take this parameter's place in a module, is no other sharded parameter.

        Raises:
            ValueError: it is one, of this or another model. Each would take the other's memory and gradients for its own. Or it
                is None.
        """
        if value is None:
            raise ValueError(self._removed_message())
        if not isinstance(value, DTensor):
            return
        # Parameters on the meta device have no memory: those of this model are found by its units.
        known = chain((param for unit in self.unit.scope.units for param in unit.params), _params_by_memory.values())
        other = next((param for param in known if param.param is value and param is not self), None)
        if other is not None:
            raise ValueError(
                f"Parameter {self.name} cannot be replaced by {other.name}, which is sharded already. Tie or exchange "
                "parameters before fully_shard. To copy values: with torch.no_grad(): param.copy_(other)."
            )

    def adopt_assigned_parameter(self) -> None:
        """Adopt a parameter that was registered in the place of this one (``load_state_dict(assign=True)``)."""
        for module, name in self.owners:
            registered = _table_of(module).registered[name]
            if registered is self.param:
                continue
            self.check_replacement(registered)
            self.param = registered
            self.unit.abandon_gathers()
            self.state = ParamState()
            for other, other_name in self.owners:
                _table_of(other).registered[other_name] = self.param
            return

    def update_operator_args(self) -> None:
        """Compute the arguments of ``unshard`` that follow the shard, and put them into the tables of the owners.

        Equal blocks have equal arguments, so that they can share a compiled graph. The backend adds qualified names.
        """
        mesh, policy = self.mesh, self.unit.mp_policy
        args = self.local_name, tuple(self.shape), mesh.shard_group
        kwargs = {
            "dim": self.dim,
            "offset": self.offset,
            "param_dtype": self._cast_dtype,
            "reduce_dtype": reduce_dtype(policy, self.param.dtype),
            "replicate_group": mesh.replicate_group,
            "node_group": mesh.node_group,
            "reshard_after_forward": self.unit.reshards_after_forward,
            "post_forward_group": self.post_forward_group,
            "sent_as": "" if self.sent_as is None else str(self.sent_as),
            "packed": self.is_packed,
            # The type alone: with an index, graphs would differ between ranks.
            "device": self.mesh.device.type if self.unit.copies else "",
        }
        special: tuple[Any, ...] = () if self.model_parallel is None else (self.model_parallel, None, ())
        if self.extension is not None:
            # The extension sends tensors of its own, which do not lie in storage.
            kwargs |= {"extension": self.extension.key, "param_dtype": None, "offset": -1, "packed": False}
            special = self.model_parallel, attributes_of(self.local), self.extension.optional
        others = {key: value for key, value in kwargs.items() if value != UNSHARD_DEFAULTS[key]}
        self.unshard_args = UnshardArgs.of(args, others)
        for module, name in self.owners:
            table = _table_of(module)
            if name in table.registered:
                found = None if self.shard.is_meta else (self.shard, self.unshard_args, *special)
                setattr(table, shard_attribute(name), found)

    def gather_alone(self) -> Tensor:
        """Gather the full parameter at once, in a collective of its own. Differentiable."""
        self.unit.follow_extensions()
        args, kwargs = self.unshard_args
        if self.extension is None:
            full: Tensor = unshard(self.shard, *args, **kwargs)
            return full
        self.check_gather()
        tensors = self.extension.tensors_of(self.local)
        return unshard_extension(self.shard, *args, tensors=[*tensors.values()], names=tuple(tensors), **kwargs)

    def convert_replacement(self, given: Tensor | None) -> Tensor | None:
        """Convert a tensor that is registered in the parameter's place to the layout and dtype that a forward reads."""
        if given is None:
            return None
        if self.model_parallel is not None:
            full = self.model_parallel.piece_of(given)
        else:
            full = given.full_tensor() if isinstance(given, DTensor) else given
        return self.as_read(full.to(self.compute_dtype) if full.is_floating_point() else full)

    def as_read(self, full: Tensor) -> Tensor:
        """Return a gathered parameter as a forward reads it: with another parallelism, as a DTensor. Differentiable."""
        return full if self.model_parallel is None else self.model_parallel.wrap(full)

    def check_gather(self) -> None:
        """Check that the local tensor has the same all-gather extension as when the unit was laid out, or still none.

        Raises:
            RuntimeError: functions of the extension have changed after a graph was compiled; or its constants have.
        """
        if self.extension_changed():
            self.unit.follow_extensions()
            raise RuntimeError(
                f"fsdp_pre_all_gather or fsdp_post_all_gather of parameter {self.name} was set, replaced or deleted after its "
                "forward was compiled. Call the model again, and it compiles anew."
            )
        if self.extension is not None:
            self.extension.check_constants(self.local, self.name)

    def is_replaced(self) -> bool:
        """Return whether a module reads a tensor in the parameter's place, as in ``torch.func.functional_call``."""
        return any(isinstance(_table_of(module).__dict__.get(shard_attribute(name)), Tensor) for module, name in self.owners)

    def check_registered(self) -> None:
        """Check that the modules still register this parameter.

        Raises:
            RuntimeError: something else is registered in its place.
        """
        for module, name in self.owners:
            if _table_of(module).registered.get(name) is not self.param:
                raise RuntimeError(
                    f"A compiled graph reads the shard of parameter {self.name}, but something else stands in its place in "
                    "module._parameters. Write values to the parameter: param.copy_, load_state_dict."
                )

    def sync_requires_grad(self) -> bool:
        """Set the shard's ``requires_grad`` to the parameter's. Return whether it changed."""
        if self.shard.requires_grad is self.param.requires_grad:
            return False
        self.shard.requires_grad_(self.param.requires_grad)
        self.unit.attach(self)
        return True

    def note_requires_grad(self) -> bool:
        """Set the shard's ``requires_grad`` to the parameter's. Return whether it changed since it was last noted.

        Calls note it, and traces do not. So all ranks find a change in the same call, also if some trace anew for that call.
        """
        self.sync_requires_grad()
        if self._noted is None:
            # Ranks may use different parts of a model. The first call counts for all of it.
            for param in (param for unit in self.unit.scope.units for param in unit.params):
                param._noted = param.param.requires_grad if param._noted is None else param._noted
        before, self._noted = self._noted, self.param.requires_grad
        return before not in (None, self._noted)


def _table_of(module: nn.Module) -> Any:
    """Return the table in the place of the module's ``_parameters`` (:mod:`fsdp_compile.api.parameters`)."""
    return own_parameters(module)


_params_by_memory: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def find_sharded_param(value: Any) -> ShardedParam | None:
    """Return the parameter whose shard is a value; None: it is no shard."""
    return getattr(value, "_fsdp_sharded_param", None)


def param_in_memory(tensor: Tensor) -> ShardedParam | None:
    """Return the parameter whose shard has the memory of a tensor, such as one that a checkpoint gives backward, or None."""
    param = _params_by_memory.get(tensor.data_ptr()) if has_memory(tensor) else None
    lies_there = param is not None and param.shard.data_ptr() == tensor.data_ptr() and param.shard.shape == tensor.shape
    return param if lies_there else None


def params_with_memory() -> dict[int, ShardedParam]:
    """Return all parameters whose shards have memory, by the ``id`` of their DTensors."""
    return {id(sharded.param): sharded for sharded in _params_by_memory.values()}
