"""The loss and its gradients by hand: a mean over targets that count, of documents each by itself.

The reference knows nothing of our batches, steps and models: the targets are chosen here from lists
of tokens, the model is megatron-core's own, and the cross entropy is torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.models import (
    MemoryCorpus,
    StepsDone,
    named_parameters,
    parse,
    set_weights_by_name,
    train_all,
    whole_gradients,
)

SEQ_LENGTH = 128
# Two windows of two ranks. Of 128 documents of a token each, all that the first rank owns at first,
# none has a target. The longest document is cut by ranks and by a window, and some of its tokens
# count, by half or twice. That of 40 tokens counts, those of 3 and 37 in their last half, that of 2
# not at all.
DOCUMENTS = [*([1] * 128), 40, 3, 300, 2, 1, 37, 1]
WINDOW = 2 * SEQ_LENGTH
# Flags of two processes, and the tokens after which documents must attend anew.
LAYOUTS = {
    "plain DP2": (f"--seq-length {SEQ_LENGTH} --global-batch-size 4", SEQ_LENGTH),
    "DP2": (f"--seq-length {SEQ_LENGTH} --global-batch-size 4 --distca", WINDOW),
    "DP2, whole": (
        f"--seq-length {SEQ_LENGTH} --global-batch-size 4 --distca --no-distca-ping-pong",
        WINDOW,
    ),
    "PP2": (
        f"--seq-length {WINDOW} --global-batch-size 2 --distca --pipeline-model-parallel-size 2",
        WINDOW,
    ),
    "TP2-SP": (
        f"--seq-length {WINDOW} --global-batch-size 2 --distca --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        WINDOW,
    ),
}


@pytest.fixture(scope="module")
def found(ranks) -> dict[str, list[StepsDone]]:
    """A step of two micro-batches in each layout, as each rank saw it."""
    runs = [flags.split() for flags, _ in LAYOUTS.values()]
    results = ranks.run(train_all, runs, DOCUMENTS, 1, True, world_size=2)
    return dict(zip(LAYOUTS, zip(*results, strict=True), strict=True))


@pytest.fixture(scope="module")
def references(ranks) -> dict[int, tuple[float, StepsDone]]:
    """By hand, for documents cut after so many tokens."""
    cuts = sorted({tokens for _, tokens in LAYOUTS.values()})
    return dict(zip(cuts, ranks.run(by_hand, DOCUMENTS, cuts, world_size=1)[0], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_mean_over_the_targets_of_all_documents(found, references, layout) -> None:
    expected, _ = references[LAYOUTS[layout][1]]
    for rank in found[layout]:
        assert rank.losses == [pytest.approx(expected, rel=1e-6)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_that_mean_s(found, references, layout) -> None:
    """Also with a rank, and micro-batches, that have fewer targets than others, or none."""
    _, reference = references[LAYOUTS[layout][1]]
    gradients, expected = whole_gradients(found[layout]), whole_gradients([reference])
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, (name, float(error))


def test_the_documents_have_what_can_go_wrong() -> None:
    assert sum(DOCUMENTS) == 2 * WINDOW
    weights = np.array(
        [
            weight
            for tokens, _, of_targets in pieces(DOCUMENTS, WINDOW)
            # The last token of a document has no target.
            for weight in [*of_targets, 0.0][: len(tokens)]
        ]
    )
    counted = (weights > 0).reshape(2, 2, SEQ_LENGTH).sum(axis=-1)
    assert counted.tolist() == [[0, 98], [85, 77]]
    assert set(weights) == {0.0, 0.5, 1.0, 2.0}
    # A document goes on over the end of the first window.
    assert np.cumsum(DOCUMENTS)[129] < WINDOW < np.cumsum(DOCUMENTS)[130]


def by_hand(lengths: Sequence[int], cuts: Sequence[int]) -> list[tuple[float, StepsDone]]:
    """The mean loss of a fresh model and its gradients, for each distance of cuts."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.arguments import core_transformer_config_from_args

    from support import training

    args = parse(["--seq-length", str(SEQ_LENGTH)])
    training.initialize(args)
    model = GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=max(lengths),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    set_weights_by_name(model)
    results = []
    for every in cuts:
        model.zero_grad()
        total, targets = torch.zeros([], dtype=torch.float64), 0
        for tokens, following, weights in pieces(lengths, every):
            if not following:
                continue
            size = len(tokens)
            logits = model(
                torch.tensor([tokens]),
                torch.arange(size)[None],
                torch.ones(1, 1, size, size, dtype=torch.bool).triu(1),
            )
            # Only a document's last token is followed by none.
            logits = logits[0, : len(following)].double()
            losses = torch.nn.functional.cross_entropy(
                logits, torch.tensor(following), reduction="none"
            )
            total = total + (losses * torch.tensor(weights)).sum()
            targets += sum(weight > 0 for weight in weights)
        loss = total / targets
        loss.backward()
        gradients = {
            name: (parameter.grad.clone(), None) for name, parameter in named_parameters(model)
        }
        results.append((float(loss), StepsDone(gradients=gradients)))
    return results


def pieces(
    lengths: Sequence[int], every: int
) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Tokens that attend to each other, what follows each in its document, and its weight."""
    corpus, at = MemoryCorpus(np.array(lengths), weighted=True), 0
    for number, length in enumerate(lengths):
        document = corpus.read(number, 0, length).tolist()
        found = corpus.loss_weights(number, 0, length)
        weights = [1.0] * length if found is None else found.tolist()
        start = 0
        while start < length:
            end = min(length, start + every - at % every)
            following = slice(start + 1, end + 1)
            yield document[start:end], document[following], weights[following]
            at, start = at + end - start, end


def test_a_micro_batch_s_loss_is_megatron_lm_s() -> None:
    """The rule of `loss_func` in its `pretrain_gpt.py`: a sum in float32, and a count of targets.
    Where no target counts, a 0 is logged.

    What its loop then does with the pair is `sum_reports` in ours.
    """
    from megatron_patches.batches.micro_batch import MicroBatch, sum_loss

    generator = torch.Generator().manual_seed(0)
    # Sums in bfloat16 stop growing long before.
    losses = (4 + torch.rand(1, 4000, generator=generator)).bfloat16()
    mask = (torch.rand(1, 4000, generator=generator) < 0.7).float()
    nothing = torch.zeros(1, 4000, dtype=torch.int64)
    batch = MicroBatch(nothing, nothing, mask, nothing)
    loss, targets, report = sum_loss(batch, losses)
    kept = [float(each) for each, counts in zip(losses[0], mask[0], strict=True) if counts]
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(sum(kept), rel=1e-6)
    assert (targets.dtype, int(targets)) == (torch.int32, len(kept))
    assert report.keys() == {"lm loss"}
    assert report["lm loss"].tolist() == [float(loss), len(kept)]
    loss, targets, report = sum_loss(replace(batch, loss_mask=torch.zeros(1, 4000)), losses)
    assert (float(loss), int(targets)) == (0, 0)
    total, count = report["lm loss"]
    assert total / count == 0


def test_a_global_batch_of_no_targets_has_no_gradients(ranks) -> None:
    lengths, step = [1] * 2 * WINDOW, f"--seq-length {SEQ_LENGTH} --global-batch-size 4".split()
    for run in ranks.run(train_all, [step, [*step, "--distca"]], lengths, 1, world_size=2)[0]:
        assert (run.losses, run.grad_norms) == ([0.0], [0.0])
        assert all(not gradient.any() for gradient, _ in run.gradients.values())
