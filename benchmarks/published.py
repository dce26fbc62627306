"""Predict training speed and memory of runs that others have published, and print both.

    python benchmarks/published.py [--only torchtitan] [--json published.json]

Every row is a run of PyTorch's FSDP, published with model, batch, machine and policy. Nothing here was measured, and no number
of the cost models was fitted to a run. :data:`MACHINES` says, with sources, where a machine differs from the table of
`passes.models.hardware`. `explain` predicts for this library and a model compiled as a whole; the published runs
compile block by block. Operators outside of graphs, such as torchtitan's loss, count by what they read, write and hold.

The predicted memory is what lives in a step of this library. torchtitan publishes what the allocator reserved in a run of
FSDP2. FSDP2 allocates on several streams, each with a memory pool that the others cannot use: :func:`_reserved` adds these
pools. Fragmentation is not predicted.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.llama import Llama, LlamaSize
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_compile import fully_shard
from fsdp_compile.explain import Report, explain
from passes.models.hardware import Hardware, Link, Links, known_hardware

_aten = torch.ops.aten
GIB = 1 << 30


def _network(hardware: Hardware, gbit_per_node: float) -> Hardware:
    """Return a machine whose nodes share adapters of this rate. NCCL reaches the same part of it as on other machines."""
    rate = gbit_per_node / 8 * 1e9 * 47 / 50
    far = Links(*[Link(0.0, rate, taken_part=hardware.between_nodes.all_gather.taken_part)] * 3)
    return replace(hardware, between_nodes=far)


def _limited(hardware: Hardware, watts: float, of_watts: float) -> Hardware:
    """Return a machine under a limit of ``watts`` in place of ``of_watts``. Matrix products slow down in proportion.

    A GB300 reaches 617 TFLOP/s at 500 W, and 1600 to 2174 at 1400 W (https://github.com/facebookexperimental/triton/pull/2023).
    A B200 reaches 1088 at 750 W (same project, pull/854), and 1610 without a limit, 1000 W (https://pyptx.dev/performance).
    """
    half = {dtype: rate * watts / of_watts for dtype, rate in hardware.flops_per_s.items() if dtype in ("bfloat16", "float16")}
    return replace(hardware, flops_per_s={**hardware.flops_per_s, **half})


_A100, _H100 = known_hardware("cuda", "A100"), known_hardware("cuda", "H100")
#: torchtitan used an H100 with HBM2e of 2.4 TB/s and a limit of 500 W (benchmarks/llama3_h100_202412_torchtitan.md). As on all
#: machines, nine tenths of the memory's rate are reached. The README of fms-fsdp gives nodes a network of 400 or 800 Gbit/s.
MACHINES = {
    "H100, 500 W": _limited(replace(_H100, bytes_per_s=0.9 * 2.4e12), 500, 700),
    "A100, 400 Gbit/s a node": _network(_A100, 400),
    "H100, 800 Gbit/s a node": _network(_H100, 800),
    "H200, four a node": replace(known_hardware("cuda", "H200"), ranks_per_node=4),
}


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: source and model.
        source: where it was published.
        machine: a key of :data:`MACHINES`.
        mesh_shape: as :func:`fsdp_compile.explain.explain` takes it.
        size: the model, and a rank's batch.
        checkpointing: "none"; "op": backward recomputes every second matrix product of each block; "1" or "3": it recomputes
            each or every third block as a whole.
        reduce_dtype: of gradients in collectives; parameters compute in bfloat16, and are kept in float32.
        eager_loss: True if the loss is outside of the compiled model.
        microbatches: how many a step accumulates; each reduces its gradients.
        tokens_per_s: published tokens per second of a rank.
        memory_gib: published GiB of a rank; None: not published.
    """

    name: str
    source: str
    machine: str
    mesh_shape: tuple[int, ...]
    size: LlamaSize
    checkpointing: str
    reduce_dtype: torch.dtype
    eager_loss: bool
    tokens_per_s: float
    memory_gib: float | None = None
    microbatches: int = 1


_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_FMS = "https://github.com/foundation-model-stack/fms-fsdp"
# Published memory is left out: it is nearly the same with two and with four ranks, so it is not that of sharded float32.
_FORGE = "https://github.com/KempnerInstitute/KempnerForge/blob/main/benchmarks/mfu_scaling/mfu_scaling.md"
_LLAMA3 = LlamaSize(32, 4096, 32, 8, 14_336, 128_256, batch=2, sequence=8192, dtype=torch.float32, tied=False)
_LLAMA3_4K = replace(_LLAMA3, batch=4, sequence=4096)
_LLAMA2 = replace(_LLAMA3, kv_heads=32, hidden=11_008, vocabulary=32_000, sequence=4096)
_LLAMA2_13B = replace(_LLAMA2, layers=40, width=5120, heads=40, kv_heads=40, hidden=13_824)
_LLAMA2_34B = replace(_LLAMA2, layers=48, width=8192, heads=64, kv_heads=8, hidden=22_016)
_LLAMA2_70B = replace(_LLAMA2_34B, layers=80, hidden=28_672)
# fms-fsdp calls its checkpoints "selective". Its flops on A100, with recomputation, are 1.13 times the model's for 13B:
# checkpoints of a third of the blocks come closest. For larger models they are 1.35 times the model's: all blocks.
_HALF, _FULL = torch.bfloat16, torch.float32
RUNS = (
    Run("torchtitan 8B", _TITAN, "H100, 500 W", (8,), _LLAMA3, "op", _FULL, True, 6667, 77.0),
    Run("torchtitan 8B", _TITAN, "H100, 500 W", (128,), _LLAMA3, "op", _FULL, True, 6514, 62.0),
    Run("fms-fsdp 7B", _FMS, "A100, 400 Gbit/s a node", (16, 8), _LLAMA2, "none", _HALF, True, 4550),
    Run("fms-fsdp 7B", _FMS, "H100, 800 Gbit/s a node", (12, 8), _LLAMA2, "none", _HALF, True, 9600),
    Run("fms-fsdp 13B", _FMS, "A100, 400 Gbit/s a node", (128,), _LLAMA2_13B, "3", _HALF, True, 2150),
    Run("fms-fsdp 13B", _FMS, "H100, 800 Gbit/s a node", (96,), _LLAMA2_13B, "3", _HALF, True, 4850),
    Run("fms-fsdp 34B", _FMS, "A100, 400 Gbit/s a node", (128,), _LLAMA2_34B, "1", _HALF, True, 820),
    Run("fms-fsdp 34B", _FMS, "H100, 800 Gbit/s a node", (96,), _LLAMA2_34B, "1", _HALF, True, 1830),
    Run("fms-fsdp 70B", _FMS, "A100, 400 Gbit/s a node", (128,), _LLAMA2_70B, "1", _HALF, True, 410),
    Run("fms-fsdp 70B", _FMS, "H100, 800 Gbit/s a node", (96,), _LLAMA2_70B, "1", _HALF, True, 890),
    Run("KempnerForge 8B", _FORGE, "H200, four a node", (2,), _LLAMA3_4K, "1", _HALF, True, 18_728 / 2, microbatches=2),
    Run("KempnerForge 8B", _FORGE, "H200, four a node", (4,), _LLAMA3_4K, "1", _HALF, True, 38_983 / 4, microbatches=2),
)


@dataclass
class Outside(TorchDispatchMode):
    """A counter of the work and the memory of operators outside of graphs.

    Attributes:
        moved_bytes: bytes that they read and wrote.
        kernels: number of kernels.
        peak_bytes: the most bytes of their results that lived at once.
    """

    moved_bytes: int = 0
    kernels: int = 0
    peak_bytes: int = 0
    _made: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        written = [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, Tensor)]
        if not func.is_view:
            self.kernels += 1
            self.moved_bytes += sum(value.nbytes for value in (*read, *written))
            known = {StorageWeakRef(value.untyped_storage()).cdata for value in read}
            storages = [StorageWeakRef(value.untyped_storage()) for value in written]
            self._made += [(ref, value.nbytes) for ref, value in zip(storages, written, strict=True) if ref.cdata not in known]
        self._made = [(ref, num_bytes) for ref, num_bytes in self._made if not ref.expired()]
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._made))
        return result


