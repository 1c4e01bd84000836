"""How ranks start, use and end NVSHMEM, with a stand-in for it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distca.transport import Channel, ChannelBytes, MessageSizes, TransportError, channels, nvshmem
from support.fake_nvshmem import Fake

CHANNEL = Channel("dispatch", 0)
SIZES = {CHANNEL: ChannelBytes(send=1000, receive=5000)}


def error_of(work: Callable[[], Any]) -> str | None:
    """The message of the TransportError that it raises, if it does."""
    try:
        work()
    except TransportError as error:
        return str(error)
    return None


def start_on_machines(machines: list[str]) -> tuple[str | None, list[str], list[str]]:
    """The error, what NVSHMEM was asked for, and what was logged before that."""
    fake, said = Fake(), []

    def log(text: str, *more: Any) -> None:
        assert not fake.calls
        said.append(text % more)

    with (
        fake.in_place(),
        mock.patch.object(nvshmem, "machine_id", return_value=machines[dist.get_rank()]),
        mock.patch.object(nvshmem.logger, "info", log),
    ):
        return error_of(fake.transport), fake.calls, said


def test_machines_have_as_many_ranks_each(ranks) -> None:
    for error, calls, said in ranks.run(start_on_machines, ["a", "a", "b"], world_size=3):
        assert "ranks on each machine: 2, 1" in error
        assert (calls, said) == ([], [])
    results = ranks.run(start_on_machines, ["a", "b", "b", "a"], world_size=4)
    for error, calls, _ in results:
        assert error is None
        assert calls[0] == "init"
    ((text,), *others) = (said for *_, said in results)
    assert others == [[], [], []]
    assert "NVSHMEM starts on 4 ranks of 2 machines" in text
    assert "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" in text
    assert "NVSHMEM_IB_ENABLE_IBGDA=0" in text


def start_over_networks() -> list[tuple[str, str | None]]:
    """What starts transfers, and what the environment says then, case by case."""
    name, found = "NVSHMEM_IB_ENABLE_IBGDA", []
    for machines, can, off in (
        ("ab", True, False),
        ("ab", False, False),
        ("ab", True, True),
        ("aa", True, False),
    ):
        fake = Fake(unmapped=(1,) if machines == "ab" else (), gpu_initiated=can)
        with (
            mock.patch.dict(os.environ, {name: "0"} if off else {}),
            fake.in_place(),
            mock.patch.object(nvshmem, "machine_id", return_value=machines[dist.get_rank()]),
        ):
            found.append((fake.transport().network, os.environ.get(name)))
    return found


def test_gpus_are_asked_to_start_transfers_between_machines(ranks) -> None:
    host = "a thread of the host starts transfers between machines: see `distca doctor`"
    expected = [
        ("GPUs start transfers between machines (IBGDA)", "1"),
        (host, "1"),
        (host, "0"),
        ("all memory is mapped", None),
    ]
    assert ranks.run(start_over_networks, world_size=2) == [expected] * 2


def start_and_end(fails: dict[int, str], unmapped: tuple[int, ...]) -> tuple[str | None, list[str]]:
    """Starts, and closes twice.

    Args:
        fails: call that raises, by rank.
        unmapped: ranks.
    """
    fake = Fake(fails=fails.get(dist.get_rank(), ""), unmapped=unmapped)
    with fake.in_place():

        def work() -> None:
            transport = fake.transport()
            transport.close()
            transport.close()

        return error_of(work), fake.calls


def test_nvshmem_ends_once(ranks) -> None:
    for error, calls in ranks.run(start_and_end, {}, (), world_size=2):
        assert error is None
        assert calls == ["init", "allocate", "compile", "finalize"]
    for _, calls in ranks.run(start_and_end, {}, (1,), world_size=2):
        assert calls[2:] == ["compile", "library_init", "library_finalize", "finalize"]


@pytest.mark.parametrize("call", ["init", "compile"])
def test_nvshmem_ends_if_the_start_fails(ranks, call: str) -> None:
    """Its end is collective: not where a rank has not begun."""
    results = ranks.run(start_and_end, {1: call}, (), world_size=2)
    for error, calls in results:
        assert error == f"rank 1: {call} fails"
        assert ("finalize" in calls) == (call == "compile")


def fail_and_go_on(reserves: bool) -> tuple[str | None, list[str]]:
    """The second rank alone knows of a failure."""
    fake = Fake()
    with fake.in_place():
        transport = fake.transport()
        del fake.calls[:]
        fake.failure = "rank 0 did nothing" if dist.get_rank() == 1 else None
        work = (lambda: transport.reserve(SIZES)) if reserves else transport.close
        return error_of(work), fake.calls


@pytest.mark.parametrize("reserves", [True, False], ids=["reserve", "close"])
def test_what_one_rank_knows_stops_all(ranks, reserves: bool) -> None:
    """Others would wait in NVSHMEM for the one that raised."""
    for result in ranks.run(fail_and_go_on, reserves, world_size=2):
        assert result == ("rank 1: rank 0 did nothing", [])


def grow(free_bytes: list[int], nbytes: list[int]) -> list[tuple[str | None, list[str]]]:
    """Reserves so many bytes in turn, where the second rank's GPU has so many left."""
    fake, found = Fake(), []
    with fake.in_place():
        transport = fake.transport()
        for free, room in zip(free_bytes, nbytes, strict=True):
            del fake.calls[:]
            fake.free_bytes = free if dist.get_rank() == 1 else 1 << 40
            sizes = {CHANNEL: ChannelBytes(send=1000, receive=room)}
            found.append((error_of(lambda sizes=sizes: transport.reserve(sizes)), [*fake.calls]))
    return found


