"""The methods of ``ScheduleControls``: where gathers and reductions start in graphs, and which calls lower graphs again.

Tests of graphs run on a fake process group. Tests of values run on real ranks, and compare with FSDP2.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import expecttest
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile.runtime.gradients
from fsdp_compile import FSDPModule, UnshardHandle, fsdp_backend, fully_shard
from fsdp_compile.debug import Capture, CapturedGraph, capture
from passes.ir.reduction import Stage
from passes.ir.work import bucket, role
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import Collectives, count_collectives
from tests.common.parity import (
    Batch,
    Case,
    Forward,
    FullyShard,
    Run,
    compare,
    regression_batch,
    shard_units,
    squared_error,
    train_sharded,
)

pytestmark = pytest.mark.units_apart

_AOT_EAGER: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


class Chain:
    """A chain of linear layers, each a unit. The root has a layer of its own at the end."""

    def __init__(self, units: int = 4, *, compiled: bool = True, hsdp: bool = False, **policy: Any):
        names = ("replicate", "shard") if hsdp else ("shard",)
        mesh = init_device_mesh("cpu", (2, 4) if hsdp else (8,), mesh_dim_names=names)
        self.model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(units)], nn.Linear(8, 8))
        for index in range(units):
            fully_shard(self.model[index], mesh=mesh, **policy)
        fully_shard(self.model, mesh=mesh, **policy)
        self.root = cast(FSDPModule, self.model)
        self.units = [cast(FSDPModule, self.model[index]) for index in range(units)]
        self.forward: Callable[[Tensor], Tensor] = torch.compile(self.model, **_AOT_EAGER) if compiled else self.model

    def step(self) -> None:
        # With a gradient of the input, backward reads the first weight, too, and blocks are traced alike.
        self.forward(torch.ones(3, 8, requires_grad=True)).sum().backward()
        self.model.zero_grad()

    def prefetch(self, method: str, **lists: list[int]) -> None:
        """Set prefetch lists. Keys ``u0``, ``u1`` and so on name units; the other units get empty lists."""
        for index, unit in enumerate(self.units):
            getattr(unit, method)([self.units[target] for target in lists.get(f"u{index}", [])])


def traces(captured: Capture) -> int:
    """Return the number of graphs that Dynamo has traced."""
    return sum(step.stage == "dynamo" for step in captured.passes)


def lowered(captured: Capture) -> tuple[int, int]:
    """Return the numbers of lowered forward and backward graphs."""
    return len(captured.forward), len(captured.backward)


def communication(graph: CapturedGraph) -> str:
    """Return a line for each start and each wait of a graph's communication, in order. Compute is left out."""
    lines: list[str] = []
    for node in graph.graph_module.graph.nodes:
        line = f"{role(node)} {bucket(node)}"
        if role(node) and lines[-1:] != [line]:
            lines.append(line)
    return "\n".join(lines) + "\n"


def gathered(graph: CapturedGraph) -> list[str]:
    """Return the units that a graph gathers, in the order in which their gathers start."""
    return re.findall(r"start_gather ([\w.]+)", communication(graph))


@pytest.mark.usefixtures("fake_ranks")
class TestGraphs(expecttest.TestCase):
    def test_lists_place_gathers(self) -> None:
        training = Chain()
        training.prefetch("set_modules_to_forward_prefetch", u0=[1, 2], u1=[3])
        training.root.set_modules_to_backward_prefetch([training.units[index] for index in (3, 2, 1)])
        training.prefetch("set_modules_to_backward_prefetch", u3=[0])
        with capture() as captured:
            training.step()
        self.assertExpectedInline(
            communication(captured.forward[0]),
            """\
start_gather 0
start_gather 1
start_gather 2
finish_gather 0
start_gather 3
finish_gather 1
finish_gather 2
start_gather root
finish_gather 3
finish_gather root
""",
        )
        self.assertExpectedInline(
            communication(captured.backward[0]),
            """\
start_gather 3
start_gather 2
start_gather 1
start_reduce root
start_gather 0
finish_gather 3
start_reduce 3
finish_gather 2
finish_reduce root
start_reduce 2
finish_gather 1
finish_reduce 3
start_reduce 1
finish_gather 0
finish_reduce 2
start_reduce 0
finish_reduce 1
finish_reduce 0
""",
        )

    def test_reductions_have_a_group_of_their_own(self) -> None:
        training = Chain(2)
        training.root.set_separate_reduce_scatter_group()
        with capture() as captured:
            training.step()
        calls = re.findall(r"_c10d_functional\.(\w+)\.default\(.*'(\w+)'\)", captured.backward[0].readable())
        self.assertExpectedInline(
            "\n".join(f"{kind} over {group}" for kind, group in calls),
            """\
all_gather_into_tensor over shard
reduce_scatter_tensor over reduce
all_gather_into_tensor over shard
reduce_scatter_tensor over reduce
reduce_scatter_tensor over reduce""",
        )


