"""Ping and pong on the timeline of a run: what is under way while the other one computes."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest

from support.models import make_run, memory_stream, parse, train
from support.parity import RECOMPUTE
from support.pipelines import WINDOW, documents


def order_of_events(tmp_path: Path, ranks, flags: list[str]) -> list[list[tuple[str, ...]]]:
    """Of each rank, what core attention did: `(name, layer, nano-batch)`, in order."""
    file = tmp_path / "trace.json"
    flags = [*flags, "--distca-trace", str(file), "--distca-trace-iterations", "1", "1"]
    flags.append("--distca-ping-pong")
    world_size = 2
    ranks.run(train, flags, documents(1), 1, world_size=world_size)
    events = json.loads(file.read_text())["traceEvents"]
    return [
        [
            (e["name"], str(e["args"]["layer"]), e["args"]["nano_batch"])
            for e in sorted(events, key=lambda e: e.get("ts", 0.0))
            if e["pid"] == rank and e.get("cat") in ("exchange", "kernels")
        ]
        for rank in range(world_size)
    ]


def test_the_order_of_ping_and_pong(ranks, tmp_path: Path) -> None:
    """Each communicates while the other computes; backward is the exact mirror."""
    flags = ["--num-layers", "2", "--distca", "--seq-length", str(WINDOW // 2)]
    flags += ["--distca-scheduler", "greedy"]
    forward = ["dispatch", "wait for dispatch", "core attention", "combine", "wait for combine"]
    found = order_of_events(tmp_path, ranks, flags)
    assert found[0] == found[1]
    there = [event for event in found[0] if "backward" not in event[0]]
    back = [event for event in found[0] if "backward" in event[0]]
    compute = forward[1:4]
    assert there == [
        ("dispatch", "1", "ping"),
        ("dispatch", "1", "pong"),
        *((name, "1", nano) for nano in ("ping", "pong") for name in compute),
        *(("wait for combine", "1", "ping"), ("dispatch", "2", "ping")),
        *(("wait for combine", "1", "pong"), ("dispatch", "2", "pong")),
        *((name, "2", nano) for nano in ("ping", "pong") for name in compute),
        *(("wait for combine", "2", nano) for nano in ("ping", "pong")),
    ]
    compute = [f"{name} backward" for name in ("wait for dispatch", "core attention", "combine")]
    assert back == [
        *(("dispatch backward", "2", nano) for nano in ("pong", "ping")),
        *((name, "2", nano) for nano in ("pong", "ping") for name in compute),
        *(("wait for combine backward", "2", "pong"), ("dispatch backward", "1", "pong")),
        *(("wait for combine backward", "2", "ping"), ("dispatch backward", "1", "ping")),
        *((name, "1", nano) for nano in ("pong", "ping") for name in compute),
        *(("wait for combine backward", "1", nano) for nano in ("pong", "ping")),
    ]


@pytest.mark.parametrize("recompute", [False, True])
def test_one_nano_batch_goes_through_a_layer_after_the_other_where_nothing_returns(
    ranks, tmp_path: Path, recompute: bool
) -> None:
    """What is sent travels while the other's kernels and linear layers run, there and back."""
    flags = ["--num-layers", "2", "--distca", "--seq-length", str(WINDOW // 2)]
    flags += ["--distca-scheduler", "per-document-cp", "--distca-context-parallel-size", "2"]
    flags += RECOMPUTE if recompute else []
    found = order_of_events(tmp_path, ranks, flags)
    assert found[0] == found[1]
    both = ("ping", "pong")

    def there(*layers: str) -> list[tuple[str, ...]]:
        events = [("dispatch", layers[0], nano) for nano in both]
        for layer, after in itertools.zip_longest(layers, layers[1:]):
            for nano in both:
                names = ["wait for dispatch", "core attention", "combine", "wait for combine"]
                events += [(name, layer, nano) for name in names]
                events += [("dispatch", after, nano)] if after else []
        # Known before the loss is.
        return [*events, *(("dispatch backward", layers[-1], nano) for nano in both[::-1])]

    def back(*layers: str) -> list[tuple[str, ...]]:
        events = []
        for before, layer, after in itertools.zip_longest(["", *layers], layers, layers[1:]):
            for nano in both[::-1]:
                events += [("wait for combine backward", before, nano)] if before else []
                names = ["wait for dispatch", "core attention", "combine"]
                events += [(f"{name} backward", layer, nano) for name in names if layer]
                # Known before its gradient is.
                events += [("dispatch backward", after, nano)] if after else []
        return events

    expected = there("1", "2") + back("2", "1")
    if recompute:
        first_time = there("1")[:-2] + there("2")[:-2]
        expected = first_time + there("2") + back("2") + there("1") + back("1")
    assert found[0] == expected


def test_linear_layers_run_while_the_other_nano_batch_s_rows_are_under_way(ranks) -> None:
    """On the trace, with tensor and sequence parallelism, whose collectives mark linear layers."""
    flags = "--num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel --distca".split()
    flags += ["--seq-length", str(WINDOW // 2), "--distca-ping-pong"]
    flags += ["--distca-scheduler", "greedy"]
    found = ranks.run(under_way_at_linear_layers, flags, documents(1), world_size=4)
    expected = [
        # Pre-attention of ping, then of pong.
        *(set(), {("dispatch", "1", "ping")}),
        *({("combine", "1", "pong")}, {("dispatch", "2", "ping")}),
        # Post-attention of the last layer of ping, then of pong; then what follows the layers, and
        # all of it backwards.
        *({("combine", "2", "pong")}, set(), {("dispatch backward", "2", "pong")}),
        *({("combine backward", "2", "ping")}, {("dispatch backward", "1", "pong")}),
        *({("combine backward", "1", "ping")}, set()),
    ]
    for seen, _ in found:
        assert seen == expected
    for phase in ("dispatch", "combine", "dispatch_backward", "combine_backward"):
        assert sum(sent.get(phase, 0) for _, sent in found) > 0


def under_way_at_linear_layers(
    flags: list[str], lengths: list[int]
) -> tuple[list[set[tuple[str, str, str]]], dict[str, int]]:
    """The exchanges that are under way at each collective of tensor parallelism, by `(name, layer,
    nano-batch)`, without repetitions; and the bytes that this rank sent. Collective."""
    from unittest import mock

    from megatron.core.tensor_parallel import layers, mappings

    from support import training

    args = parse(flags)
    training.initialize(args)
    run, made = make_run(args, memory_stream(lengths))
    trace = made.core_attention.trace
    with contextlib.ExitStack() as patched:
        for module in (layers, mappings):
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
                # Each calls the function that this module had.
                wrapped = trace.span("linear layer", "pipeline")(getattr(module, name))
                patched.enter_context(mock.patch.object(module, name, wrapped))
        trace.recording = True
        training.forward_backward(run)
    under_way: set[tuple[str, str, str]] = set()
    seen: list[set[tuple[str, str, str]]] = []
    for event in sorted(trace.take(0), key=lambda each: each["ts"]):
        name = event["name"]
        if name == "linear layer" and seen[-1:] != [under_way]:
            seen.append(set(under_way))
        elif event["cat"] == "exchange":
            labels = str(event["args"]["layer"]), event["args"]["nano_batch"]
            if name.startswith("wait for "):
                under_way.remove((name.removeprefix("wait for "), *labels))
            else:
                under_way.add((name, *labels))
    run.data.close()
    return seen, dict(made.core_attention.transport.bytes_sent)


def test_the_ablation_by_signals_moves_a_byte_a_message(ranks) -> None:
    flags = ["--num-layers", "2", "--distca", "--seq-length", str(WINDOW // 2)]
    whole = ranks.run(train, flags, [WINDOW] * 2, 1, world_size=2)
    signal = ranks.run(
        train, [*flags, "--distca-ablation", "signal"], [WINDOW] * 2, 1, world_size=2
    )
    for full, one in zip(whole, signal, strict=True):
        assert full.bytes_counted == full.bytes_planned
        # One peer, two layers, two nano-batches: at most a byte for each.
        assert all(0 < count <= 4 for count in one.bytes_counted.values())
        assert set(one.bytes_counted) <= set(full.bytes_counted)
