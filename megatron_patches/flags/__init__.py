"""The flags of a job.

`distca` adds DistCA's own to Megatron-LM's, `config` makes one value of them, `validation` refuses
what does not go together, and `planning` turns flags into the planner's configuration.
"""
