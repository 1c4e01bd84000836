"""vLLM with prefill ranks answers as vLLM alone does, whatever becomes of the ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from distca.schedule.serving.handoff.protocol import Transfer
from support.byte_tokenizer import chat_tokenizer
from support.ports import free_port
from support.prefills import Reader, free_address, prompt
from support.prometheus import program, prometheus, queries_of
from support.small_models import save_small_model
from support.vllm_server import (
    LONGEST,
    MIN_TOKENS,
    POSITIONS,
    Server,
    environment,
    prefill,
    vllm_serve,
    wait_for_vllm,
)

STRATEGIES = {
    "pass-kv": ("--prefill-strategy", "pass-kv", "--transfer", "tcp"),
    "pass-q": ("--prefill-strategy", "pass-q"),
    "slices": ("--context-parallel-size", "1", "--tensor-parallel-size", "2"),
    "auto": ("--context-parallel-threshold", "256"),
    "runahead": ("--prefill-strategy", "runahead", "--partition", "0.6,0.4"),
    "csps": ("--prefill-strategy", "csps", "--ranks-per-node", "1"),
    "sp-ntp": ("--prefill-strategy", "sp-ntp"),
    "tiles": ("--prefill-strategy", "tiles"),
    "cdsp": ("--rank-groups", "cdsp", "--prefill-times", "times.json"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"page": {"type": "integer"}, "kind": {"enum": ["text", "table"]}},
            "required": ["kind", "page"],
        },
    },
}
CHOICE = {"type": "function", "function": {"name": "look_up"}}
START = 600.0
"""Seconds in which ranks start, which takes minutes on a busy machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`vllm serve` that stays up for all tests; prefill ranks come and go."""
    folder = save_small_model(
        "llama",
        tmp_path_factory.mktemp("model"),
        # vLLM's kernels have heads of 32 and more. What has a grammar needs a token to end with.
        **{"hidden_size": 128, "head_dim": 32, "max_position_embeddings": POSITIONS},
        end=2,
    )
    chat_tokenizer().save_pretrained(folder)
    port = free_port()
    log = folder / "vllm.log"
    with vllm_serve(folder, free_address(), port, log) as running:
        yield running


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of all kinds: half share beginnings, some stream, some are chats, some are bound to
    a form."""
    chance, found = random.Random(seed), []
    for number in range(count):
        length = {1: LONGEST, 2: 1}.get(number, int(2 ** chance.uniform(0, math.log2(LONGEST))))
        tokens = prompt(number % 5 if number % 2 else 100 + number, length)
        body: dict[str, Any] = {"model": "model", "max_tokens": 8, "temperature": 0, "seed": 0}
        if number % 7 == 3:
            text = "".join(chr(97 + token % 26) for token in tokens)
            body |= {"messages": [{"role": "user", "content": text}]}
            if number % 3 == 1:
                # A call of the tool, whose arguments have its form.
                body |= {"tools": [TOOL], "tool_choice": CHOICE, "max_tokens": 64}
        else:
            body |= {"prompt": [token % 256 for token in tokens]}
        # vLLM takes one of both.
        if number % 11 == 5 and "tools" not in body:
            choice = {"choice": ["yes", "no", "perhaps"]}
            body |= {"extra_body": {"structured_outputs": choice}}
        found.append(body | {"stream": number % 3 == 0})
    return found


def measure_groups(folder: Path) -> None:
    """Writes the times by which groups of ranks grow."""
    command = [*(sys.executable, "-m", "distca", "tune", "groups", str(folder))]
    command += [*("--context-parallel-size", "2", "--lengths", "256", "1024", "4096")]
    command += [*("--rounds", "1", "--output", str(folder / "times.json"))]
    subprocess.run(command, env=environment(), check=True, timeout=300)


def tokens_received(server: Server) -> int:
    """Tokens whose keys and values the ranks have handed over since they started."""
    reader = Reader(server.folder, server.address, engine="test")
    assert reader.client.connect(60.0)
    due = time.monotonic() + 60
    while not reader.client.state.received and time.monotonic() < due:
        reader.poll(0.2)
    reader.client.close()
    return reader.client.state.tokens


