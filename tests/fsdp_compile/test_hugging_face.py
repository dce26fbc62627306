"""Unmodified Hugging Face models, whose layers combine more than tests of single features do.

A sharded and compiled model is compared with the same model alone and uncompiled, in each step: the loss, and the gradient of
every parameter. Nine layers are deep enough to be folded. Two layers have one of each kind that a model has, and take batches
of changing length, so that sizes are symbols.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import SymInt, Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

import passes.pipeline
from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler.stored_graph import can_store
from fsdp_compile.debug import Capture, capture
from passes.fx.graph import is_view
from passes.fx.sizes import size_hint
from tests.common.distributed import RankPools, device_mesh
from tests.common.hugging_face import ARCHITECTURES, layers_of
from tests.common.stored_graphs import count_traces, storing

pytestmark = pytest.mark.example

pytest.importorskip("transformers", reason="the test extra installs transformers; without it there is no model to try")

LENGTHS = (12, 9, 7)
#: Regressions: a kernel's sizes were an expression of a symbol that the kernel was not given.
DIED_OF_LENGTHS = ["Llama", "Qwen3", "Gemma", "ModernBert"]
#: Mixtures of experts, encoders and decoders.
THROUGH_INDUCTOR = [
    "GPT2",
    "Bloom",
    "Mixtral",
    "GptOss",
    "Bert",
    "T5",
    "Whisper",
    "ViT",
    "Swin",
    "Mamba",
]
WITH_AND_WITHOUT_FOLDING = [
    "Gemma2",
    "Falcon",
    "GPTNeo",
    "DebertaV2",
    "GPTJ",
    "Olmo2",
    "Mixtral",
    "GptOss",
    "Bert",
    "T5",
    "ViT",
    "Mamba",
    "Jamba",
]
#: One of each kind of layer.
NINE_LAYERS = [
    *("Llama", "Qwen3", "Gemma3", "GPT2", "GPTNeoX", "Falcon", "Phi", "StableLm", "Cohere", "Glm4", "SmolLM3", "ModernBert"),
    *("Qwen3Moe", "Olmoe", "DeepseekV3", "Roberta", "Albert", "DebertaV2", "Bart", "Whisper", "DeiT", "ConvNext", "Segformer"),
    *("CLIP", "Mamba2"),
]
ON_TWO_RANKS = ["Mixtral", "DeepseekV3", "T5", "ViT", "Mamba"]


# The tokens of different ranks may reach different experts.
REACH_SOME_EXPERTS = ["SwitchTransformers", "Jamba"]

# Models whose forwards Dynamo traces in each process, and why.
TRACED_AGAIN = {
    **dict.fromkeys(["GPT2", "SwitchTransformers", "Wav2Vec2Conformer", "Segformer"], "graph breaks"),
    **dict.fromkeys(["GPTJ", "Bloom", "Mpt", "Phimoe", "ConvBert"], "an autograd.Function"),
    **dict.fromkeys(["Mamba", "Mamba2", "FalconMamba", "Jamba"], "torch.compiler.assume_constant_result"),
}


class Traced(NamedTuple):
    """The number of a model's graphs, and of its graph breaks, in Dynamo."""

    graphs: int
    breaks: int


