"""What Megatron-LM's loop calls in place of its own: data, the forward step, checks, checkpoints.

`megatron_hooks`, `evaluation`, `step_log` and `megatron_checkpoints` have the functions that
replace those of the loop; the table of them is `megatron_patches/hooks.py`.
"""
