"""The only package that knows Megatron: what DistCA changes in it, and how a job is run on it."""

import importlib.util

if importlib.util.find_spec("megatron") is None:
    raise ImportError(
        "megatron_patches needs megatron-core: `pip install 'distca[megatron]'`, with torch "
        "installed before it"
    )
