"""`distca.library.core_attention` on live ranks against dense attention in float64."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch

from distca.library import IGNORED, AttentionShape, Document, Mask, Planner
from support.library_loops import attend, attend_alone, compile_a_layer, refuse

GROUPED, EQUAL = AttentionShape(4, 2, 16, 4), AttentionShape(3, 3, 8, 4)
WIDER = AttentionShape(4, 2, 24, 4, v_head_dim=16)
LONG, ODD, FEW = (301, 17, 64, 33), (5, 1, 200, 3, 77), (1,)

CASES = [
    (2, LONG, GROUPED, Mask(), "tiles", False, None),
    (3, ODD, EQUAL, Mask(), "tiles", False, None),
    (2, ODD, GROUPED, Mask(window_left=20), "tiles", False, None),
    (2, LONG, GROUPED, Mask(attention_chunk=48), "tiles", False, None),
    (2, LONG, GROUPED, Mask(), "tiles", True, None),
    (2, LONG, GROUPED, Mask(window_left=40), "greedy", True, 5.0),
    (2, LONG, WIDER, Mask(), "per-document-cp", False, None),
    (4, LONG, GROUPED, Mask(), "wlb-llm", False, None),
    # Ranks without tokens.
    (3, FEW, GROUPED, Mask(), "tiles", True, None),
    (1, LONG, GROUPED, Mask(), "tiles", False, None),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_output_and_gradients_are_dense_attentions(ranks: Any, case: tuple[Any, ...]) -> None:
    world_size, lengths, shape, mask, scheduler, sink, softcap = case
    if mask.attention_chunk is not None:
        expected = _chunks(lengths, shape, mask.attention_chunk)
    else:
        expected = attend_alone(lengths, shape, mask, sink, softcap)
    out, gradients, of_sink = expected
    given = lengths, shape, mask, scheduler, sink, softcap, torch.float32
    found = ranks.run(attend, *given, world_size=world_size)
    for rank in found:
        assert rank.bytes_counted
        torch.testing.assert_close(rank.out.double(), out, rtol=1e-5, atol=2e-6)
        for mine, other in zip(rank.gradients, gradients, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=5e-6)
        if of_sink is not None:
            torch.testing.assert_close(rank.of_sink.double(), of_sink, rtol=1e-5, atol=5e-6)
    tokens = [rank.tokens for rank in found]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) - min(tokens) <= 1


def _chunks(lengths: tuple[int, ...], shape: AttentionShape, size: int) -> Any:
    """Chunks of documents are documents to core attention."""
    cut = [min(size, n - start) for n in lengths for start in range(0, n, size)]
    return attend_alone(cut, shape, Mask(), False, None)


def test_bfloat16_is_as_near_as_its_rounding(ranks: Any) -> None:
    shape = AttentionShape(4, 2, 16, 2)
    out, gradients, _ = attend_alone(LONG, shape, Mask(), False, None)
    given = LONG, shape, Mask(), "tiles", False, None, torch.bfloat16
    for rank in ranks.run(attend, *given, world_size=2):
        assert rank.out.dtype == torch.bfloat16
        for mine, other in ((rank.out, out), *zip(rank.gradients, gradients, strict=True)):
            assert float((mine.double() - other).norm() / other.norm()) < 0.01


def test_groups_of_ranks_share_documents_each_for_itself(ranks: Any) -> None:
    out, gradients, _ = attend_alone(LONG, GROUPED, Mask(), False, None)
    given = LONG, GROUPED, Mask(), "tiles", False, None, torch.float32
    for rank in ranks.run(attend, *given, 2, world_size=4):
        assert rank.bytes_counted
        for mine, other in ((rank.out, out), *zip(rank.gradients, gradients, strict=True)):
            torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=5e-6)


def test_compiles_without_a_break(ranks: Any) -> None:
    for eager, compiled in ranks.run(compile_a_layer, LONG, world_size=2):
        for mine, other in zip(compiled, eager, strict=True):
            torch.testing.assert_close(mine, other)


REFUSED = {
    "rows": r"q is \[\d+, 4, 16\], but the batch and the planner's shape have \[\d+, 4, 16\]",
    "heads": r"k is \[\d+, 4, 16\], but the batch and the planner's shape have \[\d+, 2, 16\]",
    "dtype": "v is torch.float64: q, k and v need one dtype of 4 bytes",
    "integers": "q is torch.int32: q, k and v need one dtype of 4 bytes",
    "bytes": "the shape has 8 bytes an element: give 2",
    "sink": r"the sink is \[3\], but there are 4 heads",
    "list": "a document's tokens are a list: give a tensor",
    "place after close": "the batch's planner is gone",
    "rotary": "rotary embeddings of the type dynamic",
    "encoder": "t5 is no decoder",
    "latents": r"latent attention \(MLA\) is not supported",
    "chunks": "layers of the kind chunked_attention are not supported",
    "mask": r"a layer has Mask\(window_left=5, .*\), but the planner \(Mask",
    "forgotten": "batch 0 is gone, since 1 were placed after it",
    "closed": "the batch's planner is gone",
    "plans": r"the plans are of 3 ranks and the masks .*, the planner of 2",
    "scheduler": "no scheduler 'tile': choose from",
    "masks": "masks has none, or one twice",
    "softcap": "softcap is -1.0: give a positive bound",
    "none": "there are no documents",
    "empty": "a document has no tokens",
    "targets": "a document has 5 tokens, but 4 targets",
    "labels": "a document's targets are its own tokens",
    "other documents": "rank 1 places other documents than rank 0",
    "own documents": "rank 0: a document has no tokens",
    "not causal": "a layer's attention is not causal",
    "floats": r"a document's tokens are torch.float32 \[5\]",
    "values": r"3 values are given for \d+ tokens of this rank",
    "no batch": "needs a batch: call the model with `inputs_of",
    "padding": "give documents without padding or mask",
    "dropout": "attention dropout 0.1 is not supported",
    "other softcap": "a layer has the soft cap 30.0, but the planner None",
}


def test_mistakes_are_refused_on_every_rank(ranks: Any) -> None:
    for found in ranks.run(refuse, list(REFUSED), world_size=2):
        for name, message in REFUSED.items():
            assert re.search(message, found[name]), (name, found[name])


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Planner(GROUPED)


def test_a_slice_of_a_corpus_does_not_carry_it() -> None:
    corpus = torch.arange(1_000_000)
    document = Document(corpus[10:20], corpus[11:21])
    assert len(pickle.dumps(document)) < 2000
    assert document.tokens.tolist() == list(range(10, 20))


def test_labels_of_transformers_are_shifted() -> None:
    tokens = torch.tensor([5, 6, 7, 8])
    labels = torch.tensor([IGNORED, IGNORED, 7, 8])
    assert Document.from_labels(tokens, labels).next_tokens.tolist() == [IGNORED, 7, 8, IGNORED]
    assert Document(tokens).next_tokens.tolist() == [6, 7, 8, IGNORED]
