"""`--distca` in a pipeline of several stages against plain Megatron in one process."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import StepsDone, make_run, memory_stream, parse, train
from test_parity import RECOMPUTE, WHOLE, both_ways, check_gradients

from distca.schedule import SCHEDULERS
from megatron_patches.job import DataIterators

SIZES = "--num-layers 4 --group-query-attention --num-query-groups 2".split()
WINDOW = 768
LAYOUTS = {
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2-DP2": (4, "--pipeline-model-parallel-size 2"),
    "TP2-PP2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    "TP2-SP-PP2": (
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "PP2-VPP2": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "PP2-VPP2-DP2": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
}
# The last process holds no model.
DEDICATED = {
    "PP2 + 1": (3, "--pipeline-model-parallel-size 2 --distca-servers dedicated:1"),
    "PP2-VPP2 + 1": (
        3,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--distca-servers dedicated:1",
    ),
}
_PLAIN: dict[tuple[int, int, bool], StepsDone] = {}


def documents(micro_batches: int, steps: int = 1) -> list[int]:
    """Windows of very different attention: one document, odd ones with one that spans, short."""
    windows = [[WINDOW], [1, 300, 5, 1, 129, 332], [128] * 6, [200, 500, 68], [12] * 64]
    return [n for i in range(micro_batches * steps) for n in windows[i % len(windows)]]


def plain(ranks, micro_batches: int, steps: int, tied: bool = False) -> StepsDone:
    """One process without `--distca`, with a dense mask."""
    key = (micro_batches, steps, tied)
    if key not in _PLAIN:
        flags = [*SIZES, "--seq-length", str(WINDOW), "--global-batch-size", str(micro_batches)]
        flags += ["--attention-backend", "local"]
        lengths = documents(micro_batches, steps)
        _PLAIN[key] = ranks.run(train, flags, lengths, steps, tied, world_size=1)[0]
    return _PLAIN[key]


def flags_of(layout: str, micro_batches: int) -> tuple[int, list[str]]:
    world_size, text = (LAYOUTS | DEDICATED)[layout]
    flags = text.split()
    model_parallel = 2 if "--tensor-model-parallel-size" in flags else 1
    stages = int(flags[flags.index("--pipeline-model-parallel-size") + 1])
    with_model = world_size - (layout in DEDICATED)
    data_parallel = with_model // (model_parallel * stages)
    return world_size, [
        *(*SIZES, *flags, "--distca"),
        *("--seq-length", str(WINDOW // data_parallel)),
        *("--global-batch-size", str(micro_batches * data_parallel)),
    ]


def check(found: list[StepsDone], expected: StepsDone, case: object) -> None:
    for rank in found:
        assert rank.bytes_counted == rank.bytes_planned, case
        if rank.serves_only:
            assert rank.bytes_counted.keys() == {"return", "return_backward"}, case
            continue
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5), case
        assert rank.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4), case
    if found[0].gradients:
        check_gradients(found, expected, case)


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [*((layout, number) for layout in LAYOUTS for number in (1, 5)), ("PP4", 3)],
)
def test_losses_gradients_and_bytes(ranks, layout: str, micro_batches: int) -> None:
    """With fewer micro-batches than stages, and with five; two steps."""
    world_size, flags = flags_of(layout, micro_batches)
    found = ranks.run(train, flags, documents(micro_batches, 2), 2, world_size=world_size)
    check(found, plain(ranks, micro_batches, 2), layout)


@pytest.mark.parametrize("layout", ["PP4", "TP2-SP-PP2", "PP2-VPP2-DP2"])
def test_whole_micro_batches(ranks, layout: str) -> None:
    world_size, flags = flags_of(layout, 5)
    flags.append(WHOLE)
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    check(found, plain(ranks, 5, 2), layout)


@both_ways
@pytest.mark.parametrize("layout", DEDICATED)
def test_dedicated_servers(ranks, layout: str, nano_batches: list[str]) -> None:
    world_size, flags = flags_of(layout, 5)
    flags += nano_batches
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    assert [rank.serves_only for rank in found] == [False, False, True]
    check(found, plain(ranks, 5, 2), layout)


VARIANTS = {
    "whole": "--no-distca-ping-pong",
    "whole, recompute uniformly": "--no-distca-ping-pong --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 2",
    "single-stream": "--distca-ablation single-stream",
    "stages apart": "--no-distca-pool-stages",
    "one in flight": "--distca-max-in-flight 1",
    "three in flight": "--distca-max-in-flight 3",
    "sequential": "--distca-placement sequential",
    "sharded optimizer": "--use-distributed-optimizer",
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "recompute selectively": "--recompute-activations",
    "recompute uniformly": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2",
    "recompute the first": "--recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1",
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["PP2-DP2", "PP2-VPP2-DP2"])
def test_it_mixes(ranks, layout: str, variant: str) -> None:
    world_size, flags = flags_of(layout, 5)
    flags += VARIANTS[variant].split()
    if "VPP" in layout and "--recompute-num-layers" in flags:
        # A virtual stage has one layer only.
        flags[flags.index("--recompute-num-layers") + 1] = "1"
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    check(found, plain(ranks, 5, 2), variant)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler(ranks, scheduler: str) -> None:
    """Also wlb-llm, under which ranks send messages of different sizes."""
    world_size, flags = flags_of("PP2-DP2", 5)
    flags = [*flags, "--distca-scheduler", scheduler]
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    check(found, plain(ranks, 5, 2), scheduler)


@both_ways
@pytest.mark.parametrize("layout", ["PP2-DP2", "PP4", "TP2-PP2"])
def test_tied_embeddings(ranks, layout: str, nano_batches: list[str]) -> None:
    world_size, flags = flags_of(layout, 5)
    flags += nano_batches
    found = ranks.run(train, flags, documents(5, 2), 2, True, world_size=world_size)
    check(found, plain(ranks, 5, 2, tied=True), layout)


def test_idle_stages_compute_tasks(ranks, tmp_path: Path) -> None:
    """On the timeline of a run: in warm-up and drain servers without tokens run kernels."""
    file = tmp_path / "trace.json"
    world_size, flags = flags_of("PP2-DP2", 5)
    flags += ["--distca-trace", str(file), "--distca-trace-iterations", "1", "2"]
    flags += ["--seq-length", "1024", "--distca-ping-pong"]
    lengths = [2048] * 10
    ranks.run(train, flags, lengths, 2, world_size=world_size)
    events = json.loads(file.read_text())["traceEvents"]
    ticks = [e for e in events if e.get("cat") == "ticks"]
    assert len(ticks) == 2 * world_size * 2 * (5 + 2 - 1)
    for phase in ("forward", "backward"):
        idle = [e for e in ticks if e["args"]["phase"] == phase and e["args"]["own_tokens"] == 0]
        assert {e["name"] for e in idle} == {f"{phase}: serve"}
        # Two ranks of a stage wait in the first tick of an iteration, and two in the last.
        assert len(idle) == 2 * 2 * 2
        assert all(e["args"]["pairs"] > 0 for e in idle)
        kernels = [
            e
            for e in events
            if e.get("cat") == "kernels"
            and e["args"]["own_tokens"] == 0
            and e["args"]["phase"] == phase
        ]
        # Two layers on each stage, two nano-batches.
        assert len(kernels) == 2 * 2 * len(idle)
        assert all(e["dur"] > 0 for e in kernels)
    # Every pair of every micro-batch is computed in a forward tick, on any server.
    pairs = sum(e["args"]["pairs"] for e in ticks if e["args"]["phase"] == "forward")
    assert pairs == 2 * sum(length * (length + 1) // 2 for length in lengths)


def test_bytes_of_every_tick(ranks) -> None:
    """What a tick's plan says that each rank sends is what its transport counts in that tick."""
    for layout in ("PP2-DP2", "PP2-VPP2-DP2"):
        world_size, flags = flags_of(layout, 5)
        for extra in ([], VARIANTS["recompute the first"].split()):
            results = ranks.run(
                bytes_of_ticks, [*flags, *extra], documents(5), world_size=world_size
            )
            for planned, counted in results:
                assert planned == counted
            assert sum(sum(tick.values()) for planned, _ in results for tick in planned) > 0


