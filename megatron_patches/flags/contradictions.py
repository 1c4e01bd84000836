"""Flags that contradict each other, which Megatron-LM refuses by an assertion without words."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

_NOT_IN_ALL = (
    "save_params_interval",
    "save_retain_interval",
    "decoder_seq_length",
    "data_args_path",
    "per_split_data_args_path",
    "num_dataset_builder_threads",
    "use_gloo_process_groups",
    "ckpt_convert_format",
    "ckpt_convert_save",
)
"""Arguments that some versions of Megatron-LM may lack."""


def check_contradictions(args: Namespace) -> None:
    """Checks a command line for flags that do not go together.

    Args:
        args: parsed arguments, before Megatron-LM checks them.

    Raises:
        ValueError: the message names the flags, their values and what to change.
    """
    args = Namespace(**dict.fromkeys(_NOT_IN_ALL) | vars(args))
    for found in (*_of_sizes(args), *_of_training(args), *_of_intervals(args), *_of_files(args)):
        raise ValueError(found)


def _of_sizes(args: Namespace) -> Iterator[str]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    if None not in (hidden, heads) and args.kv_channels is None and hidden % heads:
        less = hidden // heads * heads
        near = " or ".join(str(size) for size in (less, less + heads) if size)
        yield (
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: give "
            f"--hidden-size {near}, other heads, or --kv-channels, the size of a head"
        )
    if None not in (args.seq_length, args.encoder_seq_length):
        yield "--seq-length and --encoder-seq-length say the same: remove --encoder-seq-length"
    length, positions = args.decoder_seq_length, args.max_position_embeddings
    if None not in (length, positions) and positions < length:
        yield (
            f"--decoder-seq-length {length} is more than --max-position-embeddings {positions}: "
            "remove --decoder-seq-length, which a GPT does not use"
        )


def _of_training(args: Namespace) -> Iterator[str]:
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 are two formats of the same numbers: remove one of the two"
    if args.lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr:g} is more than --lr {args.lr:g}: give a smaller --min-lr"
    ends = {
        "--start-weight-decay": args.start_weight_decay,
        "--end-weight-decay": args.end_weight_decay,
    }
    style = args.weight_decay_incr_style
    if style == "constant" and (given := [name for name, end in ends.items() if end is not None]):
        yield (
            f"{given[0]} is for a weight decay that changes: add --weight-decay-incr-style linear "
            "or cosine, or remove the flag"
        )
    missing = [name for name, end in ends.items() if end is None]
    if style != "constant" and missing:
        yield f"--weight-decay-incr-style {style} needs {' and '.join(missing)}"


def _of_intervals(args: Namespace) -> Iterator[str]:
    kept, saved = args.save_retain_interval, args.save_interval
    if args.save is not None and None not in (kept, saved) and kept % saved:
        yield _not_a_multiple("--save-retain-interval", kept, "--save-interval", saved)
    memory, log = args.log_memory_interval, args.log_interval
    if None not in (memory, log) and memory % log:
        yield _not_a_multiple("--log-memory-interval", memory, "--log-interval", log)
    parameters = args.save_params_interval is not None
    if args.save is not None and parameters and args.overlap_param_gather:
        yield "--save-params-interval does not work with --overlap-param-gather: remove one"


def _not_a_multiple(name: str, value: int, of: str, unit: int) -> str:
    return f"{name} {value} is not a multiple of {of} {unit}: give {-(-value // unit) * unit}"


def _of_files(args: Namespace) -> Iterator[str]:
    if args.data_path is not None and args.data_args_path is not None:
        yield "--data-path and --data-args-path both name the data: remove one of the two"
    split = args.train_data_path, args.valid_data_path, args.test_data_path
    if args.per_split_data_args_path is not None and any(each is not None for each in split):
        yield (
            "--per-split-data-args-path names the data of all splits: remove it, or "
            "--train-data-path, --valid-data-path and --test-data-path"
        )
    threads = args.num_dataset_builder_threads
    if threads is not None and threads < 1:
        yield f"--num-dataset-builder-threads {threads}: give at least 1"
    shards = args.use_distributed_optimizer and args.use_gloo_process_groups is False
    if shards and args.ckpt_format == "torch":
        yield (
            "--use-distributed-optimizer saves with --ckpt-format torch by way of gloo: give "
            "--ckpt-format torch_dist, or remove --disable-gloo-process-groups"
        )
    if args.ckpt_convert_format is not None and None in (args.ckpt_convert_save, args.load):
        yield "--ckpt-convert-format needs --load, and --ckpt-convert-save for what it writes"