def _policy() -> Any:
    """Return torchtitan's policy for checkpoints: save every other matrix product and attention, recompute the rest."""
    seen: dict[bool, int] = defaultdict(int)

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == _aten.mm.default:
            seen[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        kept = (_aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_efficient_attention.default)
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def build(run: Run) -> Llama:
    """Build the model on the meta device, with checkpoints."""
    model = run.size.build(torch.device("meta"))
    for index, block in enumerate(model.blocks):
        if run.checkpointing == "op":
            model.blocks[index] = checkpoint_wrapper(block, context_fn=_policy, preserve_rng_state=False)
        elif run.checkpointing != "none" and index % int(run.checkpointing) == int(run.checkpointing) // 2:
            model.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False)
    return model


def _shard(run: Run) -> Callable[[Any, DeviceMesh], None]:
    def shard(model: Any, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=run.reduce_dtype)
        for index, block in enumerate(model.blocks):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=index < len(model.blocks) - 1)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    return shard


@dataclass(frozen=True)
class Prediction:
    """Speed and memory of a run, as the models of time and memory predict them.

    Attributes:
        seconds: of a step.
        tokens_per_s: of a rank.
        memory_gib: the most that lives at once.
        reserved_gib: the most that FSDP2 would reserve on its streams.
        exposed_part: exposed communication, as a part of the step.
        mfu: utilisation of model flops. Causal attention counts whole, and the peak is that of the data sheet.
        outside_s: seconds of the step that run outside of graphs.
    """

    seconds: float
    tokens_per_s: float
    memory_gib: float
    reserved_gib: float
    exposed_part: float
    mfu: float
    outside_s: float


