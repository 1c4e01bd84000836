"""Prefetching, messages, and the ranks that the tests share."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.attention import KernelTasks
from distca.attention.kernel_timing import KernelTimer, held_out_errors
from distca.cost import volume
from distca.cost.profile import Profile, _diagonal_pairs
from distca.cost.volume import AttentionShape
from distca.plan import Mask
from distca.runtime import Prefetcher
from distca.runtime.messages import WORD, PackedRows, QAndKV, message_layout, peer_rows
from distca.runtime.trace import Trace
from distca.runtime.workspace import Workspace
from distca.timeline import LANES
from support.ranks import RankError, Ranks


def test_values_are_made_ahead_and_waiting_is_measured() -> None:
    made = []

    def values():
        for number in range(5):
            time.sleep(0.05)
            made.append(number)
            yield number

    ahead = Prefetcher(values(), depth=1)
    assert next(ahead) == 0
    assert ahead.seconds_waited > 0.02
    time.sleep(0.8)
    # One waits in the queue and the thread holds the next.
    assert made == [0, 1, 2]
    assert next(ahead) == 1
    assert ahead.seconds_waited == 0
    assert list(ahead) == [2, 3, 4]
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_an_error_reaches_the_consumer() -> None:
    def values():
        yield 1
        raise ValueError("bad data")

    ahead = Prefetcher(values())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="bad data"):
        next(ahead)
    ahead.close()


def test_closing_ends_an_endless_maker() -> None:
    ahead = Prefetcher(iter(int, 1))
    assert next(ahead) == 0
    ahead.close()
    with pytest.raises(ValueError, match="depth is 0"):
        Prefetcher(iter([]), depth=0)


@pytest.mark.parametrize("width", [3, 6, 16])
@pytest.mark.parametrize("keys", [False, True])
def test_messages_survive_packing(width: int, keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several tensors and types, with empty messages. Each tensor's row begins at a
    multiple of 16 bytes, whatever its size: so does every message, and copies have whole words."""
    monkeypatch.setattr(volume, "PIECE_BYTES", 0)
    q_counts, kv_counts = np.array([2, 0, 3]), np.array([0, 1, 1])
    rows = peer_rows(q_counts, np.array([1, 0, 4]), kv_counts, np.array([0, 2, 1]))
    tensors = QAndKV(
        [torch.randn(5, width).bfloat16(), torch.randn(5, 5)],
        [torch.randn(2, 2, width), torch.randn(2, 4)] if keys else [],
    )
    q_row = {3: 16, 6: 16, 16: 32}[width] + 32
    kv_row = ({3: 32, 6: 48, 16: 128}[width] + 16) * keys
    # They come back as they were sent.
    layout = message_layout(rows, rows, tensors.row_types)
    sizes = layout.sizes
    assert sizes.send == sizes.receive
    assert sizes.send == (2 * q_row, kv_row, 3 * q_row + kv_row)
    assert sizes.put_at == (q_row, 2 * kv_row, 4 * q_row + kv_row)
    # Messages are a part of a larger buffer.
    messages = torch.zeros(16 + sizes.sent, dtype=torch.uint8)[16:].view(WORD)
    memory = Workspace(torch.device("cpu"))
    memory.reserve(4096)
    apart, together = [], []
    for kind, found in zip(tensors, layout.send, strict=True):
        if not kind:
            continue
        packed = PackedRows.take(memory, found.format, found.rows)
        packed.words.zero_()
        for tensor, target in zip(kind, packed.tensors, strict=True):
            target.copy_(tensor)
        if keys:
            found.put(messages, packed.words)
        else:
            found.in_place(messages).copy_(packed.words)
    for kind, found in zip(tensors, layout.receive, strict=True):
        if kind:
            packed = PackedRows.take(memory, found.format, found.rows)
            found.take(messages, packed.words)
            together += packed.tensors
            assert len(found.pieces) == (2 if keys else 1)
            for piece, words in found.views(messages):
                assert torch.equal(words, packed.words[piece])
            apart += [torch.full_like(each, 7) for each in kind]
            found.take_apart(messages, apart[-2:])
    sent = [*tensors.q, *tensors.kv]
    for found in (apart, together):
        assert all(torch.equal(*pair) for pair in zip(sent, found, strict=True))
    # Each rank's message: its rows of queries, each with that of the other tensor; then of keys.
    expected = []
    for rank in range(3):
        for kind, counts in zip(tensors, (q_counts, kv_counts), strict=True):
            first = int(counts[:rank].sum())
            for row in range(first, first + int(counts[rank])):
                for each in kind:
                    one = each[row].flatten().view(torch.uint8)
                    expected += [one, one.new_zeros(-len(one) % 16)]
    assert torch.equal(messages.view(torch.uint8), torch.cat(expected))


