"""The order in which every rank goes through a plan's steps, a value that all follow.

*dispatch* starts the exchange of a step's rows; *receive* waits for them; *compute* runs the
kernels of the step, and starts the return of the outputs of queries from other ranks; *combine*
waits for outputs that return, and merges them. So the rows of a step, some of which have just been
received to be passed on, travel during the kernels of the step before, and outputs return during
those of the next:

    dispatch 0  receive 0  dispatch 1  compute 0  receive 1  dispatch 2  compute 1  combine 0  ...
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Action = Literal["dispatch", "receive", "compute", "combine"]


class StepEvent(NamedTuple):
    """One event of a call of core attention in steps."""

    action: Action
    step: int


def step_program(steps: int) -> tuple[StepEvent, ...]:
    """Makes the program of a layer's core attention over so many steps."""
    events = [StepEvent("dispatch", 0)]
    for step in range(steps):
        events.append(StepEvent("receive", step))
        if step + 1 < steps:
            events.append(StepEvent("dispatch", step + 1))
        events.append(StepEvent("compute", step))
        if step > 0:
            events.append(StepEvent("combine", step - 1))
    return (*events, StepEvent("combine", steps - 1))
