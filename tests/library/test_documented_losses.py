"""What the page of shared prefixes says of losses and of memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from distca.cost.memory import plan_memory
from distca.library import AttentionShape, Mask, Rollout, share_prefixes
from distca.library.plans import PlanDocuments
from distca.schedule import ScheduleConfig
from support.documented_losses import PAGE, documented_losses, losses_one_by_one


def test_the_losses_on_the_page_are_those_of_rollouts_one_by_one(ranks: Any) -> None:
    pytest.importorskip("transformers")
    expected = losses_one_by_one()
    for found in ranks.run(documented_losses, world_size=2):
        for name, (loss, gradient) in expected.items():
            assert found[name][0] == pytest.approx(loss, rel=3e-6, abs=3e-6), name
            assert float((found[name][1] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_the_buffers_on_the_page() -> None:
    made, shape = torch.Generator().manual_seed(0), AttentionShape(32, 8, 128, 2)
    prompt, *responses = (
        torch.randint(100_000, (n,), generator=made) for n in (65536, *[512] * 64)
    )
    trees = share_prefixes([Rollout(torch.cat([prompt, each])) for each in responses])
    needed = []
    for ranks in (1, 8):
        (plan,) = PlanDocuments("tiles", ScheduleConfig(shape=shape), (Mask(),), ranks)(trees).plans
        needed.append(plan_memory(plan, shape).total(1) / 1e9)
    text = " ".join(PAGE.read_text().split())
    (shown,) = re.findall(r"(\d+) GB of buffers on one rank, or ([\d.]+) GB on each of 8", text)
    assert shown == (f"{needed[0]:.0f}", f"{needed[1]:.1f}")