# --- Prefetch lists -------------------------------------------------------------------------------


def test_each_list_lowers_its_graph_once(fake_ranks: None) -> None:
    training = Chain()
    forward = partial(training.prefetch, "set_modules_to_forward_prefetch")
    backward = partial(training.prefetch, "set_modules_to_backward_prefetch")
    steps: list[tuple[Callable[[], None], tuple[int, int]]] = [
        (lambda: None, (1, 1)),
        (partial(forward, u0=[1, 2]), (2, 1)),
        (partial(backward, u3=[2, 1]), (2, 2)),
        (partial(forward, u0=[2, 1]), (3, 2)),
        (partial(forward, u0=[1, 2]), (3, 2)),
        (forward, (3, 2)),
        (backward, (3, 2)),
        # The root keeps its parameters, so that backward has none of them to gather.
        (lambda: training.units[3].set_modules_to_backward_prefetch([training.root]), (3, 3)),
    ]
    with capture() as captured:
        for change, expected in steps:
            change()
            training.step()
            assert lowered(captured) == expected
    assert traces(captured) == 1


def test_default_is_the_next_unit_in_order(fake_ranks: None) -> None:
    """Lists that repeat the default lower other graphs, which are equal."""
    training = Chain(3)
    with capture() as captured:
        training.step()
        for unit, following in zip(training.units, [*training.units[1:], training.root], strict=True):
            unit.set_modules_to_forward_prefetch([following])
        for unit, following in zip(training.units[1:], training.units, strict=False):
            unit.set_modules_to_backward_prefetch([following])
        training.step()
    assert lowered(captured) == (2, 2)
    for graphs in (captured.forward, captured.backward):
        assert graphs[0].readable() == graphs[1].readable()
    assert gathered(captured.forward[0]) == ["0", "1", "2", "root"]
    assert gathered(captured.backward[0]) == ["2", "1", "0"]


def change_lists() -> list[list[str]]:
    """Return the order of the gathers of three steps, each with another list. Runs on every rank."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for module in (*model, model):
        fully_shard(module, mesh=device_mesh((2,)))
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "min_bucket_bytes": 0})
    first, found = cast(FSDPModule, model[0]), []
    for places in ((1,), (3, 2, 1), (2, 1, 3)):
        first.set_modules_to_forward_prefetch([cast(FSDPModule, model[place]) for place in places])
        with capture() as captured:
            compiled(torch.ones(3, 8)).sum().backward()
        found += [gathered(graph) for graph in captured.forward]
    return found


def test_lists_may_change_between_steps(rank_pools: RankPools) -> None:
    """The ranks have agreed on an earlier order of the same gathers. They do not stay with it."""
    for found in rank_pools[2].run(change_lists):
        assert found == [["0", "1", "2", "3"], ["0", "3", "2", "1"], ["0", "2", "1", "3"]]


def test_kept_units_start_their_lists(fake_ranks: None) -> None:
    """A graph that takes unit 0 without a gather starts the unit's list where it first computes with the unit."""
    training = Chain()
    training.units[0].set_reshard_after_backward(False)
    training.prefetch("set_modules_to_forward_prefetch", u0=[3])
    with capture() as captured:
        training.step()
        training.step()
    assert gathered(captured.forward[1]) == ["1", "3", "2", "root"]


