"""The trace of a prefill's transfer: what is noted on real ranks, and what is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import zmq

from benchmarks.serving.prefill_trace import PacedConnection, Span, simulate
from distca.cost.model_sizes import MODELS
from distca.prefill.messages import Rows
from distca.prefill.outbox import Parcel
from distca.schedule.serving.handoff.protocol import Transfer
from distca.simulate import CLUSTERS
from distca.simulate.requests.vllm import PrefillRanks
from distca.simulate.serving import InferenceCosts

ROOT = Path(__file__).parents[2]
RANKS = PrefillRanks(InferenceCosts(MODELS["llama-8b"], CLUSTERS["dgx-h100"]), 4, 1024, 25e9)


def test_a_link_that_is_never_full_exposes_the_last_layer_alone() -> None:
    found, layers = simulate(RANKS, 32768), RANKS.costs.model.layers
    # Four iterations of 8,192 tokens, whose layers have as many rows.
    assert found.exposed == pytest.approx(found.busy / (4 * layers))
    faster = simulate(replace(RANKS, bytes_per_second=250e9), 32768)
    assert faster.exposed == pytest.approx(found.exposed / 10)
    assert faster.seconds == found.seconds


def test_a_link_that_is_always_full_exposes_what_does_not_fit() -> None:
    found = simulate(replace(RANKS, bytes_per_second=1e7), 8192)
    first = found.seconds / RANKS.costs.model.layers
    assert found.seconds + found.exposed == pytest.approx(first + found.busy)


def test_messages_leave_one_after_the_other_at_the_link_s_speed() -> None:
    inbox: zmq.Socket = zmq.Context.instance().socket(zmq.PULL)
    port = inbox.bind_to_random_port("tcp://127.0.0.1")
    spans: list[Span] = []
    rows = [Rows(Transfer(3), 0, layer, [(0, 4)], 4, 0, 2) for layer in range(3)]
    values = torch.zeros(4, 2, 16)
    # A message takes a tenth of a second.
    connection = PacedConnection(f"tcp://127.0.0.1:{port}", 20 * values.nbytes, spans)
    begin = time.monotonic()
    for each in rows:
        connection.send(Parcel(each, values, values))
    assert time.monotonic() - begin < 0.1
    for _ in rows:
        assert [len(frame) for frame in inbox.recv_multipart()[1:]] == [values.nbytes] * 2
    assert time.monotonic() - begin >= 0.3
    connection.close()
    inbox.close()
    assert [(each.what, each.prompt, each.layer) for each in spans] == [
        ("sent", 3, layer) for layer in range(3)
    ]
    for earlier, later in pairwise(spans):
        assert earlier.end <= later.begin
        assert later.end - later.begin >= 0.1


def test_a_small_trace_has_a_row_for_each_speed_and_layer(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/serving/prefill_trace.py", "--output", str(tmp_path)]
    command += ["--tokens", "512", "--chunk", "256", "--layers", "2", "--rounds", "1"]
    command += ["--busy", "0.5", "--trace", "1"]
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "prefill_trace.json").read_text())
    # 2 layers, a head of 64 and both keys and values in float32, of half of the tokens.
    assert {each["bytes_of_a_rank"] for each in found} == {256 * 2 * 64 * 2 * 4}
    assert found[1]["rate"] == pytest.approx(
        found[0]["bytes_of_a_rank"] / (0.5 * found[0]["computing"][0])
    )
    text = (tmp_path / "prefill_trace.md").read_text()
    shown = text[text.index("| layer |") :].split("\n\n")[0].splitlines()[2:]
    for row in shown:
        begin, computed, sending, sent = map(float, row.split("|")[2:6])
        assert begin <= computed
        # Rows of a layer leave once they are there: while its attention is computed.
        assert begin <= sending <= sent
    assert len(shown) == 2
