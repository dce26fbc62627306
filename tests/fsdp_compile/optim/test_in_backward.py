"""Updates in backward, beside FSDP2 and a step of torch's optimizer after backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import optimizer_in_backward
from tests.common.distributed import RankPools
from tests.common.parity import Case, Run, compare, train_reference, train_with
from tests.fsdp_compile.test_parity import CASES

# --- Beside FSDP2 ---------------------------------------------------------------------------------

_ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
_OPTIONS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, _ADAMW),
    "amsgrad": (torch.optim.AdamW, {**_ADAMW, "amsgrad": True}),
    "adam": (torch.optim.Adam, {**_ADAMW, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "plain": (torch.optim.SGD, {"lr": 0.1}),
}


def _make(kind: str, in_backward: bool, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    kind_class, options = _OPTIONS[kind]
    make: Any = partial(optimizer_in_backward, kind_class) if in_backward else kind_class
    optimizer: torch.optim.Optimizer = make(params, **options)
    return optimizer


def run_case(name: str, system: str, kind: str, in_backward: bool) -> Run:
    """Executed by every rank."""
    run = train_with(_case(name, kind, in_backward), system)
    if in_backward:
        assert not any(run.gradients.values()) or name == "ignored_params", run.gradients
    # Those of the other are compared by their effects.
    run.gradients, run.layout, run.local_gradients = {}, {}, {}
    return run


def _case(name: str, kind: str, in_backward: bool = False) -> Case:
    return dataclasses.replace(CASES[name], optimizer=partial(_make, kind, in_backward))


# A model, an optimizer, how many ranks.
_CASES = [
    ("mlp", "adamw", 2),
    ("mlp", "amsgrad", 2),
    ("mlp", "adam", 2),
    ("mlp", "sgd", 2),
    ("mlp", "nesterov", 2),
    ("mlp", "plain", 2),
    ("uneven", "adamw", 4),
    ("hsdp", "adamw", 4),
    ("reshard_int", "adamw", 4),
    ("bf16_mlp", "adamw", 2),
    ("to_bfloat16", "sgd", 2),
    ("to_float64", "adamw", 2),
    ("shard_columns", "adamw", 2),
    ("tied_in_root", "adamw", 2),
    ("tied_across_units", "adamw", 2),
    ("shared_weight", "adamw", 2),
    ("recurrent", "adamw", 2),
    ("reads_child_unit", "adamw", 2),
    ("frozen_in_part", "adamw", 2),
    ("unused_parameter", "adamw", 2),
    ("ignored_params", "adamw", 2),
    ("compile_each_block", "adamw", 2),
    ("graph_breaks", "adamw", 2),
    ("two_models_in_one_graph", "adamw", 2),
    ("checkpoint_around_units", "adamw", 2),
    ("checkpoint_inside_units", "adamw", 2),
    ("evaluation_no_grad", "adamw", 2),
    ("dynamic_batch", "adamw", 2),
]
_QUICK = {("mlp", "adamw", 2, "aot_eager"), ("hsdp", "adamw", 4, "aot_eager")}
_INDUCTOR = {("mlp", "adamw", 2), ("mlp", "sgd", 2), ("bf16_mlp", "adamw", 2), ("hsdp", "adamw", 4)}


def _parameters() -> list[Any]:
    found = []
    for case in _CASES:
        for system in ("eager", "aot_eager", *(["inductor"] if case in _INDUCTOR else [])):
            marks = () if (*case, system) in _QUICK else pytest.mark.exhaustive
            found.append(pytest.param(*case, system, marks=marks, id="-".join(map(str, (*case, system)))))
    return found


@pytest.mark.parametrize(("name", "kind", "world", "system"), _parameters())
def test_parity(name: str, kind: str, world: int, system: str, rank_pools: RankPools) -> None:
    case = _case(name, kind)
    runs = rank_pools[world].run(run_case, name=name, system=system, kind=kind, in_backward=True)
    if not case.fsdp2:
        assert case.reference_rtol is not None
        reference = train_reference(case, world)
        compare(runs, reference, case.reference_rtol)
        return
    theirs = rank_pools[world].run(run_case, name=name, system="fsdp2", kind=kind, in_backward=False)
    compare(runs, theirs, case.lowered_rtol.get(system, case.fsdp2_rtol))