def assert_no_blocks_used(server: Server) -> None:
    """Nothing holds blocks of vLLM, which counts them after each step."""
    due = time.monotonic() + 30
    while (used := server.used()) and time.monotonic() < due:
        time.sleep(0.5)
    assert used == 0


def blocks_held(server: Server) -> int:
    """Blocks of all ranks that prompts hold; it may take some seconds until those of dead engines
    and of clients that have gone are free."""
    reader = Reader(server.folder, server.address, engine="test")
    assert reader.client.connect(60.0)
    due = time.monotonic() + 60
    seen = first = reader.client.state
    while time.monotonic() < due and (seen is first or seen.blocks):
        reader.poll(0.2)
        seen = reader.client.state
    reader.client.close()
    return seen.blocks + seen.held + seen.running + seen.waiting


def ready(server: Server, log: Path) -> None:
    """Waits until vLLM knows that the ranks are there, and they have computed a prompt."""
    reader = Reader(server.folder, server.address, engine="test")
    assert reader.client.connect(START)
    for number in range(10):
        reader.until(lambda: reader.client.ready, 120.0)
        reader.begin(number, prompt(0, 10))
        reader.until(lambda count=number + 1: len(reader.ended) == count, 120.0)
        # On a busy machine their first prompt takes longer than a lease, and is given up.
        if not reader.ended[Transfer(number)]:
            break
    # Until they count it: what is said last before the end may be lost then.
    reader.until(lambda: reader.client.state.received > 0, 120.0)
    reader.client.close()
    wait_for_vllm(log)


def test_answers_are_vllm_s_own_with_every_strategy(server: Server, full: bool) -> None:
    bodies = requests(500 if full else 48, 0)
    server.reset()
    # Nobody prefills: vLLM computes all.
    expected = server.answers(bodies)
    assert all(answer is not None for answer in expected)
    assert len(set(expected)) > len(expected) // 3
    lengths = [len(body["prompt"]) for body in bodies if "prompt" in body]
    assert (min(lengths), max(lengths)) == (1, LONGEST)
    called = [said for body, said in zip(bodies, expected, strict=True) if "tools" in body]
    assert called
    assert all(called)
    before = server.metrics()
    assert before["declined_requests_total" + 'reason="unreachable"'] > len(bodies) // 3
    assert before["declined_requests_total" + 'reason="short"'] > len(bodies) // 5
    assert before["asked_requests_total"] == before["received_bytes_total"] == 0
    if full:
        measure_groups(server.folder)
    for name, flags in STRATEGIES.items() if full else list(STRATEGIES.items())[:3]:
        assert_same_answers(server, bodies, expected, name, flags)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tiles_answer_a_thousand_requests(server: Server, ranks: int) -> None:
    bodies = requests(1000, ranks)
    server.reset()
    expected = server.answers(bodies)
    flags = (*STRATEGIES["tiles"], "--context-parallel-size", str(ranks))
    assert_same_answers(server, bodies, expected, f"tiles-{ranks}", flags)


def assert_same_answers(
    server: Server,
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[Any],
    name: str,
    flags: Sequence[str],
) -> None:
    """Starts ranks; vLLM answers as before, and gets the bytes of the tokens that it asked for."""
    before = server.metrics()
    sizes = json.loads((server.folder / "config.json").read_text())
    numbers = sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    # With 64 prompts at once on a busy machine a rank may be silent for long.
    lease, log = ("--lease", "30"), server.folder / f"{name}.log"
    with prefill(server.folder, server.address, log, *flags, *lease):
        ready(server, log)
        server.reset()
        assert server.answers(bodies) == expected, name
        by = "TCP" if "tcp" in flags or find_spec("nixl") is None else "NIXL"
        assert f", process 0, rows by {by}" in log.read_text()
        wanted = sum(
            length for body in bodies if (length := len(body.get("prompt", ()))) > MIN_TOKENS
        )
        # Beginnings that vLLM has from an earlier prompt are not asked for.
        assert (received := tokens_received(server)) > wanted // 3, name
        change = Counter(server.metrics())
        change.subtract(before)
        # The ranks' own count has the prompt that waited for them.
        received_tokens = change["loaded_tokens_total"]
        assert received_tokens == change["asked_tokens_total"] == received - 10
        assert change["received_bytes_total"] == received_tokens * 2 * numbers * 4
        loads = change["loads_total" + 'outcome="loaded"']
        assert loads == change["asked_requests_total"] == change["load_seconds_count"]


