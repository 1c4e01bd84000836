"""Plans a global batch of documents of given lengths as training does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan import LayerMasks
from distca.plan.span import Int64s
from distca.schedule import (
    ExecutionOptions,
    GlobalBatchPlanner,
    LinearWork,
    PlannedGlobalBatch,
    ScheduleConfig,
    documents_in_turn,
)


def plan_global_batch(
    windows: Sequence[Int64s],
    stages: int,
    data_parallel: int,
    config: ScheduleConfig,
    options: ExecutionOptions,
    masks: LayerMasks | None = None,
    linear_work: LinearWork | None = None,
) -> PlannedGlobalBatch:
    """Makes all plans of a global batch.

    Args:
        windows: lengths of the documents in each micro-batch, or in each chain of micro-batches,
            int64; all hold the same number of tokens, which the micro-batches of a chain and the
            data-parallel ranks (and two nano-batches) divide.
        stages: number of pipeline stages.
        data_parallel: number of ranks in a stage.
        config: tolerance, cost model and links that the scheduler plans with.
        options: scheduler, nano-batches and pipeline schedule.
        masks: tokens that a query sees in the layers of a model chunk; None: all earlier tokens of
            its document.
        linear_work: linear layers of the model, as for `GlobalBatchPlanner`.

    Raises:
        ValueError: micro-batches differ in size or don't divide, or a scheduler refuses.
    """
    # Ranks are numbered as in Megatron: those of the first stage, of the second, ...
    servers = np.arange(stages * data_parallel, dtype=np.int64).reshape(stages, data_parallel)
    # Nothing runs here: a rank without tokens, which a model cannot train on, is no error.
    planner = GlobalBatchPlanner(
        servers, config, options, masks or LayerMasks(), 0, False, linear_work
    )
    return planner.plan(documents_in_turn(windows, options.chain))
