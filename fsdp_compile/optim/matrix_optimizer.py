"""Optimizers whose update of a matrix depends on the whole matrix, such as Muon.

A step has three parts. Two are elementwise, and each rank computes them for its shards: momentum, and the application of an
update. In between, the update is computed of the whole matrix, once, on one of the ranks that shard it (:mod:`.owners`).
Operators on DTensors would instead gather each matrix by itself, and repeat the work on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from passes.fx.torch_internals.objects import as_local, local_tensor

from ..runtime.checked_program import CheckedProgram, eager_run
from ..units.sharded_param import params_with_memory
from .owners import Exchange, Matrix, Replicas, Unshared, choose_owners
from .torch_step import step_after

# Matrices are exchanged together up to so many bytes on each rank, so that owners begin before all has arrived.
_BUCKET_BYTES = 32 << 20


class MatrixShard:
    """A rank's shard of a matrix in a step, or a matrix that nobody shards.

    Of a batch of matrices, it is a batch: the shards of those matrices that the rank has shards of, ``[batch, rows, columns]``.

    Attributes:
        param: the shard of the parameter, which the step writes to.
        grad: the shard of the gradient, of the same shape.
        shape: the shape of a whole matrix.
        group: the parameter's group of the optimizer, with its settings.
    """

    def __init__(self, param: Any, grad: Any, group: Mapping[str, Any], state: dict[str, Any]):
        self.param, self.grad = as_local(param), as_local(grad)
        self.shape, self.group = param.shape[-2:], group
        self._whole_grad, self._state = grad, state

    def buffer(self, name: str) -> Tensor:
        """Return this rank's shard of a state of the parameter, ``optimizer.state[param][name]``: zeros at first."""
        if name not in self._state:
            self._state[name] = torch.zeros_like(self._whole_grad, memory_format=torch.preserve_format)
        return as_local(self._state[name])

    @property
    def count(self) -> int:
        """The number of matrices."""
        return 1 if self.param.ndim == 2 else self.param.shape[0]


def _matrices(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor] if tensor.ndim == 2 else tensor.unbind()


