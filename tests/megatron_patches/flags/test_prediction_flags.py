"""Flags of multi-token prediction: what does not go together is refused in a line."""

from __future__ import annotations

import re
from unittest import mock

import pytest

from megatron_patches.flags import prediction
from support.arguments import parse
from support.versions import PREDICTS_TOKENS


@pytest.mark.skipif(not PREDICTS_TOKENS, reason="not covered in this version")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--attention-backend unfused", "takes a rank's tokens for one document: remove one of"),
        (
            "--pipeline-model-parallel-size 2 --overlap-grad-reduce",
            "an output layer that it does not use: add --untie-embeddings-and-output-weights, or "
            "remove --overlap-grad-reduce",
        ),
        ("--distca --spec a b", "does not go together with layers of --spec: remove one of the"),
        (
            "--distca --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 2",
            "with --recompute-num-layers 2, as each of these layers is recomputed alone: give "
            "--recompute-num-layers 1",
        ),
        ("--distca --distca-pool-size 1", "does not count these layers: remove it"),
        ("--distca --distca-chain 2 --mtp-use-repeated-layer", "with --distca-chain with --mtp-"),
        (
            "--distca --sft --distca-share-prefixes",
            "with tokens that several others follow: remove --distca-share-prefixes",
        ),
    ],
)
def test_a_line_says_what_to_do(flags: str, message: str) -> None:
    start = "^--mtp-num-layers 1 does not go together with .*"
    with pytest.raises(ValueError, match=start) as error:
        parse("--mtp-num-layers", "1", *flags.split())
    assert message in str(error.value)


def test_older_versions_are_named() -> None:
    with mock.patch.multiple(prediction, MAJOR=0, MINOR=18):
        parse("--distca")
        message = re.escape("--mtp-num-layers 1 needs megatron-core 0.19, not 0.18: install that")
        with pytest.raises(ValueError, match=f"^{message}"):
            parse("--distca", "--mtp-num-layers", "1")
