"""Layouts of pipelines, and their runs against plain Megatron in one process."""

from __future__ import annotations

import pytest

from support.models import StepsDone, train
from support.parity import check_gradients

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
_PLAIN: dict[tuple[int, bool], StepsDone] = {}


def documents(micro_batches: int, steps: int = 1) -> list[int]:
    """Windows of very different attention: one document, odd ones with one that spans, short."""
    windows = [[WINDOW], [1, 300, 5, 1, 129, 332], [128] * 6, [200, 500, 68], [12] * 64]
    return [n for i in range(micro_batches * steps) for n in windows[i % len(windows)]]


def plain(ranks, micro_batches: int, tied: bool = False) -> StepsDone:
    """Two steps of one process without `--distca`, with a dense mask."""
    key = (micro_batches, tied)
    if key not in _PLAIN:
        flags = [*SIZES, "--seq-length", str(WINDOW), "--global-batch-size", str(micro_batches)]
        flags += ["--attention-backend", "unfused"]
        lengths = documents(micro_batches, 2)
        _PLAIN[key] = ranks.run(train, flags, lengths, 2, tied, world_size=1)[0]
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
    """The ranks' steps are the first ones of those expected."""
    for rank in found:
        assert rank.bytes_counted == rank.bytes_planned, case
        if rank.serves_only:
            assert rank.bytes_counted.keys() == {"combine", "combine_backward"}, case
            continue
        steps = len(rank.losses)
        assert rank.losses == pytest.approx(expected.losses[:steps], rel=1e-5), case
        assert rank.grad_norms == pytest.approx(expected.grad_norms[:steps], rel=1e-4), case
    if found[0].gradients:
        check_gradients(found, expected, case)


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
