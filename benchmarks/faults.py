"""Count what faults of one rank do to the other ranks: here and with FSDP2.

In each run of a small training, one rank meets one fault, in one state. A run ends

- equal: all ranks end, with the parameters of a run without the fault;
- skipped: all ranks end, with the parameters of a run in which all ranks skip the batch of the fault;
- error: each living rank ends with an error, and a restart from the last checkpoint ends with the parameters of a run without
  the fault;
- hangs: some rank lives longer than the timeout of the process group and ten seconds;
- wrong: otherwise.

Parameters are compared to the bit. The seconds are those from the fault to the end of the last living rank.

    python benchmarks/faults.py --draws 200
    python benchmarks/faults.py --systems aot_eager --states backward,hook --faults caught
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.flags import names_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SYSTEMS = ("fsdp2", "fsdp2-compiled", "eager", "aot_eager", "inductor")
STATES = ("data", "forward", "backward", "hook", "compile", "optimizer", "save")
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
FAULTS = {
    "kill": "SIGKILL",
    "terminate": "SIGTERM",
    "stop": "SIGSTOP, for good",
    "pause": "SIGSTOP for 5 s",
    "raise": "an exception that ends the rank",
    "caught": "an exception that the training loop catches, to go on with the next batch",
    "twice": "one forward and backward more than other ranks",
    "alone": "full_tensor() of a parameter on this rank alone",
}
_WIDTH, _STEPS, _FAULT_AT, _SAVES_EVERY = 16, 6, 3, 2
# States in which a rank can run what communicates besides.
_BETWEEN = ("data", "optimizer", "save")
# States in which an exception leaves the library, or the graph that it made. No library knows what the loop catches elsewhere.
_IN_A_STEP = ("forward", "backward", "hook", "compile")


class Cell(NamedTuple):
    """A run: a system, the state in which the fault comes, the fault, and the rank that meets it."""

    system: str
    state: str
    fault: str
    victim: int


# ---------------------------------------------------------------------------------------------- in a rank


def _pass_by(_state: str) -> None:
    """Meet the fault, if it is that of a state. :func:`train` replaces this."""


def _passing_by(state: str, traced: str = "") -> Any:
    """Return an operator that copies a tensor, and passes by a state when it runs, and by ``traced`` while it is traced."""

    @torch.library.custom_op(f"faults::{state}", mutates_args=())
    def copy(x: Tensor) -> Tensor:
        _pass_by(state)
        return x.clone()

    @copy.register_fake
    def _(x: Tensor) -> Tensor:
        _pass_by(traced)
        return torch.empty_like(x)

    return copy


_in_forward, _in_backward = _passing_by("forward", traced="compile"), _passing_by("backward")
_in_forward.register_autograd(lambda _ctx, grad: _in_backward(grad))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(_in_forward(torch.relu(self.up(x))))


class Fault:
    """The fault of this rank. Calling it where the fault is to happen makes it happen, once."""

    def __init__(self, args: argparse.Namespace, step: Callable[[], Any], alone: Callable[[], Any]):
        self.is_near = False
        self._args, self._does = args, {"twice": step, "alone": alone}
        self._is_over = args.fault not in FAULTS or args.victim != _place()["rank"]

    def __call__(self, state: str) -> None:
        if self._is_over or not self.is_near or state != self._args.state:
            return
        self._is_over = True
        print("now", flush=True)
        if self._args.fault in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self._args.fault])
        elif self._args.fault in self._does:
            self._does[self._args.fault]()
        elif self._args.fault == "caught":
            raise torch.OutOfMemoryError("a fault")
        else:
            raise AssertionError("a fault")


def _place() -> dict[str, int]:
    return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def train(args: argparse.Namespace) -> None:
    """Train, meet the fault, and print a digest of the parameters at the end."""
    global _pass_by
    torch.set_num_threads(1)
    address = f"tcp://localhost:{args.port}"
    dist.init_process_group("gloo", init_method=address, timeout=timedelta(seconds=args.timeout_s), **_place())
    model, run = build(args.system, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved = Path(args.saves)

    def batch(step: int) -> Tensor:
        return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))

    def backward(step: int) -> None:
        run(batch(step)).square().mean().backward()

    fault = Fault(args, lambda: backward(0), lambda: next(model.parameters()).full_tensor())
    _pass_by = fault
    next(model[1].parameters()).register_post_accumulate_grad_hook(lambda _param: fault("hook"))
    for step in range(load(model, optimizer, saved), _STEPS):
        fault.is_near = step == _FAULT_AT
        if fault.is_near and args.fault == "skip":
            continue
        if fault.is_near and args.state == "compile":
            torch.compiler.reset()
        fault("data")
        try:
            backward(step)
            fault("optimizer")
            optimizer.step()
        except RuntimeError:
            if args.fault != "caught":
                raise
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
        optimizer.zero_grad()
        if (step + 1) % _SAVES_EVERY == 0:
            save(model, optimizer, saved / str(step + 1), lambda: fault("save"))
    full = [param.full_tensor().detach().numpy().tobytes() for param in model.parameters()]
    print("digest", hashlib.sha256(b"".join(full)).hexdigest(), flush=True)
    # The first rank serves the store. Connections may close before all have left.
    with contextlib.suppress(RuntimeError):
        dist.barrier()


def build(system: str, mesh: DeviceMesh) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return the sharded model, and what a step calls: the model, or its compiled form."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(3)))
    if system.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard
    else:
        from fsdp_compile import fsdp_backend, fully_shard
    for block in model:
        fully_shard(block, mesh=mesh)
        if system == "fsdp2-compiled":
            block.compile(backend="aot_eager")
    fully_shard(model, mesh=mesh)
    if system in ("aot_eager", "inductor"):
        return model, torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    return model, model


def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path, before: Callable[[], None]) -> None:
    names = ("model", "optimizer")
    state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    before()
    dcp.save(state, checkpoint_id=folder)


def load(model: Any, optimizer: torch.optim.Optimizer, saved: Path) -> int:
    """Load the newest whole checkpoint, whose metadata is written last, and return the step that comes next."""
    whole = [int(path.parent.name) for path in saved.glob("*/.metadata")]
    if not whole:
        return 0
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=saved / str(max(whole)))
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return max(whole)


# ------------------------------------------------------------------------------------------- around ranks


class Run:
    """The ranks of a run, and how each has ended. :func:`harness.ranks.run_ranks` would kill all when one fails.

    Args:
        cell: the run.
        args: the flags.
        folder: where checkpoints are saved and loaded, and ranks write their logs.
    """

    def __init__(self, cell: Cell, args: argparse.Namespace, folder: Path):
        self._cell, self._args = cell, args
        self._logs = [folder / f"{rank}.log" for rank in range(args.ranks)]
        port = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
        flags = {"system": cell.system, "state": cell.state, "fault": cell.fault, "victim": cell.victim, "port": port}
        flags |= {"saves": folder, "timeout-s": args.timeout_s}
        command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in flags.items())]
        self._ranks = []
        for rank, log in enumerate(self._logs):
            own = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(args.ranks), "OMP_NUM_THREADS": "1"}
            with log.open("w") as file:
                self._ranks.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))

    def outcome(self) -> tuple[str, float, list[str]]:
        """Wait for the ranks.

        Returns:
            "ended", "error" or "hangs"; the seconds since the fault; the digest or the error of each rank.
        """
        began, fault_at = time.monotonic(), None
        try:
            while True:
                now = time.monotonic()
                if fault_at is None and "\nnow\n" in f"\n{self._logs[self._cell.victim].read_text()}":
                    fault_at = now
                    if self._cell.fault == "pause":
                        time.sleep(5)
                        self._ranks[self._cell.victim].send_signal(signal.SIGCONT)
                living = [rank for rank, process in enumerate(self._ranks) if process.poll() is None]
                # A stopped rank does not end.
                living = [rank for rank in living if (rank, self._cell.fault) != (self._cell.victim, "stop")]
                since = now - (fault_at or began)
                if not living:
                    said = [self._said(rank) for rank in range(len(self._ranks))]
                    return ("ended" if all(text.startswith("digest") for text in said) else "error"), since, said
                if since > (self._args.timeout_s + 10 if fault_at else self._args.limit_s):
                    return "hangs", since, [f"rank {rank} lives" for rank in living]
                time.sleep(0.1)
        finally:
            for process in self._ranks:
                process.kill()
                process.wait()

    def _said(self, rank: int) -> str:
        lines = self._logs[rank].read_text().splitlines()
        digests = [line for line in lines if line.startswith("digest")]
        errors = [line for line in lines if "Error" in line or "RanksDisagree" in line]
        return (digests or errors[-1:] or lines[-1:] or ["nothing"])[0]


def judge(cell: Cell, args: argparse.Namespace, references: dict[str, str]) -> dict[str, Any]:
    """Run a cell, and again from its last checkpoint if it ends with an error. Return how it ended."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        how, seconds, said = Run(cell, args, folder).outcome()
        if how == "ended":
            same = [name for name, digest in references.items() if set(said) == {digest}]
            how = same[0] if same else "wrong"
        elif how == "error":
            survivors = [text for rank, text in enumerate(said) if rank != cell.victim]
            again, _, digests = Run(cell._replace(fault="none"), args, folder).outcome()
            if again != "ended" or set(digests) != {references["equal"]} or any("digest" in text for text in survivors):
                how = "wrong"
    return {**cell._asdict(), "how": how, "seconds": round(seconds, 1), "said": said}