def test_equal_blocks_share_graphs(fake_ranks: None, caplog: pytest.LogCaptureFixture) -> None:
    """A list has no effect if another graph holds the listed units."""
    training = Chain(3, compiled=False)
    training.prefetch("set_modules_to_forward_prefetch", u0=[1], u1=[2])
    for unit in training.units:
        cast(nn.Module, unit).compile(**_AOT_EAGER)
    with caplog.at_level(logging.INFO, "fsdp_compile"), capture() as captured:
        training.step()
    assert lowered(captured) == (1, 1)
    assert [record.getMessage() for record in caplog.records if "prefetch" in record.getMessage()] == [
        "A forward graph of 0 does not prefetch what the lists of 1 say: it uses none of their parameters."
    ]


def test_lists_stop_at_graph_breaks(fake_ranks: None) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](x))
            torch._dynamo.graph_break()
            return self.blocks[3](self.blocks[2](x))

    model = Broken()
    blocks = [fully_shard(block) for block in model.blocks]
    fully_shard(model)
    blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
    with capture() as captured:
        torch.compile(model, **_AOT_EAGER)(torch.ones(3, 8)).sum().backward()
    assert [gathered(graph) for graph in captured.forward] == [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]


def test_lists_reach_units_of_another_root(fake_ranks: None) -> None:
    """A list starts units of another root in a graph that holds both roots. In other graphs it has no effect."""
    first, second = Chain(2, compiled=False), Chain(2, compiled=False)
    first.units[0].set_modules_to_forward_prefetch([second.units[1]])
    second.units[1].set_modules_to_backward_prefetch([first.units[1]])
    both = torch.compile(lambda x: second.model(first.model(x)), **_AOT_EAGER)
    alone = torch.compile(first.model, **_AOT_EAGER)
    with capture() as captured:
        both(torch.ones(3, 8, requires_grad=True)).sum().backward()
        alone(torch.ones(3, 8, requires_grad=True)).sum().backward()
    assert gathered(captured.forward[0]) == ["0", "1_2", "1", "root", "0_2", "root_2"]
    assert gathered(captured.backward[0]) == ["1_2", "1", "0_2", "0"]
    assert gathered(captured.forward[1]) == ["0", "1", "root"]


def test_a_unit_called_root_is_not_the_root(fake_ranks: None) -> None:
    model = nn.Sequential()
    model.add_module("root", nn.Linear(8, 8))
    model.add_module("head", nn.Linear(8, 8))
    unit = fully_shard(model.root)
    fully_shard(model)
    with capture() as captured:
        compiled = torch.compile(model, **_AOT_EAGER)
        compiled(torch.ones(3, 8, requires_grad=True)).sum().backward()
        unit.set_modules_to_forward_prefetch([unit])
        compiled(torch.ones(3, 8, requires_grad=True)).sum().backward()
    assert gathered(captured.forward[0]) == ["root_2", "root"]
    # The unit's list names no other unit, so the root is no longer prefetched. The list is not taken for the root's.
    first, second = (communication(graph).splitlines() for graph in captured.forward)
    assert first.index("start_gather root") < first.index("finish_gather root_2")
    assert second.index("start_gather root") > second.index("finish_gather root_2")


def test_wrong_lists(fake_ranks: None) -> None:
    training = Chain(2)
    for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(ValueError, match=f"{method} takes modules that fully_shard has sharded, but got Linear"):
            getattr(training.root, method)([training.units[0], nn.Linear(8, 8)])
    assert not any(unit.forward_prefetch or unit.backward_prefetch for unit in training.root._fsdp_unit.scope.units)


# --- unshard and reshard --------------------------------------------------------------------------


def issued(function: Callable[[], Any]) -> Collectives:
    """Return the numbers of collectives that ``function`` issues."""
    with count_collectives() as counts:
        function()
    return counts


