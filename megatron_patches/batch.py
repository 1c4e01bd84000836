"""Micro-batches of packed documents: which tokens a rank owns, and the plan that goes with them.

The token stream of a split (see `stream.py`) is cut into *windows* of data-parallel size times
`--seq-length` tokens; a micro-batch is `--micro-batch-size` windows, of each of which every
data-parallel rank owns `--seq-length` tokens. Sample `i` of Megatron's counting is the tokens
`[i * seq_length, (i + 1) * seq_length)` of the stream, so that consumed samples say where a run
resumes, whatever its number of ranks.

With `--distca` the documents of a window span its ranks. Without, a rank's documents end where its
tokens end, as in plain Megatron. Which tokens of a micro-batch a rank owns is then for the
scheduler to say, and so is which micro-batch of a global batch a document is in; the loss is a sum
over all targets of the global batch, so it depends on neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from distca.attention.reference import document_visibility
from distca.plan import Mask, Plan, place_in_turn, place_sequentially
from distca.plan.span import Int64s, expand_ranges
from distca.runtime import Prefetcher
from distca.schedule import (
    Crossing,
    NanoPlan,
    ScheduleConfig,
    Scheduler,
    document_loads,
    share_out,
    split_in_two,
)
from megatron_patches.attention import DocumentParams
from megatron_patches.stream import TokenStream

NANO_BATCHES = ("ping", "pong")


@dataclass(frozen=True)
class WindowLayout:
    """How samples, windows and ranks relate.

    Attributes:
        data_parallel_rank: this rank's part of every window.
        data_parallel_size: ranks that share a window.
        seq_length: tokens of a window that each rank owns.
        micro_batch_size: windows in a micro-batch.
    """

    data_parallel_rank: int
    data_parallel_size: int
    seq_length: int
    micro_batch_size: int

    @property
    def window_tokens(self) -> int:
        return self.data_parallel_size * self.seq_length

    @property
    def samples_per_micro_batch(self) -> int:
        return self.data_parallel_size * self.micro_batch_size

    def windows(self, first_sample: int) -> list[tuple[int, int]]:
        """The stream positions of the windows of the micro-batch that starts at a sample."""
        start = first_sample * self.seq_length
        return [
            (start + n * self.window_tokens, start + (n + 1) * self.window_tokens)
            for n in range(self.micro_batch_size)
        ]


@dataclass(frozen=True)
class MicroBatch:
    """This rank's tokens of one micro-batch; `tokens = micro_batch_size * seq_length`.

    Attributes:
        tokens: int64 `[1, tokens]`.
        labels: int64 `[1, tokens]`, the next token of the same document.
        loss_mask: float32 `[1, tokens]`, 0 where a document has no next token.
        position_ids: int64 `[1, tokens]`, positions in the document.
        packed_seq_params: the documents; None with a dense mask.
        attention_mask: bool `[1, 1, tokens, tokens]`, True where a query must not look; or None.
        report: figures for the log line, by name.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    packed_seq_params: DocumentParams | None = None
    attention_mask: torch.Tensor | None = None
    report: dict[str, float] = field(default_factory=dict)

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        params = self.packed_seq_params
        if params is not None:
            params = _moved(params, move)
            if params.halves is not None:
                ping, pong = (_moved(half, move) for half in params.halves)
                pong = replace(pong, before=None if pong.before is None else ping)
                params = replace(params, halves=(ping, pong))
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            attention_mask=move(self.attention_mask),
            packed_seq_params=params,
        )


def _moved(
    params: DocumentParams, move: Callable[[torch.Tensor | None], torch.Tensor | None]
) -> DocumentParams:
    """With its index tensors where `move` puts them."""
    return replace(
        params,
        cu_seqlens_q=move(params.cu_seqlens_q),
        cu_seqlens_kv=move(params.cu_seqlens_kv),
        cu_seqlens_q_padded=move(params.cu_seqlens_q_padded),
        cu_seqlens_kv_padded=move(params.cu_seqlens_kv_padded),
        earlier_rows=move(params.earlier_rows),
    )


