"""Floating-point operations of a model: counted by hand, and the same however ranks share them."""

from __future__ import annotations

import pytest
import torch

from support.models import parse
from support.whole_runs import write_documents

FLAGS = "--seq-length 128 --global-batch-size 4 --log-throughput --hidden-dropout 0.1".split()


def operations(flags: list[str]) -> float:
    """Of a step and an evaluation, by the mean rank; collective."""
    from megatron.core import num_microbatches_calculator, parallel_state

    from megatron_patches.loop.gpt_job import GPT_JOB
    from megatron_patches.loop.lean import training
    from megatron_patches.loop.lean.throughput import Throughput

    args = parse(flags)
    training.initialize_megatron(args)
    run = training.build_run(GPT_JOB, args)
    throughput = Throughput(args, run.model)
    training.train_step(run)
    training.evaluate(run, "valid")
    done = throughput.per_gpu(seconds=1.0)
    assert throughput.per_gpu(seconds=1.0) == 0
    run.data[0].close()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    return done * torch.distributed.get_world_size()


@pytest.mark.parametrize("window", [None, 15])
def test_operations(ranks, tmp_path, window: int | None) -> None:
    prefix = write_documents(tmp_path / "documents", [64] * 40)
    flags = [*FLAGS, "--data-path", prefix, "--split", "60,30,10", "--eval-iters", "1"]
    flags += [] if window is None else ["--window-size", f"{window},0"]
    tokens, layers, heads, head_dim, hidden, ffn = 4 * 128, 2, 4, 16, 64, 96
    # Queries, keys, values and output; three matrices of SwiGLU.
    per_layer = hidden * 4 * heads * head_dim + 3 * hidden * ffn
    # 250 tokens and the end token, up to a multiple of 64; with TP2 of 128.
    output = hidden * 256
    pairs = 8 * sum(min(position, 63 if window is None else window) + 1 for position in range(64))
    forward = 2 * tokens * (layers * per_layer + output) + layers * pairs * heads * 4 * head_dim
    for shared in (
        [],
        ["--distca"],
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--distca", "--pipeline-model-parallel-size", "2"],
    ):
        done = ranks.run(operations, [*flags, *shared], world_size=2)
        assert done == [pytest.approx(3 * forward)] * 2, shared