def bytes_of_ticks(flags: list[str], lengths: list[int]) -> tuple[list, list]:
    """Bytes sent by this rank in each tick by phase, as planned and as counted; collective."""
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state

    from megatron_patches.lean import training
    from megatron_patches.pipeline import TickPipeline
    from megatron_patches.tick_batches import TickInput, TickStream

    args = parse(flags)
    training.initialize_megatron(args)
    run, made = make_run(args, memory_stream(lengths))
    transport = made.core_attention.transport
    planned, counted = [], []

    class Watched(TickStream):
        """Notes the counts when a tick ends, which is when the next one is asked for."""

        def __init__(self, ticks: TickStream) -> None:
            self.batches, self._inner = ticks.batches, ticks

        def __next__(self) -> TickInput:
            counted.append(dict(transport.bytes_sent))
            following = next(self._inner)
            planned.append({k: v for k, v in following.bytes_sent.items() if v})
            return following

    assert isinstance(run.forward_backward_func, TickPipeline)
    run.data[0] = DataIterators(Watched(run.data[0].train), None, None)
    for chunk in run.model:
        chunk.zero_grad_buffer()
    training.forward_backward(run, "train", forward_only=False)
    counted.append(dict(transport.bytes_sent))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    each = [
        {k: after[k] - before.get(k, 0) for k in after if after[k] > before.get(k, 0)}
        for before, after in itertools.pairwise(counted)
    ]
    return planned, each