def read_positions(
    stream: TokenStream, positions: Int64s
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and loss mask at positions of the stream, each `[1, len(positions)]`.

    They are read in as few contiguous runs as they have.
    """
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    columns = [
        stream.read(int(run[0]), int(run[-1]) + 1)
        for run in np.split(positions, breaks)
        if len(run)
    ]
    tokens, labels, loss_mask = (
        torch.from_numpy(np.concatenate(column))[None] for column in zip(*columns, strict=True)
    )
    return tokens, labels, loss_mask


@dataclass(frozen=True)
class PackedBatches:
    """Plain micro-batches: each rank attends within its own tokens.

    Attributes:
        stream: where the tokens come from.
        layout: windows and ranks.
        mask: what a query sees.
        dense: give a dense attention mask rather than `packed_seq_params`.
        token_positions: rotary angles are looked up token by token (`rotary.py`); off where
            Megatron numbers the packed documents itself.
    """

    stream: TokenStream
    layout: WindowLayout
    mask: Mask
    dense: bool
    token_positions: bool

    def __call__(self, first_sample: int) -> MicroBatch:
        """The micro-batch that starts at a sample."""
        at = self.layout
        mine = [
            start + at.data_parallel_rank * at.seq_length for start, _ in at.windows(first_sample)
        ]
        lengths = np.concatenate(
            [self.stream.document_lengths(start, start + at.seq_length) for start in mine]
        )
        starts = np.array(mine, dtype=np.int64)
        positions = expand_ranges(np.zeros_like(lengths), lengths)
        tokens, labels, loss_mask = read_positions(
            self.stream, expand_ranges(starts, np.full_like(starts, at.seq_length))
        )
        if self.dense:
            how = {"attention_mask": dense_mask(lengths, self.mask)[None, None]}
        else:
            how = {"packed_seq_params": _document_params(lengths, self.token_positions)}
        return MicroBatch(
            tokens,
            labels,
            loss_mask,
            torch.from_numpy(positions)[None],
            **how,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch, in the order in which its plan numbers them.

    Attributes:
        lengths: tokens of each, int64 `[documents]`.
        starts: where each starts in the stream, int64 `[documents]`.
        window_sizes: how many of them each window has, where they are as they came in.
    """

    lengths: Int64s
    starts: Int64s
    window_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NanoBatches:
    """A micro-batch's documents and plans, by nano-batch: one, or ping and pong.

    Attributes:
        documents: of each nano-batch; a document that crosses is in pong from the cut on.
        plans: of each, over the data-parallel ranks.
    """

    documents: tuple[Documents, ...]
    plans: tuple[NanoPlan, ...]


@dataclass(frozen=True)
class PlannedBatches:
    """Micro-batches with `--distca`: documents span ranks, and a plan says who computes what.

    Attributes:
        stream: where the tokens come from.
        layout: windows and ranks.
        mask: what a query sees.
        scheduler: makes the plans.
        schedule_config: what plans are judged by.
        free_placement: the scheduler places documents as it likes best, and they are shared out
            over the micro-batches of a global batch; otherwise one after the other.
        ping_pong: micro-batches are run as two nano-batches.
        sequence_shards: tensor-parallel ranks that divide the tokens among them (sequence
            parallelism), or 1.
    """

    stream: TokenStream
    layout: WindowLayout
    mask: Mask
    scheduler: Scheduler
    schedule_config: ScheduleConfig
    free_placement: bool
    ping_pong: bool
    sequence_shards: int

    def global_batch(self, first_sample: int, micro_batches: int) -> list[Documents]:
        """The documents of each micro-batch of the global batch that starts at a sample."""
        step = self.layout.samples_per_micro_batch
        came = [self._as_they_came(first_sample + n * step) for n in range(micro_batches)]
        return self._share_out(came) if self.free_placement and micro_batches > 1 else came

    def _as_they_came(self, sample: int) -> Documents:
        windows = [
            self.stream.document_lengths(start, stop) for start, stop in self.layout.windows(sample)
        ]
        lengths = np.concatenate(windows)
        starts = sample * self.layout.seq_length + np.cumsum(lengths) - lengths
        return Documents(lengths, starts, tuple(len(window) for window in windows))

    def _share_out(self, came: list[Documents]) -> list[Documents]:
        """The documents of a global batch's micro-batches, so that these have equal loads."""
        lengths = np.concatenate([documents.lengths for documents in came])
        starts = np.concatenate([documents.starts for documents in came])
        windows = np.repeat(np.arange(len(came)), [len(documents.lengths) for documents in came])
        loads = document_loads(lengths, self.mask, self.schedule_config.cost_model)
        shared = share_out(lengths, loads, windows)
        return [Documents(lengths[shared == n], starts[shared == n]) for n in range(len(came))]

    def plan(self, documents: Documents) -> NanoBatches:
        """The plans of a micro-batch over its data-parallel ranks; the same on every rank.

        Raises:
            ValueError: the scheduler leaves a rank without tokens.
        """
        if not self.ping_pong:
            return NanoBatches((documents,), (NanoPlan(self._nano_plan(documents)),))
        loads = document_loads(documents.lengths, self.mask, self.schedule_config.cost_model)
        halves = split_in_two(documents.lengths, loads)
        nano = tuple(
            Documents(half.end - half.start, documents.starts[half.document] + half.start)
            for half in halves
        )
        ping, pong = (self._nano_plan(each) for each in nano)
        crossing = None
        if len(halves[1].start) and halves[1].start[0] > 0:
            # It is the last of ping and the first of pong.
            earlier = ping.placement.select(ping.placement.document == len(ping.lengths) - 1)
            crossing = Crossing(0, earlier)
        return NanoBatches(nano, (NanoPlan(ping), NanoPlan(pong, crossing)))

    def _nano_plan(self, documents: Documents) -> Plan:
        at, lengths = self.layout, documents.lengths
        nano_batches = 2 if self.ping_pong else 1
        tokens = at.micro_batch_size * at.seq_length // nano_batches
        rooms = np.full(at.data_parallel_size, tokens, dtype=np.int64)
        if self.free_placement:
            plan = self.scheduler.plan(lengths, rooms, self.mask)
        elif self.ping_pong:
            plan = self.scheduler.schedule(lengths, place_in_turn(lengths, rooms), self.mask)
        else:
            windows = np.split(lengths, np.cumsum(documents.window_sizes)[:-1])
            placement = place_sequentially(windows, at.data_parallel_size, at.seq_length)
            plan = self.scheduler.schedule(lengths, placement, self.mask)
        plan.validate()
        if not plan.placement.tokens_per_rank().all():
            raise ValueError(
                f"{plan.scheduler} leaves a rank without tokens, which a model cannot train on: "
                "use another --distca-scheduler"
            )
        return plan

    def micro_batch(self, nano: NanoBatches, report: dict[str, float]) -> MicroBatch:
        """This rank's tokens of a micro-batch; who computes its core attention is added later."""
        rank = self.layout.data_parallel_rank
        starts, positions, all_lengths = [], [], []
        for documents, planned in zip(nano.documents, nano.plans, strict=True):
            mine = planned.plan.placement.of_rank(rank)
            lengths = mine.end - mine.start
            crossing = planned.crossing
            # The crossing document's positions count from its start in ping.
            cut = np.zeros_like(documents.lengths)
            if crossing is not None:
                cut[crossing.document] = crossing.earlier.end.max()
            starts.append(expand_ranges(documents.starts[mine.document] + mine.start, lengths))
            positions.append(expand_ranges(cut[mine.document] + mine.start, lengths))
            all_lengths.append(lengths)
        order = nano_order([len(rows) for rows in starts], self.sequence_shards)
        tokens, labels, loss_mask = read_positions(self.stream, np.concatenate(starts))
        params = _document_params(np.concatenate(all_lengths), token_positions=True)
        if self.ping_pong:
            ping, pong = (
                replace(_document_params(rows, token_positions=True), nano_batch=name)
                for name, rows in zip(NANO_BATCHES, all_lengths, strict=True)
            )
            crossing = nano.plans[1].crossing
            if crossing is not None:
                first_rows = nano.plans[0].plan.placement.first_rows()
                last = len(nano.documents[0].lengths) - 1
                pieces = nano.plans[0].plan.placement.document == last
                at = nano.plans[0].plan.placement.select(pieces)
                here = at.rank == rank
                rows = expand_ranges(first_rows[pieces][here], (at.end - at.start)[here])
                ping.lends_keys = True
                pong = replace(pong, before=ping, earlier_rows=torch.from_numpy(rows))
            params = replace(params, halves=(ping, pong))
        return MicroBatch(
            tokens[:, order],
            labels[:, order],
            loss_mask[:, order],
            torch.from_numpy(np.concatenate(positions))[None, order],
            packed_seq_params=params,
            report=report,
        )


def nano_order(sizes: list[int], shards: int) -> Int64s:
    """The order in which the rows of nano-batches are given to the model.

    Sequence parallelism gives each tensor-parallel rank a contiguous shard of the rows: its shard
    of ping, then its shard of pong, so that each nano-batch gathers from all.

    Args:
        sizes: rows of each nano-batch, which lie one after the other.
        shards: of the rows; they divide all sizes.

    Returns:
        int64 `[rows]`, the rows in that order.
    """
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(
        [
            np.arange(start + shard * size // shards, start + (shard + 1) * size // shards)
            for shard in range(shards)
            for start, size in zip(starts, sizes, strict=True)
        ]
    )


def _document_params(lengths: Int64s, token_positions: bool) -> DocumentParams:
    """Describes the documents of this rank's tokens to Megatron's layers."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    cu_seqlens = torch.from_numpy(ends)
    total = int(ends[-1])
    params = DocumentParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        documents_cu_seqlens=cu_seqlens,
    )
    if token_positions:
        # Rotary embedding sees one sequence, whose angles are given token by token.
        whole = torch.tensor([0, total], dtype=torch.int32)
        params = replace(
            params,
            cu_seqlens_q_padded=whole,
            cu_seqlens_kv_padded=whole,
            max_seqlen_q=total,
            max_seqlen_kv=total,
        )
    return params


def dense_mask(lengths: Int64s, mask: Mask) -> torch.Tensor:
    """Which (query, key) pairs are hidden, bool `[tokens, tokens]`, as Megatron's masks say it."""
    return ~document_visibility(lengths.tolist(), mask.window_left)


class MicroBatches:
    """An endless iterator over a split's plain micro-batches, each made one ahead on a thread.

    Args:
        make: makes the micro-batch that starts at a sample.
        first_sample: samples consumed so far.
        samples_per_micro_batch: how far each micro-batch advances.
        device: where the model is.
    """

    def __init__(
        self,
        make: PackedBatches,
        first_sample: int,
        samples_per_micro_batch: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._batches = Prefetcher(
            make(sample) for sample in itertools.count(first_sample, samples_per_micro_batch)
        )

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> MicroBatch:
        return next(self._batches).to(self._device)

    def close(self) -> None:
        """Ends the thread."""
        self._batches.close()
