"""Ranks that fail write reports, from which ``python -m fsdp_compile.diagnose`` tells who differs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import RanksDisagree, fsdp_backend, fully_shard
from fsdp_compile.diagnose import diagnose, load, main
from tests.common.distributed import RankPools


def _fail(how: str, folder: str) -> None:
    """Train together, until rank 1 does something else. Every rank calls this."""
    os.environ["FSDP_COMPILE_REPORT"] = folder
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in (*model, model):
        fully_shard(module, mesh=DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"))
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    try:
        for _ in range(2):
            compiled(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RanksDisagree if how == "a flag" or dist.get_rank() == 0 else torch.OutOfMemoryError):
            if dist.get_rank() == 1:
                if how == "an exception":
                    raise torch.OutOfMemoryError("in a test")
                model.set_requires_gradient_sync(False)  # type: ignore[operator]
            compiled(torch.ones(2, 8)).sum().backward()
        if how == "an exception" and dist.get_rank() == 1:
            try:
                raise torch.OutOfMemoryError("in a test")
            except torch.OutOfMemoryError:
                model.reset_iter_state()  # type: ignore[operator]
        elif how == "an exception":
            model.reset_iter_state()  # type: ignore[operator]
    finally:
        del os.environ["FSDP_COMPILE_REPORT"]


def test_ranks_that_disagree(own_rank_pools: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_rank_pools[2].run(_fail, how="a flag", folder=str(tmp_path))
    main([str(tmp_path)])
    text = capsys.readouterr().out
    assert text.startswith("Reports of ranks 0-1 of 2.\n")
    assert "Reason, as ranks 0-1 have it:\n  The ranks of process group shard run different programs, and would hang" in text
    assert "Process group shard (ranks 0-1):\n  The ranks have run the same programs, up to program 5.\n" in text
    # The last program of each rank, and its age.
    for rank, program in enumerate(("program 6, begun .*: backward graph that", "program 5, begun .*: forward graph that")):
        assert re.search(rf"rank {rank}: {program} begins with 1: all_gather_into_tensor", text)
    assert "    1: all_gather_into_tensor 36 x float32 over shard" in text
    place = r"rank 0 \(\S+, process \d+\): \S+\.py:\d+, in \w+"
    assert re.search(rf"Where they were:\n  {place}; memory: most of the host", text)


def test_an_exception_on_one_rank(own_rank_pools: RankPools, tmp_path: Path) -> None:
    own_rank_pools[2].run(_fail, how="an exception", folder=str(tmp_path))
    text = diagnose(load(tmp_path))
    sides = r"    rank 0: forward graph.*\n    rank 1: OutOfMemoryError: in a test"
    assert re.search(rf"The ranks differ first at program 5:\n{sides}", text)
    # The other rank has ended without a report.
    (tmp_path / "rank1.json").unlink()
    assert diagnose(load(tmp_path)).startswith("Reports of rank 0 of 2.\nRank 1 has written none: it was killed or stopped, ")


def test_there_are_no_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "There are no reports (rank0.json, ...)" in capsys.readouterr().err