class MatrixOptimizer(Optimizer):
    """The base of optimizers whose update depends on whole matrices.

    A subclass says what it does with shards, and with whole matrices. Parameters are matrices that ``fully_shard`` (or FSDP2)
    has sharded along one dimension, or that nobody shards. Replicas (HSDP, "ddp") have owners for different matrices. In a
    group with ``"batch_of_matrices": True``, a parameter ``[batch, rows, columns]``, such as the weights of experts, stands for
    ``batch`` matrices. Ranks that cut the batch among them have whole matrices.

    Attributes:
        sent_dtype: the dtype in which shards and updates travel; None: that of :meth:`prepare` 's result.

    Example::

        class SpectralDescent(fsdp_compile.MatrixOptimizer):
            def __init__(self, params, lr):
                super().__init__(params, {"lr": lr})

            def prepare(self, shard):
                return shard.buffer("momentum").lerp_(shard.grad, 0.1)

            def update(self, matrix, group):
                u, _, v = torch.linalg.svd(matrix, full_matrices=False)
                return u @ v

            def apply(self, shard, update):
                shard.param.add_(update, alpha=-shard.group["lr"])
    """

    sent_dtype: torch.dtype | None = None

    def prepare(self, shard: MatrixShard) -> Tensor:
        """Return a shard of what :meth:`update` takes, elementwise of a shard of the gradient and its states."""
        raise NotImplementedError

    def update(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the update for a whole matrix, of its shape. Called on one rank for each matrix.

        Args:
            matrix: what :meth:`prepare` returned, of all ranks.
            group: the parameter's group of the optimizer, with its settings.
        """
        raise NotImplementedError

    def apply(self, shard: MatrixShard, update: Tensor) -> None:
        """Write a shard of an update to the shard of the parameter."""
        raise NotImplementedError

    def cost(self, shape: Sequence[int]) -> float:
        """Return what :meth:`update` costs for a matrix, in any unit. Ranks own matrices of equal costs together."""
        smaller, larger = sorted(shape)
        return float(smaller * smaller * larger)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's.

        Raises:
            ValueError: a parameter of the group is no matrix, or no batch of matrices.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        ndim, what = (3, "batches of matrices") if group.get("batch_of_matrices") else (2, "matrices")
        for index, param in enumerate(group["params"]):
            if param.ndim != ndim:
                name = group["param_names"][index] if "param_names" in group else _name_of(param) or f"{index} of its group"
                self.param_groups.pop()
                batch = ' If it is a batch of matrices, such as experts, give its group "batch_of_matrices": True.'
                raise ValueError(
                    f"{type(self).__name__} steps {what}, but parameter {name} has shape {list(param.shape)}. Give it to "
                    f"another optimizer, such as AdamW, and usually embeddings and the head, too.{batch * (param.ndim == 3)}"
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have gradients. A collective call of the ranks that shard them.

        Args:
            closure: computes gradients and returns a loss, which is returned.

        Raises:
            ValueError: a parameter or its gradient is sharded in another way than along one dimension.
            RanksDisagree: ranks that shard parameters together have gradients of different ones.
        """
        return step_after(closure, self._step_matrices)

    @torch.no_grad()
    def _step_matrices(self) -> None:
        by_ranks: defaultdict[_Ranks, list[_Held]] = defaultdict(list)
        others: list[list[Any]] = []
        for group in self.param_groups:
            others.append([])
            for param in (param for param in group["params"] if param.grad is not None):
                grad = _gradient_of(param)
                found = _layout_of(param, grad)
                if found is None:
                    others[-1].append(param)
                else:
                    by_ranks[found.ranks].append(_Held(MatrixShard(param, grad, group, self.state[param]), found.dim, param))
        if any(others):
            self._step_others([{**group, "params": params} for group, params in zip(self.param_groups, others, strict=True)])
        alone = by_ranks.pop(_ALONE, [])
        with contextlib.ExitStack() as stack:
            for ranks, held in by_ranks.items():
                run = self._exchange_over(ranks, held)
                run.begin()
                stack.enter_context(run)
            buckets = [bucket for ranks, held in by_ranks.items() for bucket in self._buckets(ranks, held)]
            for bucket in buckets:
                bucket.send()
            for shard in (one.shard for one in alone):
                updates = [self.update(matrix, shard.group) for matrix in _matrices(self.prepare(shard))]
                self._write(shard, updates)
            for bucket in buckets:
                bucket.update()
            for bucket in buckets:
                bucket.share()
            for bucket in buckets:
                bucket.apply()

    def _write(self, shard: MatrixShard, updates: Sequence[Tensor]) -> None:
        """Write this rank's shards of the updates of all matrices of ``shard``."""
        if updates:
            update = updates[0] if shard.param.ndim == 2 else torch.stack(list(updates))
            self.apply(shard, update.to(shard.param.device))

    def _exchange_over(self, ranks: _Ranks, held: Sequence[_Held]) -> CheckedProgram:
        """Return the exchange over some ranks as they compare it, as one that steps other matrices would wait for ever."""
        params = (param for group in self.param_groups for param in group["params"])
        without = [param for param in params if param.grad is None and param.requires_grad]
        layouts = ((param, _layout_of(param, param)) for param in without)
        names = [
            _name_of(param) or f"a parameter {list(param.shape)}"
            for param, layout in layouts
            if layout is not None and layout.ranks == ranks
        ]
        label = f"step of {type(self).__name__}{' without gradients' if names else ''}"
        sizes = tuple(one.shard.count * one.shard.shape.numel() for one in held)
        return eager_run(label, sizes, ranks.names, tuple(names), is_step=True)

    def _step_others(self, groups: list[dict[str, Any]]) -> None:
        """Step parameters that are sharded in other ways."""
        param = next(param for group in groups for param in group["params"])
        raise ValueError(
            f"{type(self).__name__} cannot step {_name_of(param) or 'a parameter'}, a {type(param).__name__} with placements "
            f"{getattr(param, 'placements', None)}, and {getattr(param.grad, 'placements', None)} of its gradient: it takes "
            "matrices that one dimension of a mesh shards, with gradients alike. Give it to another "
            "optimizer."
        )

    def _buckets(self, ranks: _Ranks, held: Sequence[_Held]) -> list[_Bucket]:
        """Cut matrices into buckets, and choose their owners: among all ranks, over all buckets."""
        owners = iter(
            choose_owners([self.cost(one.shard.shape) for one in held for _ in range(one.shard.count)], ranks.num_owners)
        )
        found: list[_Bucket] = []
        size = _BUCKET_BYTES
        for one in held:
            dtype = self.sent_dtype or one.shard.grad.dtype
            nbytes = one.shard.count * -(-one.shard.shape.numel() // ranks.num_shards) * dtype.itemsize
            if size + nbytes > _BUCKET_BYTES or found[-1].dtype != dtype:
                found.append(_Bucket(self, ranks, dtype, torch.device(one.param.device_mesh.device_type)))
                size = 0
            size += nbytes
            found[-1].shards.append(one.shard)
            found[-1].matrices += [
                Matrix(tuple(one.shard.shape), one.dim, owner % ranks.num_shards, owner // ranks.num_shards)
                for owner in itertools.islice(owners, one.shard.count)
            ]
        return found


class _Ranks(NamedTuple):
    """The ranks that step matrices together.

    Attributes:
        shard: the process group of the ranks that have shards of the same matrices; None: each rank has whole matrices.
        replicas: the process group of the ranks that have equal shards; None: there are none.
    """

    shard: Any
    replicas: Any

    @property
    def names(self) -> tuple[str, str]:
        return "" if self.shard is None else self.shard.group_name, "" if self.replicas is None else self.replicas.group_name

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def num_owners(self) -> int:
        return self.num_shards * (1 if self.replicas is None else self.replicas.size())


_ALONE = _Ranks(None, None)


class _Layout(NamedTuple):
    """The ranks that have shards of a matrix, and the dimension of the matrix that they cut."""

    ranks: _Ranks
    dim: int


class _Held(NamedTuple):
    """A shard, the dimension along which its matrices are cut, and the parameter."""

    shard: MatrixShard
    dim: int
    param: Any


class _Bucket:
    """Matrices of the same ranks, which are exchanged together."""

    def __init__(self, optimizer: MatrixOptimizer, ranks: _Ranks, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.shards: list[MatrixShard] = []
        self.matrices: list[Matrix] = []
        self._optimizer, self._ranks, self._device = optimizer, ranks, device

    def send(self) -> None:
        """Send shards to owners in this replica."""
        pieces = [piece for shard in self.shards for piece in _matrices(self._optimizer.prepare(shard))]
        groups = [shard.group for shard in self.shards for _ in range(shard.count)]
        replica = 0 if self._ranks.replicas is None else dist.get_rank(self._ranks.replicas)
        own = [index for index, matrix in enumerate(self.matrices) if matrix.replica == replica]
        self._groups = [groups[index] for index in own]
        self._exchange: Exchange | Unshared = Unshared()
        if self._ranks.shard is not None and own:
            self._exchange = Exchange([self.matrices[index] for index in own], self._ranks.shard, self.dtype, self._device)
        self._exchange.send_shards([pieces[index] for index in own])

    def update(self) -> None:
        """Update the matrices that this rank owns, and send shards of the updates."""
        matrices = self._exchange.whole_matrices()
        self._exchange.send_results({index: self._optimizer.update(matrix, self._groups[index]) for index, matrix in matrices})

    def share(self) -> None:
        """Send shards of updates to the other replicas."""
        if self._ranks.replicas is not None:
            index = 0 if self._ranks.shard is None else dist.get_rank(self._ranks.shard)
            self._replicas = Replicas(
                self.matrices, self._ranks.num_shards, index, self._ranks.replicas, self.dtype, self._device
            )
            self._replicas.send(self._exchange.result_shards())

    def apply(self) -> None:
        """Write updates to the shards of parameters."""
        results = iter(self._exchange.result_shards() if self._ranks.replicas is None else self._replicas.results())
        for shard in self.shards:
            self._optimizer._write(shard, list(itertools.islice(results, shard.count)))


def _gradient_of(param: Any) -> Any:
    """Return a parameter's gradient, reduced where it is Partial."""
    grad = param.grad
    if (
        isinstance(param, DTensor)
        and isinstance(grad, DTensor)
        and any(placement.is_partial() for placement in grad.placements)
    ):
        return grad.redistribute(placements=param.placements)
    return grad


def _layout_of(param: Any, grad: Any) -> _Layout | None:
    """Return which ranks have shards of a parameter and its gradient; None: they are cut otherwise than along one dimension."""
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return None if isinstance(param, DTensor) or isinstance(grad, DTensor) else _Layout(_ALONE, 0)
    is_replicated = all(placement.is_replicate() for placement in (*param.placements, *grad.placements))
    if not is_replicated and (grad.device_mesh != param.device_mesh or grad.placements != param.placements):
        return None
    if type(local_tensor(param)) is not Tensor or type(local_tensor(grad)) is not Tensor:
        return None
    mesh, cut, replicas, dim = param.device_mesh, None, None, 0
    for mesh_dim, placement in enumerate(param.placements):
        if mesh.size(mesh_dim) == 1 or (param.ndim == 3 and getattr(placement, "dim", None) == 0):
            continue
        if placement.is_replicate():
            # With several dimensions of replicas, the ranks of the others do the same.
            if replicas is None or mesh.size(mesh_dim) > mesh.size(replicas):
                replicas = mesh_dim
        elif cut is not None or type(placement) is not Shard:
            # A subclass of Shard cuts otherwise.
            return None
        else:
            cut, dim = mesh_dim, placement.dim % param.ndim - (param.ndim - 2)
    groups = [None if mesh_dim is None else mesh.get_group(mesh_dim) for mesh_dim in (cut, replicas)]
    return _Layout(_Ranks(*groups), dim)


def _name_of(param: Any) -> str:
    sharded = params_with_memory().get(id(param))
    return sharded.name if sharded is not None and sharded.param is param else ""
