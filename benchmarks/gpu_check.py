"""Check on one GPU that the library trains right, that it runs the expected code, and how fast it is.

    python benchmarks/gpu_check.py --json gpu.json               # everything, in less than eight minutes
    python benchmarks/gpu_check.py --checks time --batch 2
    python benchmarks/gpu_check.py --dry-run                     # on CPU, small: that the script itself works

It needs torch, Triton and this project, and no network. The checks:

parity  Train a small Llama with fsdp_backend and with FSDP2: one rank on NCCL, and two ranks on Gloo that share the GPU; in
        fp32, with a policy of bf16, and in fp16 with divide factors. Gradients have to agree. In fp32 also train with shards on
        the host, with activations on the host (by a policy of checkpoints, and by a budget), and with padded matrix products.
        Updates of an optimizer with states on the host have to equal those of one on the device. On NCCL also capture a step as
        a CUDA graph, and record graphs by an option and by Inductor's mode.
code    Compile a sharded model for this GPU and, in a process that sees no GPU, with cuda_code: both have to
        launch the same kernels, collectives and waits in the same order.
time    Time forward and backward of a Llama of 1.2 billion parameters in bf16, as one of eight pretended ranks: all kernels of
        sharding run, and nothing is sent. Compare with the unsharded model, compiled, and with FSDP2. Systems take turns;
        figures are medians. Then time fsdp_backend with options={"cudagraphs": True}; whole steps as one CUDA graph, of the
        unsharded model and of fsdp_backend's; and steps of AdamW with states on the device and on the host.

The exit code is 1 if gradients or code differ, or if a check fails. A goal for time that is missed is printed, and is no error.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from harness import allocations, cuda_graph, device_profile, host, parity, ranks, replay, report
from harness.flags import names_of
from harness.link import LOOPBACK
from harness.llama import LlamaSize
from harness.systems import (
    BASE,
    OFFLOADED,
    RECORDED,
    REDUCED_OVERHEAD,
    ROUNDED,
    ROUNDED_UNCOMPILED,
    UNCOMPILED,
    YARDSTICK,
    Setting,
    System,
    build,
    shard_blocks,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import flat_optimizer, offload_optimizer

_CHECKS = ("parity", "code", "time")
_GROUPS = ("nccl", "gloo")
_OURS = "ours"
_SYSTEMS = (BASE, YARDSTICK, "fsdp2", _OURS)
_CAPTURED = (BASE, _OURS)
_OFFLOADED = "offload_optimizer"
_WARM_UP_STEPS = 3
_STEPS = 5
# Seconds for a job: several times what it takes.
_TIMEOUT_S = 300
# The goal for device time, relative to the unsharded model.
_MOST_DEVICE_TIME = 1.05
# An optimizer may take this much more memory than it says: small tensors take whole blocks of the allocator.
_SLACK_BYTES = 16 << 20
# False in torch 2.11, where reductions of pretended ranks leave gradients unset. Checks on NCCL still compare gradients there.
_PRETENDED_REDUCE = torch.__version__ >= "2.13"
# Relative: for losses in bf16, and for the norm of gradients by the same kernels, of which some add atomically.
_TOLERANCE = 1e-2

_DRY_SIZE = LlamaSize(
    layers=1, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256, batch=2, sequence=32, dtype=torch.float32
)
_CODE_SIZE = LlamaSize(
    layers=2, width=1024, hidden=2048, vocabulary=4096, batch=2, sequence=256, attention=False, dtype=torch.float32
)
_DRY_CODE_SIZE = replace(_CODE_SIZE, layers=1)
_DRY_PRECISIONS = ["bf16", "fp16-factor-4"]
_CODE_POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on CPU with small shapes, as far as that goes")
    parser.add_argument(
        "--checks", type=names_of("check", _CHECKS), default=list(_CHECKS), metavar="A,B", help=f"of {', '.join(_CHECKS)}"
    )
    parser.add_argument(
        "--precisions", type=names_of("precision", parity.PRECISIONS), metavar="A,B", help=f"of {', '.join(parity.PRECISIONS)}"
    )
    parser.add_argument(
        "--groups",
        type=names_of("group", _GROUPS),
        default=list(_GROUPS),
        metavar="A,B",
        help=f"of parity: {', '.join(_GROUPS)}",
    )
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help=f"of a job; default {_TIMEOUT_S}")
    parser.add_argument("--batch", type=int, default=LlamaSize.batch, metavar="N", help=f"sequences; default {LlamaSize.batch}")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=LlamaSize.vocabulary,
        metavar="N",
        help=f"words, of time; default {LlamaSize.vocabulary}. Inductor pads products with rows that are not aligned, as 50257",
    )
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="of timing; default 8")
    parser.add_argument("--job", choices=_JOBS, help=argparse.SUPPRESS)
    report.add_flags(parser)
    args = parser.parse_args(argv)
    if not (args.dry_run or args.job or torch.cuda.is_available()):
        parser.error("torch finds no GPU; --dry-run does without")
    # The code that makes process groups reads these.
    args.device, args.link = "cpu" if args.dry_run else "cuda", LOOPBACK
    args.precisions = args.precisions or (_DRY_PRECISIONS if args.dry_run else list(parity.PRECISIONS))
    args.lowering = "aot_eager" if args.dry_run else "inductor"
    return args


# -------------------------------------------------------------------------------------- in a rank: parity


def measure_parity(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Measure distances of gradients for each precision; on NCCL also between a step and its CUDA graph."""
    device = torch.device(args.device)
    size = replace(parity.SIZE, layers=1) if args.dry_run else parity.SIZE
    setting = Setting(size, mesh, device, lowering=args.lowering)
    kinds: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in parity.precisions(mesh.size()):
        if name in args.precisions:
            kinds[name] = lambda name=name: parity.compare(name, setting)
    kinds["fp32, not compiled"] = lambda: parity.compare("fp32", setting, UNCOMPILED)
    # Triton kernels round when compiled, operators when not. Both have to give the same.
    kinds["fp32, rounded"] = lambda: parity.compare("fp32", setting, ROUNDED, ROUNDED_UNCOMPILED)
    kinds["fp32, CPU offload"] = lambda: parity.compare("fp32", setting, OFFLOADED)
    kinds["fp32, activations offloaded"] = lambda: host.policy_parity(setting)
    kinds["fp32, updates by offload_optimizer"] = lambda: host.optimizer_parity(setting)
    if dist.get_backend() == "nccl":
        kinds["fp32, CUDA graph of a step"] = lambda: captured_parity(setting)
    if not args.dry_run:
        kinds["fp32, nine layers, lengths that change"] = lambda: parity.compare_lengths(setting)
        # Inductor pads on GPUs alone.
        kinds["fp32, padded products"] = lambda: parity.compare_padded(setting)
    if mesh.size() == 1:
        kinds["fp32, cudagraphs"] = lambda: recorded_parity(setting, RECORDED)
        if not args.dry_run:
            # A dry run records operators, and this mode calls generated code.
            kinds["fp32, reduce-overhead"] = lambda: recorded_parity(setting, REDUCED_OVERHEAD)
        # The search for a budget takes the longest of all.
        kinds["fp32, memory and host budget"] = lambda: host.budget_parity(setting)
    result = {}
    for name, measure in kinds.items():
        found = result[name] = measured(measure)
        how = found["error"] if "error" in found else f"{found['ours']:.1e}, FSDP2 {found['fsdp2']:.1e}"
        ranks.progress(f"parity on {dist.get_backend()}, {name}: {how}")
    return result


def measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the measurement, or the error: other measurements are useful without it."""
    try:
        return measure()
    except Exception as error:
        return {"ours": math.nan, "fsdp2": 0.0, "error": str(error), "traceback": traceback.format_exc()}


def recorded_parity(setting: Setting, system: str) -> dict[str, Any]:
    with recordings(setting.device):
        return parity.compare("fp32", setting, system)


def captured_parity(setting: Setting) -> dict[str, Any]:
    torch._dynamo.reset()
    _, distance = captured(build(_OURS, setting), setting.size.make_batch(0, setting.device))  # type: ignore[attr-defined]
    return {"ours": distance, "fsdp2": 0.0}


def recordings(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context for ``options={"cudagraphs": True}`` on a device. In a dry run, it records operators."""
    return replay.on_cpu() if device.type == "cpu" else contextlib.nullcontext()


def captured(system: System, batch: tuple[Tensor, Tensor]) -> tuple[Callable[[], None], float]:
    """Capture a step as a CUDA graph. Return its replay, and the distance of its gradients from an ordinary step's."""
    forward_backward(system, batch)
    expected = [gradient.clone() for gradient in local_gradients(system)]
    forget(system)
    replay = cuda_graph.capture(lambda: forward_backward(system, batch), lambda: forget(system))
    for gradient in local_gradients(system):
        gradient.fill_(math.nan)
    replay()
    return replay, distance(local_gradients(system), expected)


