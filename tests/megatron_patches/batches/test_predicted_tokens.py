"""What layers of multi-token prediction predict, against megatron-core's shift of whole rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

from distca.plan import LayerMasks, Mask
from distca.schedule import GlobalBatchPlanner
from distca.schedule.base import ScheduleConfig
from distca.schedule.training.global_batch import ExecutionOptions
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.planned import PlannedReader
from support.models import memory_stream

WINDOW, LAYERS = 128, 3
LENGTHS = [1, 30, 2, 90, 17, 64, 5, 40, 3, 4, 256] * 2


def reader(stream, **options) -> PlannedReader:
    layout = WindowLayout(0, 2, WINDOW // 2, 1)
    planner = GlobalBatchPlanner(
        np.array([[0, 1]]), ScheduleConfig(), ExecutionOptions(ping_pong=False, **options)
    )
    return PlannedReader(stream, layout, planner, 1, prediction_layers=LAYERS)


def test_columns_and_sums_are_those_of_whole_rows() -> None:
    """Of one process that has all tokens of a window, and shifts them inside the documents."""
    stream = memory_stream(LENGTHS, weighted=True)
    mine, number = reader(stream), 4
    predicted = mine.predicted(0, number)
    assert predicted is not None
    sums = np.zeros(1 + LAYERS)
    for start in range(0, number * WINDOW, WINDOW):
        lengths = stream.document_lengths(start, start + WINDOW)
        ends = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        places = np.concatenate([np.arange(length) for length in lengths])
        own = np.arange(start, start + WINDOW)
        found = mine._next_tokens(own, places, predicted)
        columns = [torch.from_numpy(each)[None] for each in stream.read(start, start + WINDOW)]
        columns.insert(1, torch.from_numpy(places)[None])
        sums[0] += float(columns[3].sum())
        for depth in range(LAYERS):
            columns = [roll_tensor(each, packed_seq_params=params)[0] for each in columns]
            sums[1 + depth] += float(columns[3].sum())
            tokens, positions, labels, mask = columns
            assert torch.equal(found.tokens[depth], tokens)
            assert torch.equal(found.position_ids[depth], positions)
            assert torch.equal(found.labels[depth] * (mask != 0), labels * (mask != 0))
            assert torch.equal(found.loss_mask[depth], mask)
            assert found.depth_after(found.tokens[depth]) == depth + 1
    assert sums[0] > sums[1] > sums[2] > sums[3] > 0
    np.testing.assert_allclose(predicted.all_targets, sums)


def test_documents_that_go_on_behind_windows() -> None:
    """In chains, and in server pools, they end with the chain, or with the global batch."""
    stream = memory_stream([512])
    whole, chained = replace(reader(stream), cuts_at_windows=False), reader(stream, chain=2)
    for each, edges in ((reader(stream), 5), (chained, 3), (whole, 2)):
        predicted = each.predicted(0, 4)
        assert predicted is not None
        assert len(predicted.edges) == edges
        lost = np.arange(1 + LAYERS) * (edges - 1)
        np.testing.assert_allclose(predicted.all_targets, 511 - lost)


def test_a_stream_in_passes() -> None:
    stream = memory_stream([100, 28, 72]).in_passes(128)
    assert stream.tokens == 256
    for start in (0, 90, 256, 256 + 90, 512):
        mask = stream.loss_mask(start, start + 100)
        np.testing.assert_array_equal(mask, stream.read(start, start + 100)[2])
    positions = np.array([0, 99, 100, 255, 256, 256 + 99, 512 + 128])
    assert stream.piece_ends(positions).tolist() == [100, 100, 128, 256, 356, 356, 712]


def test_masks_of_all_stages() -> None:
    local = Mask(window_left=10)
    assert LayerMasks.of([local, Mask()]).of_all_stages == LayerMasks.of([local, Mask()])
    masks = LayerMasks((Mask(), local, local), (1, 0, 2), of_last_stage=1)
    assert masks.of_all_stages == LayerMasks((Mask(), local), (1, 0))