def test_an_evaluation_has_forward_ticks_only(ranks) -> None:
    for layout in ("PP2-DP2", "PP2-VPP2"):
        world_size, flags = flags_of(layout, 5)
        found = ranks.run(evaluation_loss, flags, documents(5), world_size=world_size)
        assert found == pytest.approx([plain(ranks, 5, 2).losses[0]] * world_size, rel=1e-5)


def test_a_global_batch_can_be_run_again(ranks) -> None:
    """As Megatron-LM's loop does to validate a result: with the ticks that it kept."""
    for layout in ("PP2-DP2", "PP2-VPP2"):
        world_size, flags = flags_of(layout, 3)
        found = ranks.run(losses_of_reruns, flags, documents(3), world_size=world_size)
        assert found == [[pytest.approx(plain(ranks, 3, 2).losses[0], rel=1e-5)] * 3] * world_size


def losses_of_reruns(flags: list[str], lengths: list[int]) -> list[float]:
    """Of the same global batch, run again and again; collective."""
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state

    from megatron_patches.lean import training

    args = parse(flags)
    training.initialize_megatron(args)
    run, _ = make_run(args, memory_stream(lengths))
    stream = run.data[0].train
    first = next(stream)
    kept = [first, *(next(stream) for _ in first.schedule.ticks[1:])]

    class Again:
        """In the form of Megatron's `RerunDataIterator`."""

        iterable = stream
        ticks = itertools.cycle(kept)

        def __next__(self) -> Any:
            return next(self.ticks)

    run.data[0] = DataIterators(Again(), None, None, end=run.data[0].end)
    losses = []
    for _ in range(3):
        for chunk in run.model:
            chunk.zero_grad_buffer()
        losses.append(training.forward_backward(run, "train", forward_only=False)["lm loss"])
    stream.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    return losses


def test_a_failed_exchange_stops_the_step(ranks) -> None:
    """Before the optimizer, and before the loss that it made not-a-number is blamed."""
    world_size, flags = flags_of("PP2", 2)
    results = ranks.run(step_with_failed_exchange, flags, documents(2), world_size=world_size)
    assert results == [("rank 1 did nothing", 0, True)] * world_size


