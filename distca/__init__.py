"""DistCA: core attention disaggregation for training transformers on very long contexts.

Plans are in `distca.plan`, schedulers in `distca.schedule`, and the runtime that executes plans in
`distca.runtime`. The package requires only torch, which `import distca` does not load.
"""

__version__ = "0.1.0"
