"""What is under way while the other nano-batch computes, and the ablation of exchanges."""

from __future__ import annotations

import contextlib

from support.models import make_run, memory_stream, parse, train
from support.pipelines import WINDOW, documents


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
    trace = made.runtime.core_attention.trace
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
    return seen, dict(made.runtime.core_attention.transport.bytes_sent)


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
