"""Random numbers of hooks are equal with and without graphs, and differ between ranks, steps and parameters.

Hooks leave torch's generator alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import HookNotTraceable, fsdp_backend, fully_shard
from fsdp_compile.comm_hooks import DefaultState, QuantizedReduce
from passes.collectives.block_formats import LARGEST, restore_groups
from passes.collectives.random_numbers import AnsweringRandomOperators, Draws, new_key
from passes.collectives.stochastic_rounding import round_groups_by_chance
from tests.common.distributed import RankPools, device_mesh


def noise(group: Any, grad: Tensor, output: Tensor) -> None:
    dist.reduce_scatter_tensor(output, grad, group=group)
    output.copy_(torch.rand_like(output) + 2 * torch.randint(0, 2, output.shape, device=output.device))


def draw(hook: bool, system: str) -> tuple[list[Tensor], Tensor]:
    """Return this rank's gradients of two steps, and numbers from torch's generator afterwards. Runs on every rank."""
    torch.manual_seed(3)
    # Units of one parameter, as numbers depend on the place in a bucket.
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Dropout(), nn.Linear(8, 4, bias=False))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=device_mesh((2,)))
    if hook:
        model.register_comm_hook(device_mesh((2,)).get_group(), noise)
    forward = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    found = []
    for _ in range(2):
        forward(torch.ones(4, 6)).sum().backward()
        found += [param.grad.to_local().clone() for param in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
    return found, torch.rand(4)


@pytest.mark.parametrize("system", ["aot_eager", "inductor"])
def test_numbers(rank_pools: RankPools, system: str) -> None:
    by_system = {
        name: [rank_pools[2].run(draw, hook=hook, system=name) for hook in (True, False)] for name in ("eager", system)
    }
    results, _ = by_system["eager"]
    flat = [grad.flatten() for grads, _ in results for grad in grads]
    assert all(grad.min() >= 0 and grad.max() < 3 and not ((grad > 1) & (grad < 2)).any() for grad in flat)
    # Ranks, steps and parameters have different numbers.
    for place, grad in enumerate(flat):
        assert not any(torch.isin(grad % 1, other % 1).any() for other in flat[:place])
    for (ours, _), (theirs, _) in zip(by_system[system][0], results, strict=True):
        assert all(map(torch.equal, ours, theirs))
    for with_hook, without in by_system.values():
        assert all(torch.equal(left, right) for (_, left), (_, right) in zip(with_hook, without, strict=True))


def draws() -> Draws:
    return Draws(new_key(0, 0, "weight", torch.device("cpu")))


def answered(function: Callable[[], Tensor]) -> Tensor:
    with AnsweringRandomOperators(draws(), lambda func: AssertionError(func)):
        return function()


_N = 100_000


@pytest.mark.parametrize(
    ("function", "mean", "variance"),
    [
        (lambda: torch.rand(_N), 1 / 2, 1 / 12),
        (lambda: torch.empty(_N).uniform_(-1, 3), 1.0, 16 / 12),
        (lambda: torch.randn(_N), 0.0, 1.0),
        (lambda: torch.empty(2, _N // 2).normal_(1, 3), 1.0, 9.0),
        (lambda: torch.randn_like(torch.empty(_N, dtype=torch.bfloat16)), 0.0, 1.0),
        (lambda: torch.bernoulli(torch.full((_N,), 0.25)), 1 / 4, 3 / 16),
        (lambda: torch.empty(_N).bernoulli_(0.25), 1 / 4, 3 / 16),
        (lambda: torch.randint(2, 5, (_N,)), 3.0, 2 / 3),
    ],
)
def test_distributions(function: Callable[[], Tensor], mean: float, variance: float) -> None:
    state = torch.get_rng_state()
    found = answered(function).double().flatten()
    assert torch.equal(torch.get_rng_state(), state)
    spread = variance**0.5
    assert abs(found.mean() - mean) < 0.02 * spread and abs(found.var() / variance - 1) < 0.03
    # Neighbouring numbers are uncorrelated.
    centred = (found - found.mean()) / found.std()
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.02


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_stochastic_rounding_is_right_in_the_mean(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(4, 16, generator=generator)
    # A group has small values beside a large one, another only zeros.
    groups[1, 0], groups[2] = 50.0, 0.0
    count, numbers = 4000, draws()
    with AnsweringRandomOperators(numbers, lambda func: AssertionError(func)):
        many = restore_groups(*round_groups_by_chance(groups.expand(count, -1, -1), dtype))
    largest = groups.abs().amax(-1, keepdim=True)
    step = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2}[dtype]
    # The distance of neighbouring values: a part of the largest value in the group, or of the value itself.
    apart = step * (largest if dtype == torch.int8 else groups.abs().maximum(largest / LARGEST[dtype]))
    assert ((many - groups).abs() <= 1.01 * apart).all()
    assert ((many.mean(0) - groups).abs() <= 4.5 * 0.5 * apart / count**0.5 + 1e-6 * largest).all()
    # A value is rounded to at most two neighbours, and to both of them if it is between them.
    kinds = [len(values.unique()) for values in many.flatten(1).t()]
    assert max(kinds) == 2 and sum(kind == 2 for kind in kinds) > 30
    # A single rounding has a larger error than the mean.
    assert (many.mean(0) - groups)[0].abs().max() < (many[0] - groups)[0].abs().max()


@pytest.mark.parametrize("special", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_what_is_not_finite_arrives(dtype: torch.dtype, special: float) -> None:
    groups = torch.tensor([[1.0, special, 2.0], [3.0, 0.0, -1.0]])
    found = answered(lambda: restore_groups(*round_groups_by_chance(groups, dtype)))
    assert not found[0].isfinite().any() and found[1].isfinite().all()


def _multinomial(group: Any, grad: Tensor, output: Tensor) -> None:
    output.copy_(torch.multinomial(grad.abs(), output.numel(), replacement=True))


def _with_generator(group: Any, grad: Tensor, output: Tensor) -> None:
    output.uniform_(generator=torch.Generator())


def _reads_a_value(group: Any, grad: Tensor, output: Tensor) -> None:
    output.copy_(grad[: output.numel()] * grad.max().item())


def test_refusals(fake_ranks: None) -> None:
    model = fully_shard(nn.Linear(8, 8))
    for hook, message in [
        (_multinomial, "draws random numbers with aten.multinomial.* Draw them with torch.rand"),
        (_with_generator, "draws random numbers with aten.uniform_.* without a generator"),
        (_reads_a_value, r"asks for values of a tensor .*torch.where"),
    ]:
        with pytest.raises(HookNotTraceable, match=message):
            model.register_comm_hook(None, hook)
    with pytest.raises(HookNotTraceable, match="draws random numbers"):
        model.set_all_reduce_hook(lambda shard: shard.add_(torch.rand_like(shard)))
    with pytest.raises(ValueError, match="stochastic_rounding=True"):
        QuantizedReduce(torch.bfloat16, stochastic_rounding=True)
    model.register_comm_hook(DefaultState(dist.group.WORLD), QuantizedReduce(stochastic_rounding=True))


@pytest.mark.inductor
def test_inductor_evaluates_numbers_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed value has two readers. If each evaluated it anew, fifteen readers inside of each other would do so 2**15 times."""
    create_node, nodes = torch.fx.Graph.create_node, 0

    def counted(*args: Any, **kwargs: Any) -> torch.fx.Node:
        nonlocal nodes
        nodes += 1
        return create_node(*args, **kwargs)

    key = new_key(0, 0, "weight", torch.device("cpu"))
    with monkeypatch.context() as patched, torch._inductor.config.patch(force_disable_caches=True):
        patched.setattr(torch.fx.Graph, "create_node", counted)
        found = torch.compile(lambda key: Draws(key).normal([64], None))(key)
    torch.testing.assert_close(found, Draws(key).normal([64], None))
    assert nodes < 5_000
