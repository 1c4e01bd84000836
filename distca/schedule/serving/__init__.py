"""Plans of inference: which rank holds a sequence's keys and values, and who computes a step.

* the scheduler: `scheduler.py`, with `request.py` a request, `limits.py` its bounds,
  `blocks.py` which blocks are free, which requests hold, and the prefix cache, which evicts,
  `block_owners.py` which rank owns a new one, `home_shares.py` how much of an iteration is whose,
  `moves.py` which blocks change their owner, `scheduled.py` what it decides;
* the plans of an iteration: `iteration.py`, with `batches.py` its two parts, prefills and decodes,
  and a plan for each mask of the layers;
* strategies: `steps.py` and `rings.py` keys or queries in rings, `partitions.py` chains,
  `csps/` sparse levels, head scatter, row sharing, `cdsp/` groups of ranks that grow,
  `balanced.py` prompts whose attention is shared in tiles;
  `selection.py` chooses among them;
* `handoff/`: the hand-off of a prompt's keys and values, and what an abort during it does.

To add a strategy of prefills: if it differs from others by what travels, as four of the eight do,
name it in `steps.py` (`Strategy`), and make its plan in `step_plan` or a file of its own, as
`rings.py` is. If it plans all layers of a prefill at once, as `tiles` and `csps` do, dispatch to it
in `plan_layers` (`batches.py`). If it differs by who owns the tokens, as Runahead does, it is a
`Sharding` (`partitions.py`) and travels as pass-KV. `sp-tp` shares rows, not tokens
(`csps/layouts.py`). Give it a flag's value in `distca/commands/described.py` and
`served_strategy.py`. `tests/inference/test_exactness.py`
compares its answers with one process's, and its bytes with the plan's. Strategies of growing
groups, which choose ranks and not what travels, are in `cdsp/strategies.py`.

All are pure functions of values, and import no torch.
"""

from distca.schedule.serving.selection import (
    SELECTORS,
    PaperRule,
    Planned,
    Selector,
    SelectorName,
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
    "PaperRule",
    "Planned",
    "Selector",
    "SelectorName",
    "Sharding",
    "Strategy",
    "held_after",
    "nobody_holds",
    "shard_evenly",
    "shard_in_stripes",
    "step_plan",
]