def test_dead_ranks_and_clients_that_go_away(server: Server, full: bool) -> None:
    """Every other kill hits ranks that are ready, which compute then; the others any moment."""
    count = 500 if full else 60
    bodies = requests(count, 1)
    server.reset()
    expected = server.answers(bodies)
    chance = random.Random(1)
    stormy = [
        body | ({"give_up": chance.uniform(0.05, 2.0)} if chance.random() < 0.3 else {})
        for body in bodies
    ]
    rounds: list[list[Any]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            # Otherwise vLLM has all prompts after the first round.
            server.reset()
            rounds.append(server.answers(stormy, 16))

    log = server.folder / "storm.log"
    with prefill(server.folder, server.address, log, "--prefill-strategy", "pass-kv") as launcher:
        ready(server, log)
        work = threading.Thread(target=ask)
        work.start()
        try:
            for kill in range(30 if full else 3):
                if kill % 2 == 0:
                    wait_for_ranks(log)
                time.sleep(chance.uniform(0.5, 6.0 if full else 3.0))
                # For a moment there is none: they start again.
                while not (there := ranks_of(launcher)):
                    time.sleep(0.1)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(there), signal.SIGKILL)
        finally:
            over.set()
            work.join(900)
        assert not work.is_alive(), "requests hang"
        # The server never ended, and answers go on through the ranks once they are back.
        wait_for_ranks(log)
        ready(server, log)
        server.reset()
        again = [body for body in bodies if len(body.get("prompt", ())) > 2 * MIN_TOKENS][:4]
        right = [answer for body, answer in zip(bodies, expected, strict=True) if body in again]
        assert server.answers(again) == right
        assert tokens_received(server) > 0
        assert blocks_held(server) == 0
    assert rounds
    for answers in rounds:
        pairs = enumerate(zip(answers, expected, strict=True))
        assert not [n for n, (answer, right) in pairs if answer not in (None, right)]
        assert sum(answer is not None for answer in answers) >= count // 2
    # No block is left, and as many as before can be used at once.
    assert_no_blocks_used(server)
    assert server.answers(bodies, 64) == expected
    assert_no_blocks_used(server)


