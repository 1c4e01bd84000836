"""Pretrain a GPT on documents of any length: Megatron-LM's flags, plus the group `--distca`.

    torchrun --nproc-per-node 4 pretrain_gpt.py --distca --num-layers 4 --hidden-size 128 ...

Without `--distca` the same command is plain Megatron on the same data. The table of contents, in
the order in which a batch meets the files (`megatron_patches/loop/gpt_job.py` puts them together):

* the flags: `megatron_patches/flags/distca.py`, beside Megatron's own; checks of them:
  `megatron_patches/flags/validation.py`;
* the iterators of a run: `megatron_patches/batches/sources.py`, over the token stream of
  `megatron_patches/batches/stream.py`;
* the documents of a global batch, and a rank's tokens: `megatron_patches/batches/planned.py`; their
  plans, which the simulator makes alike: `distca/schedule/training/global_batch.py`;
* a rank's input of each tick: `megatron_patches/batches/ticks.py`;
* the forward and backward passes of a global batch, in ticks:
  `megatron_patches/pipeline/tick_pipeline.py`;
* one forward step and its loss: `megatron_patches/loop/step.py`;
* the model, whose core attention alone is replaced: `megatron_patches/model/gpt.py`;
* two nano-batches through the layers in turn: `megatron_patches/model/ping_pong.py`;
* the layers around core attention as CUDA graphs, if asked for:
  `megatron_patches/model/cuda_graphs.py`;
* core attention as a layer calls it: `megatron_patches/model/core_attention.py`, which hands it to
  `distca/runtime/core_attention.py`;
* the loop around all of it: a lean one on megatron-core alone
  (`megatron_patches/loop/lean/training.py`) or, with `--training-loop megatron`, Megatron-LM's own
  (`megatron_patches/upstream.py`).

What a plan is: `distca/plan`; who makes it: `distca/schedule`; how it is executed:
`distca/runtime`.
"""

import os

from megatron_patches.loop.launcher import end_with_launcher

if __name__ == "__main__":
    end_with_launcher(os.environ)

    # These imports take seconds.
    from megatron_patches.loop.choice import choose_loop
    from megatron_patches.loop.gpt_job import GPT_JOB

    pretrain = choose_loop(os.environ)
    pretrain(GPT_JOB)
