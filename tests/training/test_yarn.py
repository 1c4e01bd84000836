"""Rotary angles scaled by YaRN, which documents on several ranks have at their own positions."""

from __future__ import annotations

from support.models import StepsDone, train
from support.pipelines import SIZES, WINDOW, check, documents

MICRO_BATCHES = 3
YARN = """
    --position-embedding-type yarn --rotary-scaling-factor 8
    --yarn-original-max-position-embeddings 64
""".split()


def test_losses_gradients_and_bytes(ranks) -> None:
    def run(flags: list[str], world_size: int) -> list[StepsDone]:
        given = [*SIZES, *flags, *YARN]
        return ranks.run(train, given, documents(MICRO_BATCHES), 1, world_size=world_size)

    plain = ["--seq-length", str(WINDOW), "--global-batch-size", str(MICRO_BATCHES)]
    halves = ["--seq-length", str(WINDOW // 2), "--global-batch-size", str(2 * MICRO_BATCHES)]
    (expected,) = run([*plain, "--attention-backend", "unfused"], 1)
    check(run([*halves, "--distca"], 2), expected, halves)
