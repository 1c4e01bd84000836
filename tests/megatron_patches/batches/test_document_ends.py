"""What `--reset-position-ids`, `--reset-attention-mask` and `--eod-mask-loss` ask for is done.

Megatron-LM finds documents by the token that ends them, we by the index: where each document ends
with it, as those of `distca prepare` and of Megatron-LM's `--append-eod` do, it is the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from distca.plan import LayerMasks
from megatron_patches.batches.blends import Blend
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.packed import PackedReader
from megatron_patches.batches.stream import TokenStream

END, SAMPLE = 0, 64


def test_masks_and_positions_are_megatron_s(tmp_path: Path) -> None:
    prefix = str(tmp_path / "documents")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in [1, 30, 2, 90, 17, 64, 5, 40] * 3:
        builder.add_document(np.array([*range(1, length), END]), [length])
    builder.finalize(f"{prefix}.idx")
    stream = TokenStream.open(Blend((prefix,), None, None), "train", seed=1, num_tokens=600)
    reader = PackedReader(
        stream, WindowLayout(0, 1, SAMPLE, 1), LayerMasks(), dense=True, as_one_sequence=True
    )
    ends = 0
    for sample in range(8):
        batch = reader.micro_batch(sample)
        visible, loss_mask, positions = _get_ltor_masks_and_position_ids(
            batch.tokens[0],
            END,
            reset_position_ids=True,
            reset_attention_mask=True,
            eod_mask_loss=True,
            create_attention_mask=True,
        )
        assert torch.equal(batch.loss_mask[0], loss_mask)
        assert torch.equal(batch.position_ids[0], positions)
        assert batch.attention_mask is not None
        assert torch.equal(batch.attention_mask[0], visible)
        ends += int((loss_mask == 0).sum())
    assert ends > 8
