"""vLLM's servers and prefill ranks in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.plan import Mask
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate import CLUSTERS
from distca.simulate.requests import Request, RequestTrace
from distca.simulate.requests.vllm import (
    PrefillRanks,
    PrefillServers,
    Replicas,
    answer,
    room_of,
)
from distca.simulate.serving import InferenceCosts, Overheads, simulate_step

MODEL = replace(MODELS["llama-8b"], layers=4)
COSTS = InferenceCosts(MODEL, CLUSTERS["dgx-h100"])
ONE = Replicas(COSTS, 1)


def trace(*requests: tuple[float, int, int]) -> RequestTrace:
    return RequestTrace(tuple(Request(*each) for each in requests))


@pytest.mark.parametrize(("start", "count"), [(0, 8192), (0, 512), (65536, 8192)])
def test_a_step_of_vllm_takes_what_one_of_our_ranks_takes(start: int, count: int) -> None:
    """Its peers are charged alike, but for our merging and copies, which take little."""
    owners = np.zeros(-(-(start + count) // 128), dtype=np.int64)
    plan = plan_iteration([ScheduledTokens(0, start, count, owners)], (Mask(),), 128, 1, "pass-kv")
    assert plan.prefill is not None
    stepped = plan.prefill.plans.of(0, Mask())
    ours = simulate_step([stepped] * MODEL.layers, COSTS).seconds
    assert ONE.seconds([(start, count)], []) == pytest.approx(ours, rel=0.05)


def test_a_prompt_alone_is_computed_in_chunks_and_then_decoded() -> None:
    found = answer(trace((1.0, 20000, 3)), ONE)
    chunks = [ONE.seconds([(at, min(8192, 20000 - at))], []) for at in (0, 8192, 16384)]
    assert found.ttft[0] == pytest.approx(sum(chunks))
    decoded = [ONE.seconds([], [20001]), ONE.seconds([], [20002])]
    assert found.per_token[0] == pytest.approx(np.mean(decoded))
    assert found.seconds == pytest.approx(1.0 + sum(chunks) + sum(decoded))
    assert not found.asked[0]


def test_what_decodes_goes_first_and_prompts_wait_in_their_order() -> None:
    found = answer(trace((0.0, 100, 4000), (0.1, 60000, 1), (0.2, 100, 1)), ONE)
    # The last waits until the long prompt has had all of its chunks but a part of the last.
    assert found.ttft[2] > 0.9 * found.ttft[1] - 0.1
    alone = answer(trace((0.0, 100, 4000)), ONE)
    assert found.per_token[0] > alone.per_token[0]


def test_replicas_share_requests_by_their_loads() -> None:
    requests = trace(*((0.0, 30000, 2) for _ in range(4)))
    one, four = (answer(requests, Replicas(COSTS, number)) for number in (1, 4))
    # The end of a prompt shares its step with the beginning of the next.
    assert four.ttft.max() == pytest.approx(one.ttft.min(), rel=0.1)
    assert one.ttft.max() > 3.5 * four.ttft.max()


def ranks(number: int, **changes: float) -> PrefillRanks:
    return PrefillRanks(COSTS, number, 1024, **({"bytes_per_second": 1e15} | changes))  # type: ignore[arg-type]


def test_ranks_take_long_prompts_and_leave_the_others_as_they_were() -> None:
    short = [(0.001 * n, 100 + 37 * n % 400, 5) for n in range(50)]
    alone = answer(trace(*short), ONE)
    with_ranks = answer(trace(*short), ONE, ranks(2))
    assert not with_ranks.asked.any()
    np.testing.assert_array_equal(with_ranks.ttft, alone.ttft)
    mixed = answer(trace(*short[:25], (0.02, 50000, 5), *short[25:]), ONE, ranks(2))
    assert mixed.asked.tolist() == [n == 25 for n in range(51)]
    least = answer(trace((0, 1023, 1), (0, 1024, 1)), ONE, ranks(2))
    assert least.asked.tolist() == [False, True]
    beside = answer(trace(*short[:25], (0.02, 50000, 5), *short[25:]), ONE)
    assert np.delete(mixed.ttft, 25).max() < 0.1 * np.delete(beside.ttft, 25).max()


def test_a_prompt_on_ranks_takes_its_iterations_its_rows_and_a_last_token() -> None:
    tokens = 20001
    found = answer(trace((0.0, tokens, 1)), ONE, ranks(1))
    last = ONE.seconds([(tokens - 1, 1)], [])
    of_ranks = found.ttft[0] - last
    chunks = [ONE.seconds([(at, min(8192, 20000 - at))], []) for at in (0, 8192, 16384)]
    # What has come is read and written once.
    nbytes = (tokens - 1) * COSTS.shape.kv_row_bytes * MODEL.layers
    written = 2 * nbytes / COSTS.cluster.copied_bytes_per_second
    assert of_ranks - written == pytest.approx(sum(chunks), rel=0.05)
    host = answer(trace((0.0, tokens, 1)), ONE, ranks(1, host_seconds=0.5))
    assert host.ttft[0] == pytest.approx(found.ttft[0] + 1.5)
    # On a slow link all rows but those of the first layer's first chunk are waited for.
    slow = answer(trace((0.0, tokens, 1)), ONE, ranks(1, bytes_per_second=1e7))
    assert slow.ttft[0] == pytest.approx(nbytes / 1e7, rel=0.05)
    several = answer(trace((0.0, tokens, 1)), ONE, ranks(4))
    assert several.ttft[0] < 0.4 * found.ttft[0]


def test_nobody_has_more_than_there_is_room_for() -> None:
    room = room_of(COSTS)
    assert ONE.room == room
    with pytest.raises(ValueError, match="is more than a replica's"):
        answer(trace((0.0, room, 10)), ONE)
    with pytest.raises(ValueError, match="more than the"):
        answer(trace((0.0, room - 20, 10)), ONE, replace(ranks(1), block_size=room - 100))
    large = replace(MODELS["llama-8b"], layers=400)
    with pytest.raises(ValueError, match="leave no room"):
        room_of(InferenceCosts(large, CLUSTERS["dgx-h100"]))
    # The second starts once the first has ended.
    half = room // 2 + 10
    found = answer(trace((0.0, half, 5), (0.0, half, 5)), ONE)
    alone = answer(trace((0.0, half, 5)), ONE)
    assert found.ttft[1] == pytest.approx(alone.seconds + alone.ttft[0])


def test_graphs_launch_what_decodes_and_short_chunks() -> None:
    """The longest chunk that they launch is vLLM's, rows of sequences that decode included."""
    slow, quick = Overheads(iteration_seconds=1.0), Overheads(iteration_seconds=0.25)
    charged = Replicas(replace(COSTS, overheads=slow, decode_overheads=quick), 1)
    cases = (([(0, 512)], [], 0.25), ([(0, 511)], [100, 100], 1.0), ([(0, 513)], [], 1.0))
    for chunks, rows, more in (*cases, ([], [100] * 600, 0.25)):
        assert charged.seconds(chunks, rows) - ONE.seconds(chunks, rows) == pytest.approx(more)


