"""Optimizers whose update of a matrix depends on the whole matrix, such as Muon.

A step has three parts. Two are elementwise, and each rank computes them for its shards: momentum, and the application of an
update. In between, the update is computed of the whole matrix, once, on one of the ranks that shard it (:mod:`.owners`).
Operators on DTensors would instead gather each matrix by itself, and repeat the work on all ranks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from passes.fx.torch_internals.objects import as_local, local_tensor

from ..runtime.checked_program import CheckedProgram, eager_run
from ..units.sharded_param import params_with_memory
from .owners import Exchange, Matrix, choose_owners
from .torch_step import step_after

# Matrices are exchanged together up to so many bytes on each rank, so that owners begin before all has arrived.
_BUCKET_BYTES = 32 << 20


class MatrixShard:
    """A rank's shard of a matrix in a step, or a matrix that nobody shards.

    Attributes:
        param: the shard of the parameter, which the step writes to.
        grad: the shard of the gradient, of the same shape.
        shape: the shape of the whole matrix.
        group: the parameter's group of the optimizer, with its settings.
    """

    def __init__(self, param: Any, grad: Any, group: Mapping[str, Any], state: dict[str, Any]):
        self.param, self.grad = as_local(param), as_local(grad)
        self.shape, self.group = param.shape, group
        self._whole_grad, self._state = grad, state

    def buffer(self, name: str) -> Tensor:
        """Return this rank's shard of a state of the parameter, ``optimizer.state[param][name]``: zeros at first."""
        if name not in self._state:
            self._state[name] = torch.zeros_like(self._whole_grad, memory_format=torch.preserve_format)
        return as_local(self._state[name])


