"""Each example of README and docs/ runs as printed, with tiny models instead of the reader's."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile
from fsdp_compile import comm_hooks, fsdp_backend, fully_shard
from fsdp_compile.compiler.stored_graph import can_store
from tests.common.models import MLP, Transformer
from tests.common.stored_graphs import storing
from tests.test_docs import DOCS, ROOT

Names = dict[str, Any]

#: Imports that pages take for granted.
IMPORTS = """
import functools
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy
import fsdp_compile
from fsdp_compile import comm_hooks, fsdp_backend, fully_shard, sync_module_states
"""

# Pages whose examples run elsewhere.
ELSEWHERE = {
    "passes.md": "docs/render_passes.py makes the page by running them",
    "integrations.md": "tests/fsdp_compile/test_integrations.py trains so beside FSDP2",
}
PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))) if page.name not in ELSEWHERE]


def examples(page: Path) -> list[str]:
    listings = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in listings]


EXAMPLES = {
    f"{page.stem}-{number}": (listing, "\n".join(examples(page)[:number]))
    for page in PAGES
    for number, listing in enumerate(examples(page))
}


class Model(MLP):
    """A model with the names that the pages use: ``blocks`` and ``init_weights``."""

    def init_weights(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param)


class Loss:
    """A loss whose ``backward`` runs the forward as well."""

    def __init__(self, names: Names):
        self.names = names

    def backward(self) -> None:
        self.names["compiled"](self.names["x"]).sum().backward()


def shard(model: Model, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def common_names(listing: str, folder: Path) -> Names:
    """Return names that any example may use: imports, a model, and the objects of a training loop.

    The model is sharded unless ``listing`` calls ``fully_shard``.
    """
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    if "fully_shard(" not in listing:
        shard(model, mesh)
    names: Names = {}
    exec(IMPORTS, names)
    names |= {
        # There is no GPU here.
        "init_device_mesh": lambda device, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs),
        "Model": Model,
        "model": model,
        "block": model.blocks[0],
        "blocks": model.blocks,
        "mesh": mesh,
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "group": mesh.get_group(),
        "compiled": torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}),
        "x": torch.randn(4, 8),
        "microbatches": [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(3)],
        "optimizer": torch.optim.AdamW(model.parameters()),
        "path": folder / "checkpoint",
        "prepare_batch": lambda: None,
    }
    names["loss"] = Loss(names)
    return names


def of_transformers(names: Names, folder: Path) -> Names:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokens = torch.randint(16, (2, 8))
    return {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "folder": folder, "tokens": tokens}


def whole_model(names: Names, folder: Path) -> Names:
    return {"model": Model()}


def torchao(names: Names, folder: Path) -> Names:
    pytest.importorskip("torchao")
    return {}


def loss_of_two(names: Names, folder: Path) -> Names:
    return {"loss": F.mse_loss}


def batches(names: Names, folder: Path) -> Names:
    return {"loss": F.mse_loss, "batches": names["microbatches"]}


def with_replicas(names: Names, folder: Path) -> Names:
    model, mesh = Model(), init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    shard(model, mesh)
    return {"model": model, "mesh": mesh}


def with_hook(names: Names, folder: Path) -> Names:
    hook = comm_hooks.ErrorFeedback(comm_hooks.QuantizedReduce(torch.int8))
    names["model"].register_comm_hook(comm_hooks.DefaultState(names["group"]), hook)
    return {}


def scheduler(names: Names, folder: Path) -> Names:
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 1.0)}


def flat(names: Names, folder: Path) -> Names:
    params = names["model"].parameters()
    return {"optimizer": fsdp_compile.flat_optimizer(torch.optim.AdamW, params, one_buffer=True)}


def two_by_four(names: Names, folder: Path) -> Names:
    return {"dp": 2, "tp": 4, "cp": 4}


def experts(names: Names, folder: Path) -> Names:
    names["block"].experts = nn.Linear(8, 16)
    return {"dp": 8, "ep": 4, "experts": names["block"].experts}


def attention(names: Names, folder: Path) -> Names:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
    queries, keys = torch.randn(1, 2, 128, 16), torch.randn(1, 2, 512, 16)
    return {"mesh": mesh, "queries": queries, "keys": keys, "values": keys}


def stage(names: Names, folder: Path) -> Names:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "pp"))
    sizes = {"rank": 0, "stages": 2, "device": torch.device("cpu"), "n_microbatches": 2}
    return {"stage": Model(), "mesh": mesh, **sizes, "loss_fn": F.mse_loss}


def transformer(names: Names, folder: Path) -> Names:
    return {"Transformer": lambda config: nn.Sequential(nn.Embedding(16, 8), MLP()), "config": None}


def tokens(names: Names, folder: Path) -> Names:
    class WithLoss(Transformer):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())

    model = WithLoss()
    shard(model, names["mesh"])
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    return {"compiled": compiled, "tokens": torch.randint(16, (2, 8)), "targets": torch.randint(16, (2, 8))}


def train_step(names: Names, folder: Path) -> Names:
    return {"train_step": names["loss"].backward}


#: By example: a function that returns further names that the example expects of its reader.
NAMES: dict[str, Callable[[Names, Path], Names]] = {
    "reliability-0": batches,
    "getting-started-2": whole_model,
    "getting-started-3": of_transformers,
    "gradient-sync-0": loss_of_two,
    "gradient-sync-1": lambda names, folder: {"N": 24},
    "gradient-sync-5": with_hook,
    "low-precision-3": with_replicas,
    "low-precision-6": torchao,
    "optimizers-5": flat,
    "optimizers-6": scheduler,
    "parallelism-0": two_by_four,
    "parallelism-1": experts,
    "parallelism-2": two_by_four,
    "parallelism-3": attention,
    "parallelism-4": attention,
    "parallelism-5": stage,
    "cuda-0": transformer,
    "launching-1": lambda names, folder: {"torch": torch, "fsdp_compile": fsdp_compile, "MLP": MLP},
    "explain-1": tokens,
    "explain-3": train_step,
}
#: By example: the fixture of its process group, if it wants another than eight pretended ranks; None: no group.
GROUPS = {"cuda-0": None, "launching-1": None, "explain-0": None, "gradient-sync-5": "one_rank"}
#: Examples with Inductor's cache, and versions of torch with it.
STORING = ("launching-0", "launching-1") if can_store() else ()
#: Examples that take long.
NIGHT = ("explain-0",)


@pytest.mark.inductor
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.night] if name in NIGHT else []) for name in EXAMPLES])
def test_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing, before = EXAMPLES[name]
    group = GROUPS.get(name, "fake_ranks")
    names: Names = {}
    if group is not None:
        request.getfixturevalue(group)
        names = common_names(listing, tmp_path)
    names |= NAMES.get(name, lambda names, folder: {})(names, tmp_path)
    exec("\n".join(re.findall(r"^(?:from|import) [^#\n]*", before, flags=re.MULTILINE)), names)
    monkeypatch.chdir(tmp_path)
    with storing(frames=True) if name in STORING else nullcontext():
        exec(compile(listing, name, "exec"), names)