def step_with_failed_exchange(flags: list[str], lengths: list[int]) -> tuple[str, int, bool]:
    """The error, the iteration, and whether the weights are as before; collective."""
    import torch
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state

    from distca.transport import TransportError
    from megatron_patches.lean import training

    args = parse(flags)
    training.initialize_megatron(args)
    run, made = make_run(args, memory_stream(lengths))

    def check(finished: bool = True) -> None:
        raise TransportError("rank 1 did nothing")

    made.core_attention.transport.check = check
    for parameter in run.model[0].parameters():
        parameter.data[(0,) * parameter.dim()] = torch.nan
    before = [parameter.detach().clone() for parameter in run.model[0].parameters()]
    said = ""
    try:
        training.train_step(run)
    except TransportError as error:
        said = str(error)
    after = run.model[0].parameters()
    same = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )
    run.data[0].close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    return said, args.iteration, same


def test_all_stages_meet_before_some_pass_on(ranks) -> None:
    """NCCL makes a group's communicator at its first call, which must be every rank's."""
    world_size, flags = flags_of("PP4", 2)
    calls = ranks.run(calls_between_stages, flags, documents(2), world_size=world_size)
    assert [row[0] for row in calls] == ["all_reduce"] * world_size
    assert all("P2POp" in row and row.count("all_reduce") == 1 for row in calls)


def calls_between_stages(flags: list[str], lengths: list[int]) -> list[str]:
    """What this rank calls on the pipeline's group in a step, in turn; collective."""
    from unittest import mock

    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state

    from megatron_patches.lean import training

    args = parse(flags)
    training.initialize_megatron(args)
    run, _ = make_run(args, memory_stream(lengths))
    stages = parallel_state.get_pipeline_model_parallel_group()
    called = []

    def noting(name: str):
        function = getattr(dist, name)

        def noted(*arguments, **options):
            if any(each is stages for each in (*arguments, *options.values())):
                called.append(name)
            return function(*arguments, **options)

        return mock.patch.object(dist, name, noted)

    with contextlib.ExitStack() as patched:
        for name in ("all_reduce", "P2POp"):
            patched.enter_context(noting(name))
        training.train_step(run)
    run.data[0].close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    return called