def servers(number: int, tensor: int, least: int = 0, speed: float = 1e15) -> PrefillServers:
    return PrefillServers(Replicas(replace(COSTS, tensor_parallel=tensor), number), least, speed)


def test_a_server_that_only_prefills_takes_what_vllm_takes() -> None:
    tokens = 20001
    found = answer(trace((0.0, tokens, 1)), ONE, servers(1, 4))
    alone = servers(1, 4).vllm
    chunks = [alone.seconds([(at, min(8192, 20000 - at))], []) for at in (0, 8192, 16384)]
    # All heads are written at the server that decodes.
    nbytes = (tokens - 1) * COSTS.shape.kv_row_bytes * MODEL.layers
    written = 2 * nbytes / COSTS.cluster.copied_bytes_per_second
    last = ONE.seconds([(tokens - 1, 1)], [])
    assert found.asked.all()
    assert found.ttft[0] == pytest.approx(sum(chunks) + written + last)
    # One GPU receives, over one link.
    slow = answer(trace((0.0, tokens, 1)), ONE, servers(1, 4, speed=1e7))
    assert slow.ttft[0] == pytest.approx(nbytes / 1e7, rel=0.05)
    four = Replicas(replace(COSTS, tensor_parallel=4), 1)
    wide = answer(trace((0.0, tokens, 1)), four, servers(1, 4, speed=1e7))
    assert wide.ttft[0] == pytest.approx(nbytes / 4e7, rel=0.05)
    assert (servers(3, 4).gpus, ranks(3).gpus) == (12, 3)


def test_prompts_go_to_the_server_with_the_fewest_tokens_left() -> None:
    # The third finds one server with 500 tokens, and one with 60,000.
    requests = trace((0.0, 60000, 1), (0.0, 500, 1), (0.0, 500, 1))
    two = answer(requests, ONE, servers(2, 1))
    assert two.ttft[2] < 0.1 * two.ttft[0]
    one = answer(requests, ONE, servers(1, 1))
    assert one.ttft[2] > 0.9 * one.ttft[0]
    # Prompts that are computed no longer count.
    later = trace((0.0, 40000, 1), (0.0, 500, 1), (9.0, 30000, 1), (9.0, 30000, 1))
    apart = answer(later, ONE, servers(2, 1))
    assert apart.ttft[2:].max() < 1.1 * answer(trace((0.0, 30000, 1)), ONE, servers(1, 1)).ttft[0]
    least = answer(requests, ONE, servers(2, 1, least=1024))
    assert least.asked.tolist() == [True, False, False]