def test_room_is_looked_for_before_any_rank_allocates(ranks) -> None:
    granule = nvshmem._GRANULE
    # The second fits into the first one's granule; the third needs one more than there is.
    free, nbytes = [granule, 0, 2 * granule - 1], [5000, 10_000, granule]
    for first, second, third in ranks.run(grow, free, nbytes, world_size=2):
        assert first == (None, ["empty cache", "allocate"])
        assert second == (None, ["free", "allocate"])
        assert "rank 1: core attention's buffers need 1074 MB more" in third[0]
        assert third[1] == ["free", "empty cache"]


def check_on_one(failure: str | None, abort: int, error: bool) -> str | None:
    """What a transport says after work that ends, or ends with an error, or hangs if it fails."""
    fake = Fake()
    with fake.in_place():
        transport = fake.transport()
        transport._control.own[:8] = torch.tensor([abort]).view(torch.uint8)
        queries = iter([False, False])

        def query() -> bool:
            assert not error, "waits for work that did not end"
            fake.failure = failure
            # For ever, if it fails.
            return next(queries, failure is None)

        torch.cuda.Event().query = query

        def work() -> None:
            with transport.checked():
                if error:
                    fake.failure = failure
                    raise FloatingPointError("not a number")

        try:
            return error_of(work)
        except FloatingPointError as other:
            return str(other)


def test_a_failure_is_found_when_a_step_ends(ranks) -> None:
    def found(*case: Any) -> str | None:
        return ranks.run(check_on_one, *case, world_size=1)[0]

    assert found(None, 0, False) is None
    assert found("rank 1 died", 0, False) == "rank 1 died"
    told = channels.TIMED_OUT << 48 | 2 << 24 | 1
    assert found(None, told, False) == (
        "rank 0: rank 2 ended the exchange: rank 1 did nothing for 600 s"
    )
    assert found("rank 1 died", 0, True) == "rank 1 died"
    assert found(None, 0, True) == "not a number"


def rooms_of_two_channels() -> list[tuple[int, int]]:
    """Begin and end, in the memory of this rank, of what each channel receives and stages."""
    other = Channel("dispatch", 1)
    fake, rooms = Fake(), []
    with fake.in_place():
        transport = fake.transport()
        transport.reserve({CHANNEL: SIZES[CHANNEL], other: ChannelBytes(send=700, receive=4096)})
        for memory in (transport._arenas, transport._staging):
            for channel in (CHANNEL, other):
                room = memory[channel]
                rooms.append((room.data_ptr(), room.data_ptr() + room.nbytes))
    return rooms


def test_no_two_rooms_overlap(ranks) -> None:
    for rooms in ranks.run(rooms_of_two_channels, world_size=2):
        assert sorted(end - begin for begin, end in rooms) == [700, 1000, 4096, 5000]
        ordered = sorted(rooms)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))


def put_by_copy_engines() -> list[str]:
    """The order in which the first of four sends; the third is on another machine."""
    fake = Fake(unmapped=(2,))
    with fake.in_place():
        transport = fake.transport(mode="copy-engine")
        transport.reserve(SIZES)
        transport.staging(CHANNEL, 600)
        del fake.calls[:]
        if dist.get_rank() == 0:
            transport.start(
                "forward", CHANNEL, MessageSizes((0, 100, 200, 300), (0,) * 4, (0,) * 4)
            )
    return fake.calls


def test_copy_engines_do_not_wait_for_networks(ranks) -> None:
    first = ranks.run(put_by_copy_engines, world_size=4)[0]
    assert first == ["start to put 2", "put 1", "put 3", "quiet"]
