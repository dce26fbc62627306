"""Write docs/passes.md: one small model, before and after every pass.

    python docs/render_passes.py

The graphs are those of a real compilation on the fake process group, so the page cannot drift: a test compares it.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile import Capture, CapturedPass, MixedPrecisionPolicy, capture, fsdp_backend, fully_shard

PAGE = Path(__file__).parent / "passes.md"

INTRODUCTION = """\
# Passes

What each pass does to the graphs of one small model. This page is written by `docs/render_passes.py`; a test holds it to the
code. In the listings, `-` is before the pass, `+` after it, and unmarked lines stay.

The intermediate representation is two operators (`passes/ops.py`) among ordinary aten ones: `unshard` makes a full parameter of
a rank's shard, and `reduce_grad`, its autograd formula, makes a shard of the averaged gradient of a full gradient. A third,
`reshard` (with its helper `tie`), serves `reshard_after_forward=<int>` alone: which piece a rank keeps of a gathered parameter
depends on the rank, and graphs must not.

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
torch.compile(model, backend=fsdp_backend)(torch.ones(3, 8)).sum().backward()
```

In Dynamo's graph, parameters go by their names within a unit, so that equal blocks can share a compiled graph; the backend then
writes the qualified names in.

You can have the same of your own model: `fsdp_compile.capture()` records every pass in `.passes`, `TORCH_LOGS="+passes"` prints
them, and `TORCH_TRACE=<directory>` stores them for tlparse.
"""

# Where a pass lives, if its module is not called after it.
MODULES = {"resolve_ties": "reshard_after_forward"}
STAGES = {
    "dynamo": "The graph that Dynamo captured",
    "joint": "The joint graph, ahead of the partitioner",
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


def compile_model() -> Capture:
    """Compile a training step of the model for eight ranks in this one process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model.up, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        with capture() as captured:
            torch.compile(model, backend=fsdp_backend)(torch.ones(3, 8)).sum().backward()
        return captured
    finally:
        dist.destroy_process_group()


def summary(name: str) -> str:
    """The first paragraph of the docstring of the module that holds a pass."""
    module = importlib.import_module(f"passes.{MODULES.get(name, name)}")
    assert module.__doc__ is not None
    return " ".join(module.__doc__.split("\n\n")[0].split()).partition(": ")[2]


def section(step: CapturedPass) -> str:
    """One pass over one graph."""
    heading = f"### `{step.name}`\n\n{summary(step.name)[0].upper()}{summary(step.name)[1:]} "
    heading += f"([passes/{MODULES.get(step.name, step.name)}.py](../passes/{MODULES.get(step.name, step.name)}.py))\n\n"
    if step.before == step.after:
        return heading + "Changes nothing here.\n"
    before, after = (text.replace("'0'", "'shard'").splitlines() for text in (step.before, step.after))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=len(before) + len(after)))[3:]
    return heading + "```diff\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    stage = ""
    for step in compile_model().passes:
        if step.stage != stage:
            stage = step.stage
            parts.append(f"## {STAGES[stage]}\n")
        parts.append(section(step))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
