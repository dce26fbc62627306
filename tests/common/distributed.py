"""A persistent pool of Gloo ranks.

Starting a rank costs seconds (a Python process that imports torch, then a rendezvous), whereas training a
tiny model for a few steps costs tenths of a second. A process per rank and test would therefore spend nearly
all of the suite's time on start-up. A :class:`RankPool` starts its ranks once; they then execute any number
of jobs, a job being a module-level function that every rank calls with the same keyword arguments.

A job that fails on one rank usually leaves the others waiting in a collective, and the process group unusable
for the next job. So a pool is never reused after a failure: its processes are ended, and the next job
starts new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.auto import small_units

from . import cuda_machine, inductor_use
from .lost_guards import refuse_lost_guards
from .stored_graphs import store_nothing
from .wrong_layouts import refuse_wrong_layouts

# Modules that all ranks need.
_PRELOAD = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
# Time for the remaining ranks to report after the first failure, before they count as stuck in a collective.
_GRACE_S = 5.0
# Ranks that together use less than this part of one core only wait for each other. The duration of a job says less: jobs
# compile, on machines that may be several times slower than others, or busy.
_WAITING = 0.01
# Process groups are never destroyed, and each has threads in every rank, one of which Gloo wakes a hundred times a second. With
# hundreds of groups, a job takes minutes that takes seconds on new ranks, and idle ranks use half of the machine.
_MANY_THREADS = 100
_MANY_IDLE_THREADS = 200  # of all ranks together
_IDLE_S = 15.0
_WAKING_THREAD = "gloo_tcp_loop"


class RankFailure(RuntimeError):
    """A job failed on at least one rank; the message describes every rank."""


@functools.cache
def device_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None, device: str = "cpu") -> DeviceMesh:
    """Return the mesh of this shape, kept for the life of the rank: creating a mesh creates process groups."""
    names = names or {1: ("shard",), 2: ("replicate", "shard"), 3: ("replicate", "shard", "tp")}[len(shape)]
    return init_device_mesh(device, shape, mesh_dim_names=names)


def mesh_of_new_groups(shape: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh with groups of its own, as ranks that disagree make groups unusable. Every rank calls this."""
    if len(shape) == 1:
        return DeviceMesh.from_group(dist.new_group(list(range(shape[0]))), "cpu")
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def fake_group(world_size: int = 8, rank: int = 0) -> Iterator[None]:
    """Pretend that this process is one of some ranks inside of the ``with`` block; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    torch._dynamo.reset()
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def collect_once() -> None:
    """Collect garbage, and leave the surviving objects out of later collections.

    The survivors between tests and jobs are torch's modules and caches, which survive later collections as well. Traversing
    them takes longer than many jobs, and an eighth of the time of tests of graphs.
    """
    gc.collect()
    gc.freeze()


def _execute(message: bytes) -> bytes:
    """Execute a pickled job, and return its pickled value or traceback.

    Values are pickled here rather than by the connection, whose pickler would move tensors to shared memory.
    """
    try:
        module, name, kwargs, small_units.MIN_BUCKET_BYTES, inductor_use.is_allowed = pickle.loads(message)
        torch.manual_seed(0)
        return pickle.dumps(("ok", getattr(importlib.import_module(module), name)(**kwargs)))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def _serve(
    rank: int,
    world_size: int,
    store_port: int,
    stack_file: str,
    limit_s: float,
    jobs: Connection,
    device: str,
) -> None:
    """Run the main loop of one rank: receive a job, execute it, send back its value or its traceback."""
    torch.set_num_threads(1)
    refuse_lost_guards()
    refuse_wrong_layouts()
    store_nothing()
    inductor_use.refuse_unless_allowed()
    # A rank blocked in a collective cannot run Python code; the C-level handler can still write its stack.
    stacks = open(stack_file, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    store = dist.TCPStore("127.0.0.1", store_port, timeout=timedelta(seconds=limit_s))
    if device == "pretended cuda":
        cuda_machine.join(rank, world_size, store)
    else:
        timeout = timedelta(seconds=limit_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    while True:
        collect_once()
        try:
            message = jobs.recv_bytes()
        except EOFError:
            break
        if not message:
            break
        reply = _execute(message)
        try:
            jobs.send_bytes(reply)
        except BrokenPipeError:
            break
        _forget_models()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget_models() -> None:
    """Clear the caches through which the models of a job would decide about equal models of the next job."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    programs = sys.modules.get("fsdp_compile.runtime.checked_program")
    if programs is not None:
        programs._arrangements.clear()
        for known in sys.modules["fsdp_compile.runtime.group_logs"]._logs.values():
            known.agreement.agreed.clear()


@dataclass
class _Rank:
    process: Any
    jobs: Connection
    stack_file: Path

    def cpu_s(self) -> float:
        """Return the CPU time that the rank has used, without Gloo's threads, in seconds; 0 on systems that do not tell."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        own = _cpu_ticks(tasks.with_name("stat"))
        for task in tasks.glob("*/comm"):
            with contextlib.suppress(OSError):
                if task.read_text().strip() == _WAKING_THREAD:
                    own -= _cpu_ticks(task.with_name("stat"))
        return own / os.sysconf("SC_CLK_TCK")

    def num_threads(self) -> int:
        """Return the number of the rank's threads; 0 on systems that do not tell."""
        return _stat(Path(f"/proc/{self.process.pid}/stat"))[17]


def _stat(path: Path) -> list[int]:
    """Return the numeric fields of a process's or thread's stat file; zeros if there is no such file.

    The fourth field of the file, the first one after name and state, is at index 1 (man 5 proc_pid_stat).
    """
    try:
        return [0, *map(int, path.read_text().rpartition(")")[2].split()[1:])]
    except OSError:
        return [0] * 50


