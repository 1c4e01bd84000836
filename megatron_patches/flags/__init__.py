"""The flags of a job.

`distca` adds DistCA's own, `megatron` is Megatron-LM's for the lean loop, `validation` refuses what
does not go together, and `planning` turns flags into the planner's configuration.
"""