def predict(run: Run, hardware: Hardware) -> Prediction:
    """Predict speed and memory of a run on ``hardware``."""
    outside = Outside()

    def microbatch(compiled: nn.Module, tokens: Tensor, targets: Tensor) -> None:
        if not run.eager_loss:
            compiled(tokens, targets).backward()
            return
        logits = compiled(tokens)
        apart = logits.detach().requires_grad_()
        with outside:
            F.cross_entropy(apart.flatten(0, 1).float(), targets.flatten()).backward()
        logits.backward(apart.grad)

    def step(compiled: nn.Module, tokens: Tensor, targets: Tensor) -> None:
        for _ in range(run.microbatches):
            microbatch(compiled, tokens, targets)

    batch = torch.empty(run.size.batch, run.size.sequence, dtype=torch.long, device="meta")
    tokens = run.microbatches * batch.numel()
    report = explain(
        build(run), (batch, batch), run.mesh_shape, hardware, shard=_shard(run), step=step, tokens=tokens, suggest=False
    )
    outside_s = outside.kernels * hardware.kernel_s + outside.moved_bytes / hardware.bytes_per_s
    seconds = report.time_ns / 1e9 + outside_s
    held = _at_loss(report, run) if run.eager_loss else Counter()
    return Prediction(
        seconds,
        tokens / seconds,
        max(report.memory.peak_bytes, sum(held.values()) + outside.peak_bytes) / GIB,
        max(report.memory.peak_bytes, _reserved(report, run, held) + outside.peak_bytes) / GIB,
        report.exposed_ns / 1e9 / seconds,
        report.mfu * report.time_ns / 1e9 / seconds,
        outside_s,
    )


def _at_loss(report: Report, run: Run) -> Counter[str]:
    """Return the bytes live between the graphs, by category, except logits (the caller frees them) and their gradient."""
    source = report._source
    assert source is not None
    backward = next(index for index, call in enumerate(report.calls) if call.stage == "backward")
    held = Counter(source.memory.moment(backward, 0).held)
    held["activations"] -= 2 * run.size.batch * run.size.sequence * run.size.vocabulary * 2
    return held


def _reserved(report: Report, run: Run, held: Counter[str]) -> int:
    """Return the bytes that FSDP2 reserves at the loss, where memory of the computing stream peaks.

    Gathered parameters: FSDP2 keeps all of the root's, this library only those that backward reads. Both keep the last block's.
    Pools of two other streams stay reserved. One has FSDP2's buffers for gathers, the largest of which is the root's. The other
    has the shards of reduced gradients. (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py of torch 2.6.)
    """
    if not held:
        return 0
    units = {unit.name: unit.parameters for unit in report.units}
    root, last = units["root"], units[f"blocks.{run.size.layers - 1}"]
    gradients = held["shards"]
    return sum(held.values()) - held["gathered parameters"] + 2 * (root + last) + 2 * root + gradients


_COLUMNS = ("run", "machine", "ranks", "tokens/s", "predicted", "", "GiB reserved", "predicted", "", "lives", "exposed")


def table(results: Sequence[tuple[Run, Prediction]]) -> str:
    """Return a table in Markdown: speed and memory as published and predicted, what lives, and exposed communication."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(run, found) for run, found in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(run: Run, found: Prediction) -> tuple[str, ...]:
    speed = f"{run.tokens_per_s:,.0f}", f"{found.tokens_per_s:,.0f}", f"{found.tokens_per_s / run.tokens_per_s - 1:+.0%}"
    memory = ("", "", "")
    if run.memory_gib is not None:
        memory = f"{run.memory_gib}", f"{found.reserved_gib:.1f}", f"{found.reserved_gib / run.memory_gib - 1:+.0%}"
    ranks = " x ".join(map(str, run.mesh_shape))
    return run.name, run.machine, ranks, *speed, *memory, f"{found.memory_gib:.1f}", f"{found.exposed_part:.1%}"


def main() -> None:
    """Predict all runs, print a table, and write the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--layers", type=int, help="as many of each model, which is then another one: to try the script out")
    parser.add_argument("--json", type=Path, help="where to write the predictions")
    options = parser.parse_args()
    results = []
    for run in RUNS:
        if options.only in run.name:
            size = run.size if options.layers is None else replace(run.size, layers=options.layers)
            results.append((run, predict(replace(run, size=size), MACHINES[run.machine])))
            print(table(results[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(results))
    if options.json:
        rows = [{"run": run.name, "ranks": run.mesh_shape, **asdict(found)} for run, found in results]
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