class MatrixOptimizer(Optimizer):
    """The base of optimizers whose update depends on whole matrices.

    A subclass says what it does with shards, and with whole matrices. Parameters are matrices that ``fully_shard`` (or FSDP2)
    has sharded along one dimension, or that nobody shards. With replicas (HSDP), each replica does the same.

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
            ValueError: a parameter of the group is no matrix.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for index, param in enumerate(group["params"]):
            if param.ndim != 2:
                name = group["param_names"][index] if "param_names" in group else _name_of(param) or f"{index} of its group"
                self.param_groups.pop()
                raise ValueError(
                    f"{type(self).__name__} steps matrices, but parameter {name} has shape {list(param.shape)}. Give it to "
                    "another optimizer, such as AdamW, and usually embeddings and the head, too."
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
        by_ranks: defaultdict[Any, list[_Cut]] = defaultdict(list)
        whole: list[MatrixShard] = []
        others: list[list[Any]] = []
        for group in self.param_groups:
            others.append([])
            for param in (param for param in group["params"] if param.grad is not None):
                grad = _gradient_of(param)
                if _is_whole(param, grad):
                    whole.append(MatrixShard(param, grad, group, self.state[param]))
                elif (cut := _cut_of(param, grad)) is not None:
                    shard = MatrixShard(param, grad, group, self.state[param])
                    device = torch.device(param.device_mesh.device_type)
                    by_ranks[param.device_mesh.get_group(cut.mesh_dim)].append(_Cut(shard, cut.dim, device))
                else:
                    others[-1].append(param)
        if any(others):
            self._step_others([{**group, "params": params} for group, params in zip(self.param_groups, others, strict=True)])
        buckets = [bucket for ranks, cuts in by_ranks.items() for bucket in self._buckets(ranks, cuts)]
        with contextlib.ExitStack() as stack:
            for ranks, cuts in by_ranks.items():
                run = self._exchange_over(ranks, cuts)
                run.begin()
                stack.enter_context(run)
            for bucket in buckets:
                bucket.send()
            for shard in whole:
                self.apply(shard, self.update(self.prepare(shard), shard.group))
            for bucket in buckets:
                bucket.update()
            for bucket in buckets:
                bucket.apply()

    def _exchange_over(self, ranks: Any, cuts: Sequence[_Cut]) -> CheckedProgram:
        """Return the exchange over some ranks as they compare it, as one that steps other matrices would wait for ever."""
        params = (param for group in self.param_groups for param in group["params"])
        without = [param for param in params if param.grad is None and param.requires_grad]
        names = [
            _name_of(param) or f"a parameter {list(param.shape)}"
            for param in without
            if (cut := _cut_of(param, param)) is not None and param.device_mesh.get_group(cut.mesh_dim) is ranks
        ]
        label = f"step of {type(self).__name__}{' without gradients' if names else ''}"
        return eager_run(label, tuple(cut.shard.shape.numel() for cut in cuts), (ranks.group_name,), tuple(names), is_step=True)

    def _step_others(self, groups: list[dict[str, Any]]) -> None:
        """Step parameters that are sharded in other ways."""
        param = next(param for group in groups for param in group["params"])
        raise ValueError(
            f"{type(self).__name__} cannot step {_name_of(param) or 'a parameter'}, a {type(param).__name__} with placements "
            f"{getattr(param, 'placements', None)}, and {getattr(param.grad, 'placements', None)} of its gradient: it takes "
            "matrices that one dimension of a mesh shards, with gradients alike. Give it to another "
            "optimizer."
        )

    def _buckets(self, ranks: Any, cuts: Sequence[_Cut]) -> list[_Bucket]:
        """Cut matrices into buckets, and choose their owners: among all ranks of a group, over all buckets."""
        num_ranks = ranks.size()
        owners = choose_owners([self.cost(cut.shard.shape) for cut in cuts], num_ranks)
        found: list[_Bucket] = []
        size = _BUCKET_BYTES
        for cut, owner in zip(cuts, owners, strict=True):
            dtype = self.sent_dtype or cut.shard.grad.dtype
            nbytes = -(-cut.shard.shape.numel() // num_ranks) * dtype.itemsize
            if size + nbytes > _BUCKET_BYTES or found[-1].dtype != dtype:
                found.append(_Bucket(self, ranks, dtype, cut.device))
                size = 0
            size += nbytes
            found[-1].shards.append(cut.shard)
            found[-1].matrices.append(Matrix(tuple(cut.shard.shape), cut.dim, owner))
        return found


class _Cut(NamedTuple):
    """A shard, the dimension along which its matrix is cut, and the device on which it travels."""

    shard: MatrixShard
    dim: int
    device: torch.device


class _Bucket:
    """Matrices of one group of ranks, which are exchanged together."""

    def __init__(self, optimizer: MatrixOptimizer, ranks: Any, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.shards: list[MatrixShard] = []
        self.matrices: list[Matrix] = []
        self._optimizer, self._ranks, self._device = optimizer, ranks, device

    def send(self) -> None:
        self._exchange = Exchange(self.matrices, self._ranks, self.dtype, self._device)
        self._exchange.send_shards([self._optimizer.prepare(shard) for shard in self.shards])

    def update(self) -> None:
        matrices = self._exchange.whole_matrices()
        self._exchange.send_results(
            {index: self._optimizer.update(matrix, self.shards[index].group) for index, matrix in matrices}
        )

    def apply(self) -> None:
        for shard, update in zip(self.shards, self._exchange.result_shards(), strict=True):
            self._optimizer.apply(shard, update.to(shard.param.device))


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


def _is_whole(param: Any, grad: Any) -> bool:
    """Return whether a parameter and its gradient are whole on each rank."""
    if not isinstance(param, DTensor):
        return not isinstance(grad, DTensor)
    placements = (*param.placements, *grad.placements) if isinstance(grad, DTensor) else ()
    return bool(placements) and all(placement.is_replicate() for placement in placements)


class _Layout(NamedTuple):
    """The dimension of the mesh that cuts a matrix, and the dimension of the matrix that it cuts."""

    mesh_dim: int
    dim: int


def _cut_of(param: Any, grad: Any) -> _Layout | None:
    """Return how a parameter and its gradient are cut; None: otherwise than along one dimension, or they are subclasses."""
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return None
    if grad.device_mesh != param.device_mesh or grad.placements != param.placements:
        return None
    if type(local_tensor(param)) is not Tensor or type(local_tensor(grad)) is not Tensor:
        return None
    cuts = [place for place, placement in enumerate(param.placements) if not placement.is_replicate()]
    if len(cuts) != 1:
        return None
    placement = param.placements[cuts[0]]
    # A subclass of Shard cuts otherwise.
    return _Layout(cuts[0], placement.dim % param.ndim) if type(placement) is Shard else None


def _name_of(param: Any) -> str:
    sharded = params_with_memory().get(id(param))
    return sharded.name if sharded is not None and sharded.param is param else ""
