"""The only package that knows Megatron: what DistCA changes in it, and how a job is run on it."""
