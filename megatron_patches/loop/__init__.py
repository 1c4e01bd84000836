"""What Megatron-LM's loop calls in place of its own: data, the forward step, checks, checkpoints.

`megatron_hooks` and `megatron_checkpoints` replace functions of the loop; the table of them is
`megatron_patches/hooks.py`.
"""
