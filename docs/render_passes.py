"""Write docs/passes.md: one small model before and after every pass, and another under every plan.

    python docs/render_passes.py

The graphs come from a real compilation on the fake process group, and a test compares the page with them.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile import FSDPModule, MixedPrecisionPolicy, fsdp_backend, fully_shard
from fsdp_compile.debug import Capture, CapturedGraph, CapturedPass, capture
from passes.collectives.group_names import name_on_mesh

PAGE = Path(__file__).parent / "passes.md"
LINE_LENGTH = 128

INTRODUCTION = """\
# Passes

Each pass on the graphs of one small model. `docs/render_passes.py` writes this page, and a test compares it with the code. In
the listings, `-` is before the pass, `+` after it, and unmarked lines stay. The first listing of a graph has all of it, the
others what changes, with a line around it.

The intermediate representation is two operators (`passes/ir/ops.py`) among those of aten. `unshard` returns the full parameter
for a rank's shard. `reduce_grad`, its autograd formula, returns the shard of the averaged gradient. A third, `reshard` (with
its helper `tie`), serves `reshard_after_forward=<int>` alone: it returns the piece of a gathered parameter that a rank keeps.
The piece depends on the rank, which graphs must not.

The model: two units of one `nn.Linear` each, sharded over eight ranks, computing in bfloat16 and reducing in float32.

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model.up, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
compiled = torch.compile(model, backend=fsdp_backend, options={"min_bucket_bytes": 0})  # small units stay apart
compiled(torch.ones(3, 8)).sum().backward()
```

In Dynamo's graph, parameters have their names within a unit, so that equal blocks can share a compiled graph. The backend then
writes the qualified names in.

Flags decide for each microbatch whether gradients are reduced and parameters gathered. The passes from `bucket` on therefore
run once for each plan (`passes/ir/plan.py`). The listings show the plan of a first microbatch that synchronises. The other
plans are at the [end of the page](#the-backward-epilogue-of-each-plan).

For your own model, `fsdp_compile.debug.capture()` records every pass in `.passes`, `TORCH_LOGS="+passes"` prints them, and
`TORCH_TRACE=<directory>` stores them for tlparse.
"""

# Modules of passes, where the module has another name than the pass.
MODULES = {"resolve_ties": "reshard_after_forward"}
STAGES = {
    "dynamo": "The graph that Dynamo captured",
    "joint": "The joint graph, before the partitioner",
    "forward": "The forward graph",
    "backward": "The backward graph",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@contextlib.contextmanager
def eight_ranks() -> Iterator[None]:
    """Pretend that this process is the first of eight ranks inside the block; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        torch._dynamo.reset()
        yield
    finally:
        dist.destroy_process_group()


def compile_model() -> Capture:
    """Compile a training step of the model for eight ranks in this one process."""
    with eight_ranks():
        model = Model()
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model.up, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        with capture() as captured:
            torch.compile(model, backend=fsdp_backend, options={"min_bucket_bytes": 0})(torch.ones(3, 8)).sum().backward()
        return captured


def summary(name: str) -> str:
    """Return the first paragraph of the docstring of a pass's module, without the name."""
    module = importlib.import_module(f"passes.transforms.{MODULES.get(name, name)}")
    assert module.__doc__ is not None
    return " ".join(module.__doc__.split("\n\n")[0].split()).partition(": ")[2]


def section(step: CapturedPass, is_whole: bool) -> str:
    """Return the section of one pass over one graph: the whole graph, or else its changes with a line around each."""
    path = f"passes/transforms/{MODULES.get(step.name, step.name)}.py"
    sentence, link = summary(step.name), f"([{path}](../{path}))"
    separator = " " if len(f"{sentence} {link}") <= LINE_LENGTH else "\n"
    heading = f"### `{step.name}`\n\n{sentence[0].upper()}{sentence[1:]}{separator}{link}\n\n"
    if step.before == step.after:
        return heading + "Changes nothing here.\n"
    before, after = (text.replace("'0'", "'shard'").splitlines() for text in (step.before, step.after))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=len(before) + len(after) if is_whole else 1))[3:]
    lines = ["     ..." if line.startswith("@@") else line.rstrip() for line in lines]
    return heading + "```diff\n" + "\n".join(lines) + "\n```\n"


class Microbatch(NamedTuple):
    """One microbatch of the sequence that goes through the plans.

    Attributes:
        heading: the heading of the plan's section.
        sentence: describes the graph.
        calls: code that runs before the microbatch, and that the page prints.
    """

    heading: str
    sentence: str
    calls: str = ""


PLANS_INTRODUCTION = """\
## The backward epilogue of each plan

A unit of one `nn.Linear(8, 16)` on a mesh of two replicas of four shards, in float32, on a backend that only sums. The
microbatches below run one after another, each after the calls that are shown with it. No flag traces anything again. Each plan
is lowered when it is first used.

```python
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
model = fully_shard(nn.Linear(8, 16), mesh=mesh)
compiled = torch.compile(model, backend=fsdp_backend)
compiled(torch.ones(3, 8)).sum().backward()  # a microbatch
```

All graphs begin alike, with the gradients of the weight (`mm`) and of the bias (`view`):
"""

BACKWARDS = [
    Microbatch(
        "Reduce",
        "One reduce-scatter over the shards, one all-reduce over the replicas; the divide factor is an input, and the flat "
        "shard of the averaged gradients, an output that becomes `param.grad`.",
    ),
    Microbatch(
        "Reduce into an existing `param.grad`",
        "The shard of the averaged gradients is added in place to the one that is there.",
    ),
    Microbatch(
        "No synchronisation, first microbatch",
        "The full gradients are outputs and wait; no communication.",
        "model.zero_grad()\nmodel.set_requires_gradient_sync(False)",
    ),
    Microbatch(
        "No synchronisation, later microbatches",
        "The full gradients are added in place to those that wait.",
    ),
    Microbatch(
        "Reduce with accumulated gradients",
        "The gradients that waited are added before the reduction, the only one of all microbatches.",
        "model.set_requires_gradient_sync(True)",
    ),
    Microbatch(
        "Scatter only, first microbatch",
        "The flat shard that the reduce-scatter returns is an output and waits for an all-reduce. Nothing divides it yet.",
        "model.zero_grad()\nmodel.set_requires_all_reduce(False)",
    ),
    Microbatch(
        "Scatter only, later microbatches",
        "It is added in place to the partial result that waits.",
    ),
    Microbatch(
        "All-reduce with partial results",
        "The partial result is added before the all-reduce, which sums the partial results of all replicas.",
        "model.set_requires_all_reduce(True)",
    ),
]

FORWARDS_INTRODUCTION = """\
## Forward graphs that keep parameters

The same model, whose gathered parameters outlive backward.
"""

FORWARDS = [
    Microbatch(
        "Keep",
        "The gathered parameters are outputs, too.",
        "model.zero_grad()\nmodel.set_reshard_after_backward(False)",
    ),
    Microbatch(
        "Reuse",
        "They are inputs until a parameter is written; nothing is gathered.",
    ),
]


def compile_plans() -> tuple[list[str], list[str]]:
    """Run all microbatches. Return the backward graphs of ``BACKWARDS`` and the forward graphs of ``FORWARDS``, as text."""
    with eight_ranks():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = cast(FSDPModule, fully_shard(nn.Linear(8, 16), mesh=mesh))
        compiled = torch.compile(cast(nn.Module, model), backend=fsdp_backend, options={"lowering": "aot_eager"})
        with capture() as captured:

            def lower(microbatch: Microbatch, graphs: list[CapturedGraph]) -> str:
                before = len(graphs)
                exec(microbatch.calls, {"model": model})
                compiled(torch.ones(3, 8)).sum().backward()
                assert len(graphs) == before + 1, f"{microbatch.heading} has no plan of its own"
                return graphs[-1].readable()

            backwards = [lower(microbatch, captured.backward) for microbatch in BACKWARDS]
            forwards = [lower(microbatch, captured.forward) for microbatch in FORWARDS]
        return backwards, forwards


def plans() -> list[str]:
    """Return the parts of the page on plans."""
    backwards, forwards = compile_plans()
    lines = [text.splitlines() for text in backwards]
    same_lines = takewhile(lambda same: len(set(same)) == 1, zip(*(body for _, *body in lines), strict=False))
    alike = [line for line, *_ in same_lines]
    parts = [PLANS_INTRODUCTION, code("\n".join(alike))]
    for microbatch, (signature, *body) in zip(BACKWARDS, lines, strict=True):
        parts.append(plan(microbatch, "\n".join([signature, "    ...", *body[len(alike) :]])))
    parts.append(FORWARDS_INTRODUCTION)
    parts += [plan(microbatch, text) for microbatch, text in zip(FORWARDS, forwards, strict=True)]
    return parts


TENSOR_PARALLEL = """\
## A tensor parallel block

The model in float32. Over `tp`, each of two ranks has half of the width between the products. Each half is sharded over four
ranks that see different tokens. The graphs hold the collectives of both. Those of tensor parallelism are operators like any
other: the passes leave them where they are.

```python
mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
fully_shard(model.up, mesh=mesh["dp"], reshard_after_forward=True)
fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
compiled = torch.compile(model, backend=fsdp_backend, options={"min_bucket_bytes": 0})
compiled(torch.ones(3, 8, requires_grad=True)).sum().backward()
```
"""


def tensor_parallel() -> list[str]:
    """Return the part of the page on tensor parallelism: graphs after the last pass, and forward before the first."""
    with eight_ranks():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = Model()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model.up, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "min_bucket_bytes": 0})
        with capture() as captured:
            compiled(torch.ones(3, 8, requires_grad=True)).sum().backward()
        names = {name_on_mesh(mesh["dp"], 0): "shard", mesh.get_group("tp").group_name: "tp"}
    parts = [TENSOR_PARALLEL]
    for stage in ("forward", "backward"):
        steps = [step for step in captured.passes if step.stage == stage]
        before, after = (code(graph(text, names)) for text in (steps[0].before, steps[-1].after))
        listings = f"Before the passes:\n\n{before}\n" if stage == "forward" else ""
        listings += f"After the passes:\n\n{after}"
        parts.append(f"### {stage.capitalize()}\n\n{listings}")
    return parts


def graph(text: str, group_names: dict[str, str]) -> str:
    """Return a graph as the page prints it."""
    for group, name in group_names.items():
        text = text.replace(f"'{group}'", f"'{name}'")
    signature, body = text.split("\n", 1)
    # Drop inputs without a type: these are meshes, which graphs take from torch 2.12 on.
    return re.sub(r"primals_\d+, ", "", signature) + "\n" + body


def plan(microbatch: Microbatch, graph: str) -> str:
    """Return the section of one plan."""
    listings = [code(text) for text in (microbatch.calls, graph) if text]
    return "\n".join([f"### {microbatch.heading}\n", f"{textwrap.fill(microbatch.sentence, LINE_LENGTH)}\n", *listings])


def code(text: str) -> str:
    """Return a listing of Python code."""
    return "```python\n" + text.strip("\n") + "\n```\n"


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    stage, was_whole = "", False
    # The backward graph is prepared before the passes for a plan of the forward graph run.
    for step in sorted(compile_model().passes, key=lambda step: list(STAGES).index(step.stage)):
        if step.stage != stage:
            stage = step.stage
            parts.append(f"## {STAGES[stage]}\n")
            was_whole = False
        parts.append(section(step, is_whole=not was_whole))
        was_whole = was_whole or step.before != step.after
    parts += plans()
    parts += tensor_parallel()
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