def is_full(*units: FSDPModule) -> list[bool]:
    """Return, for each unit, whether its weight reads as a full tensor."""
    weights = [cast(nn.Linear, unit).weight for unit in units]
    assert all(isinstance(weight, DTensor) or weight.shape == (8, 8) for weight in weights)
    return [not isinstance(weight, DTensor) for weight in weights]


def test_unsharded_units_are_not_gathered(fake_ranks: None) -> None:
    training = Chain(3)
    first, second, _ = training.units
    assert issued(first.unshard).all_gather == 1
    assert issued(first.unshard).all_gather == 0
    handle = second.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    # The second unit's gather is in flight.
    assert is_full(first, second) == [True, False]
    with capture() as captured:
        training.step()
        assert gathered(captured.forward[0]) == ["2", "root"]
        assert gathered(captured.backward[0]) == ["2", "1", "0"]
        # The forward has waited for the gather and freed both units. The handle has nothing left to do.
        handle.wait()
        assert is_full(first, second) == [False, False]
        training.step()
    assert gathered(captured.forward[1]) == ["0", "1", "2", "root"]
    assert (traces(captured), *lowered(captured)) == (1, 2, 1)


def test_a_root_stays_unsharded_until_its_backward_ends(fake_ranks: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    unit = cast(FSDPModule, fully_shard(model, reshard_after_forward=False))
    linear = cast(nn.Linear, model[0])
    unit.unshard()
    with capture() as captured:
        loss = torch.compile(model, **_AOT_EAGER)(torch.ones(3, 8)).sum()
        assert not isinstance(linear.weight, DTensor)
        loss.backward()
    assert isinstance(linear.weight, DTensor)
    assert gathered(captured.forward[0]) == gathered(captured.backward[0]) == []


def test_reshard_frees(fake_ranks: None) -> None:
    training = Chain(2)
    for unit in training.units:
        unit.unshard()
    assert training.units[1].unshard(async_op=True) is not None
    training.units[0].reshard()
    assert is_full(*training.units) == [False, True]
    handle = training.units[0].unshard(async_op=True)
    training.units[0].reshard()
    assert handle is not None
    handle.wait()
    assert is_full(*training.units) == [False, True]
    with capture() as captured:
        training.step()
    assert gathered(captured.forward[0]) == ["0", "root"]


def test_kept_parameters_outlive_the_forward(fake_ranks: None) -> None:
    training = Chain(2)
    training.root.set_reshard_after_backward(False)
    training.units[0].unshard()
    with capture() as captured:
        training.step()
        training.root.set_reshard_after_backward(True)
        training.step()
    assert [gathered(graph) for graph in captured.forward] == [["1", "root"], []]
    assert [gathered(graph) for graph in captured.backward] == [[]]


def _registered(module: nn.Module, name: str) -> nn.Parameter:
    """Return the DTensor, also after ``unshard()``, when reads by name give full tensors."""
    return dict(module.named_parameters())[name]


def test_what_is_written_is_gathered_again(fake_ranks: None) -> None:
    training = Chain(2)
    writes: list[Callable[[nn.Linear], Any]] = [
        lambda linear: _registered(linear, "weight").data_ptr(),
        lambda linear: nn.init.zeros_(_registered(linear, "weight")),
        lambda linear: linear.load_state_dict(linear.state_dict()),
        lambda linear: linear.load_state_dict(linear.state_dict(), assign=True),
        lambda linear: linear.double().float(),
        lambda linear: torch.optim.SGD(linear.parameters()).step(),
    ]
    shows = []
    for write in writes:
        handle = training.units[0].unshard(async_op=True)
        training.units[1].unshard()
        for unit in training.units:
            write(cast(nn.Linear, unit))
        assert handle is not None
        handle.wait()
        shows.append(is_full(*training.units))
    assert shows == [[True, True]] + [[False, False]] * 5


def test_what_is_written_while_its_gather_runs_is_stale(fake_ranks: None) -> None:
    """A parameter written during a gather reads as a shard after the gather. One that was stale before reads in full."""
    unit = Chain(1).units[0]
    linear = cast(nn.Linear, unit)
    unit.unshard()
    nn.init.zeros_(_registered(linear, "bias"))
    handle = unit.unshard(async_op=True)
    nn.init.zeros_(_registered(linear, "weight"))
    assert handle is not None and is_full(unit) == [False]
    handle.wait()
    assert is_full(unit) == [False]
    assert not isinstance(linear.bias, DTensor)


def test_others_go_on_seeing_shards(fake_ranks: None) -> None:
    training = Chain(2)
    before = list(training.model.parameters())
    for unit in (*training.units, training.root):
        unit.unshard()
    assert all(now is then for now, then in zip(training.model.parameters(), before, strict=True))
    assert all(isinstance(value, DTensor) for value in training.model.state_dict().values())


def test_an_uncompiled_forward_takes_what_is_unsharded(fake_ranks: None) -> None:
    training = Chain(2, compiled=False)
    training.units[0].unshard()
    handle = training.units[1].unshard(async_op=True)
    # The gather of the root.
    assert issued(lambda: training.forward(torch.ones(3, 8))).all_gather == 1
    assert handle is not None
    handle.wait()
    assert is_full(*training.units) == [False, False]


def test_meta_parameters_cannot_be_unsharded(fake_ranks: None) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match=r"Parameter weight is on the meta device.*to_empty"):
        cast(FSDPModule, fully_shard(model)).unshard()


