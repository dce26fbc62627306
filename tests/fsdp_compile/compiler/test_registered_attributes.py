"""Guards and graphs that Dynamo makes for reads of sharded parameters.

``tests/fsdp_compile/api/test_parameters.py`` compares the values of such reads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.compiler import registered_attributes
from fsdp_compile.units.sharded_param import UnshardArgs
from passes.ir.ops import unshard

_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def guards_of(model: nn.Module, word: str) -> list[tuple[str, str]]:
    """Return the name and the kind of each guard of a model's forward whose name has a certain word."""
    found = torch._dynamo.explain(model)(torch.ones(2, 8)).out_guards or ()
    return sorted((guard.name, guard.create_fn_name()) for guard in found if word in guard.name)


def test_a_read_takes_a_guard_on_the_shard_and_one_on_all_other_arguments(one_rank: None) -> None:
    model = fully_shard(nn.Linear(8, 8))
    for name in ("weight", "bias"):
        read = f"L['self']._parameters._fsdp_shard_{name}"
        assert guards_of(model, f"_fsdp_shard_{name}") == [(f"{read}[0]", "TENSOR_MATCH"), (f"{read}[1]", "ID_MATCH")]


def test_the_scope_is_guarded_once(one_rank: None) -> None:
    """Comparing the scopes of two tables takes a guard in Python, at each call."""
    model = fully_shard(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8)))
    assert {name for name, _ in guards_of(model, "scope")} <= {
        f"L['self']._fsdp_scope{rest}" for rest in ("", ".active", ".lent", ".optimizer_state", ".tied_reads")
    }


def test_the_graph_is_that_of_a_traced_read(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo captures the same graph if it traces the table's ``__getitem__``."""
    model = fully_shard(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8)), mp_policy=_BFLOAT16)
    graphs = []
    for _ in range(2):
        torch._dynamo.reset()
        (captured,) = torch._dynamo.explain(model)(torch.ones(2, 8)).graphs
        graphs.append([(node.op, node.target, str(node.args), str(node.kwargs)) for node in captured.graph.nodes])
        monkeypatch.setattr(registered_attributes, "_unshard", lambda *_: None)
    assert [target for _, target, _, _ in graphs[0]].count(unshard) == 3
    assert graphs[0] == graphs[1]


def test_equal_arguments_are_one_object() -> None:
    def args(**kwargs: Any) -> UnshardArgs:
        return UnshardArgs.of(("weight", (8, 8), "0"), kwargs)

    assert args(offset=8) is args(offset=8)
    assert args(offset=8) is not args(offset=16)
    assert args(param_dtype=torch.bfloat16) is not args(param_dtype=torch.float16)
