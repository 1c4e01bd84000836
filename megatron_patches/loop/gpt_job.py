"""The job of this repository, pretraining a GPT on documents: each part has a file of its own."""

from megatron_patches.flags.distca import add_distca_arguments
from megatron_patches.flags.validation import validate
from megatron_patches.loop.data import build_data
from megatron_patches.loop.job import Job
from megatron_patches.loop.step import forward_step
from megatron_patches.model.gpt import build_model
from megatron_patches.pipeline.tick_pipeline import forward_backward_func

GPT_JOB = Job(
    add_arguments=add_distca_arguments,
    validate_arguments=validate,
    build_model=build_model,
    build_data=build_data,
    forward_step=forward_step,
    forward_backward_func=forward_backward_func,
)