class Mixed(nn.Module):
    """A model with uneven rows, columns, a scalar between other parameters, and another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.scale = nn.Parameter(torch.randn(()))
        self.down = nn.Linear(8, 5, bias=False)
        self.register_parameter("frozen", nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False))


def unshard_mixed(mesh_shape: tuple[int, ...], param_dtype: torch.dtype | None) -> list[str]:
    """Unshard a model, and return the names of parameters that read wrong. Every rank calls this."""
    model = Mixed()
    expected = {name: value.detach().clone().to(param_dtype) for name, value in model.named_parameters()}
    unit = fully_shard(
        model,
        mesh=device_mesh(mesh_shape),
        mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype),
        shard_placement_fn=lambda param: Shard(1) if param.shape == (5, 8) else None,
    )
    with torch.inference_mode():
        counts = issued(unit.unshard)
    wrong = [f"{counts}"] if counts.all_gather != 1 else []
    for name, value in expected.items():
        found = getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        same = not isinstance(found, DTensor) and not found.is_inference() and found.dtype == value.dtype
        wrong += [] if same and torch.equal(found, value) else [name]
    return wrong


@pytest.mark.parametrize(("mesh_shape", "param_dtype"), [((4,), None), ((2, 2), torch.bfloat16)])
def test_unsharded_values(mesh_shape: tuple[int, ...], param_dtype: torch.dtype | None, rank_pools: RankPools) -> None:
    assert rank_pools[4].run(unshard_mixed, mesh_shape=mesh_shape, param_dtype=param_dtype) == [[]] * 4


# --- Other settings -------------------------------------------------------------------------------


class Event:
    """An event that counts its waits."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("compiled", [True, False])
def test_the_next_forward_waits_for_the_event(compiled: bool, fake_ranks: None) -> None:
    training = Chain(2, compiled=compiled)
    event = Event()
    training.step()
    training.root.set_post_optim_event(event)
    loss = training.forward(torch.ones(3, 8)).sum()
    assert event.waits == 1
    loss.backward()
    training.step()
    assert event.waits == 1


def test_the_event_is_waited_for_where_a_graph_falls_back(fake_ranks: None) -> None:
    training = Chain(2)
    training.step()
    cast(nn.Module, training.units[0]).requires_grad_(False)
    event = Event()
    training.root.set_post_optim_event(event)
    training.forward(torch.ones(3, 8))
    assert event.waits == 1


def test_unshard_waits_for_the_event_and_the_forward_does(fake_ranks: None) -> None:
    training = Chain(2)
    event = Event()
    training.root.set_post_optim_event(event)
    training.units[0].unshard()
    assert event.waits == 1
    training.forward(torch.ones(3, 8))
    assert event.waits == 2


def test_there_may_be_no_event(fake_ranks: None) -> None:
    """The event may be None, which the current stream of a CPU records."""
    training = Chain(2)
    training.root.set_post_optim_event(torch.cpu.current_stream().record_event())
    training.step()


