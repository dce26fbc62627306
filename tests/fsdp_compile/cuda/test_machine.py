"""The CUDA program trains as one process in float64 does: generated code, run on the CPU (tests/common/cuda_machine)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compile
import tests.fuzz.execute
from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.common.cuda_machine import mutants
from tests.common.cuda_machine.machine import Machine, machine
from tests.common.distributed import RankPools
from tests.common.models import MLP
from tests.common.parity import Run, compare, shard_units, train_reference, train_sharded
from tests.fsdp_compile.test_parity import CASES
from tests.fuzz.blocks import network
from tests.fuzz.case import Block, Call, Case, Micro, Model, Step
from tests.fuzz.compare import differences
from tests.fuzz.draw import draw
from tests.fuzz.execute import EventRecord, execute

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only"),
]


@pytest.fixture(scope="module")
def machines() -> Iterator[RankPools]:
    """Pools of ranks that run CUDA programs."""
    pools = RankPools("pretended cuda")
    yield pools
    pools.close()


_ALL = ("collectives", "copies")
_RECORDED = [
    "mlp",
    "bf16",
    "frozen_in_part",
    "tied_in_root",
    "reshard_false",
    "evaluation_no_grad",
    "adamw_foreach_clip_grad_norm",
]


def run_case(name: str) -> Run:
    with machine(late=_ALL) as cuda:
        run = train_sharded(CASES[name], fully_shard, {"backend": cuda.backend}, cuda)
        assert cuda.sources
        return Run(**cuda.values(vars(run)))


_QUICK = ["bf16", "fewer_rows_than_ranks", "scalar_parameters"]
_REST = [name for name in CASES if name not in _QUICK]


@pytest.mark.parametrize("name", [*_QUICK, *(pytest.param(name, marks=pytest.mark.night) for name in _REST)])
def test_trains_as_one_process(name: str, machines: RankPools) -> None:
    """Collectives run as late as the program permits, so each wait must be there, and no input may be written before it."""
    case = CASES[name]
    world = 2 if 2 in case.worlds else 4
    # Where all is rounded to bfloat16, a gradient that nearly cancels is off by several roundings.
    compare(machines[world].run(run_case, name=name), train_reference(case, world), case.reference_rtol or 1e-1)


def replay(name: str) -> tuple[Run, int]:
    with machine() as cuda:
        options = {"backend": cuda.backend, "options": {"cudagraphs": True}}
        run = train_sharded(CASES[name], fully_shard, options, cuda)
        return Run(**cuda.values(vars(run))), cuda.recorder.replays


@pytest.mark.parametrize("name", ["accumulate_gradients", *(pytest.param(one, marks=pytest.mark.night) for one in _RECORDED)])
def test_cuda_graphs(name: str, machines: RankPools) -> None:
    """Graphs that are recorded and replayed, with other batches and plans, train as one process does."""
    runs, replays = zip(*machines[2].run(replay, name=name), strict=True)
    # The second call of a graph records it.
    assert min(replays) >= CASES[name].steps
    compare(runs, train_reference(CASES[name], 2), CASES[name].reference_rtol or 1e-1)


# Models of transformers.


def _llama() -> Any:
    """Build a model whose layers are enough to be folded."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_hidden_layers=9, **sizes))


