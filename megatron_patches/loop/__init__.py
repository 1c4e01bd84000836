"""Everything around the layers: the job, Megatron-LM's loop that runs it, and its checkpoints.

`gpt_job` names the parts of a job, and `step` is its forward step and loss. `megatron_hooks` and
`megatron_checkpoints` replace functions of Megatron-LM's loop (`megatron_patches/hooks.py` is their
table); `parts` uses that loop's parts alone.
"""