def trace_count() -> Traced:
    return Traced(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def lengths_of(name: str) -> tuple[int, ...]:
    return LENGTHS if ARCHITECTURES[name].changes_length else (12, 12)


def shard(model: Any, layers: int) -> Any:
    mesh = device_mesh((dist.get_world_size(),)) if dist.get_world_size() > 1 else init_device_mesh("cpu", (1,))
    for layer in layers_of(model, layers):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    total = torch.stack([param.grad.norm() for param in reference.parameters() if param.grad is not None]).norm()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if theirs.grad is None:
            # Compiled, a parameter that only an unused output needs has a gradient of zeros.
            assert ours.grad is None or not ours.grad.full_tensor().any(), name  # type: ignore[attr-defined]
            continue
        assert ours.grad is not None, name
        error = (ours.grad.full_tensor() - theirs.grad).norm()  # type: ignore[attr-defined]
        # Some gradients are sums that cancel, such as that of a bias of keys.
        assert error < 1e-4 * theirs.grad.norm() + 1e-6 * total, f"{name}: {error} of {theirs.grad.norm()}"


def take_steps(name: str, reference: Any, model: Any, forward: Any, lengths: Iterable[int]) -> None:
    """Train a model alone and one that is sharded over all ranks, and compare them; ``forward`` calls the sharded one."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(system.parameters(), lr=0.1) for system in (reference, model)]
    for step, length in enumerate(lengths):
        seeds = range(step * world_size, (step + 1) * world_size)
        batches = [ARCHITECTURES[name].batch(reference, 2, length, seed=seed) for seed in seeds]
        losses = [reference(**batch).loss for batch in batches]
        (sum(losses) / world_size).backward()
        loss = forward(**batches[rank]).loss
        loss.backward()
        torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=1e-6)
        assert_equal_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train(name: str, layers: int, lengths: Iterable[int], **options: Any) -> Traced:
    """Take steps with a sharded and compiled model; count its graphs."""
    architecture = ARCHITECTURES[name]
    reference, model = architecture.build(layers), shard(architecture.build(layers), layers)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=fsdp_backend, options=options)
    take_steps(name, reference, model, compiled, lengths)
    return trace_count()


def train_alone(name: str, layers: int, lengths: Iterable[int], backend: str) -> Traced:
    """Take steps with plain ``torch.compile``; count the graphs."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(layers)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=backend)
    for step, length in enumerate(lengths):
        compiled(**architecture.batch(model, 2, length, seed=step)).loss.backward()
    return trace_count()


def check(name: str, layers: int, lengths: tuple[int, ...], **options: Any) -> None:
    if ARCHITECTURES[name].untrainable:
        with pytest.raises(Exception, match=ARCHITECTURES[name].untrainable):
            train_alone(name, layers, lengths, "aot_eager")
        return
    ours = train(name, layers, lengths, **options)
    # Dynamo traces a second time when a length changes, and then for all lengths. No model needs fewer graphs.
    fewest = Traced(graphs=1 if len(set(lengths)) == 1 else 2, breaks=0)
    # Dynamo decides what is traced and where the graph breaks. The backend hardly ever changes that.
    plain = fewest if ours == fewest else train_alone(name, layers, lengths, "eager")
    is_more = ours.graphs > plain.graphs or ours.breaks > plain.breaks
    assert is_more == bool(ARCHITECTURES[name].traced_more), (ours, plain)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "Bert" else pytest.mark.night) for name in ARCHITECTURES],
)
def test_training(name: str, one_rank: None) -> None:
    """Models of two layers train, with changing lengths for text."""
    check(name, 2, lengths_of(name), lowering="aot_eager")


@pytest.mark.night
@pytest.mark.parametrize("name", [name for name, found in ARCHITECTURES.items() if not found.untrainable])
def test_stored_frames(name: str, one_rank: None) -> None:
    """A second process trains the same with what Dynamo made in the first one."""
    if not can_store():
        pytest.skip("this torch runs passes before it looks into its cache")
    with storing(frames=True):
        graphs = train(name, 2, lengths_of(name), lowering="aot_eager")
        with count_traces() as traces:
            train(name, 2, lengths_of(name)[::-1], lowering="aot_eager")
    assert graphs.graphs and (traces == [0]) == (name not in TRACED_AGAIN)


@pytest.mark.night
@pytest.mark.parametrize("name", NINE_LAYERS)
def test_nine_layers(name: str, one_rank: None) -> None:
    check(name, 9, (12, 12), lowering="aot_eager")