def reference(args: argparse.Namespace, system: str, fault: str) -> str:
    """Return the digest of the parameters after a run without a fault: all batches, or all but one."""
    with tempfile.TemporaryDirectory() as scratch:
        how, _, said = Run(Cell(system, "data", fault, 0), args, Path(scratch)).outcome()
    if how != "ended" or len(set(said)) != 1:
        raise RuntimeError(f"{system} does not train without a fault: {said}")
    return said[0]


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield all runs that the flags ask for, and that make sense."""
    for system, state, fault, victim in itertools.product(args.systems, args.states, args.faults, (0, args.ranks - 1)):
        only_in = {"twice": _BETWEEN, "alone": _BETWEEN, "caught": _IN_A_STEP}.get(fault, STATES)
        if state in only_in and (state != "compile" or system not in ("fsdp2", "eager")):
            yield Cell(system, state, fault, victim)


def table(found: Sequence[Mapping[str, Any]], systems: Sequence[str]) -> str:
    """Return a row for each fault: for each system, how its runs ended, how many, and the seconds of the slowest."""
    lines = ["| fault | " + " | ".join(systems) + " |", "|---" * (1 + len(systems)) + "|"]
    for fault, what in FAULTS.items():
        row = []
        for system in systems:
            runs = [run for run in found if (run["system"], run["fault"]) == (system, fault)]
            counts = Counter(run["how"] for run in runs).most_common()
            slowest = {how: max(run["seconds"] for run in runs if run["how"] == how) for how, _ in counts}
            row.append(", ".join(f"{count} {how} ({slowest[how]:.0f} s)" for how, count in counts))
        if any(row):
            lines.append(f"| {what} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, names in (("system", SYSTEMS), ("state", STATES), ("fault", tuple(FAULTS))):
        listed = f"some of {','.join(names)}; default: all"
        parser.add_argument(f"--{kind}s", type=names_of(kind, names), default=list(names), metavar="NAMES", help=listed)
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--timeout-s", type=int, default=20, help="timeout of the process group in seconds (default 20)")
    parser.add_argument("--limit-s", type=int, default=300, help="seconds that a run may take up to its fault (default 300)")
    parser.add_argument("--draws", type=int, help="so many runs, drawn at random; default: each once")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--json", type=Path, help="write all runs to this file, after each run")
    for flag in ("system", "state", "fault", "saves"):
        parser.add_argument(f"--{flag}", help=argparse.SUPPRESS)
    for flag in ("port", "victim"):
        parser.add_argument(f"--{flag}", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.port is not None:
        train(args)
        return
    wanted = list(cells(args))
    if not wanted:
        parser.error("no run has such a state and such a fault")
    if args.draws is not None:
        wanted = random.Random(args.seed).choices(wanted, k=args.draws)
    found: list[dict[str, Any]] = []
    references: dict[str, dict[str, str]] = {}
    for cell in wanted:
        if cell.system not in references:
            references[cell.system] = {
                how: reference(args, cell.system, fault) for how, fault in (("equal", "none"), ("skipped", "skip"))
            }
        found.append(judge(cell, args, references[cell.system]))
        print(*(found[-1][key] for key in (*Cell._fields, "how", "seconds")), flush=True)
        for text in found[-1]["said"]:
            print("   ", text[:160], flush=True)
        if args.json:
            args.json.write_text(json.dumps({"torch": torch.__version__, "ranks": args.ranks, "runs": found}))
    print(table(found, args.systems))


if __name__ == "__main__":
    main()
