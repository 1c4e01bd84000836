"""Pretrain a GPT on documents of any length: Megatron-LM's flags, plus the group `--distca`.

    torchrun --nproc-per-node 4 pretrain_gpt.py --distca --num-layers 4 --hidden-size 128 ...

Where the package is installed and there is no checkout, `torchrun -m megatron_patches.pretrain` is
the same. Without `--distca` either is plain Megatron on the same data. The table of contents, in
the order in which a batch meets the files:

* the loop around all of it, Megatron-LM's own: `megatron_patches/megatron_lm.py` runs it, and
  `megatron_patches/hooks.py` says what is replaced in it;
* the flags: `megatron_patches/flags/distca.py`, beside Megatron's own; the value that is made of
  them: `megatron_patches/flags/config.py`; checks: `megatron_patches/flags/validation.py`;
* the iterators of a run: `megatron_patches/loop/data.py`, over the token stream of
  `megatron_patches/batches/stream.py`; with `--distca` they are made by
  `megatron_patches/pipeline/planned_data.py`;
* a rank's input of each tick, planned ahead: `megatron_patches/batches/ticks.py`;
* the documents of a global batch, and a rank's tokens: `megatron_patches/batches/planned.py`; their
  plans, which the simulator makes in the same way: `distca/schedule/training/global_batch.py`;
* the forward and backward passes of a global batch, in ticks:
  `megatron_patches/pipeline/tick_pipeline.py`;
* one forward step and its loss: `megatron_patches/batches/micro_batch.py`;
* the model, whose core attention alone is replaced: `megatron_patches/model/gpt.py`;
* two nano-batches through the layers in turn: `megatron_patches/model/ping_pong.py`;
* the layers around core attention as CUDA graphs, if asked for:
  `megatron_patches/model/cuda_graphs.py`;
* core attention as a layer calls it: `megatron_patches/model/core_attention.py`, which hands it to
  `distca/runtime/core_attention.py`.

What a plan is: `distca/plan`; who makes it: `distca/schedule`; how it is executed:
`distca/runtime`.
"""

from megatron_patches.pretrain import main

if __name__ == "__main__":
    main()
