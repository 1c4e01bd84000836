"""DistCA: core attention disaggregation for training transformers on very long contexts.

The vocabulary is in `distca.plan`, the schedulers in `distca.schedule`, what runs a plan in
`distca.runtime`. Importing this package needs nothing but torch, and imports not even that.
"""

__version__ = "0.1.0"