def test_every_panel_of_the_dashboard_shows_real_servers(server: Server, tmp_path: Path) -> None:
    """What a real Prometheus scrapes from vLLM while it answers short and long prompts."""
    program("prometheus")
    queries = [query for each in queries_of("vllm").values() for query in each]
    loaded = "loads_total" + 'outcome="loaded"'
    before = server.metrics().get(loaded, 0.0)
    port, log = int(server.url.rpartition(":")[2]), server.folder / "dashboard.log"
    with (
        prefill(server.folder, server.address, log),
        prometheus(tmp_path, [port]) as scraped,
    ):
        ready(server, log)
        empty, due, rounds = queries, time.monotonic() + 180, 0
        # Rates are of figures that grow between two scrapes, and quantiles of none are no number.
        while empty and time.monotonic() < due:
            bodies = [
                {"model": "model", "prompt": prompt(1000 + rounds, tokens), "max_tokens": 8}
                for tokens in (MIN_TOKENS // 2, 8 * MIN_TOKENS)
            ]
            assert None not in server.answers(bodies)
            rounds += 1
            time.sleep(1.5)
            empty = [each for each in queries if not any(map(is_number, scraped.ask(each)))]
        assert empty == []
        after = server.metrics()[loaded]
        # Ranks that are slow on a busy machine may lose a prompt to vLLM.
        assert before + rounds / 2 <= after <= before + rounds
        query = 'sum(vllm:distca_loads_total{outcome="loaded"})'
        scraped.wait_for(f"{query} == {after}")


def is_number(series: dict[str, Any]) -> bool:
    """Whether the value of one of Prometheus's series is a number."""
    return not math.isnan(float(series["value"][1]))


def wait_for_ranks(log: Path) -> None:
    """Waits until ranks are ready that have not been killed since."""
    due = time.monotonic() + START
    while log.read_text().rfind("ready at") < log.read_text().rfind("exitcode: -9"):
        assert time.monotonic() < due, "the ranks don't come back"
        time.sleep(0.2)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Processes of the ranks."""
    found: list[int] = []
    for task in Path(f"/proc/{launcher.pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"distca_address": None}, 'add "kv_connector_extra_config"'),
        ({"distca_address": ""}, 'add "kv_connector_extra_config"'),
        ({"distca_address": 8300}, "give an address as tcp://HOST:PORT"),
        ({"distca_address": "localhost:8300"}, "give an address as tcp://HOST:PORT"),
        ({"distca_address": "tcp://127.0.0.1"}, "give an address as tcp://HOST:PORT"),
        ({"distca_address": "tcp://127.0.0.1:99999"}, "give an address as tcp://HOST:PORT"),
        ({"distca_address": "http://127.0.0.1:8300"}, "give an address as tcp://HOST:PORT"),
        (
            {"distca_address": "tcp://no.such.host.invalid:1"},
            "host no.such.host.invalid cannot",
        ),
        ({"distca_address": "tcp://[::1]:8300"}, "distca_address .*: ::1 is an IPv6 address"),
        ({"distca_address": "tcp://::1:8300"}, "give an address as tcp://HOST:PORT"),
        ({"distca_transfer": "rdma"}, "distca_transfer 'rdma': choose from auto, nixl, tcp"),
        ({"distca_landing_bytes": 0}, "distca_landing_bytes 0: give a number of at least 1"),
        ({"distca_adress": "tcp://127.0.0.1:1"}, r"\(is distca_address meant\?\): choose from"),
        ({"block_size": 3}, "has no setting block_size: choose from distca_address, "),
        ({"distca_min_tokens": 0}, "distca_min_tokens 0: give a number of at least 1"),
        ({"distca_min_tokens": "many"}, "distca_min_tokens 'many': give a number"),
        ({"distca_connect_seconds": -1}, "distca_connect_seconds -1: give seconds"),
        ({"distca_connect_seconds": "1"}, "distca_connect_seconds '1': give seconds"),
        ({"kv_role": "kv_producer"}, 'give "kv_role": "kv_consumer"'),
        ({"kv_load_failure_policy": "fail"}, 'needs "kv_load_failure_policy": "recompute"'),
        ({"pipeline_parallel_size": 2}, "leave --pipeline-parallel-size out"),
        ({"use_mla": True}, 'add --compilation-config \'{"custom_ops": \\["-rotary_embedding"'),
        ({"decode_context_parallel_size": 2}, "leave --decode-context-parallel-size out"),
        ({"prefill_context_parallel_size": 2}, "leave --prefill-context-parallel-size out"),
        ({"cache_dtype": "fp8"}, "not as fp8: leave --kv-cache-dtype out"),
        ({"method": "eagle"}, "as the method eagle of --speculative-config has"),
    ],
)
def test_mistakes_are_a_line_before_the_model_is_loaded(changes: dict[str, Any], line: str) -> None:
    from distca.vllm.settings import checked_settings

    extra = {"distca_address": "tcp://127.0.0.1:1"} | {
        name: value for name, value in changes.items() if name not in OF_VLLM
    }
    of_vllm = OF_VLLM | changes | {"kv_connector_extra_config": extra, "model": "a model"}
    part = SimpleNamespace(**of_vllm)
    config: Any = SimpleNamespace(**{f"{name}_config": part for name in PARTS})
    with pytest.raises(ValueError, match=line) as refused:
        checked_settings(config)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("changes", [{"rope_type": "yarn"}, {"custom_ops": ["-rotary_embedding"]}])
def test_latents_that_vllm_rotates_rightly_are_taken_on_cpus_alone(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from distca.vllm.settings import checked_settings

    rotary = SimpleNamespace(rope_parameters={"rope_type": "default"} | changes)
    extra = {"kv_connector_extra_config": {"distca_address": "tcp://127.0.0.1:1"}}
    of_latents = {"use_mla": True, "hf_text_config": rotary, "model": "a model"}
    part = SimpleNamespace(**OF_VLLM | of_latents | extra | changes)
    config: Any = SimpleNamespace(**{f"{name}_config": part for name in PARTS})
    checked_settings(config)
    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("distca.vllm.settings.current_platform", gpu)
    with pytest.raises(ValueError, match="multi-latent attention, which prefill ranks compute"):
        checked_settings(config)


PARTS = ("kv_transfer", "parallel", "model", "cache", "speculative", "compilation")

OF_VLLM = {
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "use_mla": False,
    "dtype": "torch.bfloat16",
    "cache_dtype": "auto",
    "method": "ngram",
    "custom_ops": ["all"],
    "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
}


def test_a_step_without_loads_costs_nothing() -> None:
    from distca.vllm import connector
    from distca.vllm.settings import Settings
    from distca.vllm.stats import Tally

    polled: list[float] = []

    def poll(seconds: float) -> list[Any]:
        polled.append(seconds)
        return []

    one, nothing = SimpleNamespace(kv_cache_groups=[]), connector.KVConnectorTransferResults()
    writes = connector._Writes(SimpleNamespace(), Settings("tcp://127.0.0.1:1"), one, Tally())
    assert writes.ended() == nothing
    client: Any = SimpleNamespace(idle=True, poll=poll)
    writes._client = client
    assert writes.ended() == nothing
    assert not polled
    # Rows of a prompt that was cancelled may still come.
    client.idle = False
    assert writes.ended() == nothing
    assert polled == [0.0]


def test_rows_that_a_window_has_left_are_not_written() -> None:
    """Layer 0 keeps all of a prompt, and layer 1 its last block of two tokens alone."""
    from distca.vllm import connector
    from distca.vllm.settings import Settings
    from distca.vllm.stats import Tally

    written: list[tuple[list[float], list[int]]] = []

    def update(layer: object, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        assert (values == -keys).all()
        written.append((keys.flatten().tolist(), slots.tolist()))

    groups = [
        SimpleNamespace(
            layer_names=[f"layers.{n}.attn"], kv_cache_spec=SimpleNamespace(block_size=2)
        )
        for n in range(2)
    ]
    settings, kept = Settings("tcp://127.0.0.1:1"), SimpleNamespace(kv_cache_groups=groups)
    writes = connector._Writes(SimpleNamespace(), settings, kept, Tally())
    module = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))
    writes._layers = {n: (module, torch.zeros(1)) for n in range(2)}
    client: Any = SimpleNamespace(begin=lambda *_: None)
    writes._client, one = client, Transfer(0)
    load = connector.Load(0, "one", [7] * 6, 0, ([3, 4, 5], [0, 0, 6]), 0, b"")
    writes.take(connector.Loads([load]))
    for positions in ([1, 2, 5], [0, 3]):
        rows = torch.tensor(positions, dtype=torch.float32)[:, None, None]
        for layer in range(2):
            writes._write(one, layer, np.array(positions), rows, -rows)
    assert written == [([1, 2, 5], [7, 8, 11]), ([5], [13]), ([0, 3], [6, 9])]


def test_settings_that_are_right_are_taken() -> None:
    from distca.vllm import DistCAConnector
    from distca.vllm.settings import Settings

    asks = DistCAConnector.requires_piecewise_for_cudagraph
    assert asks({"distca_address": "tcp://127.0.0.1:1"}) is False
    with pytest.raises(ValueError, match="distca_min_tokens 0: give a number"):
        asks({"distca_address": "tcp://127.0.0.1:1", "distca_min_tokens": 0})
    extra = {"distca_address": "tcp://127.0.0.1:1", "distca_min_tokens": 7}
    assert Settings.of(extra) == Settings("tcp://127.0.0.1:1", 7, 10.0)
