"""The example scheduler, kernel and transport do what their interfaces ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.attention import KernelTasks
from distca.plan import Mask, Plan, validate_plan
from distca.schedule import ScheduleConfig, describe, even_capacities, make_scheduler
from examples.kernel import PlainKernel
from examples.scheduler import LargestFirst
from examples.transport import MessagesTransport
from support.attention_cases import CASES, SCALE, assert_close, make_inputs, reference
from support.exchanges import Exchanges


def test_the_scheduler_balances_where_no_piece_is_too_large() -> None:
    config = ScheduleConfig(tolerance=0.1)
    scheduler = LargestFirst(config)
    lengths = np.sort(np.random.default_rng(0).integers(1, 4000, 40))
    capacities = even_capacities(int(lengths.sum()), 4)
    for mask in (Mask(), Mask(500)):
        plan: Plan = scheduler.plan(lengths, capacities, mask)
        validate_plan(plan)
        assert describe(plan, config).load_max_over_mean < 1.1
    packed = make_scheduler("packed", config).plan(lengths, capacities, Mask())
    assert describe(packed, config).load_max_over_mean > 1.1


def test_a_registered_scheduler_is_one_of_the_commands(monkeypatch, capsys) -> None:
    from distca.commands import plan
    from distca.schedule import schedulers

    monkeypatch.setitem(schedulers.COMPARED, "largest-first", LargestFirst)
    batch = "--distribution pretrain --servers 16 --tokens-per-server 65536 --model llama-8b"
    assert plan.main([*batch.split(), "--scheduler", "largest-first"]) == 0
    assert "plan by largest-first for 16 servers" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "case", "causal", "window"), CASES, ids=[c[0] for c in CASES])
def test_the_kernel(name, case, causal, window) -> None:
    kernel = PlainKernel()
    tensors, edges = make_inputs(case, 4, 2, 24, torch.float32)
    q, k, v, dout = tensors
    tasks = KernelTasks(*edges, causal, window, SCALE)
    out, lse = kernel.forward(q, k, v, tasks)
    gradients = kernel.backward(dout, q, k, v, out, lse, tasks)
    expected_out, expected_lse, expected = reference(tensors, edges, causal, window)
    assert_close(out, expected_out, 3e-6)
    assert_close(lse, expected_lse, 3e-6)
    for found, wanted in zip(gradients, expected, strict=True):
        assert_close(found, wanted, 3e-6)


def exchange_at_random(seed: int) -> int:
    transport = MessagesTransport(dist.group.WORLD, torch.device("cpu"))
    wrong = Exchanges(transport, seed).run(60)
    transport.close()
    return wrong


def test_the_transport(ranks) -> None:
    assert ranks.run(exchange_at_random, 3, world_size=3) == [0, 0, 0]
