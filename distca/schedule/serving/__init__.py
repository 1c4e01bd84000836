"""Plans of inference: which rank holds a sequence's keys and values, and who computes a step."""

from distca.schedule.serving.selection import (
    SELECTORS,
    EmpiricalRule,
    PaperRule,
    Planned,
    Selector,
    SelectorName,
    chosen_strategy,
)
from distca.schedule.serving.steps import (
    STRATEGIES,
    Sharding,
    Strategy,
    held_after,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)

__all__ = [
    "SELECTORS",
    "STRATEGIES",
    "EmpiricalRule",
    "PaperRule",
    "Planned",
    "Selector",
    "SelectorName",
    "Sharding",
    "Strategy",
    "chosen_strategy",
    "held_after",
    "nobody_holds",
    "shard_evenly",
    "shard_in_stripes",
    "step_plan",
]
