"""Whether overlap survives one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`).

The model: kernels and exchanges each run in their order of launch, on a stream each. A launch that
waits (for its inputs, or for its stream) holds up every later launch, on either stream, if there is
one queue. With a queue for each stream it does not.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest

from distca.schedule.program import Program, layer_groups, tick_program


class Launch(NamedTuple):
    """A launch of a program.

    Attributes:
        exchange: whether it runs on the stream of exchanges, not on that of kernels.
        name: name of its work.
        inputs: names of works that must have ended.
    """

    exchange: bool
    name: str
    inputs: tuple[str, ...]


def launches(program: Program) -> list[Launch]:
    """The launches of a rank that follows a program, in order."""
    found: list[Launch] = []
    kernels: tuple[str, ...] = ()
    for direction, step, nano_batch, layer in program:
        name = f"{direction} {nano_batch} {layer}"
        if step == "prefetch":
            found.append(Launch(True, f"sent {name}", ()))
        elif step == "dispatch":
            found.append(Launch(True, f"sent {name}", kernels))
        elif step == "compute":
            kernels = (f"kernels {name}",)
            found.append(Launch(False, *kernels, (f"sent {name}",)))
            found.append(Launch(True, f"outputs {name}", kernels))
        else:
            kernels = (f"linear {name}",)
            found.append(Launch(False, *kernels, (f"outputs {name}",)))
    return found


def seconds(found: list[Launch], lasting: dict[str, float], one_queue: bool) -> float:
    """When all of it has ended."""
    ends: dict[str, float] = {}
    free = {False: 0.0, True: 0.0}
    last_start = 0.0
    for exchange, name, inputs in found:
        # The first layers' inputs are there.
        waits = [ends.get(each, 0.0) for each in inputs]
        start = max(free[exchange], *waits, last_start if one_queue else 0.0)
        last_start, ends[name] = start, start + lasting[name]
        free[exchange] = ends[name]
    return max(free.values())


def loss(program: Program, seed: int) -> float:
    """How many times as long a program takes with one queue, with random seconds of its works."""
    chance, found = random.Random(seed), launches(program)
    slow = chance.choice([0.1, 0.5, 1.0, 2.0])
    lasting = {each.name: chance.random() * (slow if each.exchange else 1.0) for each in found}
    one, several = (seconds(found, lasting, one_queue) for one_queue in (True, False))
    return one / several


PASSES = [*itertools.product(("forward", "backward"), (None, "full"), (1, 2))]


@pytest.mark.parametrize(("direction", "granularity", "nano_batches"), PASSES)
def test_overlap_loses_nothing_with_one_queue(direction, granularity, nano_batches) -> None:
    """An exchange comes after the kernels whose results it sends, before those that hide it."""
    groups = layer_groups(4, granularity, "uniform", 2)
    program = tick_program(direction, groups, nano_batches, at_home=False)
    assert all(loss(program, seed) == 1 for seed in range(100))


def test_keys_that_are_sent_ahead_may_hold_up_kernels() -> None:
    """They wait behind gradients, and no later launch needs them."""
    groups = layer_groups(4, None, None, None)
    for direction, loses in (("forward", False), ("backward", True)):
        program = tick_program(direction, groups, 2, at_home=True, goes_back=False)
        assert any(loss(program, seed) > 1.02 for seed in range(100)) == loses
