"""``python -m tests.fuzz --lowering inductor --seeds 200 --ranks 2x2``: run cases, and shrink what fails to a script."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import partial

from tests.common.distributed import RankFailure, RankPool
from tests.common.lost_guards import refuse_lost_guards

from .case import Case
from .compare import check
from .draw import draw
from .generate import generate
from .shrink import shrink

#: Seconds between two lines with the number of cases that have run.
_SAY_S = 300.0

_SCRIPT = '''\
"""Run it with: torchrun --nproc-per-node {world} FILE, from where the folder "tests" is."""

import torch.distributed as dist

from tests.fuzz.case import *
from tests.fuzz.compare import check

CASE = {case}

dist.init_process_group("gloo")
for line in check(CASE, {system!r}, {oracle!r}, {device!r}):
    if dist.get_rank() == 0:
        print(line)
dist.destroy_process_group()
'''


def run(pool: RankPool, case: Case, system: str, oracle: str, device: str) -> list[str]:
    """Run a case. Return lines with the differences, or with the error that ended the ranks.

    For the system "cuda", only generate code.
    """
    if system == "cuda":
        try:
            generate(case)
        except Exception:
            return traceback.format_exc().splitlines()
        return []
    try:
        return list(pool.run(check, case=case, system=system, oracle=oracle, device=device)[0])
    except RankFailure as error:
        return str(error).strip().splitlines()


def kind_of(lines: list[str]) -> str:
    """Return the kind of a failure: its error or "difference"; empty if nothing failed."""
    if not lines:
        return ""
    errors = [line.strip() for line in lines if "Error: " in line or "did not finish" in line or "died" in line]
    return errors[-1].split(":")[0] if errors else "difference"


def is_of_fsdp2(pool: RankPool, case: Case, system: str, device: str) -> bool:
    """Return whether whole parameters agree with the library, but not with FSDP2."""
    return not run(pool, case, system, "whole", device) and bool(run(pool, case, "fsdp2", "whole", device))


def script(case: Case, system: str, oracle: str, device: str = "cpu") -> str:
    """Return a script that runs one case."""
    return _SCRIPT.format(world=case.world, case=case, system=system, oracle=oracle, device=device)


def for_gpu(case: Case) -> Case:
    """Leave out of a case what the library refuses on a GPU: parameters with extensions that are kept on the host."""
    extended = any(block.kind == "extended" for block in case.model.blocks)
    return replace(case, features=tuple(one for one in case.features if one != "offload")) if extended else case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--lowering",
        choices=("eager", "aot_eager", "inductor", "cuda"),
        default="aot_eager",
        help="cuda: generate code without a GPU, and run nothing",
    )
    parser.add_argument("--seeds", type=int, default=20, help="how many cases")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", default="2", help="2, 4, or 2x2: two replicas of two shards")
    parser.add_argument("--oracle", choices=("whole", "fsdp2", "eager"), default="whole", help="what to compare with")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="on cuda, all ranks share one GPU, by Gloo")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further case after this time")
    parser.add_argument("--no-shrink", action="store_true", help="print what fails as it was drawn")
    given = parser.parse_args()
    refuse_lost_guards()
    mesh = tuple(map(int, given.ranks.split("x")))
    drawn = partial(draw, mesh=mesh, compiled=given.lowering != "eager", oracle=given.oracle)
    how = given.lowering, given.oracle, given.device
    failed: list[int] = []
    of_fsdp2: list[int] = []
    count = 0
    start = said = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        pool = RankPool(drawn(given.first).world, device=given.device)
        try:
            for seed in range(given.first, given.first + given.seeds):
                if time.monotonic() - start > given.seconds:
                    break
                case = drawn(seed) if given.device == "cpu" else for_gpu(drawn(seed))
                lines = run(pool, case, *how)
                count += 1
                if time.monotonic() - said > _SAY_S:
                    said = time.monotonic()
                    print(f"{count} cases, {len(failed)} failed", flush=True)
                if not lines:
                    continue
                if given.oracle == "fsdp2" and is_of_fsdp2(pool, case, given.lowering, given.device):
                    of_fsdp2.append(seed)
                    continue
                failed.append(seed)
                print(f"--- seed {seed}: {kind_of(lines)}", *lines[-12:], sep="\n", flush=True)
                if not given.no_shrink:
                    wanted = kind_of(lines)
                    case = shrink(case, lambda one: kind_of(run(pool, one, *how)) == wanted)  # noqa: B023
                    lines = run(pool, case, *how)
                print(*lines[-4:], script(case, *how), sep="\n", flush=True)
        except KeyboardInterrupt:
            print("Interrupted.")
        took = time.monotonic() - start
        print(
            f"{count} cases, {len(failed)} failed{f': {failed}' if failed else ''}; {took / max(count, 1):.2f} s each",
            flush=True,
        )
        if of_fsdp2:
            print(f"In {len(of_fsdp2)} FSDP2 fails, or differs from whole parameters: {of_fsdp2}")
        pool.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
