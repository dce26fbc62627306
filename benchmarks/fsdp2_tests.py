"""Run FSDP2's own tests, with torch's ``fully_shard`` and with this library's, on CPU ranks.

The tests are those of PyTorch's repository, ``test/distributed/_composable/fsdp``, which wheels of torch do not have. Give the
files of the release that is installed::

    python benchmarks/fsdp2_tests.py pytorch/test/distributed/_composable/fsdp/test_fully_shard_training.py ...

Each test runs once for each system:

- ``fsdp2``: torch's ``fully_shard``;
- ``fsdp2-compiled``: the same, with each outermost sharded module compiled by torch's ``aot_eager``;
- ``ours``: this library's ``fully_shard``, uncompiled;
- ``ours-compiled``: the same, with each outermost sharded module compiled by ``fsdp_backend``, lowering ``aot_eager``.

Ranks serve many tests, and start anew after a failure. Not as in torch's own run are:

- Two ranks, more where a test demands more (``skip_if_lt_x_gpu``); 2-D meshes get four.
- ``run_subtests`` tries each value of each setting, not each combination (``--all-settings`` does).
- Float32 tensors may differ by 1e-4 of their largest value, and by 2e-5, as two orders of summation meet.
- An error in other words counts as the same error.
- ``CommDebugMode`` counts functional collectives, which this library calls, as the ``c10d`` ones that FSDP2 calls.
- Tests that are skipped without a GPU run, if they can.

Results are printed as a table, and ``--json`` writes the outcome of each test with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import multiprocessing
import re
import sys
import tempfile
import traceback
import unittest
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import report
from harness.flags import names_of

SYSTEMS = ("fsdp2", "fsdp2-compiled", "ours", "ours-compiled")
#: Seconds for the other ranks after one has failed.
GRACE_S = 20


@dataclass(frozen=True)
class Test:
    """A test of a file, and the ranks that it wants."""

    file: str
    case: str
    name: str
    ranks: int


@dataclass
class Outcome:
    """The result of a test with one system: ``passed``, ``failed``, ``skipped`` or ``hung``, and the error."""

    file: str
    name: str
    system: str
    result: str
    error: str = ""


# --------------------------------------------------------------------------------------------- in a rank


def _patch_test_utilities(all_settings: bool) -> None:
    """Replace torch's test classes, which start processes for each test, and what asks for GPUs."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal import common_distributed, common_fsdp, common_utils
    from torch.testing._internal.common_utils import TestCase

    class RankTestCase(TestCase):  # type: ignore[misc]
        """The part of ``FSDPTest`` and its siblings that tests call, in a process that is a rank already."""

        device = torch.device("cpu")
        rank = property(lambda self: dist.get_rank())
        process_group = property(lambda self: dist.group.WORLD)

        def perThreadSetUp(self) -> None: ...

        def run_subtests(self, settings: dict[str, list[Any]], function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            for chosen in [settings] if all_settings else each_value_once(settings):
                common_distributed.run_subtests(self, chosen, function, *args, **kwargs)

        def assertEqual(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
            if not args and not kwargs.keys() & {"atol", "rtol"} and _is_float(x):
                expected = torch.as_tensor(y).detach().double()
                largest = expected.abs().amax().item() if expected.numel() else 0.0
                kwargs |= {"atol": max(2e-5, 1e-4 * largest), "rtol": 1e-4}
            super().assertEqual(x, y, *args, **kwargs)

        def assertRaisesRegex(self, kind: Any, regex: Any, *args: Any, **kwargs: Any) -> Any:
            return self.assertRaises((kind, RuntimeError, ValueError, TypeError, NotImplementedError), *args, **kwargs)

    class ContinuousTestCase(RankTestCase):
        @classmethod
        def _init_pg(cls, *args: Any) -> None: ...

    common_fsdp.FSDPTest = common_fsdp.FSDPTestMultiThread = RankTestCase
    common_fsdp.FSDPTestContinuous = common_distributed.MultiProcContinuousTest = ContinuousTestCase
    common_fsdp.compiled_fsdp_test = lambda compile_compute_on_module=None: lambda test: test
    for name in ("skip_if_lt_x_gpu", "skip_if_rocm_arch_multiprocess"):
        setattr(common_distributed, name, functools.partial(_wants_ranks, name))
    common_utils.skipIfTorchInductor = lambda *args, **kwargs: lambda test: test
    common_distributed.requires_nccl_version = lambda *args: lambda test: test
    torch.cpu._sleep = lambda cycles: None  # type: ignore[attr-defined]
    CommDebugMode.get_comm_counts = _as_c10d(CommDebugMode.get_comm_counts)
    # Torch's returns "cpu", which is no index of a device.
    torch.cpu.current_device = lambda: None  # type: ignore[assignment, return-value]
    torch.cpu.device_count = lambda: dist.get_world_size() if dist.is_initialized() else 2


def _as_c10d(get_comm_counts: Callable[[Any], dict[Any, int]]) -> Callable[[Any], dict[Any, int]]:
    # Over Gloo, this library reduces and scatters by an all-to-all.
    names = {
        torch.ops.c10d_functional.all_gather_into_tensor: torch.ops.c10d._allgather_base_,
        torch.ops.c10d_functional.all_to_all_single: torch.ops.c10d._reduce_scatter_base_,
        torch.ops.c10d_functional.reduce_scatter_tensor: torch.ops.c10d._reduce_scatter_base_,
    }

    def counts(mode: Any) -> dict[Any, int]:
        found: Counter[Any] = Counter()
        for operator, count in get_comm_counts(mode).items():
            found[names.get(operator, operator)] += count
        return found

    return counts


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.dtype is torch.float32)


def _wants_ranks(decorator: str, count: Any = 2, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        if decorator == "skip_if_lt_x_gpu":
            test.wanted_ranks = count
        return test

    return mark


def each_value_once(settings: dict[str, list[Any]]) -> Iterator[dict[str, list[Any]]]:
    """Yield settings of one combination each, such that each value occurs."""
    for index in range(max(map(len, settings.values()))):
        yield {key: [values[index % len(values)]] for key, values in settings.items()}


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    # Files ask for the accelerator when they are imported; Dynamo asks whether there is one.
    with unittest.mock.patch.object(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu")):
        spec.loader.exec_module(module)
    return module


def _cases(module: Any) -> Iterator[type[unittest.TestCase]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__:
            yield value


# Never left: a block that nobody references ends.
_for_good = contextlib.ExitStack()


def _use_system(system: str) -> None:
    """Put the ``fully_shard`` of a system in the place of torch's, for good."""
    how: dict[str, Any] = {"backend": "aot_eager"}
    if system.startswith("ours"):
        import fsdp_compile

        _for_good.enter_context(fsdp_compile.patch_fsdp2())
        assert torch.distributed.fsdp.fully_shard is fsdp_compile.fully_shard
        how = {"backend": fsdp_compile.fsdp_backend, "options": {"lowering": "aot_eager"}}
    if not system.endswith("compiled"):
        return
    fully_shard = torch.distributed.fsdp.fully_shard

    @functools.wraps(fully_shard)
    def shard_and_compile(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = fully_shard(module, *args, **kwargs)
        for outermost in module if isinstance(module, (list, tuple)) else [module]:
            for inner in outermost.modules():
                inner._compiled_call_impl = None
            outermost.compile(**how)
        return sharded

    torch.distributed.fsdp.fully_shard = shard_and_compile


def serve(rank: int, ranks: int, system: str, all_settings: bool, pipe: Connection) -> None:
    """Run the tests that come through a pipe as one of several ranks, and send back how each ended."""
    torch.set_num_threads(1)
    _patch_test_utilities(all_settings)
    _use_system(system)
    modules: dict[str, Any] = {}
    while True:
        test, store = pipe.recv()
        if test.file not in modules:
            modules[test.file] = _load(Path(test.file))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        pipe.send(_run(getattr(modules[test.file], test.case), test.name, ranks))
        dist.destroy_process_group()


def _run(case: Any, name: str, ranks: int) -> tuple[str, str]:
    test = type(case.__name__, (case,), {"world_size": ranks})(name)
    result = unittest.TestResult()
    torch._dynamo.reset()
    torch.manual_seed(0)
    test.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    failures = [*result.errors, *result.failures]
    return ("failed", "".join(text for _, text in failures)) if failures else ("passed", "")


# ------------------------------------------------------------------------------------------ in the parent


class Ranks:
    """Processes that run tests together. They start when first used, and anew after a failure."""

    def __init__(self, ranks: int, system: str, all_settings: bool):
        self._args = ranks, system, all_settings
        self._processes: list[tuple[Any, Connection]] = []

    def run(self, test: Test, timeout_s: float) -> tuple[str, str]:
        """Run a test and return its result, and the error of the first rank that failed."""
        if not self._processes:
            self._start()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for _, pipe in self._processes:
                pipe.send((test, f"{folder}/store"))
            ended = self._collect(timeout_s)
        results = [result for result, _ in ended]
        for result in ("failed", "hung", "skipped"):
            if result in results:
                if result != "skipped":
                    self.stop()
                return ended[results.index(result)]
        return "passed", ""

    def _collect(self, timeout_s: float) -> list[tuple[str, str]]:
        """Wait for all ranks. Those that wait for a rank that has failed get :data:`GRACE_S`."""
        ended: list[tuple[str, str]] = []
        waiting = [pipe for _, pipe in self._processes]
        while waiting:
            ready = wait(waiting, GRACE_S if any(result == "failed" for result, _ in ended) else timeout_s)
            if not ready:
                return [*ended, ("hung", f"no end after {timeout_s} s")]
            for pipe in ready:
                waiting.remove(pipe)  # type: ignore[arg-type]
                try:
                    ended.append(pipe.recv())  # type: ignore[union-attr]
                except EOFError:
                    ended.append(("failed", "the process of a rank has ended"))
        return ended

    def _start(self) -> None:
        ranks = self._args[0]
        context = multiprocessing.get_context("spawn")
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, *self._args, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, mine))

    def stop(self) -> None:
        """End the processes."""
        for process, _ in self._processes:
            process.kill()
            process.join()
        self._processes.clear()


def find_tests(file: Path) -> list[Test]:
    """Return the tests of a file with the ranks that each wants. The test utilities must be replaced already."""
    tests = []
    for case in _cases(_load(file)):
        for name in unittest.TestLoader().getTestCaseNames(case):
            tests.append(Test(str(file), case.__name__, name, _ranks_of(case, name)))
    return tests


def _ranks_of(case: Any, name: str) -> int:
    """Return 1 or 2 ranks, or as many as the test demands; 4 for a mesh of two dimensions, where a test takes what there is."""
    if (world_size := getattr(case(name), "world_size", 2)) in (1, 4):
        return world_size
    least = 4 if re.search("hsdp|nd_mesh|2d", f"{case.__name__} {name}".lower()) else 2
    return max(least, getattr(getattr(case, name), "wanted_ranks", 2))


def summarize(outcomes: list[Outcome]) -> str:
    """Return a table: tests that passed, by file and system."""
    counts: Counter[tuple[str, str]] = Counter()
    tests: dict[str, set[str]] = {}
    for outcome in outcomes:
        tests.setdefault(outcome.file, set()).add(outcome.name)
        counts[outcome.file, outcome.system] += outcome.result == "passed"
    rows = [[file, str(len(names)), *(str(counts[file, system]) for system in SYSTEMS)] for file, names in tests.items()]
    sums = [str(sum(counts[file, system] for file in tests)) for system in SYSTEMS]
    rows.append(["together", str(sum(map(len, tests.values()))), *sums])
    return report.table(["file", "tests", *SYSTEMS], rows)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="files of PyTorch's test/distributed/_composable/fsdp")
    parser.add_argument(
        "--systems", type=names_of("system", SYSTEMS), default=list(SYSTEMS), metavar="A,B", help=f"of {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--only", default="", help="a regular expression that names of tests match")
    parser.add_argument("--all-settings", action="store_true", help="each combination of the settings of a test")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a test")
    report.add_flags(parser)
    args = parser.parse_args(argv)
    if missing := [str(file) for file in args.files if not file.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    return args


def main() -> None:
    args = parse_args()
    _patch_test_utilities(args.all_settings)
    tests = [test for file in args.files for test in find_tests(file) if re.search(args.only, test.name)]
    outcomes: list[Outcome] = []
    for system in args.systems:
        pools: dict[int, Ranks] = {}
        for test in tests:
            pool = pools.setdefault(test.ranks, Ranks(test.ranks, system, args.all_settings))
            try:
                result, error = pool.run(test, args.timeout)
            except (OSError, EOFError):
                pool.stop()
                result, error = "failed", traceback.format_exc()
            outcomes.append(Outcome(Path(test.file).stem, test.name, system, result, error))
            print(f"{system:14} {result:8} {test.name}", flush=True)
        for pool in pools.values():
            pool.stop()
        report.write_json(args.json, outcomes=[asdict(outcome) for outcome in outcomes])
    print(f"\n{report.headline()}\n\n{summarize(outcomes)}")


if __name__ == "__main__":
    main()
