"""``fully_shard``: shard a module's parameters in place, with the signature and meaning of
``torch.distributed.fsdp.fully_shard`` (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parameter import is_lazy

from passes.collectives.layout import REPLICATED
from passes.collectives.rounded_gather import GatherPolicy
from passes.fx.torch_internals.core import FakeTensor
from passes.fx.torch_internals.distributed import concatenate_meshes
from passes.fx.torch_internals.dynamo import OptimizedModule
from passes.fx.torch_internals.objects import as_local, flattened, own_parameters, wrapped_module

from ..compiler import frame_cache, registered_attributes
from ..runtime import func_transforms
from ..runtime.eager_hooks import attach
from ..torch_versions import param_dtype
from ..units.extension import check_extension, is_extension
from ..units.mesh import ShardingMesh
from ..units.model_parallel import ModelParallel
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .composable import is_fsdp2s, register, state_of
from .composable_checkpoints import trace_checkpoints
from .module import (
    FSDPModule,
    add_methods,
    make_unit,
    set_scope,
    shard_parameters,
    swap_class_of_wrapper,
    sync_before_trace,
    unit_of,
)
from .param_dtypes import ParamDtypes, check_param_dtypes, param_dtype_of
from .parameters import ShardedParameters, replace_functions, sharded_params_of
from .partial_offload import PartialCPUOffloadPolicy, UnshardedParam
from .placement import Placement

M = TypeVar("M", bound=nn.Module)
# Its result may be torch's ShardPlacementResult, which torch 2.11 lacks.
ShardPlacementFn = Callable[[nn.Parameter], Any]


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object | None = None,
    gather_policy: GatherPolicy | None = None,
    placement: str | Mapping[str, str] | None = None,
    param_dtypes: ParamDtypes | None = None,
) -> M: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object | None = None,
    gather_policy: GatherPolicy | None = None,
    placement: str | Mapping[str, str] | None = None,
    param_dtypes: ParamDtypes | None = None,
) -> list[nn.Module]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen; FSDP2's own default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object | None = None,
    gather_policy: GatherPolicy | None = None,
    placement: str | Mapping[str, str] | None = None,
    param_dtypes: ParamDtypes | None = None,
) -> Any:
    """Shard a module's parameters over a mesh, in place.

    Call it bottom-up. Each call groups the parameters that no earlier call on a submodule took into one *unit*. A unit is
    gathered with one collective, and reduced with one for each dtype. Outside of a forward, parameters are ``DTensor`` s;
    inside, reading one gives the full tensor. Compile the result with ``torch.compile(model, backend=fsdp_backend)``.

    Args:
        module: the module, or a list of modules to make one unit of; also wrappers that ``torch.compile`` returned.
        mesh: 1-D for FSDP; 2-D (replicate, shard) for HSDP; None: all ranks. If your mesh has more dimensions, pass a slice,
            perhaps flattened. A parameter may be a DTensor already, on another slice of the same mesh: tensor or expert
            parallel. The first use of a mesh is a collective call of its ranks. It sets up communication: NCCL's communicators;
            over Gloo, a second group for each.
        reshard_after_forward: True: backward gathers the unit again. False: the gathered parameters live until backward.
            None: True for all units but the root. An int: after forward, each group of so many ranks keeps shards, and backward
            gathers over that group.
        shard_placement_fn: returns ``Shard(dim)`` for a parameter, or None for ``Shard(0)``. Dimensions other than 0 must
            divide by the number of ranks. It may also return torch's ``ShardPlacementResult``: one of these, and the mesh that
            the parameter is sharded over in the place of ``mesh``.
        mp_policy: dtypes of computation and reduction. Its ``param_dtype_override_fn`` (torch 2.15) is called once for each
            parameter, and may return the parameter's dtype, which then computes in it.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer on the host (docs/memory.md).
            :class:`PartialCPUOffloadPolicy` does so if the device has no room for them.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: torch's ``DataParallelMeshDims``, for parameters that are DTensors on all dimensions of ``mesh``: the
            dimensions to shard over, and to have replicas on. Parameters must be replicated there. In a forward they are
            DTensors on ``mesh`` again. Their gradients, which are sums over it, are divided by the number of these ranks.
        gather_policy: send parameters in a byte for each element (docs/low-precision.md); FSDP2 has no such argument.
        placement: the tensors that the ranks of each mesh dimension cut among them: "zero1", "zero2", "zero3", "hsdp",
            "hybrid", "ddp", or a level for each dimension by name (docs/placement.md). None: parameters, gradients and
            optimizer states, over the last dimension. FSDP2 has no such argument.
        param_dtypes: dtypes that single parameters compute in, where ``mp_policy`` is not to decide (docs/low-precision.md): a
            mapping from patterns of names in ``module`` (:mod:`fnmatch`; the first that fits counts) to a dtype or "keep", the
            parameter's own; or a function of name and parameter that returns one of these, or None. FSDP2 has no such argument.

    Returns:
        ``module``. Its class is now ``FSDP<Class>``, a subclass of its own class and of :class:`FSDPModule`.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: the arguments do not fit the module; nothing has changed then.

    Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py. Scalars, which FSDP2 refuses, stay whole on every rank.
    """
    modules = _check_modules(module)
    _check_offload_policy(offload_policy)
    if not isinstance(gather_policy, GatherPolicy | None):
        raise TypeError(f"fully_shard(gather_policy=...) takes a GatherPolicy, not {gather_policy!r}.")
    check_param_dtypes(param_dtypes)
    ignored = _check_ignored(ignored_params)
    found = _collect_parameters(modules, ignored)
    over = mesh if dp_mesh_dims is None else _mesh_of_dims(mesh, dp_mesh_dims)
    if placement is not None and dp_mesh_dims is not None:
        raise NotImplementedError(f"fully_shard(placement={placement!r}) beside dp_mesh_dims, which places parameters, too.")
    placed = None if placement is None else Placement.of(placement, over, reshard_after_forward)
    sharding_mesh = ShardingMesh.of(over) if placed is None else placed.sharding_mesh(over)
    cuts = _cuts(found, sharding_mesh, shard_placement_fn, dp_mesh_dims, mp_policy)
    if param_dtypes is not None:
        for param, cut in cuts.items():
            dtype = param_dtype_of(param_dtypes, found[param][0][2], param)
            cuts[param] = cut if dtype is None else cut._replace(param_dtype=dtype)
    if placed is not None:
        cuts = _cuts_of_placement(found, cuts, placed, sharding_mesh, offload_policy, gather_policy)
        if reshard_after_forward is None:
            reshard_after_forward = placed.reshard_after_forward
    if dp_mesh_dims is not None:
        _check_dims(found, cuts, mesh)
    _check_meshes(found, cuts)
    _check_devices(found)

    meshes = dict.fromkeys(cut.mesh for cut in cuts.values()) or (sharding_mesh,)
    offload, bytes_on_device = _offload(offload_policy, cuts)
    unit = Unit(modules, sharding_mesh, meshes, mp_policy, reshard_after_forward, attach, gather_policy, offload)
    if unit.copies:
        _check_copied(found, cuts, gather_policy)
    if placed is not None:
        placed.apply(unit)
    wrappers = [wrapper for wrapper in _as_list(module) if isinstance(wrapper, OptimizedModule)]
    inner = _inside(modules)
    with _all_or_nothing([*modules, *wrappers, *inner], found):
        _install(unit, inner, found, cuts)
        for member in modules:
            make_unit(member, unit)
        for wrapper in wrappers:
            swap_class_of_wrapper(wrapper)
        register([*modules, *wrappers], unit)
        trace_checkpoints(dict.fromkeys([*modules, *inner]))
        unit.allocate()
        for member in modules:
            _name_units(member)
    registered_attributes.install(ShardedParameters)
    frame_cache.install(sync_before_trace)
    replace_functions()
    func_transforms.install()
    if isinstance(offload_policy, PartialCPUOffloadPolicy):
        offload_policy.bytes_on_device += bytes_on_device
    for param in ignored:
        param._fsdp_ignored = True  # type: ignore[attr-defined]
    return module


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (as above)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Keep a module's parameters whole on all ranks, and average their gradients: ``fully_shard`` with the placement "ddp".

    Each call makes a unit, whose gradients are all-reduced together. Parameters are DTensors with the placement Replicate().

    Args:
        module, mp_policy, offload_policy, ignored_params: as for :func:`fully_shard`.
        mesh: a 1-D mesh; None: all ranks.

    Returns:
        ``module``.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as :func:`fully_shard`.

    Source: torch/distributed/_composable/replicate_with_fsdp.py.
    """
    return fully_shard(
        module, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy, ignored_params=ignored_params, placement="ddp"
    )


