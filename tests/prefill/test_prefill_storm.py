"""Storms on `distca prefill`: aborts, killed and stopped ranks. Nothing is wrong, lost or left."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from distca.schedule.serving.handoff.protocol import Transfer
from support.prefills import (
    BY_EACH,
    Reader,
    free_address,
    prefill_command,
    prompt,
    ranks_of,
    reference,
)
from support.small_models import save_small_model

LEASE = 4.0
MOST_UNDER_WAY = 16


def is_cancelled(number: int) -> bool:
    """Whether the storm cancels a prompt: 1,275 of 1,800."""
    return number % 3 > 0 or number % 24 == 0


@BY_EACH
def test_a_storm_of_aborts_and_dead_ranks(tmp_path: Path, full: bool, transfer: str) -> None:
    """Most prompts are cancelled at some moment. Ranks are killed and stopped in between, and start
    again by themselves. Only prompts that are under way then are lost."""
    folder, address = save_small_model("llama", tmp_path), free_address()
    chance, count = random.Random(0), 1800 if full else 90
    prompts = [prompt(n % 11, chance.randint(1, 200)) for n in range(count)]
    faults = dict.fromkeys(range(count // 6, count, count // 12), signal.SIGKILL) if full else {}
    faults |= {count // 6: signal.SIGKILL, count // 2: signal.SIGSTOP}
    fault_of, lost = "", set[int]()
    # For minutes all processes wait for cores as well.
    lease = 10.0 if full else LEASE
    with prefill_command(folder, address, lease, "--transfer", transfer) as launcher:
        reader = Reader(folder, address, landing_bytes=1 << 16)
        for number, tokens in enumerate(prompts):
            if number % 5 == 0:
                # After a fault: until those that have started again have said so.
                reader.until(partial(reader.is_ready_after, fault_of), 240.0)
            # An engine has so many sequences at most.
            reader.until(lambda: reader.client.under_way < MOST_UNDER_WAY, 240.0)
            reader.begin(number, tokens, priority=number % 2)
            if number in faults:
                assert reader.client.welcome is not None
                fault_of = reader.client.welcome.instance
                os.kill(chance.choice(ranks_of(launcher)), faults[number])
                lost |= {n for n in range(number) if Transfer(n) not in reader.ended}
            if not reader.is_ready_after(fault_of):
                lost.add(number)
            for _ in range(chance.randint(0, 3)):
                reader.poll(0.01)
            if number % 3:
                for earlier in filter(is_cancelled, range(max(number - 3, 0), number + 1)):
                    reader.client.cancel(Transfer(earlier))
        reader.until(lambda: len(reader.ended) == count, 180.0)
        # What is ended here is ended there, too, soon after, as they say from now on.
        before = reader.client.state

        def is_empty() -> bool:
            state = reader.client.state
            left = state.waiting + state.running + state.held + state.blocks
            return state is not before and not left and not reader.client.under_way

        reader.until(is_empty, 180.0)
        reader.client.close()
    assert not reader.late
    expected: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    for number, tokens in enumerate(prompts):
        failure = reader.ended[Transfer(number)]
        if failure == "":
            if tuple(tokens) not in expected:
                expected[tuple(tokens)] = reference(folder, tokens)
            rows = zip(reader.rows[Transfer(number)], expected[tuple(tokens)], strict=True)
            for ours, whole in rows:
                torch.testing.assert_close(ours, whole, atol=2e-5, rtol=1e-5)
        else:
            assert number in lost or (failure == "cancelled" and is_cancelled(number)), number
    right = sum(not failure for failure in reader.ended.values())
    assert right >= sum(not is_cancelled(n) for n in range(count)) - len(lost)
    assert len(lost) < len(faults) * (MOST_UNDER_WAY + 5)


def test_processes_that_share_layers_start_again_together(tmp_path: Path) -> None:
    folder, address = save_small_model("llama", tmp_path), free_address()
    flags = ("--context-parallel-size", "1", "--tensor-parallel-size", "2")
    with prefill_command(folder, address, LEASE, *flags) as launcher:
        reader = Reader(folder, address)
        for kill in range(2):
            fault_of = "" if reader.client.welcome is None else reader.client.welcome.instance
            reader.until(partial(reader.is_ready_after, fault_of), 180.0)
            reader.begin(2 * kill, prompt(kill, 90))
            reader.until(lambda kill=kill: Transfer(2 * kill) in reader.ended)
            if not kill:
                reader.begin(1, prompt(2, 4000))
                reader.until(lambda: reader.written[Transfer(1)].any().item())
                os.kill(ranks_of(launcher)[1], signal.SIGKILL)
                reader.until(lambda: Transfer(1) in reader.ended, 60.0)
        reader.client.close()
        # Others can listen there once they are gone.
        left = ranks_of(launcher)
        assert len(left) == 2
        launcher.kill()
        due = time.monotonic() + 60
        while any(Path(f"/proc/{each}").exists() for each in left):
            assert time.monotonic() < due, "they outlive the command"
            time.sleep(0.05)
    assert reader.ended[Transfer(1)]
    for kill in range(2):
        for ours, whole in zip(
            reader.rows[Transfer(2 * kill)], reference(folder, prompt(kill, 90)), strict=True
        ):
            torch.testing.assert_close(ours, whole, atol=2e-5, rtol=1e-5)


def test_ranks_that_end_leave_nobody_waiting(tmp_path: Path) -> None:
    folder, address = save_small_model("llama", tmp_path), free_address()
    reader = Reader(folder, address)
    # Nobody is there yet.
    reader.begin(0, prompt(0, 40))
    reader.poll()
    assert reader.ended == {Transfer(0): "the prefill ranks are not there"}
    with prefill_command(folder, address, LEASE):
        reader.until(lambda: reader.client.ready, 180.0)
        reader.begin(1, prompt(1, 40))
        reader.until(lambda: Transfer(1) in reader.ended)
        assert reader.ended[Transfer(1)] == ""
        reader.begin(2, prompt(1, 4000))
    since = time.monotonic()
    reader.until(lambda: Transfer(2) in reader.ended, 30.0)
    assert time.monotonic() - since < 3 * LEASE
    reader.until(lambda: not reader.client.ready, 30.0)
    reader.client.close()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "0"], "--port 0: give 1 to 65535"),
        (["--lease", "0"], "--lease 0.0: give seconds above 0"),
        (["--prefill-strategy", "sp-tp"], "invalid choice: 'sp-tp'"),
        (["--kv-cache-memory-bytes", "100"], "--kv-cache-memory-bytes 100 is less than a block"),
        (["--context-parallel-size", "0"], "--context-parallel-size 0: give at least 1"),
        (["--context-parallel-size", "65"], "65 processes of ranks: give at most 64 on CPUs"),
        (["--max-num-seqs", "99999"], "raise --max-num-batched-tokens, or lower --max-num-seqs"),
        (["--partition", "0.5,0.5"], "--partition 0.5,0.5 needs --prefill-strategy runahead"),
    ],
)
def test_mistakes_are_a_line_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], line: str
) -> None:
    from distca.commands.main import main

    folder = save_small_model("llama", tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["prefill", str(folder), *flags])
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert line in told[-1]
    assert "distca prefill" in told[-1]


def test_a_port_in_use_is_told_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from distca.commands.main import main

    folder = save_small_model("llama", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as ended:
            main(["prefill", str(folder), "--port", port, "--model-impl", "transformers"])
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert f"cannot listen at tcp://127.0.0.1:{port}: Address already in use" in told[-1]
