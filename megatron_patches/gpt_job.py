"""The job of this repository: pretraining a GPT on documents. Every part is a file beside this."""

from megatron_patches.arguments import add_distca_arguments
from megatron_patches.data import build_data
from megatron_patches.job import Job
from megatron_patches.model import build_model
from megatron_patches.pipeline import forward_backward_func
from megatron_patches.step import forward_step
from megatron_patches.validation import validate_distca_arguments

GPT_JOB = Job(
    add_arguments=add_distca_arguments,
    validate_arguments=validate_distca_arguments,
    build_model=build_model,
    build_data=build_data,
    forward_step=forward_step,
    forward_backward_func=forward_backward_func,
)