@pytest.mark.night
@pytest.mark.parametrize("name", [*DIED_OF_LENGTHS, *THROUGH_INDUCTOR])
def test_through_inductor(name: str, one_rank: None) -> None:
    train(name, 2, lengths_of(name))


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        *(pytest.param(name, marks=pytest.mark.night) for name in ON_TWO_RANKS),
    ],
)
def test_two_ranks(name: str, rank_pools: RankPools) -> None:
    found = rank_pools[2].run(train, name=name, layers=2, lengths=(12, 12), lowering="aot_eager")
    if name == "Llama":
        assert found[0] == Traced(graphs=1, breaks=0)


def _checkpoint_layers(model: Any) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def train_uncompiled(name: str, checkpointed: bool) -> None:
    """Train three layers uncompiled, gathered again for backward, with lengths that change."""
    architecture = ARCHITECTURES[name]
    reference, model = architecture.build(3), architecture.build(3)
    for unit in (*layers_of(model, 3), model):
        fully_shard(unit, mesh=device_mesh((dist.get_world_size(),)), reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(name in REACH_SOME_EXPERTS)
    if checkpointed and model.supports_gradient_checkpointing:
        _checkpoint_layers(reference)
        _checkpoint_layers(model)
    take_steps(name, reference, model, model, lengths_of(name))


def train_all_uncompiled(checkpointed: bool) -> None:
    for name in ARCHITECTURES:
        try:
            train_uncompiled(name, checkpointed)
        except Exception as error:
            error.add_note(name)
            raise


@pytest.mark.night
@pytest.mark.parametrize("checkpointed", [False, True])
def test_uncompiled(checkpointed: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_all_uncompiled, checkpointed=checkpointed)


def steps(name: str, layers: int, lengths: Iterable[int]) -> tuple[Capture, list[Tensor]]:
    """Compile for each length. Return the graphs, and the last loss and all gradients."""
    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]
    model = shard(architecture.build(layers), layers)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    with capture() as captured:
        for length in lengths:
            loss = compiled(**architecture.batch(model, 2, length, seed=1)).loss
            loss.backward()
    gradients = [param.grad.full_tensor() for param in model.parameters() if param.grad is not None]
    return captured, [loss.detach(), *gradients]


def operators(graph: Graph) -> Counter[Any]:
    """Count by kind the operators of a graph that compute tensors, with the sizes at hand.

    Layers may express equal symbolic sizes in several ways, and so make several constants of one size. These count once.
    """
    is_symbolic = any(isinstance(node.meta.get("val"), SymInt) for node in graph.find_nodes(op="placeholder"))
    found: Counter[Any] = Counter()
    for node in graph.nodes:
        outputs = [(*map(size_hint, (*value.shape, *value.stride())), value.dtype) for value in tensors_of(node)]
        if node.op == "call_function" and not is_view(node) and outputs:
            kind = (str(node.target), *outputs)
            is_constant = not any(map(tensors_of, node.all_input_nodes))
            found[kind] = 1 if is_symbolic and is_constant else found[kind] + 1
    return found


def tensors_of(node: Node) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


@pytest.mark.night
@pytest.mark.parametrize("name", ["Llama", *WITH_AND_WITHOUT_FOLDING])
def test_folded_layers_change_nothing(name: str, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine layers fold, also with symbolic sizes. Graphs have the same operations, perhaps in another order, and results are
    equal to the bit.

    There may be more views: each layer makes its own view of a value that all layers read.
    """
    folded = []
    fold_layers = passes.pipeline.fold_layers
    monkeypatch.setattr(passes.pipeline, "fold_layers", lambda gm: folded.append(fold_layers(gm)) or folded[-1])
    lengths = dict.fromkeys(lengths_of(name)[:2])
    once, found = steps(name, 9, lengths)
    assert len(once.forward) == len(once.backward) == len(lengths)
    assert all(folded)

    monkeypatch.setattr(passes.pipeline, "fold_layers", lambda gm: False)
    one_by_one, expected = steps(name, 9, lengths)
    assert all(map(torch.equal, found, expected))
    for ours, theirs in zip(once.forward + once.backward, one_by_one.forward + one_by_one.backward, strict=True):
        assert operators(ours.graph_module.graph) == operators(theirs.graph_module.graph)