def _cpu_ticks(path: Path) -> int:
    return sum(_stat(path)[11:13])


class RankPool:
    """Ranks ``0 .. world_size - 1`` of one Gloo world, started by the first job and kept for the next.

    A job fails when its ranks have hardly computed for ``stall_s`` seconds, or are not done after ``limit_s``.
    On "cuda", which a process that was forked after importing torch cannot use, ranks take seconds to start. On "pretended
    cuda", jobs have no process group, and use :func:`tests.common.cuda_machine.machine`.
    """

    def __init__(self, world_size: int, stall_s: float = 120.0, limit_s: float = 800.0, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self.stall_s = stall_s
        self.limit_s = limit_s
        self._ranks: list[_Rank] = []
        self._scratch: Path | None = None
        self._store: dist.TCPStore | None = None
        self._used = 0.0

    def run(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Call ``function(**kwargs)`` on every rank and return the values in rank order.

        The function travels as its qualified name, so it must be at module level.
        """
        if not self._ranks:
            self._start()
        settings = (small_units.MIN_BUCKET_BYTES, inductor_use.is_allowed)
        job = pickle.dumps((function.__module__, function.__qualname__, kwargs, *settings))
        try:
            for rank in self._ranks:
                # A rank that has died shows up as the end of its replies.
                with contextlib.suppress(BrokenPipeError):
                    rank.jobs.send_bytes(job)
            replies = self._collect()
            if len(replies) < self.world_size or any(state != "ok" for state, _ in replies.values()):
                raise RankFailure(self._describe(replies))
        except BaseException:
            self._end()
            raise
        if any(rank.num_threads() > _MANY_THREADS for rank in self._ranks):
            self.close()
        self._used = time.monotonic()
        return [replies[rank][1] for rank in range(self.world_size)]

    def end_if_idle(self) -> None:
        """End ranks that have many threads and have had no job for a while; the next job starts new ones."""
        is_idle = self._ranks and time.monotonic() > self._used + _IDLE_S
        if is_idle and sum(rank.num_threads() for rank in self._ranks) > _MANY_IDLE_THREADS:
            self._end()

    def close(self) -> None:
        """End the loops of the ranks, then kill the ranks that have not ended."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.jobs.send_bytes(b"")
        for rank in self._ranks:
            rank.process.join(timeout=5)
        self._end()

    def _start(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="ranks-"))
        # The store is served here, on any free port: a rank that served it could end before others have left.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = mp.get_context("forkserver" if self.device == "cpu" else "spawn")
        if self.device == "cpu":
            # The server imports torch once; a rank is then forked in milliseconds, with everything imported.
            # Unlike this process, the server starts no threads and creates no tensors, so forking it is safe.
            context.set_forkserver_preload(_PRELOAD)
        environment = {
            # One thread per rank: the ranks together already use every core.
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Inductor's own pool of compile workers would cost more to start than it saves on tiny kernels.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        if self.device == "pretended cuda":
            # Triton reads it when it is imported.
            environment["TRITON_INTERPRET"] = "1"
        with _environment(environment):
            for index in range(self.world_size):
                ours, theirs = context.Pipe()
                stack_file = self._scratch / f"stack-{index}"
                arguments = (
                    index,
                    self.world_size,
                    self._store.port,
                    str(stack_file),
                    self.limit_s,
                    theirs,
                    self.device,
                )
                process = context.Process(target=_serve, args=arguments, name=f"rank-{index}-of-{self.world_size}", daemon=True)
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours, stack_file))

    def _collect(self) -> dict[int, tuple[str, Any]]:
        replies: dict[int, tuple[str, Any]] = {}
        pending = {rank.jobs: index for index, rank in enumerate(self._ranks)}
        limit = time.monotonic() + self.limit_s
        computed, deadline = self._cpu_s(), min(limit, time.monotonic() + self.stall_s)
        failed = False
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                before, computed = computed, self._cpu_s()
                if failed or time.monotonic() >= limit or computed - before < _WAITING * self.stall_s:
                    break
                deadline = min(limit, time.monotonic() + self.stall_s)
            for connection in ready:
                assert isinstance(connection, Connection)
                index = pending.pop(connection)
                try:
                    replies[index] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._ranks[index].process.join(timeout=1)
                    replies[index] = ("died", f"exit code {self._ranks[index].process.exitcode}")
                if replies[index][0] != "ok" and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        return replies

    def _cpu_s(self) -> float:
        return sum(rank.cpu_s() for rank in self._ranks)

    def _describe(self, replies: dict[int, tuple[str, Any]]) -> str:
        """Return one section per distinct state, naming the ranks that share it."""
        for index, rank in enumerate(self._ranks):
            if index not in replies and rank.process.is_alive():
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        sections: dict[str, list[int]] = {}
        for index, rank in enumerate(self._ranks):
            state, value = replies.get(index, ("stuck", None))
            if state == "ok":
                text = "finished"
            elif state == "stuck":
                stack = rank.stack_file.read_text() if rank.stack_file.exists() else ""
                text = f"did not finish; its stack, innermost call first:\n{stack}"
            else:
                text = f"{state}:\n{value}"
            sections.setdefault(text, []).append(index)
        return "\n" + "\n".join(f"--- rank {', '.join(map(str, who))} {text}" for text, who in sections.items())

    def _end(self) -> None:
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.jobs.close()
        self._ranks = []
        self._store = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


class RankPools:
    """The pools of a test session by world size; each starts when a test first asks for it.

    Args:
        device: the device of the pools.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, world_size: int) -> RankPool:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, device=self._device)
        return self._pools[world_size]

    def end_idle(self) -> None:
        """End idle ranks whose threads take time from others."""
        for pool in self._pools.values():
            pool.end_if_idle()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
