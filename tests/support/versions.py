"""What tests expect of the installed megatron-core where its versions differ, in one place."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    _MAJOR, _MINOR, *_ = version("megatron-core").split(".")
    MEGATRON = int(_MAJOR), int(_MINOR)
except PackageNotFoundError:
    # Tests that need it are skipped.
    MEGATRON = (0, 19)

BALANCED_BY_PASS = ["global_aux_loss"]
"""Ways of balancing experts by which a router adds up over its passes."""
if MEGATRON >= (0, 19):
    BALANCED_BY_PASS.append("quantile_balancing")

NEWER_FLAGS = MEGATRON >= (0, 18)
"""Whether it has the flags of validation sets' names and of an evaluation's micro-batches."""

COUNTS_PAIRS = MEGATRON >= (0, 19)
"""Whether Megatron-LM counts operations by the pairs of documents, so that logs have a rate."""

EVALUATES_BY_ITS_OWN_SIZE = MEGATRON >= (0, 18)
"""Whether the batches of an evaluation have a size of their own."""

PREDICTS_TOKENS = MEGATRON >= (0, 19)
"""Whether multi-token prediction is covered: earlier versions have other functions."""

NAMES_VALIDATION_SETS = MEGATRON >= (0, 18)
"""Whether validation sets have names, and not numbers alone."""


def null_tokenizer(tokens: int) -> list[str]:
    """The flags of a tokenizer whose last token ends a document.

    Up to 0.17 the flag does not count that one.
    """
    counted = tokens if MEGATRON >= (0, 18) else tokens - 1
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(counted)]
