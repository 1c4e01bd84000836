"""Layers of `--spec`: the user's own, whose core attention alone is disaggregated."""

from __future__ import annotations

import pytest

from megatron_patches.model.given_layers import given_spec
from support.models import StepsDone, train
from support.pipelines import SIZES, WINDOW, check, documents

MICRO_BATCHES = 3
SPEC = ["--spec", "support.own_layers", "DAMPED"]
PLAIN = ["--seq-length", str(WINDOW), "--global-batch-size", str(MICRO_BATCHES)]
PLAIN += ["--attention-backend", "unfused"]


def run(ranks, flags: list[str], world_size: int) -> list[StepsDone]:
    given = [*SIZES, *flags]
    return ranks.run(train, given, documents(MICRO_BATCHES), 1, world_size=world_size)


@pytest.mark.parametrize("nano_batches", ["--distca-ping-pong", "--no-distca-ping-pong"])
def test_losses_gradients_and_bytes(ranks, nano_batches: str) -> None:
    halves = ["--seq-length", str(WINDOW // 2), "--global-batch-size", str(2 * MICRO_BATCHES)]
    (expected,) = run(ranks, [*PLAIN, *SPEC], 1)
    (megatrons,) = run(ranks, PLAIN, 1)
    assert abs(expected.losses[0] / megatrons.losses[0] - 1) > 1e-3
    check(run(ranks, [*halves, *SPEC, "--distca", nano_batches], 2), expected, halves)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["support.own_layers"], "give a module, and the name of a spec in it"),
        (["no_such_module", "LAYER"], "No module named 'no_such_module'"),
        (["support.own_layers", "NONE"], "has no attribute 'NONE'"),
        (["support.own_layers", "DampedLayer"], "it is of type ABCMeta: give a ModuleSpec"),
        (["support.own_layers", "CAPPED"], "its core attention is CappedAttention, for which"),
        (["support.own_layers", "WITHOUT_ATTENTION"], "or a subclass, not TransformerLayer"),
    ],
)
def test_specs_that_cannot_be_used(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^--spec {' '.join(words)}: .*{message}"):
        given_spec(words)


def test_a_spec_stays_as_its_module_has_it() -> None:
    from support import own_layers

    first, second = (given_spec(SPEC[1:]) for _ in range(2))
    assert first is not second
    assert own_layers.DAMPED not in (first, second)