def evaluation_loss(flags: list[str], lengths: list[int]) -> float:
    """The loss of one global batch, without its gradients; collective."""
    import torch
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state

    from megatron_patches.data import batch_maker, window_layout
    from megatron_patches.lean import training
    from megatron_patches.tick_batches import TickStream

    args = parse(flags)
    training.initialize_megatron(args)
    stream, device = memory_stream(lengths), torch.device("cpu")
    run, _ = make_run(args, stream)
    maker = batch_maker(args, window_layout(args), device)
    ticks = TickStream(maker(stream, forward_only=True), 0, maker.micro_batches, device)
    run.data[0] = DataIterators(None, ticks, None)
    args.eval_iters = 1
    losses = training.evaluate(run, "valid")
    ticks.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    return losses["lm loss"]


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
    forward = ["dispatch", "wait for dispatch", "core attention", "return", "wait for return"]
    found = order_of_events(tmp_path, ranks, flags)
    assert found[0] == found[1]
    there = [event for event in found[0] if "backward" not in event[0]]
    back = [event for event in found[0] if "backward" in event[0]]
    compute = forward[1:4]
    assert there == [
        ("dispatch", "1", "ping"),
        ("dispatch", "1", "pong"),
        *((name, "1", nano) for nano in ("ping", "pong") for name in compute),
        *(("wait for return", "1", "ping"), ("dispatch", "2", "ping")),
        *(("wait for return", "1", "pong"), ("dispatch", "2", "pong")),
        *((name, "2", nano) for nano in ("ping", "pong") for name in compute),
        *(("wait for return", "2", nano) for nano in ("ping", "pong")),
    ]
    compute = [f"{name} backward" for name in ("wait for dispatch", "core attention", "return")]
    assert back == [
        *(("dispatch backward", "2", nano) for nano in ("pong", "ping")),
        *((name, "2", nano) for nano in ("pong", "ping") for name in compute),
        *(("wait for return backward", "2", "pong"), ("dispatch backward", "1", "pong")),
        *(("wait for return backward", "2", "ping"), ("dispatch backward", "1", "ping")),
        *((name, "1", nano) for nano in ("pong", "ping") for name in compute),
        *(("wait for return backward", "1", nano) for nano in ("pong", "ping")),
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
                names = ["wait for dispatch", "core attention", "return", "wait for return"]
                events += [(name, layer, nano) for name in names]
                events += [("dispatch", after, nano)] if after else []
        # Known before the loss is.
        return [*events, *(("dispatch backward", layers[-1], nano) for nano in both[::-1])]

    def back(*layers: str) -> list[tuple[str, ...]]:
        events = []
        for before, layer, after in itertools.zip_longest(["", *layers], layers, layers[1:]):
            for nano in both[::-1]:
                events += [("wait for return backward", before, nano)] if before else []
                names = ["wait for dispatch", "core attention", "return"]
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
        *({("return", "1", "pong")}, {("dispatch", "2", "ping")}),
        # Post-attention of the last layer of ping, then of pong; then what follows the layers, and
        # all of it backwards.
        *({("return", "2", "pong")}, set(), {("dispatch backward", "2", "pong")}),
        *({("return backward", "2", "ping")}, {("dispatch backward", "1", "pong")}),
        *({("return backward", "1", "ping")}, set()),
    ]
    for seen, _ in found:
        assert seen == expected
    for phase in ("dispatch", "return", "dispatch_backward", "return_backward"):
        assert sum(sent.get(phase, 0) for _, sent in found) > 0


def under_way_at_linear_layers(
    flags: list[str], lengths: list[int]
) -> tuple[list[set[tuple[str, str, str]]], dict[str, int]]:
    """The exchanges that are under way at each collective of tensor parallelism, by `(name, layer,
    nano-batch)`, without repetitions; and the bytes that this rank sent. Collective."""
    from unittest import mock

    from megatron.core.tensor_parallel import layers, mappings

    from megatron_patches.lean import training

    args = parse(flags)
    training.initialize_megatron(args)
    run, made = make_run(args, memory_stream(lengths))
    trace = made.core_attention.trace
    with contextlib.ExitStack() as patched:
        for module in (layers, mappings):
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
                # Each calls the function that this module had.
                wrapped = trace.span("linear layer", "pipeline")(getattr(module, name))
                patched.enter_context(mock.patch.object(module, name, wrapped))
        trace.recording = True
        training.forward_backward(run, "train", forward_only=False)
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
    run.data[0].close()
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


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("aligned", [False, True])
def test_when_gradients_are_reduced(stage: int, aligned: bool) -> None:
    """As in Megatron's own schedules: with a `grad_sync_func` only the first stage reduces during
    its last backward pass, and the others afterwards; never twice."""
    from megatron_patches.pipeline import _GradientSync

    held = [False]
    events: list[str] = []

    @contextlib.contextmanager
    def no_sync():
        held[0] = True
        yield
        held[0] = False

    chunk = SimpleNamespace(parameters=lambda: "parameters")
    launch = (lambda parameters: events.append(f"launch {parameters}")) if aligned else None
    config = SimpleNamespace(no_sync_func=no_sync, grad_sync_func=launch)
    sync = _GradientSync([chunk], config, first_stage=stage == 0)
    for last in (False, True):
        with sync.backward(last):
            events.append("held" if held[0] else "reduced as it comes")
    sync.finish()
    assert not held[0]
    if aligned and stage:
        assert events == ["held", "held", "launch parameters"]
    else:
        assert events == ["held", "reduced as it comes"]