def distance(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the distance between gradients, relative to the norm of the expected ones; 0 if reductions leave them unset."""
    if dist.get_backend() == "fake" and not _PRETENDED_REDUCE:
        return 0.0
    pairs = list(zip(gradients, expected, strict=True))
    difference = sum((a.float() - e.float()).square().sum() for a, e in pairs)
    size = sum(e.float().square().sum() for _, e in pairs)
    return math.sqrt(float(difference / size))  # type: ignore[operator]


def local_gradients(system: System) -> list[Tensor]:
    grads: list[Any] = [parameter.grad for parameter in system.model.parameters()]
    return [getattr(grad, "_local_tensor", grad) for grad in grads]


# ---------------------------------------------------------------------------------------- in a rank: code


def measure_code(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Compile a step for this GPU. Return its launches."""
    from fsdp_compile.debug import capture

    with capture() as graphs:
        device = torch.device(args.device)
        system = build(_OURS, Setting(_CODE_SIZE, mesh, device, policy=_CODE_POLICY))
        forward_backward(system, _CODE_SIZE.make_batch(0, device))
    return launches(graphs)


def measure_pretended_code(arch: str, size: LlamaSize) -> dict[str, Any]:
    """Compile the step of ``measure_code`` without a GPU. Return its launches."""
    from fsdp_compile.debug import cuda_code

    graphs = cuda_code(
        size.build(torch.device("meta")),
        size.make_batch(0, torch.device("cpu")),
        (ranks.FAKE_WORLD_SIZE,),
        arch,
        shard=shard_for_code,
    )
    return launches(graphs)


def shard_for_code(model: Any, mesh: DeviceMesh) -> None:
    """Shard a model as ``build`` does."""
    from fsdp_compile import fully_shard

    shard_blocks(model, fully_shard, mesh=mesh, mp_policy=_CODE_POLICY)


def launches(graphs: Any) -> dict[str, list[list[str]]]:
    """Return the launches of the forward and the backward graphs, as lines of text."""
    from fsdp_compile.debug import cuda_outline

    return {kind: [cuda_outline(graph).splitlines() for graph in getattr(graphs, kind)] for kind in ("forward", "backward")}


# ---------------------------------------------------------------------------------------- in a rank: time


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step in a round, the mean over the steps of a round.

    Attributes:
        wall: from the first call to the end of the last kernel.
        host: from the first call until the last one returned: the host issues steps in this time.
        span: between device events before the first kernel and after the last; on CPU the same as wall.
    """

    wall: float
    host: float
    span: float


def forward_backward(system: System, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = system.forward(*batch)
    loss.backward()
    return loss.detach()


def forget(system: System) -> None:
    system.model.zero_grad(set_to_none=True)


def measure_time(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Measure loss, times, activity and memory of each system, then optimizers and CUDA graphs."""
    device = torch.device(args.device)
    size = _DRY_SIZE if args.dry_run else replace(LlamaSize(), batch=args.batch, vocabulary=args.vocabulary)
    setting = Setting(size, mesh, device, lowering=args.lowering)
    batch = size.make_batch(0, device)
    systems: dict[str, System] = {}
    result: dict[str, Any] = {
        "size": size.describe(),
        "device": args.device,
        "systems": {name: {} for name in _SYSTEMS},
        "graphs": {},
    }
    for name, found in result["systems"].items():
        began, before = time.perf_counter(), live(device)
        systems[name] = build(name, setting)
        for _ in range(_WARM_UP_STEPS):
            found["loss"] = forward_backward(systems[name], batch).item()
            forget(systems[name])
        found["held"] = live(device) - before
        ranks.progress(f"{name}: warm after {time.perf_counter() - began:.0f} s")

    def step(name: str) -> None:
        forward_backward(systems[name], batch)
        forget(systems[name])

    steps = {name: lambda name=name: step(name) for name in _SYSTEMS}
    for name, times in time_rounds(steps, args.rounds, device).items():
        result["systems"][name]["times"] = [asdict(one) for one in times]
        show_times(name, result["systems"][name]["times"])
    for name, found in result["systems"].items():
        found["activity"] = asdict(device_profile.profile(steps[name], _STEPS, device))
        ranks.progress(f"{name}: {found['activity']}")
    with allocations.inputs_held_in_flight(device):
        for name, found in result["systems"].items():
            found["peak"] = max(allocations.peaks([steps[name]] * 3, device))
            ranks.progress(f"{name}: {found['held'] / 1e6:.0f} MB held, {(found['held'] + found['peak']) / 1e6:.0f} MB at most")
    result["optimizers"] = measure_optimizers(systems[_OURS], batch, args.rounds, device)
    ranks.progress("optimizers: measured")
    # Last, as a capture that fails can leave the device useless.
    graphs: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in _CAPTURED if device.type == "cuda" else ():
        graphs[f"{name}, a step as one"] = lambda name=name: measure_captured(
            systems[name], batch, steps[name], args.rounds, device
        )
    graphs[RECORDED] = lambda: measure_recorded(setting, systems[_OURS], batch, steps[_OURS], args.rounds)
    for name, measure in graphs.items():
        try:
            result["graphs"][name] = measure()
        except RuntimeError as error:
            result["graphs"][name] = {"error": str(error).splitlines()[0]}
        for system in systems.values():
            forget(system)
        ranks.progress(f"{name}: CUDA graphs {'failed' if 'error' in result['graphs'][name] else 'measured'}")
    return result


def show_times(name: str, times: Sequence[dict[str, float]]) -> None:
    """Print medians. The table at the end repeats them, but a job that is cut short never gets there."""
    medians = ", ".join(f"{key} {statistics.median(one[key] for one in times):.2f} ms" for key in times[0])
    ranks.progress(f"{name}: {medians}")


def measure_optimizers(
    system: System, batch: tuple[Tensor, Tensor], rounds: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Measure steps of AdamW over the same parameters and gradients, with states on the device and on the host in turns.

    Returns:
        Times, activity and memory by name. With states on the host, also the memory that the optimizer says it takes.
    """
    forward_backward(system, batch)
    # Where reductions leave gradients unset, memory may hold anything.
    for gradient in local_gradients(system):
        gradient.normal_()
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    with host.memory_of_its_own(device):
        for name, make in (("flat_optimizer", flat_optimizer), (_OFFLOADED, offload_optimizer)):
            before = live(device)
            # A learning rate of 0 leaves the parameters alone: CUDA graphs are later compared with this model.
            optimizer: Any = make(torch.optim.AdamW, system.model.parameters(), lr=0.0, fused=True)
            steps[name] = optimizer.step
            optimizer.step()
            found[name] = {"held": live(device) - before}
        found[_OFFLOADED] |= {"said_held": optimizer.device_state_bytes, "said_peak": optimizer.step_bytes}
        for name, times in time_rounds(steps, rounds, device).items():
            found[name]["times"] = [asdict(one) for one in times]
        for name, step in steps.items():
            found[name]["activity"] = asdict(device_profile.profile(step, _STEPS, device))
            found[name]["peak"] = max(allocations.peaks([step] * 3, device))
    forget(system)
    return found


def live(device: torch.device) -> int:
    gc.collect()
    return allocations.counter_of(device).live()


def time_rounds(steps: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[Times]]:
    """Time each function in each round; in a round, the functions take turns."""
    times: dict[str, list[Times]] = {name: [] for name in steps}
    with ranks.collector_off():
        for _ in range(rounds):
            for name, step in steps.items():
                # Not timed: after another system's steps, the first step finds caches cold.
                step()
                times[name].append(time_steps(step, device))
    return times


def time_steps(step: Callable[[], None], device: torch.device) -> Times:
    """Time consecutive steps."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        elapsed = (time.perf_counter() - began) * 1000 / _STEPS
        return Times(elapsed, elapsed, elapsed)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    begin.record()
    for _ in range(_STEPS):
        step()
    end.record()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    return Times(elapsed * 1000 / _STEPS, (issued - began) * 1000 / _STEPS, begin.elapsed_time(end) / _STEPS)


def measure_recorded(
    setting: Setting, unrecorded: System, batch: tuple[Tensor, Tensor], step: Callable[[], None], rounds: int
) -> dict[str, Any]:
    """Measure times, activity and memory of steps whose graphs are CUDA graphs, in turns with a step that has none."""
    device = setting.device
    with recordings(device):
        before = live(device)
        system = build(RECORDED, setting)
        for _ in range(_WARM_UP_STEPS + 1):
            forget(system)
            forward_backward(system, batch)
        held = live(device) - before
        forward_backward(unrecorded, batch)
        off = distance(local_gradients(system), local_gradients(unrecorded))
        forget(unrecorded)

        def recorded_step() -> None:
            forget(system)
            forward_backward(system, batch)

        with allocations.inputs_held_in_flight(device):
            peak = max(allocations.peaks([recorded_step] * 3, device))
        return measure_graphs(step, recorded_step, rounds, device, off) | {"held": held, "peak": peak}


def measure_captured(
    system: System, batch: tuple[Tensor, Tensor], step: Callable[[], None], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Measure times and activity of a step's CUDA graph, in turns with the step."""
    replay_step, off = captured(system, batch)
    forget(system)
    return measure_graphs(step, replay_step, rounds, device, off)


def measure_graphs(
    step: Callable[[], None], graphed: Callable[[], None], rounds: int, device: torch.device, off: float
) -> dict[str, Any]:
    """Measure times of a step and of one with CUDA graphs, and activity of the latter.

    Args:
        step: runs the step without CUDA graphs.
        graphed: runs the step with CUDA graphs.
        rounds: how often each is timed.
        device: the GPU, or the CPU in a dry run.
        off: the relative distance between the gradients of both. If it is too large, an error is returned instead.
    """
    if not off <= _TOLERANCE:
        return {"error": f"gradients of the replayed graph are off by {off:.1e} of their norm"}
    times = {
        name: [asdict(one) for one in found]
        for name, found in time_rounds({"step": step, "graph": graphed}, rounds, device).items()
    }
    for name, found in times.items():
        show_times(name, found)
    return times | {"activity": asdict(device_profile.profile(graphed, _STEPS, device)), "distance": off}


# --------------------------------------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Job:
    """The work of a set of processes.

    Attributes:
        measure: called with the flags and the mesh of all ranks; None: a job without ranks.
        group: the kind of process group between the ranks.
        dry_group: the kind of process group in a dry run.
        count: the number of ranks; None: as many as the kind of group takes.
    """

    measure: Callable[[argparse.Namespace, DeviceMesh], Any] | None
    group: str
    dry_group: str
    count: int | None = None

    def group_of(self, args: argparse.Namespace) -> str:
        return self.dry_group if args.dry_run else self.group


_JOBS = {
    "parity-nccl": Job(measure_parity, "nccl", "gloo", count=1),
    "parity-gloo": Job(measure_parity, "gloo", "gloo", count=2),
    "code": Job(measure_code, "fake", "fake"),
    "code-pretended": Job(None, "fake", "fake"),
    "time": Job(measure_time, "fake", "fake"),
}


def serve(args: argparse.Namespace) -> None:
    """Do the job of this rank."""
    job = _JOBS[args.job]
    args.group = job.group_of(args)
    if job.measure is None:
        size = _DRY_CODE_SIZE if args.dry_run else _CODE_SIZE
        ranks.give_result(measure_pretended_code(os.environ["GPU_CHECK_ARCH"], size))
    else:
        ranks.served(args, job.measure)


def start(name: str, args: argparse.Namespace, argv: Sequence[str], environment: dict[str, str] | None = None) -> list[Any]:
    """Run a job in processes of its own, on one GPU. Return what each rank measured."""
    job = _JOBS[name]
    job_args = argparse.Namespace(**{**vars(args), "group": job.group_of(args)})
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    command = [__file__, *argv, "--job", name]
    return ranks.run_ranks(command, job_args, one_gpu | (environment or {}), count=job.count, timeout_s=args.timeout)


# --------------------------------------------------------------------------------------------- evaluation


def check_parity(args: argparse.Namespace, argv: Sequence[str]) -> tuple[Any, list[str]]:
    results: dict[str, list[dict[str, Any]]] = {}
    rows, complaints = [], []
    for job in (f"parity-{group}" for group in args.groups):
        results[job] = start(job, args, argv)
        for precision in results[job][0]:
            found = [parity.Comparison(rank[precision]["ours"], rank[precision]["fsdp2"]) for rank in results[job]]
            worst = max(found, key=lambda one: (not one.agrees, one.ours))
            what = f"{_JOBS[job].group_of(args)}, world size {len(found)}, {precision}"
            rows.append([what, f"{worst.ours:.1e}", f"{worst.fsdp2:.1e}"])
            if not worst.agrees:
                why = results[job][0][precision].get("error", f"gradients are off by {worst.ours:.1e} of their norm")
                complaints.append(f"parity: {what}: {why}")
    print("\n" + report.table(["distance from FSDP2 in fp32", "ours", "FSDP2"], rows))
    return results, complaints


def check_code(args: argparse.Namespace, argv: Sequence[str]) -> tuple[Any, list[str]]:
    arch = "sm_90" if args.dry_run else "sm_{}{}".format(*torch.cuda.get_device_capability())
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "GPU_CHECK_ARCH": arch}
    (pretended,) = start("code-pretended", args, argv, no_gpu)
    # A dry run only checks that code comes out the same twice.
    (real,) = start("code-pretended", args, argv, no_gpu) if args.dry_run else start("code", args, argv)
    complaints = []
    for kind in pretended:
        difference = first_difference(real[kind], pretended[kind])
        count = sum(len(lines) for lines in real[kind])
        print(f"\n{kind}: {count} kernels, collectives and waits, " + (difference or "the same without a GPU"))
        if difference:
            complaints.append(f"code: the {kind} differs from what it is without a GPU")
    return {"arch": arch, "real": real, "pretended": pretended}, complaints


def first_difference(real: Sequence[Sequence[str]], pretended: Sequence[Sequence[str]]) -> str | None:
    """Describe the first difference between the launches of graphs, or return None."""
    if len(real) != len(pretended):
        return f"{len(real)} graphs, but {len(pretended)} without a GPU"
    for graph, (lines, others) in enumerate(zip(real, pretended, strict=True)):
        padded = [*others, *["nothing"] * (len(lines) - len(others))]
        for index, line in enumerate([*lines, *["nothing"] * (len(others) - len(lines))]):
            if line != padded[index]:
                return f"different at {index} in graph {graph}:\n  here:          {line}\n  without a GPU: {padded[index]}"
    return None


@dataclass(frozen=True)
class Summary:
    """The figures of a system: times in milliseconds, medians over the rounds; memory in bytes."""

    wall: float
    host: float
    device: float
    kernels: float
    copies: float
    launches: float
    held: int | None = None
    peak: int | None = None

    @staticmethod
    def of(times: Sequence[dict[str, float]], activity: dict[str, float], **memory: int) -> Summary:
        medians = {key: statistics.median(one[key] for one in times) for key in ("wall", "host")}
        counts = {key: activity[key] for key in ("kernels", "copies", "launches")}
        return Summary(**medians, device=activity["kernel_ms"], **counts, **memory)  # type: ignore[arg-type]

    def row(self, name: str, base: Summary) -> list[str]:
        ratio = f"{self.device / base.device:.3f}" if base.device else "-"
        memory = ["-" if count is None else f"{count / 1e6:.0f}" for count in (self.held, self.peak)]
        counts = [f"{count:.0f}" for count in (self.kernels, self.copies, self.launches)]
        return [name, f"{self.wall:.2f}", f"{self.host:.2f}", f"{self.device:.2f}", ratio, *counts, *memory]


def summary_of(found: dict[str, Any]) -> Summary:
    """Summarize the measurements of a system or an optimizer."""
    return Summary.of(found["times"], found["activity"], held=found["held"], peak=found["held"] + found["peak"])


def summarize(result: dict[str, Any]) -> dict[str, Summary]:
    """Summarize each system, and each with CUDA graphs."""
    summary = {name: summary_of(found) for name, found in result["systems"].items()}
    for name, found in result["graphs"].items():
        if "error" not in found:
            memory = {"held": found["held"], "peak": found["held"] + found["peak"]} if "held" in found else {}
            summary[name] = Summary.of(found["graph"], found["activity"], **memory)
    return summary


def goals(summary: dict[str, Summary]) -> list[tuple[str, float, float, bool]]:
    """Return the goals for fsdp_backend: name, value, limit, and whether the goal is met."""
    ours, base, yardstick = summary[_OURS], summary[BASE], summary[YARDSTICK]
    most = _MOST_DEVICE_TIME * base.device
    found = [("device ms", ours.device, most, ours.device <= most)]
    for what in ("wall", "launches", "peak"):
        found.append((what, getattr(ours, what), getattr(yardstick, what), getattr(ours, what) < getattr(yardstick, what)))
    return found


def check_time(args: argparse.Namespace, argv: Sequence[str]) -> tuple[Any, list[str]]:
    with allocations.counting("cpu" if args.dry_run else "cuda") as environment:
        (result,) = start("time", args, argv, environment)
    summary = summarize(result)
    print(f"\n{result['size']}; one of {ranks.FAKE_WORLD_SIZE} pretended ranks; {args.rounds} rounds of {_STEPS} steps\n")
    header = ["wall ms", "host ms", "device ms", "ratio", "kernels", "copies", "launches", "held MB", "peak MB"]
    print(report.table(["forward + backward", *header], [one.row(name, summary[BASE]) for name, one in summary.items()]))
    optimizers = {name: summary_of(found) for name, found in result["optimizers"].items()}
    base = optimizers["flat_optimizer"]
    print("\n" + report.table(["step of AdamW", *header], [one.row(name, base) for name, one in optimizers.items()]))
    if not _PRETENDED_REDUCE:
        print("Pretended ranks of this version of torch do not reduce: gradients of CUDA graphs were not compared here.")
    for name, found in result["graphs"].items():
        if "error" in found:
            print(f"{name}: no CUDA graph: {found['error']}")
    met = goals(summary)
    if args.dry_run:
        print("A dry run: times say nothing of any GPU, and sizes nothing of any model.")
    for what, value, most, reached in [] if args.dry_run else met:
        print(f"goal {'met' if reached else 'MISSED'}: {what} {value:.6g}, at most {most:.6g}")
    result |= {"summary": {name: asdict(one) for name, one in summary.items()}, "goals": met}
    return result, time_complaints(result)


def time_complaints(result: dict[str, Any]) -> list[str]:
    """Return reasons why figures are worthless, and steps that could not be captured."""
    losses = {name: found["loss"] for name, found in result["systems"].items()}
    complaints = []
    for name, found in result["systems"].items():
        # Pretended ranks have other weights than the unsharded model.
        same = name == BASE or math.isclose(found["loss"], losses[_OURS], rel_tol=_TOLERANCE)
        if not (same and math.isfinite(found["loss"])):
            complaints.append(f"time: the loss of {name} is {found['loss']}, that of {_OURS} {losses[_OURS]}")
    complaints += [f"time: {name}: no CUDA graph" for name, found in result["graphs"].items() if "error" in found]
    offloaded = result["optimizers"][_OFFLOADED]
    for what in ("held", "peak") if result["device"] == "cuda" else ():
        if offloaded[what] > offloaded[f"said_{what}"] + _SLACK_BYTES:
            complaints.append(f"time: {_OFFLOADED}: {what} {offloaded[what]} bytes, said {offloaded[f'said_{what}']}")
    if result["device"] == "cuda" and not result["systems"][BASE]["activity"]["kernels"]:
        complaints.append("time: the profiler saw no kernel; is CUPTI installed, and allowed?")
    return complaints


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.is_rank():
        serve(args)
        return
    print(report.headline())
    checks = {"parity": check_parity, "code": check_code, "time": check_time}
    results: dict[str, Any] = {}
    complaints: list[str] = []
    for name in args.checks:
        began = time.perf_counter()
        try:
            results[name], found = checks[name](args, argv)
        except Exception as error:
            # The other checks still run, as time on a GPU is scarce.
            results[name], found = {"error": traceback.format_exc()}, [f"{name}: {error}"]
        seconds = time.perf_counter() - began
        print(f"\n{name}: {seconds:.0f} s, {'; '.join(found) or 'all right'}", flush=True)
        complaints += found
        report.write_json(args.json, complaints=complaints, **results)
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
