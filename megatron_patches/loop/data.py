"""The iterators of a run's splits, over the documents that its flags name."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_patches.batches.blends import SPLITS, Blend, Split, check_blends, sets_of
from megatron_patches.batches.dataset_factory import open_stream
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.packed import PackedIterator, PackedReader
from megatron_patches.batches.plan_log import log_first_plan
from megatron_patches.batches.resuming import (
    PLACE,
    max_document_tokens,
    with_max_document_tokens,
)
from megatron_patches.batches.stream import TokenStream
from megatron_patches.flags.batch_sizes import BatchSizes, samples_of_training
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_from_args
from megatron_patches.model.gpt import core_attention_kind
from megatron_patches.pipeline.data_iterators import (
    TEST,
    TRAIN,
    VALID,
    ClosableIterator,
    DataIterators,
    FullValidationIterator,
)
from megatron_patches.pipeline.planned_data import PlannedData
from megatron_patches.pipeline.processes import Control, Processes

logger = logging.getLogger(__name__)


def window_layout(args: Namespace, processes: Processes | None = None) -> WindowLayout:
    """Makes the layout of windows on this rank, which on a dedicated server reads no tokens.

    Args:
        args: Megatron-LM's arguments.
        processes: processes of a job with dedicated servers, or None.
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
        train_samples: 0 for no iterator of training; how many samples the run has, with those
            consumed before, follows from `args`.
        valid_samples: most samples that validation still needs; 0 for no iterator. With
            `--full-validation` neither this nor `test_samples` matters, and it may be None.
        test_samples: number of samples of the test; 0 for no iterator.
        processes: processes of a job with dedicated servers, or None.

    Raises:
        ValueError: the data is missing, corrupt or of another vocabulary; or the consumed samples
            are no whole number of micro-batches.
    """
    wanted = {"train": train_samples > 0, "valid": bool(valid_samples), "test": test_samples > 0}
    if args.full_validation:
        wanted |= {"valid": True, "test": True}
    blends = check_blends(config.documents, args, [which for which in SPLITS if wanted[which]])
    layout, planned, control = window_layout(args, processes), None, None
    if config.enabled:
        planned = PlannedData.start(config, args, layout, model_device(), processes)
        control = planned.servers.control
    if control is not None:
        config = share_place_in_data(control, config, args)
    splits = _Splits(config, args, blends, layout, planned)
    train = splits.part(
        "train", samples_of_training(args), args.consumed_train_samples, args.train_stream_start
    )
    valid: Any
    if args.full_validation:
        valid, tests = splits.whole("valid", VALID), splits.whole("test", TEST)
        valid = valid if args.multiple_validation_sets else valid[0]
        test: Any = tests[0] if tests else None
    else:
        consumed = args.consumed_valid_samples
        # The earlier run may have evaluated more often than these flags say.
        samples = valid_samples + consumed if valid_samples else 0
        valid = splits.part("valid", samples, consumed, args.valid_stream_start)
        test = splits.part("test", test_samples, 0, 0)
    return DataIterators(train, valid, test, control, None if planned is None else planned.close)


def share_place_in_data(control: Control, config: DistcaConfig, args: Namespace) -> DistcaConfig:
    """Tells dedicated servers where in the data a checkpoint left off. Collective.

    Args:
        control: control of the servers.
        config: our flags.
        args: Megatron-LM's arguments, which are set to the first rank's.

    Returns:
        The configuration of a run that goes on there.
    """
    mine = [vars(args)[name] for name in PLACE]
    pieces, *place = control.broadcast([max_document_tokens(config, args), *mine])
    vars(args).update(zip(PLACE, place, strict=True))
    return with_max_document_tokens(config, args, pieces)


@dataclass(frozen=True)
class _Splits:
    """Makes the iterators of splits.

    Attributes:
        config: our flags.
        args: Megatron-LM's arguments.
        blends: datasets of the splits that are read.
        layout: windows and ranks.
        planned: what planned iterators share; None: micro-batches are plain.
    """

    config: DistcaConfig
    args: Namespace
    blends: Mapping[Split, Blend]
    layout: WindowLayout
    planned: PlannedData | None

    def part(
        self, which: Split, samples: int, consumed: int, start: int
    ) -> ClosableIterator | None:
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
                f"{consumed} samples were consumed before, which is not a whole number of "
                f"micro-batches of {layout.samples_per_micro_batch} samples: resume with a "
                "data-parallel size times --micro-batch-size that divides it"
            )
        # One spare global batch: the last may overrun, and prefetching reads ahead.
        spare = (
            BatchSizes.from_args(args).micro_batches_by_sample()(samples)
            * layout.samples_per_micro_batch
        )
        first, tokens = start + consumed * args.seq_length, (samples + spare) * args.seq_length
        stream = open_stream(self.config, args, self.blends[which], which, tokens, start, first)
        if which == "train":
            _warn_of_repetition(stream, layout)
            if self.planned is not None:
                log_first_plan(
                    self.planned.reader(stream, forward_only=False),
                    self.config.backward,
                    consumed,
                    self.planned.micro_batches_at(consumed),
                    _folder_of_boards(args),
                )
        return self._iterator(
            stream, {"train": TRAIN, "valid": VALID, "test": TEST}[which], consumed
        )

    def whole(self, which: Split, number: int) -> list[FullValidationIterator]:
        """Makes the iterators over whole sets of a split, numbered from `number` on."""
        found: list[FullValidationIterator] = []
        if which not in self.blends:
            return found
        batch = BatchSizes.from_args(self.args).evaluated * self.args.seq_length
        for blend in sets_of(self.args, self.blends[which]):
            stream = open_stream(self.config, self.args, blend, which, None).in_passes(batch)
            iterator = self._iterator(stream, number + len(found), 0)
            found.append(FullValidationIterator(iterator, stream.tokens // batch))
        return found

    def _iterator(self, stream: TokenStream, number: int, first_sample: int) -> ClosableIterator:
        if self.planned is not None:
            return self.planned.iterator(stream, number, first_sample)
        return packed_iterator(self.config, self.args, self.layout, stream, first_sample)


def _folder_of_boards(args: Namespace) -> Path | None:
    """Returns the folder of TensorBoard's files on the rank that writes them; None: elsewhere."""
    from megatron.training.global_vars import get_tensorboard_writer

    return None if get_tensorboard_writer() is None else Path(args.tensorboard_dir)


def packed_iterator(
    config: DistcaConfig,
    args: Namespace,
    layout: WindowLayout,
    stream: TokenStream,
    first_sample: int,
) -> PackedIterator:
    """Makes the iterator over a split's plain micro-batches, from a sample on."""
    kind = core_attention_kind(config.enabled, args.transformer_impl, args.attention_backend.name)
    reader = PackedReader(
        stream,
        layout,
        masks_from_args(args),
        dense=kind == "dense mask",
        as_one_sequence=kind == "packed",
    )
    return PackedIterator(reader, first_sample, model_device(), args.apply_rope_fusion)


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