def _mixture_of_experts() -> Any:
    import transformers

    sizes = {"hidden_size": 16, "moe_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = transformers.Qwen3MoeConfig(vocab_size=50, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, **sizes)
    return transformers.Qwen3MoeForCausalLM(config)


_MODELS = {"llama": _llama, "mixture of experts": _mixture_of_experts}
# Lengths that change.
_TOKENS = [torch.randint(50, (2, 2, length), generator=torch.Generator().manual_seed(length)) for length in (8, 12, 5)]


def _train(model: Any, forward: Any, batches: Callable[[Tensor], list[Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for tokens in _TOKENS:
        own = batches(tokens)
        losses.append(0.0)
        for batch in own:
            loss = forward(input_ids=batch, labels=batch, use_cache=False).loss / len(own)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_model(name: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    with machine(late=_ALL) as cuda:
        model = cuda.module(_MODELS[name])
        mesh = cuda.mesh((2,), ("shard",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        forward = torch.compile(model, backend=cuda.backend)
        losses = _train(model, forward, lambda tokens: [cuda.tensor(tokens[cuda.rank])])
        return losses, cuda.values({name: param.full_tensor() for name, param in model.named_parameters()})


@pytest.mark.night
@pytest.mark.parametrize("name", _MODELS)
def test_transformers(name: str, machines: RankPools) -> None:
    torch.manual_seed(0)
    # torch multiplies groups of matrices in float32 at most.
    whole = _MODELS[name]().to(torch.float64 if name == "llama" else torch.float32)
    losses = _train(whole, whole, list)
    runs = machines[2].run(train_model, name=name)
    torch.testing.assert_close(torch.tensor([run[0] for run in runs]).mean(0), torch.tensor(losses), rtol=1e-5, atol=0)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(runs[0][1][name].double(), param.detach().double(), rtol=1e-4, atol=1e-6)


# Masks and waits.


_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def _model(cuda: Machine, **options: Any) -> nn.Module:
    """Build a model of two blocks, which are units, as is the rest."""
    model = cuda.module(lambda: MLP(dim=10, hidden=24, out=3))
    shard_units(model, cuda.mesh((cuda.world_size,), ("shard",)), fully_shard, **options)
    return model


def leave_out_masks() -> Counter[tuple[str, str]]:
    with machine() as cuda, mutants.recorded() as launches:
        model = torch.compile(_model(cuda, mp_policy=_BF16), backend=cuda.backend)
        for _ in range(2):
            model(cuda.tensor(torch.randn(5, 10))).square().mean().backward()
        with cuda.off():
            return mutants.count_masks(launches)


def test_masks(machines: RankPools) -> None:
    """A kernel without one of its masks accesses other memory, or computes something else."""
    counts = machines[2].run(leave_out_masks)[0]
    assert counts["tl.store", "out of bounds"] > 20 and counts["tl.load", "out of bounds"] > 20
    assert counts["tl.store", "unnoticed"] == 0
    # The lanes of these loads read other rows of the same tensor, and the mask of a store drops them.
    assert counts["tl.load", "unnoticed"] < counts["tl.load", "out of bounds"]


def leave_out_waits(late: str, offload: bool) -> tuple[int, set[int]]:
    with machine(late=[late]) as cuda:
        model = _model(cuda, **{"offload_policy": CPUOffloadPolicy()} if offload else {})
        forward = torch.compile(model, backend=cuda.backend)
        x = cuda.tensor(torch.randn(5, 10))

        def step() -> list[Tensor]:
            model.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            return cuda.values([loss, *(param.grad for param in model.parameters())])

        step()
        return mutants.unneeded_waits(cuda, step)


@pytest.mark.units_apart
def test_waits(machines: RankPools) -> None:
    """A step that does not wait for a collective computes something else."""
    # Three units: gathers of all in forward, of two in backward, reductions.
    assert machines[2].run(leave_out_waits, late="collectives", offload=False) == [(8, set())] * 2


@pytest.mark.night
@pytest.mark.units_apart
def test_waits_for_copies(machines: RankPools) -> None:
    """Nor does one that does not wait for a copy, but the last of several that the host waits for in a row."""
    late = [machines[2].run(leave_out_waits, late=what, offload=True)[0] for what in _ALL]
    # With a copy of shards before each gather, and of gradients after each reduction.
    assert [waits for waits, _ in late] == [16, 16]
    assert late[0][1] & late[1][1] == {13, 14}


# Models and loops of tests/fuzz, chosen and random.


def run_fuzz(case: Case) -> list[EventRecord]:
    with machine(late=_ALL) as cuda:

        def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None, _device: str) -> DeviceMesh:
            return cuda.mesh(shape, names or ("replicate", "shard")[2 - len(shape) :])

        with (
            mock.patch.object(tests.fuzz.execute, "device_mesh", mesh_of),
            mock.patch.object(tests.fuzz.execute, "network", lambda spec: _built_on(cuda, spec)),
            mock.patch.object(fsdp_compile, "fsdp_backend", cuda.backend),
        ):
            records = execute(case, "inductor", "cuda")
        return [EventRecord(**cuda.values(vars(record))) for record in records]


def _built_on(cuda: Machine, spec: Model) -> nn.Module:
    model = cuda.module(lambda: network(spec))
    # It is there. Modules of fake parameters do not move.
    model.to = lambda _device: model  # type: ignore[method-assign, assignment, misc]
    return model


def _check(case: Case, machines: RankPools) -> None:
    for rank, records in enumerate(machines[case.world].run(run_fuzz, case=case)):
        with mock.patch("torch.distributed.get_rank", lambda rank=rank: rank):
            torch.manual_seed(0)
            assert differences(case, records, execute(case, "whole"), "cuda") == []


_MODEL = Model((Block("mlp"), Block("attention"), Block("experts", checkpoint="around")), "float32")
# Two microbatches, of which only the second one reduces; then a step whose lengths differ, with clipping.
_EVENTS = (
    Call("set_requires_gradient_sync", args=(False,)),
    Micro(((2, 3),)),
    Call("set_requires_gradient_sync", args=(True,)),
    Micro(((2, 3),)),
    Step(),
    Micro(((3, 5),)),
    Step(0.5),
)
_FEATURES: dict[str, dict[str, Any]] = {
    "CPU offload": {"features": ("offload",), "optimizer": "adamw"},
    "CPU offload, flat": {"features": ("offload",), "optimizer": "flat"},
    "optimizer on the host": {"optimizer": "offloaded"},
    # It cannot clip.
    "optimizer in backward": {"optimizer": "in backward", "events": (*_EVENTS[:-1], Step())},
    "one buffer": {"optimizer": "one buffer"},
    "hook": {"features": ("hook",)},
    "activations on the host": {"options": (("memory_budget", 1 << 15), ("host_budget", 1 << 30))},
    # torch cannot clip gradients on several meshes together.
    "tensor parallel": {
        "features": ("tensor parallel",),
        "mesh": (2, 2),
        "model": Model((Block("parallel"), Block("mlp"))),
        "events": (*_EVENTS[:-1], Step()),
    },
}


@pytest.mark.night
@pytest.mark.parametrize("name", _FEATURES)
def test_features(name: str, machines: RankPools) -> None:
    _check(Case(**{"mesh": (2,), "model": _MODEL, "events": _EVENTS, **_FEATURES[name]}), machines)


def run_eager(case: Case) -> list[EventRecord]:
    return execute(case, "eager")


@pytest.mark.night
def test_rounded_gathers(machines: RankPools, rank_pools: RankPools) -> None:
    """Both run the same kernels in another order, or others: an element may be rounded to the next of 255 values."""
    case = Case((2,), _MODEL, _EVENTS, features=("rounded",))
    for ours, theirs in zip(machines[2].run(run_fuzz, case=case), rank_pools[2].run(run_eager, case=case), strict=True):
        assert differences(case, ours, theirs, "cuda") == []


@pytest.mark.night
@pytest.mark.parametrize(
    ("mesh", "seed", "is_small"),
    [
        *(((2,), seed, True) for seed in range(5)),
        *((mesh, seed, False) for mesh in [(2,), (2, 2)] for seed in range(100, 106)),
    ],
)
def test_random_models(mesh: tuple[int, ...], seed: int, is_small: bool, machines: RankPools) -> None:
    _check(draw(seed, mesh, compiled=True, is_small=is_small), machines)