fully_shard.state = state_of  # type: ignore[attr-defined]


@contextlib.contextmanager
def _all_or_nothing(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore modules and parameters if the ``with`` block fails."""
    modules, params = list(dict.fromkeys(modules)), list(params)
    classes = [(module, type(module)) for module in modules]
    # A module's parameters, hooks and the like are dictionaries in its ``__dict__``.
    held = [value for module in modules for value in (module.__dict__, *module.__dict__.values()) if isinstance(value, dict)]
    dictionaries = [(value, dict(value)) for value in (*held, *(param.__dict__ for param in params))]
    tied = [sharded for param in params if (sharded := _sharded_as(param)) is not None]
    owners = [(sharded, list(sharded.owners)) for sharded in tied]
    try:
        yield
    except BaseException:
        for module, original in classes:
            module.__class__ = original
        for dictionary, copy in dictionaries:
            dictionary.clear()
            dictionary.update(copy)
        for sharded, before in owners:
            sharded.owners = before
        raise


def _sharded_as(param: nn.Parameter) -> ShardedParam | None:
    """Return the sharded parameter that replaced ``param`` in a unit further in; None if none did."""
    return getattr(param, "_fsdp_sharded_as", None)


def _check_modules(module: Any) -> list[nn.Module]:
    modules = _as_list(module)
    if not modules:
        raise ValueError("fully_shard got an empty list of modules.")
    # The wrapper that torch.compile returns only calls its module.
    modules = [wrapped_module(member) if isinstance(member, OptimizedModule) else member for member in modules]
    for member in modules:
        if not isinstance(member, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, but got {type(member).__name__}.")
        if isinstance(member, FSDPModule):
            raise ValueError(
                f"{type(member).__name__} is sharded already. Call fully_shard once for each module, inner modules first."
            )
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)) and type(member).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard cannot shard a {type(member).__name__}, which has no forward. Shard its modules one by one, "
                "or pass them as a list to make one unit."
            )
    if len(set(modules)) < len(modules):
        twice = next(member for index, member in enumerate(modules) if any(member is other for other in modules[:index]))
        raise ValueError(f"fully_shard got a list that holds the same {type(twice).__name__} twice. List each module once.")
    for member in modules:
        for name, inner in member.named_modules():
            if name and any(inner is other for other in modules):
                raise ValueError(
                    f"fully_shard got a list whose modules nest: {type(inner).__name__} is '{name}' of "
                    f"{type(member).__name__}. List only modules that do not contain each other."
                )
    return modules


def _check_offload_policy(policy: Any) -> None:
    if type(policy) not in (OffloadPolicy, CPUOffloadPolicy, PartialCPUOffloadPolicy):
        raise TypeError(
            "fully_shard(offload_policy=...) takes a CPUOffloadPolicy, a PartialCPUOffloadPolicy or an OffloadPolicy, not "
            f"{policy!r}."
        )


def _offload(policy: OffloadPolicy, cuts: dict[nn.Parameter, ParamSharding]) -> tuple[CPUOffloadPolicy | None, int]:
    """Return the offload policy of a unit, and the bytes that the unit adds to a partial policy's ``bytes_on_device``."""
    if not isinstance(policy, PartialCPUOffloadPolicy):
        return (policy if isinstance(policy, CPUOffloadPolicy) else None), 0
    pieces = [(param, _piece(param), cut) for param, cut in cuts.items()]
    return policy.decide(
        UnshardedParam(piece.shape, piece.dtype, cut.dim, cut.mesh.shard_size, param.requires_grad)
        for param, piece, cut in pieces
    )


def _check_copied(
    found: dict[nn.Parameter, _Owners], cuts: dict[nn.Parameter, ParamSharding], gather_policy: GatherPolicy | None
) -> None:
    """Check that each parameter is of a kind that can be kept on the host, and copied to the device for its gather."""
    for param, owners in found.items():
        reasons = {
            "is gathered by a gather_policy, which rounds it": gather_policy is not None,
            f"is a {type(param).__name__}, which fsdp_pre_all_gather gathers": is_extension(_piece(param)),
            "is a DTensor, which another parallelism has laid out": cuts[param].layout is not None,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            raise NotImplementedError(
                f"Parameter {owners[0][2]} is to be kept on the host (offload_policy=CPUOffloadPolicy()), but {reason}. That "
                "is not supported together: shard its module without the one or the other."
            )


def _cuts_of_placement(
    found: dict[nn.Parameter, _Owners],
    cuts: dict[nn.Parameter, ParamSharding],
    placement: Placement,
    mesh: ShardingMesh,
    offload_policy: OffloadPolicy,
    gather_policy: GatherPolicy | None,
) -> dict[nn.Parameter, ParamSharding]:
    """Return how a placement cuts parameters.

    Raises:
        NotImplementedError: a placement cannot have parameters of this kind.
    """
    if placement.is_replicated or placement.is_hybrid:
        for param, owners in found.items():
            if cuts[param].mesh is not mesh:
                raise NotImplementedError(
                    f"shard_placement_fn returned a mesh for parameter {owners[0][2]} beside placement={placement.name!r}, "
                    "which places all parameters on mesh=. Leave the one or the other out."
                )
    if placement.is_replicated:
        return {param: cut._replace(dim=REPLICATED) for param, cut in cuts.items()}
    for param, owners in found.items() if placement.is_hybrid else ():
        reasons = {
            "is rounded by a gather_policy": gather_policy is not None,
            f"is a {type(param).__name__}, which fsdp_pre_all_gather gathers": is_extension(_piece(param)),
            "is kept on the host (offload_policy)": type(offload_policy) is not OffloadPolicy,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            raise NotImplementedError(
                f"Parameter {owners[0][2]} is gathered in two steps (placement={placement.name!r}), but {reason}. That is not "
                "supported together: use placement='hsdp', or leave the other out."
            )
    return cuts


def _as_list(module: Any) -> list[Any]:
    return list(module) if isinstance(module, (list, tuple)) else [module]


def _check_ignored(ignored_params: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    ignored = set(ignored_params or ())
    for entry in ignored:
        if not isinstance(entry, nn.Parameter):
            raise TypeError(
                f"ignored_params must hold nn.Parameter objects, but has {type(entry).__name__} ({str(entry)[:60]!r}). "
                "Pass the parameters themselves, such as {model.head.weight}."
            )
    return ignored


_Owners = list[tuple[nn.Module, str, str]]


def _collect_parameters(modules: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, _Owners]:
    """Collect parameters in registration order, with their owners: (module, its name for the parameter, name in the unit).

    The parameters are those that no unit has yet, and those that a unit further in has taken (tied across units). Their owners
    join the earlier ones.
    """
    found: dict[nn.Parameter, _Owners] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        if module in visited or (unit_of(module) is not None and isinstance(module, FSDPModule)):
            return
        if is_fsdp2s(module):
            raise ValueError(
                f"{prefix.rstrip('.') or type(module).__name__} is sharded by torch's own fully_shard. Import it from one of "
                "torch.distributed.fsdp and fsdp_compile for the whole model."
            )
        visited.add(module)
        for name, param in own_parameters(module).items():
            if param is None or param in ignored:
                continue
            if name in sharded_params_of(module):
                raise ValueError(
                    f"Parameter {prefix}{name} is sharded already, by an earlier call on a module around it. Call fully_shard "
                    "on inner modules first."
                )
            if is_lazy(param):
                raise ValueError(
                    f"Parameter {prefix}{name} has no shape yet, as {type(module).__name__} is lazy. Call the model once "
                    "before sharding."
                )
            piece = _piece(param)
            if is_extension(piece):
                check_extension(param, prefix + name)
            elif _overrides_operators(piece):
                raise NotImplementedError(
                    f"Parameter {prefix}{name} is a {type(piece).__name__}, a tensor subclass with operators of its own, "
                    "which a shard would lose, and without fsdp_pre_all_gather and fsdp_post_all_gather. Add it to "
                    "ignored_params, which leaves it whole on every rank, or convert the model after sharding."
                )
            if not piece.is_contiguous():
                raise NotImplementedError(
                    f"Parameter {prefix}{name} is not contiguous (stride {piece.stride()}). Make it so before sharding."
                )
            found.setdefault(param, []).append((module, name, prefix + name))
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    for index, module in enumerate(modules):
        visit(module, f"{index}." if len(modules) > 1 else "")
    return found


def _inside(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules inside of ``modules`` that are not in a unit further in."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in found and not isinstance(child, FSDPModule):
                found[child] = None
                visit(child)

    for module in modules:
        visit(module)
    return list(found)


def _piece(param: Tensor) -> Tensor:
    """Return the tensor to shard: the parameter, or the local tensor that another parallelism has left this rank."""
    return as_local(param)


def _overrides_operators(param: Tensor) -> bool:
    """Return whether a parameter's class overrides operators, rather than only adding attributes to ``nn.Parameter``."""
    kind = type(param)
    if issubclass(kind, FakeTensor):
        return False
    overrides = kind.__torch_function__ not in (Tensor.__torch_function__, nn.Parameter.__torch_function__)
    return overrides or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


class ParamSharding(NamedTuple):
    """The sharding of a parameter.

    Attributes:
        dim: the dimension that is cut, or ``REPLICATED``.
        mesh: the mesh that the parameter is sharded over.
        layout: the layout by another parallelism before; None: there is none.
        param_dtype: the dtype that the parameter computes in; None: its own.
    """

    dim: int
    mesh: ShardingMesh
    layout: ModelParallel | None
    param_dtype: torch.dtype | None


def _cuts(
    found: dict[nn.Parameter, _Owners],
    mesh: ShardingMesh,
    shard_placement_fn: ShardPlacementFn | None,
    dp_mesh_dims: object | None,
    policy: MixedPrecisionPolicy,
) -> dict[nn.Parameter, ParamSharding]:
    meshes = {mesh.mesh: mesh}
    cuts = {}
    for param, owners in found.items():
        name = owners[0][2]
        placement: Any = shard_placement_fn(param) if shard_placement_fn else None
        own = mesh
        if (mesh_info := getattr(placement, "mesh_info", None)) is not None:
            if dp_mesh_dims is not None:
                raise NotImplementedError(f"shard_placement_fn returned a mesh for parameter {name} beside dp_mesh_dims.")
            # torch's ShardPlacementResult.
            placement = placement.placement
            _check_mesh_info(mesh_info, name)
            if mesh_info.mesh not in meshes:
                meshes[mesh_info.mesh] = ShardingMesh.of(mesh_info.mesh)
            own = meshes[mesh_info.mesh]
        dim, layout = _shard_dim(param, name, own, placement), ModelParallel.of(param, dp_mesh_dims)
        cuts[param] = ParamSharding(dim, own, layout, param_dtype(policy, param, name))
    return cuts


def _mesh_of_dims(mesh: DeviceMesh | None, dims: Any) -> DeviceMesh:
    """Return the part of ``mesh`` to shard over: (shard), or (replicate, shard). Several dimensions of a kind become one."""
    if not hasattr(dims, "shard_names"):
        raise TypeError(f"dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims, not {dims!r}.")
    names = mesh.mesh_dim_names if mesh is not None else None
    if mesh is None or names is None or not set(dims.shard_names + dims.replicate_names) <= set(names):
        raise ValueError(f"{dims} names dimensions of mesh=, which has {names}. Pass the mesh that parameters are DTensors on.")
    if not dims.shard_names:
        raise NotImplementedError(
            f"{dims} shards nothing, which is not supported. Use torch's replicate, or a dimension of one rank to shard over."
        )
    one = [mesh[some[0]] if len(some) == 1 else flattened(mesh[some], "_".join(some)) for some in _kinds(dims)]
    return one[0] if len(one) == 1 else concatenate_meshes(one)


def _kinds(dims: Any) -> list[tuple[str, ...]]:
    return [some for some in (tuple(dims.replicate_names), tuple(dims.shard_names)) if some]


def _check_dims(found: dict[nn.Parameter, _Owners], cuts: dict[nn.Parameter, ParamSharding], mesh: DeviceMesh | None) -> None:
    """Check that parameters are DTensors on ``mesh``, and replicated on the dimensions that ``dp_mesh_dims`` names."""
    for param, owners in found.items():
        name, layout = owners[0][2], cuts[param].layout
        if layout is None or layout.mesh != mesh:
            raise ValueError(
                f"With dp_mesh_dims, all parameters must be DTensors on mesh=, {mesh}, but {name} is "
                f"{'a plain tensor' if layout is None else f'one on {layout.mesh}'}. Use distribute_module on it, "
                "or add it to ignored_params."
            )
        own = layout.shard + layout.replicate
        placed = dict(zip(layout.mesh.mesh_dim_names or (), layout.placements, strict=True))
        if any(not isinstance(placed[dim], Replicate) for dim in own):
            raise ValueError(
                f"Parameter {name} has the placements {layout.placements}. It must be Replicate() on {', '.join(own)}, over "
                "which dp_mesh_dims asks to shard or replicate it."
            )


def _check_mesh_info(mesh_info: Any, name: str) -> None:
    dims = [] if mesh_info.replicate_mesh_dim is None else [mesh_info.replicate_mesh_dim]
    if [*dims, mesh_info.shard_mesh_dim] != list(range(mesh_info.mesh.ndim)):
        raise ValueError(
            f"shard_placement_fn returned {mesh_info} for parameter {name}. Its mesh must have the dimension to shard over "
            "last, and ahead of it none or that of replicas: FSDPMeshInfo(mesh['dp'], 0), or HSDPMeshInfo(mesh['replicate', "
            "'shard'], shard_mesh_dim=1, replicate_mesh_dim=0)."
        )


def _shard_dim(param: nn.Parameter, name: str, mesh: ShardingMesh, placement: object) -> int:
    if param.dim() == 0:
        return REPLICATED
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(f"shard_placement_fn must return a Shard or None, but returned {placement!r} for parameter {name}.")
    if not -param.dim() <= placement.dim < param.dim():
        raise ValueError(f"shard_placement_fn returned {placement} for parameter {name} of shape {tuple(param.shape)}.")
    dim = placement.dim % param.dim()
    shape = tuple(_piece(param).shape)
    if dim > 0 and shape[dim] % mesh.shard_size:
        raise NotImplementedError(
            f"Parameter {name} of shape {shape} cannot be sharded evenly as {placement} over {mesh.shard_size} "
            "ranks. Only Shard(0) may be uneven: return Shard(0), or a dimension that divides."
        )
    return dim


def _check_meshes(found: dict[nn.Parameter, _Owners], cuts: dict[nn.Parameter, ParamSharding]) -> None:
    for param, owners in found.items():
        dim, mesh, layout, _ = cuts[param]
        if layout is None:
            continue
        if any(isinstance(placement, Partial) for placement in layout.placements):
            raise ValueError(
                f"Parameter {owners[0][2]} is a DTensor whose ranks hold parts of a sum ({layout.placements}). Redistribute "
                "it: Shard or Replicate."
            )
        try:
            layout.sharded_spec(mesh, dim, cast(DTensor, param))
        # TypeError: a mesh has no names of dimensions.
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ValueError(
                f"Parameter {owners[0][2]} is a DTensor on {layout.mesh}, which has to be another slice of the mesh that mesh= "
                f"is a slice of, {mesh.mesh}. Make one mesh of all ranks, such as init_device_mesh(device, (2, 4), "
                "mesh_dim_names=('dp', 'tp')), parallelize over mesh['tp'], and shard over mesh['dp']. Or add the parameter to "
                f"ignored_params, which leaves it as it is. ({error})"
            ) from error


def _check_devices(found: dict[nn.Parameter, _Owners]) -> None:
    names: dict[bool, str] = {}
    for param, owners in found.items():
        names.setdefault(param.is_meta, owners[0][2])
    if len(names) > 1:
        raise ValueError(
            f"Parameters of one unit must all be on the meta device or none, but {names[True]} is on it and {names[False]} is "
            "not. Move one of them, or shard the module that holds it separately."
        )


def _install(
    unit: Unit, inner: Iterable[nn.Module], found: dict[nn.Parameter, _Owners], cuts: dict[nn.Parameter, ParamSharding]
) -> None:
    """Replace full parameters by sharded ones in the modules that own them, and give modules in ``inner`` their methods."""
    owned: dict[nn.Module, dict[str, ShardedParam]] = {}
    tied = []
    for param, owners in found.items():
        sharded = _sharded_as(param)
        if sharded is None:
            sharded = ShardedParam(unit, [], owners[0][2], param, *cuts[param])
            unit.params.append(sharded)
            # For a later call, which finds the same parameter in a module of another unit.
            param._fsdp_sharded_as = sharded  # type: ignore[attr-defined]
        else:
            tied.append(sharded)
        for module, name, _ in owners:
            sharded.owners.append((module, name))
            owned.setdefault(module, {})[name] = sharded
    for module, params in owned.items():
        shard_parameters(module, unit, params)
    for module in inner:
        add_methods(module, unit)
    for sharded in tied:
        sharded.update_operator_args()


def _name_units(root: nn.Module) -> None:
    """Name all units in ``root``, and their parameters, relative to ``root``. They share its scope; only its unit is a root."""
    prefixes = {module: _without_wrappers(prefix) for prefix, module in root.named_modules()}
    root_unit = unit_of(root)
    assert root_unit is not None
    scope = root_unit.scope
    units = dict.fromkeys(unit for module in prefixes if (unit := unit_of(module)) is not None)
    scope.units = list(units)
    for module in prefixes:
        set_scope(module, scope)
    for unit in units:
        unit.name = prefixes.get(unit.modules[0], unit.name)
        unit.is_root = unit.is_root and root in unit.modules
        unit.scope = scope
        for sharded in unit.params:
            module, name = sharded.owners[0]
            sharded.name = ".".join(part for part in (prefixes.get(module, ""), name) if part)
            sharded.update_operator_args()


def _without_wrappers(name: str) -> str:
    """Remove from a name the parts that torch.compile's wrappers put in, as checkpoints do."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def sync_module_states(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Broadcast parameters and buffers from the mesh's first rank to all its ranks, across both dimensions of a 2-D mesh.

    Call it before sharding, on a module that every rank has built. Then all ranks start from the values of the first rank.

    Args:
        module: a module with plain (not sharded) parameters, none of them on the meta device.
        mesh: the mesh that the module will be sharded on. None: all ranks.

    Raises:
        ValueError: a parameter is sharded already, or on the meta device. Nothing has been sent then.

    Source: ``sync_module_states`` of torch's FSDP1.
    """
    device_mesh = ShardingMesh.of(mesh).mesh
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if isinstance(tensor, DTensor):
            raise ValueError(f"sync_module_states must come before fully_shard, but {name} is sharded already.")
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no value to send. Initialise it first, or shard and then load a state "
                "dict with set_model_state_dict(..., options=StateDictOptions(broadcast_from_rank0=True))."
            )
    with torch.no_grad():
        for dim in range(device_mesh.ndim):
            group = device_mesh.get_group(dim)
            source = torch.distributed.get_global_rank(group, 0)
            for _, tensor in tensors:
                torch.distributed.broadcast(tensor.detach(), source, group=group)
