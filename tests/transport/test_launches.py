"""What the device transport's Python gives its kernels, without a GPU."""

from __future__ import annotations

import ctypes
import re
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.kernels import device_copy
from distca.transport import MessageSizes
from distca.transport.compiled_cuda import SOURCE
from distca.transport.device import BLOCKS, DeviceRank

SIZES = MessageSizes((1, 0, 999, 0), (0, 0, 0, 0), (0, 0, 8, 0))
C_TYPES = {"int": ctypes.c_int, "Word": ctypes.c_uint64}


class Launches:
    """In the place of `Kernels`: notes what would be launched."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, tuple[Any, ...]]] = []

    def launch(self, name: str, blocks: int, stream: Any, *arguments: Any) -> None:
        self.seen.append((name, blocks, arguments))


@pytest.fixture
def launches(monkeypatch) -> Launches:
    """A rank of four launches every kernel once."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    found, stream = Launches(), object()
    rank = DeviceRank(found, 1, [1, 2, 0, 4], torch.device("cpu"), 1.0)  # type: ignore[arg-type]
    rank.set_arenas([1, 2, 0, 4])
    data = torch.zeros(1000, dtype=torch.uint8)
    rank.send(0, 1, data, SIZES.words, 0, stream)  # type: ignore[arg-type]
    rank.wait(0, 1, data, stream)  # type: ignore[arg-type]
    rank.release(0, 1, stream)  # type: ignore[arg-type]
    rank.wait_for_room(0, 1, stream)  # type: ignore[arg-type]
    rank.set_ready(0, 1, stream)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert not rank.gpu_initiated()
    return found


def test_kernels_get_the_arguments_that_they_take(launches: Launches) -> None:
    """Nothing else checks it: a kernel is found by name and takes what it is given."""
    takes = {
        name: [re.sub(r"\w+$", "", each.strip()).strip() for each in parameters.split(",")]
        for name, parameters in re.findall(
            r"distca_(\w+)\(([^)]*)\) \{", SOURCE.read_text(), re.DOTALL
        )
    }
    assert {name for name, *_ in launches.seen} == set(takes)
    for name, _, arguments in launches.seen:
        given = [type(argument) for argument in arguments]
        assert given == [int if "*" in each else C_TYPES[each] for each in takes[name]], name


def test_a_table_of_messages_is_copied_to_the_gpu_once(monkeypatch) -> None:
    """All layers have the same; a channel's own has its arena's place in it."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    found, stream = Launches(), object()
    rank = DeviceRank(found, 1, [1, 2, 0, 4], torch.device("cpu"), 1.0)  # type: ignore[arg-type]
    rank.set_arenas([1, 2, 0, 4])
    del pinned[:]
    data = torch.zeros(1000, dtype=torch.uint8)
    for epoch in range(1, 4):
        for number in (0, 2):
            rank.send(number, epoch, data, SIZES.words, 4096 * number, stream)  # type: ignore[arg-type]
    assert [table.tolist() for table in pinned] == [
        [[1, 0, 999, 0], [0, 1, 1, 1000], [begin, begin, begin + 8, begin]] for begin in (0, 8192)
    ]
    assert [arguments[4] for _, _, arguments in found.seen] == [
        table.data_ptr() for table in pinned
    ] * 3
    rank.set_arenas([1, 2, 0, 4])
    rank.send(0, 4, data, SIZES.words, 0, stream)  # type: ignore[arg-type]
    assert len(pinned) == 3


def test_every_block_has_a_part_of_every_message(launches: Launches) -> None:
    """With three peers as with any number: how many blocks there are is how many parts."""
    assert {name: blocks for name, blocks, _ in launches.seen}["send"] == BLOCKS
    assert "message, int(blockIdx.x), int(gridDim.x)" in SOURCE.read_text()


def test_the_benchmark_leaves_out_what_launching_takes(monkeypatch) -> None:
    """Rounds that began before all was launched don't count; the GPU is then held back longer."""
    event, held = mock.MagicMock(), []
    event.query.side_effect = [True, False, True, False, False, False, False]
    event.elapsed_time.side_effect = [1000, 1000, 2, 3, 4]
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: event)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)
    assert device_copy.seconds(lambda: None, 3) == 3 / 1e3
    assert [cycles // held[0] for cycles in held] == [1, 2, 2, 4, 4, 4, 4]
    event.query.side_effect = lambda: True
    with pytest.raises(RuntimeError, match="while work is launched"):
        device_copy.seconds(lambda: None, 3)
