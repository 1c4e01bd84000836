"""The iterators of micro-batches or ticks that a training loop consumes, from `--data-path`."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from distca.attention import select_kernel_of_heads
from distca.plan import LayerMasks, Mask
from distca.runtime import Buffers, CoreAttention, Trace
from distca.schedule import (
    GlobalBatchPlanner,
    PlannerProcess,
    describe,
    format_summary,
    most_in_flight_of_1f1b,
)
from distca.schedule.program import NANO_BATCHES
from megatron_patches.batches.blends import SPLITS, Blend, Split, check_blends
from megatron_patches.batches.groups_of_one import warning_of_groups_of_one
from megatron_patches.batches.micro_batch import MicroBatches, PackedBatches, WindowLayout
from megatron_patches.batches.opening import open_source
from megatron_patches.batches.planned import PlannedBatches
from megatron_patches.batches.resuming import check_packs, longest_piece, share_place_in_data
from megatron_patches.batches.stream import TokenStream
from megatron_patches.batches.ticks import TickBatches, TickStream
from megatron_patches.batches.validation_sets import WholeSet, sets_of
from megatron_patches.flags.batch_sizes import micro_batches_by_sample, samples_for_evaluation
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_from_args, masks_of_a_chunk
from megatron_patches.flags.latent_attention import head_sizes
from megatron_patches.flags.planning import linear_work, schedule_config
from megatron_patches.loop.job import TEST, TRAIN, VALID, DataIterators
from megatron_patches.model.gpt import uses_dense_mask, uses_own_attention
from megatron_patches.model.recompute import groups_of_layers
from megatron_patches.pipeline.processes import Control, Processes
from megatron_patches.pipeline.servers import Servers, find_servers
from megatron_patches.pipeline.transports import make_transport

logger = logging.getLogger(__name__)


def build_core_attention(
    config: DistcaConfig, args: Namespace, group: dist.ProcessGroup, device: torch.device
) -> CoreAttention:
    """Makes what runs the plans on the ranks of a group. Collective."""
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    return CoreAttention(
        make_transport(config.transport, group, device, timeout),
        select_kernel_of_heads(device.type, *head_sizes(args)),
        Buffers(device, len(NANO_BATCHES) if config.ping_pong else 1),
        config.backward,
        Trace(device),
    )


def window_layout(args: Namespace, processes: Processes | None = None) -> WindowLayout:
    """Makes the layout of windows on this rank, which on a dedicated server reads no tokens.

    Args:
        args: Megatron-LM's arguments.
        processes: processes of a job with dedicated servers; None: there are none.
    """
    serves_only = processes is not None and processes.serves_only
    return WindowLayout(
        0 if serves_only else parallel_state.get_data_parallel_rank(),
        args.data_parallel_size,
        args.seq_length,
        args.micro_batch_size,
    )


def model_device() -> torch.device:
    """Returns the device of this process's model."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def build_data(
    config: DistcaConfig,
    args: Namespace,
    train_samples: int,
    valid_samples: int | None,
    test_samples: int,
    processes: Processes | None = None,
) -> DataIterators:
    """Builds the splits' iterators, resumed where the run stands. Collective with `--distca`.

    Args:
        config: our flags.
        args: Megatron-LM's arguments; `consumed_train_samples`, `train_stream_start` and those
            of `valid` say where to resume.
        train_samples: number of training samples of the whole run, with those consumed before; 0
            for no iterator.
        valid_samples: most samples that validation still needs; 0 for no iterator. With
            `--full-validation` neither this nor `test_samples` matters, and it may be None.
        test_samples: number of samples of the test; 0 for no iterator.
        processes: processes of a job with dedicated servers; None: there are none.

    Raises:
        ValueError: the data is missing, corrupt or of another vocabulary; or the consumed samples
            are no whole number of micro-batches.
    """
    wanted = {"train": train_samples > 0, "valid": bool(valid_samples), "test": test_samples > 0}
    if args.full_validation:
        wanted |= {"valid": True, "test": True}
    blends = check_blends(config.documents, args, [which for which in SPLITS if wanted[which]])
    layout = window_layout(args, processes)
    maker = batch_maker(config, args, layout, model_device(), processes)
    if maker.control is not None:
        config = share_place_in_data(maker.control, config, args)
    splits = _Splits(config, args, blends, layout, maker)
    train = splits.part(
        "train", train_samples, args.consumed_train_samples, args.train_stream_start
    )
    valid: Any
    if args.full_validation:
        valid, tests = splits.whole("valid", VALID), splits.whole("test", TEST)
        valid = valid if args.multiple_validation_sets else valid[0]
        test: Any = tests[0] if tests else None
    else:
        consumed = args.consumed_valid_samples
        # Before it was resumed, the run may have evaluated more often than it would now.
        samples = valid_samples + consumed if valid_samples else 0
        valid = splits.part("valid", samples, consumed, args.valid_stream_start)
        test = splits.part("test", test_samples, 0, 0)
    return DataIterators(train, valid, test, control=maker.control, end=maker.close)