def test_an_event_has_to_wait(fake_ranks: None) -> None:
    with pytest.raises(TypeError, match=r"wait\(\) method, such as torch.Event, not 'event'"):
        Chain(1).root.set_post_optim_event(cast(Any, "event"))


def test_backward_must_not_gather(fake_ranks: None) -> None:
    training = Chain(2)
    training.step()
    training.units[1].set_unshard_in_backward(False)
    loss = training.forward(torch.ones(3, 8)).sum()
    with pytest.raises(
        RuntimeError, match=r"set_unshard_in_backward\(False\) was called on 1, .* reads 1\.weight, which has to"
    ):
        loss.backward()
    training.root.reset_iter_state()
    # No error if the unit keeps its parameters for backward, or if backward may gather them.
    training.units[1].set_reshard_after_forward(False)
    training.step()
    training.units[1].set_reshard_after_forward(True)
    training.units[1].set_unshard_in_backward(True)
    training.step()


def test_backward_may_do_without_an_embedding(fake_ranks: None) -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8))
    unit = cast(FSDPModule, fully_shard(model[0]))
    fully_shard(model)
    unit.set_unshard_in_backward(False)
    with capture() as captured:
        torch.compile(model, **_AOT_EAGER)(torch.zeros(3, dtype=torch.long)).sum().backward()
    assert gathered(captured.backward[0]) == []


def test_a_separate_group_lowers_backward_once(fake_ranks: None) -> None:
    training = Chain(2)
    with capture() as captured:
        for enable in (False, True, False, True):
            training.root.set_separate_reduce_scatter_group(enable)
            training.step()
    assert (traces(captured), *lowered(captured)) == (1, 1, 2)
    groups = [set(re.findall(r"reduce_scatter_tensor.*'(\w+)'\)", graph.readable())) for graph in captured.backward]
    assert groups == [{"shard"}, {"reduce"}]


def test_one_separate_group_for_all_units_of_the_same_ranks(fake_ranks: None) -> None:
    first, second = Chain(2), Chain(2)
    first.root.set_separate_reduce_scatter_group()
    second.units[0].set_separate_reduce_scatter_group(recurse=False)
    (groups,) = {tuple(unit.flags.reduce_scatter_groups.items()) for unit in first.root._fsdp_unit.scope.units}
    assert groups == tuple(second.units[0]._fsdp_unit.flags.reduce_scatter_groups.items())
    ((gathers, reductions),) = groups
    assert gathers == first.root._fsdp_unit.mesh.shard_group != reductions
    assert not second.root._fsdp_unit.flags.reduce_scatter_groups


def test_uncompiled_reductions_use_the_separate_group(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Chain(1, compiled=False)
    training.units[0].set_separate_reduce_scatter_group()
    groups = []
    original = fsdp_compile.runtime.gradients.stages

    def spy(*args: Any, group: str, **kwargs: Any) -> list[Stage]:
        groups.append(group)
        return original(*args, group=group, **kwargs)

    monkeypatch.setattr(fsdp_compile.runtime.gradients, "stages", spy)
    training.step()
    unit = training.units[0]._fsdp_unit
    assert sorted(groups) == sorted([unit.mesh.shard_group, *unit.flags.reduce_scatter_groups.values()])


def most_pending(graph: CapturedGraph) -> int:
    """Return the largest number of reduce-scatters that a graph has in flight."""
    pending = most = 0
    for node in graph.graph_module.graph.nodes:
        if node.target == torch.ops._c10d_functional.reduce_scatter_tensor.default:
            pending += 1
        elif node.target == torch.ops._c10d_functional.wait_tensor.default:
            pending -= node.args[0].target == torch.ops._c10d_functional.reduce_scatter_tensor.default
        most = max(most, pending)
    return most


@pytest.mark.parametrize(("hsdp", "default"), [(False, 2), (True, 1)])
def test_reduce_scatters_in_flight(hsdp: bool, default: int, fake_ranks: None) -> None:
    training = Chain(5, hsdp=hsdp)
    with capture() as captured:
        training.step()
        training.units[1].set_reduce_scatter_max_input_buffers(3)
        training.step()
        training.root.set_reduce_scatter_max_input_buffers(1)
        training.step()
    assert [most_pending(graph) for graph in captured.backward] == [default, 3, 1]
    assert (traces(captured), *lowered(captured)) == (1, 1, 3)


def test_a_limit_says_nothing_without_reductions(fake_ranks: None) -> None:
    training = Chain(2)
    training.root.set_requires_gradient_sync(False)
    training.root.set_is_last_backward(False)
    with capture() as captured:
        training.step()
        training.step()
        training.root.set_reduce_scatter_max_input_buffers(4)
        training.step()
    assert lowered(captured) == (1, 2)


@pytest.mark.parametrize(("number", "kind"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)])
def test_wrong_limits(number: Any, kind: type[Exception], fake_ranks: None) -> None:
    training = Chain(1)
    with pytest.raises(kind, match=f"set_reduce_scatter_max_input_buffers takes .*{number}"):
        training.root.set_reduce_scatter_max_input_buffers(number)
    assert training.units[0]._fsdp_unit.flags.max_pending_reductions is None


