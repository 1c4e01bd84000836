"""Pretrain a GPT on documents of any length: Megatron-LM's flags, plus the group `--distca`.

    torchrun --nproc-per-node 4 pretrain_gpt.py --distca --num-layers 4 --hidden-size 128 ...

Without `--distca` the same command is plain Megatron on the same data. The table of contents, which
`megatron_patches/gpt_job.py` puts together:

* the flags: `megatron_patches/arguments.py`, beside Megatron's own; what goes together:
  `megatron_patches/validation.py`;
* the model, whose core attention alone is replaced: `megatron_patches/model.py`;
* documents, windows, micro-batches and their plans: `megatron_patches/data.py`;
* one forward step and its loss: `megatron_patches/step.py`;
* the forward and backward passes of a global batch, in ticks: `megatron_patches/pipeline.py`;
* two nano-batches through the layers in turn: `megatron_patches/ping_pong.py`;
* what surrounds core attention as CUDA graphs, if asked for: `megatron_patches/cuda_graphs.py`;
* the loop around them: Megatron-LM's own where it is installed (`megatron_patches/upstream.py`),
  otherwise a lean one on megatron-core alone (`megatron_patches/lean/training.py`).

What a plan is and who makes it: `distca/plan`, `distca/schedule`; how it is executed:
`distca/runtime`.
"""

import os

from megatron_patches.gpt_job import GPT_JOB
from megatron_patches.loop import choose_loop

if __name__ == "__main__":
    pretrain = choose_loop(os.environ)
    pretrain(GPT_JOB)
