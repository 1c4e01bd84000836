"""Pretrain a GPT on documents of any length: Megatron-LM's flags, plus the group `--distca`.

    torchrun --nproc-per-node 4 pretrain_gpt.py --distca --num-layers 4 --hidden-size 128 ...

Without `--distca` the same command is plain Megatron on the same data. The table of contents:

* the flags: `megatron_patches/arguments.py`, beside Megatron's own;
* the model, whose core attention alone is replaced: `megatron_patches/model.py`;
* documents, windows, micro-batches and their plans: `megatron_patches/data.py`;
* one forward step and its loss: `megatron_patches/step.py`;
* the loop around them: Megatron-LM's own where it is installed (`megatron_patches/upstream.py`),
  otherwise a lean one on megatron-core alone (`megatron_patches/lean/training.py`).

What a plan is and who makes it: `distca/plan`, `distca/schedule`; how it is executed:
`distca/runtime`.
"""

from megatron_patches.arguments import add_distca_arguments, validate_distca_arguments
from megatron_patches.data import build_data
from megatron_patches.job import Job
from megatron_patches.loop import choose_loop
from megatron_patches.model import build_model
from megatron_patches.step import forward_step


def main() -> None:
    pretrain = choose_loop()
    pretrain(
        Job(
            add_arguments=add_distca_arguments,
            validate_arguments=validate_distca_arguments,
            build_model=build_model,
            build_data=build_data,
            forward_step=forward_step,
        )
    )


if __name__ == "__main__":
    main()