def test_what_graphs_cannot_do(fake_ranks: None) -> None:
    root = Chain(1).root
    with pytest.raises(
        NotImplementedError, match=r"set_allocate_memory_from_process_group_for_comm: .*values of a compiled graph"
    ):
        root.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(NotImplementedError, match=r"set_symm_mem_for_comm: .*values of a compiled graph"):
        root.set_symm_mem_for_comm()
    # False is FSDP2's default, and true of every graph.
    root.set_allocate_memory_from_process_group_for_comm(False)
    for async_op in (True, False):
        root._set_unshard_async_op(async_op)


# --- Training -------------------------------------------------------------------------------------


def _shard_with_lists(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard) -> None:
    shard_units(model, mesh, fully_shard)
    root = cast(FSDPModule, model)
    first, second, third = (cast(FSDPModule, block) for block in model.get_submodule("blocks").children())
    first.set_modules_to_forward_prefetch([third, second])
    second.set_modules_to_forward_prefetch([root])
    root.set_modules_to_backward_prefetch([third, first])
    third.set_modules_to_backward_prefetch([second])
    third.set_unshard_in_backward(True)
    if isinstance(root, fsdp_compile.FSDPModule):
        # FSDP2 has both methods only from torch 2.13 on.
        root.set_separate_reduce_scatter_group()
        root.set_reduce_scatter_max_input_buffers(3)


def _unshard_ahead(forward: Forward, batch: Batch) -> Tensor:
    model = getattr(forward, "_orig_mod", forward)
    if isinstance(model, (FSDPModule, torch.distributed.fsdp.FSDPModule)):
        model.unshard()
        handles = [model.blocks[index].unshard(async_op=True) for index in (1, 0)]
        handles[0].wait()
    return squared_error(forward, batch)


# Two ranks share rows unevenly. Gradients accumulate, so units are unsharded while gradients wait.
_CASE = Case(
    "schedule_controls",
    partial(models.MLP, dim=5, hidden=7, out=3, layers=3),
    _shard_with_lists,
    partial(regression_batch, dim=5, out=3),
    _unshard_ahead,
    steps=3,
    accumulate=2,
)


def train(system: str) -> Run:
    """Train with ``system``. Every rank calls this."""
    if system == "fsdp2":
        return train_sharded(_CASE, torch.distributed.fsdp.fully_shard)
    return train_sharded(_CASE, fully_shard, None if system == "eager" else {**_AOT_EAGER, "options": {"lowering": system}})


def test_trains_as_fsdp2(rank_pools: RankPools) -> None:
    runs = {system: rank_pools[2].run(train, system=system) for system in ("fsdp2", "eager", "aot_eager")}
    assert all(run.graphs > 0 for run in runs["aot_eager"])
    for system in ("eager", "aot_eager"):
        compare(runs[system], runs["fsdp2"], _CASE.fsdp2_rtol)