def test_a_span_says_how_long_its_thread_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(torch.device("cpu"))
    monkeypatch.setattr(time, "thread_time_ns", iter([5_000, 12_000]).__next__)
    monkeypatch.setattr(time, "time_ns", iter([100_000, 130_000]).__next__)
    with trace.span("not recorded", LANES[0]):
        pass
    trace.recording = True
    with trace.span("kernel", LANES[1], layer=3):
        pass
    (event,) = trace.take(rank=2)
    assert (event["ts"], event["dur"], event["tdur"]) == (100.0, 30.0, 7.0)
    assert (event["pid"], event["tid"], event["args"]) == (2, 1, {"layer": 3})
    assert trace.take(rank=2) == []


def test_held_out_tasks_are_full_and_on_the_diagonal_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A profile of 1e6 pairs a second is exact for a kernel that has this rate."""
    lengths = (64, 256, 1024)
    sizes = [(q, kv) for q in lengths for kv in lengths]
    full = np.array([q * kv / 1e6 for q, kv in sizes]).reshape(3, 3)
    diagonal = np.array([_diagonal_pairs(q, kv) / 1e6 for q, kv in sizes]).reshape(3, 3)
    profile = Profile(
        lengths,
        *(tuple(map(tuple, seconds.tolist())) for seconds in (full, diagonal)),
        AttentionShape(4, 2, 16, 4),
        {"hardware": "none"},
    )
    timed: list[tuple[int, int, bool]] = []

    def seconds(self: KernelTimer, q_len: int, kv_len: int, causal: bool) -> float:
        timed.append((q_len, kv_len, causal))
        columns = (np.array([x]) for x in (kv_len - q_len, kv_len, 0, kv_len))
        return float(Mask().pairs(*columns)[0] if causal else q_len * kv_len) / 1e6

    monkeypatch.setattr(KernelTimer, "seconds", seconds)
    errors = held_out_errors(profile, "cpu", points=8)
    assert [causal for _, _, causal in timed] == [False, True] * 4
    assert all(q_len <= kv_len for q_len, kv_len, causal in timed if causal)
    assert max(errors) < 0.01


class BusyMachine:
    """A kernel on a machine with a launch cost, whose processors take a block of rows each.

    Attributes:
        now: seconds so far.
    """

    LAUNCH, PROCESSORS, BLOCK, SECONDS_A_KEY = 1e-6, 16, 128, 1e-9

    def __init__(self) -> None:
        self.now = 0.0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tasks: KernelTasks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._run(tasks, times=1)
        return q, q

    def backward(self, *tensors: torch.Tensor | KernelTasks) -> None:
        tasks = tensors[-1]
        assert isinstance(tasks, KernelTasks)
        self._run(tasks, times=3)

    def timer(self, max_length: int) -> KernelTimer:
        return KernelTimer(
            self,  # type: ignore[arg-type]
            AttentionShape(4, 2, 16, 4),
            max_length,
            "cpu",
            clock=lambda: self.now,
        )

    def _run(self, tasks: KernelTasks, times: int) -> None:
        rows, keys = np.diff(tasks.cu_seqlens_q.numpy()), np.diff(tasks.cu_seqlens_kv.numpy())
        waves = -(-int((-(-rows // self.BLOCK)).sum()) // self.PROCESSORS)
        self.now += self.LAUNCH + times * waves * int(keys.max()) * self.SECONDS_A_KEY


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 32), (128, 128), (128, 2048), (2048, 2048)])
def test_a_task_is_timed_in_a_call_that_keeps_the_device_busy(q_len: int, kv_len: int) -> None:
    """Alone a short task would seem up to a hundred times as dear."""
    machine = BusyMachine()
    timer = machine.timer(16 * 2048)
    blocks = -(-q_len // machine.BLOCK)
    expected = blocks * kv_len * machine.SECONDS_A_KEY / machine.PROCESSORS
    assert timer.seconds(q_len, kv_len, causal=False) == pytest.approx(expected, rel=0.01)


def test_a_backward_pass_is_timed_in_company_too() -> None:
    """A kernel whose backward passes compute three times as long."""
    machine = BusyMachine()
    timer = machine.timer(16 * 2048)
    expected = 3 * 128 * machine.SECONDS_A_KEY / machine.PROCESSORS
    found = timer.seconds(128, 128, causal=True, direction="backward")
    assert found == pytest.approx(expected, rel=0.01)


def test_a_task_that_fills_the_call_is_timed_alone() -> None:
    machine = BusyMachine()
    timer = machine.timer(256)
    alone = machine.LAUNCH + 512 * machine.SECONDS_A_KEY
    assert timer.seconds(512, 512, causal=False) == pytest.approx(alone)


def rank_and_size() -> tuple[int, int]:
    total = torch.tensor([1])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("rank one is broken")
    dist.barrier()


def test_the_shared_ranks() -> None:
    """Results, several sizes, a failing rank while others wait, and life after it."""
    pool = Ranks()
    assert pool.run(rank_and_size, world_size=2) == [(0, 2), (1, 2)]
    assert pool.run(rank_and_size, world_size=3) == [(0, 3), (1, 3), (2, 3)]
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank one is broken|closed by peer"):
        pool.run(fail_on_rank_one, world_size=2)
    assert time.monotonic() - start < 20
    assert pool.run(rank_and_size, world_size=1) == [(0, 1)]
    pool.close()