@dataclass(frozen=True)
class _Splits:
    """Makes the iterators of splits.

    Attributes:
        config: our flags.
        args: Megatron-LM's arguments.
        blends: datasets of the splits that are read.
        layout: windows and ranks.
        maker: maker of iterators.
    """

    config: DistcaConfig
    args: Namespace
    blends: Mapping[Split, Blend]
    layout: WindowLayout
    maker: BatchMaker

    def part(
        self, which: Split, samples: int, consumed: int, start: int
    ) -> MicroBatches | TickStream | None:
        """Makes the iterator over a part of a split; None: the split is not read.

        Args:
            which: split.
            samples: number of samples, with those consumed before.
            consumed: number of samples consumed before.
            start: token of the stream at which sample 0 is.
        """
        args, layout = self.args, self.layout
        if which not in self.blends:
            return None
        if consumed % layout.samples_per_micro_batch:
            raise ValueError(
                f"{consumed} samples were consumed before, which is no whole number of "
                f"micro-batches of {layout.samples_per_micro_batch} samples: resume with a "
                "data-parallel size times --micro-batch-size that divides it"
            )
        # A global batch more, since the last one may be too long, and the iterators work ahead.
        more = micro_batches_by_sample(args)(samples) * layout.samples_per_micro_batch
        first = start + consumed * args.seq_length
        tokens = (samples + more) * args.seq_length
        stream = self._open(self.blends[which], which, tokens, start, first)
        if which == "train":
            _warn_of_repetition(stream, layout)
            self.maker.log_first_plan(stream, consumed)
        return self.maker.iterator(
            stream, {"train": TRAIN, "valid": VALID, "test": TEST}[which], consumed
        )

    def whole(self, which: Split, number: int) -> list[WholeSet]:
        """Makes the iterators over all of each set of a split, the first of which has a number."""
        found: list[WholeSet] = []
        if which not in self.blends:
            return found
        batch = samples_for_evaluation(self.args) * self.args.seq_length
        for blend in sets_of(self.args, self.blends[which]):
            stream = self._open(blend, which, None).in_passes(batch)
            iterator = self.maker.iterator(stream, number + len(found), 0)
            found.append(WholeSet(iterator, stream.tokens // batch))
        return found

    def _open(
        self, blend: Blend, which: Split, tokens: int | None, start: int = 0, first: int = 0
    ) -> TokenStream:
        config, args = self.config, self.args
        if config.documents.whole:
            check_packs(config, args, first)
        return TokenStream.open(
            blend,
            which,
            seed=args.seed,
            num_tokens=tokens,
            start=start,
            max_document_length=longest_piece(config, args),
            whole=config.documents.whole,
            open_source=lambda name: open_source(config.documents, args, name, which),
        )


def _warn_of_repetition(stream: TokenStream, layout: WindowLayout) -> None:
    """Warns, on the first rank, where a dataset is smaller than its part of a window."""
    window = layout.data_parallel_size * layout.seq_length
    if dist.get_rank() == 0 and stream.repeats_within(window):
        logger.warning(
            "a window of %d tokens (data-parallel size x --seq-length) holds documents more than "
            "once: a dataset is smaller than its part of it. Give more text, or a "
            "smaller --seq-length",
            window,
        )


class BatchMaker(Protocol):
    """A maker of iterators over a run's splits, with `--distca` or without."""

    @property
    def control(self) -> Control | None:
        """Control of the dedicated servers; None: there are none."""
        ...

    def log_first_plan(self, stream: TokenStream, first_sample: int) -> None:
        """Logs the plan of the training split's first global batch, where it is planned."""
        ...

    def iterator(
        self, stream: TokenStream, number: int, first_sample: int
    ) -> MicroBatches | TickStream:
        """Makes the iterator over a stream's micro-batches or ticks, from a sample on.

        Args:
            stream: token stream of a split.
            number: number of the iterator, as for `DataIterators.numbered`.
            first_sample: sample of the stream.
        """
        ...

    def close(self) -> None:
        """Frees what the splits share; no micro-batch may follow."""
        ...


def batch_maker(
    config: DistcaConfig,
    args: Namespace,
    layout: WindowLayout,
    device: torch.device,
    processes: Processes | None = None,
) -> PackedMaker | PlannedMaker:
    """Chooses the maker: planned ticks with `--distca`, else packed batches. Collective."""
    if config.enabled:
        masks, servers = masks_of_a_chunk(args), find_servers(config, args, device, processes)
        return PlannedMaker(config, args, layout, masks, servers, device)
    return PackedMaker(
        layout,
        masks_from_args(args).masks,
        uses_dense_mask(config, args),
        uses_own_attention(config, args),
        device,
        args.apply_rope_fusion,
    )


@dataclass(frozen=True)
class PackedMaker(BatchMaker):
    """A maker of plain micro-batches.

    Attributes:
        layout: windows and ranks.
        masks: masks that layers have.
        dense: attribute of `PackedBatches`.
        token_positions: attribute of `PackedBatches`.
        device: device of the model.
        fused_rotary: as for `MicroBatch.to`.
    """

    layout: WindowLayout
    masks: tuple[Mask, ...]
    dense: bool
    token_positions: bool
    device: torch.device
    fused_rotary: bool

    def __call__(self, stream: TokenStream) -> PackedBatches:
        """Makes the micro-batches of a split's stream."""
        return PackedBatches(stream, self.layout, self.masks, self.dense, self.token_positions)

    @property
    def control(self) -> None:
        """None, since plain Megatron has no dedicated servers."""

    def log_first_plan(self, stream: TokenStream, first_sample: int) -> None:
        """Logs nothing, since there are no plans."""

    def iterator(self, stream: TokenStream, number: int, first_sample: int) -> MicroBatches:
        """See `BatchMaker.iterator`."""
        samples = self.layout.samples_per_micro_batch
        return MicroBatches(self(stream), first_sample, samples, self.device, self.fused_rotary)

    def close(self) -> None:
        """Frees nothing, since the splits share nothing."""


class PlannedMaker(BatchMaker):
    """A maker of ticks of planned micro-batches. Collective.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.
        layout: windows and ranks.
        masks: masks of a model chunk's layers.
        servers: attention servers that exchange with this process.
        device: device of the model.

    Attributes:
        servers: attention servers that exchange with this process.
        core_attention: runtime of the plans.
        micro_batches: function from a sample of the training split to the number of micro-batches
            of the global batch that starts there.
        micro_batches_of_evaluation: number of micro-batches of a global batch of an evaluation.
    """

    def __init__(
        self,
        config: DistcaConfig,
        args: Namespace,
        layout: WindowLayout,
        masks: LayerMasks,
        servers: Servers,
        device: torch.device,
    ) -> None:
        self._config, self._args = config, args
        self._layout, self._masks, self._device = layout, masks, device
        self.servers, self._pipeline = servers, servers.layout
        self.core_attention = build_core_attention(config, args, servers.group, device)
        self._scheduling = schedule_config(config, args, self._pipeline.world_size)
        layers = args.num_layers // (self._pipeline.stages * self._pipeline.chunks)
        self._layer_groups = groups_of_layers(layers, args)
        self.micro_batches_of_evaluation = (
            samples_for_evaluation(args) // layout.samples_per_micro_batch
        )
        self.micro_batches = micro_batches_by_sample(args)

    def __call__(self, stream: TokenStream, forward_only: bool) -> TickBatches:
        """Makes the ticks of a split's stream."""
        args, pipeline = self._args, self._pipeline
        options = self._config.execution_options(pipeline.chunks, forward_only)
        planner = GlobalBatchPlanner(
            pipeline.servers,
            self._scheduling,
            options,
            self._masks,
            pipeline.dedicated,
            linear_work=linear_work(args),
        )
        shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
        return TickBatches(
            PlannedBatches(stream, self._layout, planner, shards),
            pipeline,
            self._layer_groups,
            self.core_attention,
        )

    @property
    def control(self) -> Control | None:
        """See `BatchMaker.control`."""
        return self.servers.control

    def iterator(self, stream: TokenStream, number: int, first_sample: int) -> TickStream:
        """See `BatchMaker.iterator`."""
        training, fixed = number == TRAIN, self.micro_batches_of_evaluation
        batches = self(stream, forward_only=not training)
        if self.control is not None:
            batches = replace(batches, announce=partial(self.control.announce, number))
        count = self.micro_batches if training else lambda _: fixed
        process = PlannerProcess(batches.planner())
        fused_rotary = self._args.apply_rope_fusion
        return TickStream(batches, first_sample, count, self._device, process, fused_rotary)

    def log_first_plan(self, stream: TokenStream, first_sample: int) -> None:
        """Logs what the scheduler did, and the number of ticks and micro-batches in flight."""
        batches = self(stream, forward_only=False).planned
        planner = batches.planner
        count = self.micro_batches(first_sample)
        schedule = planner.options.tick_schedule(count, planner.stages)
        micro_batches = planner.micro_batches(batches.documents(first_sample, count))
        # Only one tick is planned here: the first of those in which most stages work.
        tick = max(schedule.ticks, key=lambda each: sum(work is not None for work in each.work))
        (planned,) = planner.ticks(micro_batches, [tick])
        # The first plan is that of the mask that sees most.
        mask = planner.masks.masks[0]
        packed = batches.packed_loads(first_sample, count, {mask: 1}, planner.config.cost_model)
        before = np.zeros(self._pipeline.world_size)
        for servers, work in zip(self._pipeline.servers, tick.work, strict=True):
            if work is not None:
                before[servers] = packed[work.micro_batch]
        summary = describe(planned.plans[0], planner.config, self._config.backward, before)
        logger.info("the first plan of the run:\n%s", format_summary(summary))
        warning = warning_of_groups_of_one(planner, micro_batches)
        # Logged once, since warnings of all ranks are shown.
        if warning is not None and dist.get_rank() == 0:
            logger.warning("%s", warning)
        if schedule.stages == 1:
            return
        usual = most_in_flight_of_1f1b(schedule.micro_batches, schedule.stages, schedule.chunks)
        logger.info(
            "%d ticks (1F1B: %d), in flight on each stage at most %s (1F1B: %s)%s",
            len(schedule.ticks),
            2 * (schedule.micro_batches * schedule.chunks + schedule.stages - 1),
            ", ".join(map(str, schedule.most_in_flight)),
            ", ".join(map(str, usual)),
            f" chunks, of which a stage has {schedule.chunks}" if schedule.chunks > 1 else "",
        )

    def close(self) -> None:
        """Frees what the transport holds; no tick may follow."""
        self.core_attention.transport.close()
