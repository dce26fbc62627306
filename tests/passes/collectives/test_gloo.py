from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from passes.collectives import gloo, gloo_channels
from tests.common.distributed import RankPools, device_mesh

_c10d = torch.ops._c10d_functional


def _shard(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) % 7 + 10 * rank).to(dtype)


def _set_channels(group: ProcessGroup, wanted: bool) -> None:
    gloo.install("cpu")
    if wanted:
        gloo_channels.open_channels(group)
    else:
        gloo_channels._channels.pop(group, None)


def _gather_many(channels: bool) -> None:
    """Start gathers of several sizes and dtypes, and wait for the last one first; a job for ranks."""
    group = device_mesh((4,)).get_group()
    _set_channels(group, channels)
    whats = [
        (1, torch.float32),
        (200_000, torch.float32),
        (3, torch.bfloat16),
        (0, torch.float32),
        (70_000, torch.int8),
        (5, torch.complex64),
    ]
    for _ in range(3):
        flight = [_c10d.all_gather_into_tensor(_shard(group.rank(), *what), 4, group.group_name) for what in whats]
        for gathered, what in reversed(list(zip(flight, whats, strict=True))):
            expected = torch.cat([_shard(rank, *what) for rank in range(4)])
            assert torch.equal(_c10d.wait_tensor(gathered), expected)


def _exchange_unevenly(channels: bool, dtype: torch.dtype) -> None:
    """Exchange matrices: rank i sends ``rows[i][j]`` rows, or none, to rank j; a job for ranks."""
    group = device_mesh((4,)).get_group()
    _set_channels(group, channels)
    rows = [[0, 3, 1, 2], [5, 1, 0, 0], [1, 1, 1, 40_000], [0, 0, 2, 1]]

    def piece(source: int, target: int) -> Tensor:
        return torch.full((rows[source][target], 3), 10.0 * source + target, dtype=dtype)

    rank = group.rank()
    sent = torch.cat([piece(rank, target) for target in range(4)])
    received = [rows[source][rank] for source in range(4)]
    flight = [_c10d.all_to_all_single(sent, received, rows[rank], group.group_name) for _ in range(3)]
    for one in reversed(flight):
        assert torch.equal(_c10d.wait_tensor(one), torch.cat([piece(source, rank) for source in range(4)]))


@pytest.mark.parametrize("channels", [True, False])
def test_collectives_in_flight_do_not_mix(rank_pools: RankPools, channels: bool) -> None:
    rank_pools[4].run(_gather_many, channels=channels)
    rank_pools[4].run(_exchange_unevenly, channels=channels, dtype=torch.float32)
    rank_pools[4].run(_exchange_unevenly, channels=channels, dtype=torch.complex64)


class Channel:
    """A backend that logs sends and receives."""

    def __init__(self, name: str, log: list[str]):
        self._name, self._log = name, log

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        self._log.append(f"receive from {source} over {self._name}")

    def send(self, tensors: list[Tensor], target: int, tag: int) -> None:
        self._log.append(f"send to {target} over {self._name}")


def test_no_connection_carries_data_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    channels = mock.Mock(up=Channel("up", log), down=Channel("down", log), begun=0)
    monkeypatch.setattr(gloo, "register_work", lambda *_: None)
    values = list(torch.ones(3, 2))
    gloo._exchange(values, values, channels, torch.ones(1), 1, 0)
    assert channels.begun == 1
    # Receives come first: they permit others to send, and these permissions must not wait for data.
    assert log == ["receive from 0 over up", "receive from 2 over down", "send to 2 over up", "send to 0 over down"]
