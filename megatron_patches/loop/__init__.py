"""The job, and the training loops that can run it.

`job` describes what a loop calls, `gpt_job` puts this repository's job together, `step` is its
forward step and loss. `choice` takes Megatron-LM's own loop where it is installed, else `lean`.
"""
