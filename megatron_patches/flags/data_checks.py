"""Checks of the flags that say what a run trains on and validates with."""

from __future__ import annotations

from argparse import Namespace

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_from_args
from megatron_patches.versions import newer_flag

SFT_TOKENIZER = "SFTTokenizer"
"""Tokenizer type of `--sft`, in Megatron-LM, too."""


def validate_data(config: DistcaConfig, args: Namespace) -> None:
    """Checks the flags of the data against each other, and against those of plans.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.

    Raises:
        ValueError: some flags do not go together; the message says what to do.
    """
    _validate_sft(args)
    _validate_validation_sets(args)
    _validate_shared_prefixes(config, args)


def _validate_sft(args: Namespace) -> None:
    """Checks the flags of fine-tuning on conversations."""
    if not args.sft:
        return
    if args.tokenizer_type != SFT_TOKENIZER:
        raise ValueError(
            f"--sft needs --tokenizer-type {SFT_TOKENIZER} with --tokenizer-model FOLDER, not "
            f"{args.tokenizer_type}"
        )


def _validate_shared_prefixes(config: DistcaConfig, args: Namespace) -> None:
    """Checks that documents can be trees."""
    if not config.documents.share_prefixes:
        return
    flag, scheduling = "--distca-share-prefixes", config.scheduling
    if not config.enabled:
        raise ValueError(f"{flag} needs --distca, which plans shared prefixes: add it")
    for other, given in (
        (f"--distca-scheduler {scheduling.scheduler}", scheduling.scheduler != "tiles"),
        ("--distca-placement sequential", not scheduling.free_placement),
        ("--distca-max-buffer-bytes", scheduling.max_buffer_bytes is not None),
        (f"--distca-chain {config.chain}", config.chain > 1),
        (f"--distca-pool-size {config.pool_size}", config.pool_size is not None),
        (
            "--attention-chunk-size",
            any(mask.attention_chunk is not None for mask in masks_from_args(args).masks),
        ),
    ):
        if given:
            raise ValueError(f"{flag} does not go together with {other}: remove one of the two")


def _validate_validation_sets(args: Namespace) -> None:
    """Checks the flags of several validation sets."""
    several = "--multiple-validation-sets"
    if newer_flag(args, "validation_set_names") and not args.multiple_validation_sets:
        raise ValueError(f"--validation-set-names needs {several}")
    if not args.multiple_validation_sets:
        return
    if not args.full_validation:
        raise ValueError(f"{several} needs --full-validation, in Megatron-LM, too")
    if not (args.valid_data_path or args.per_split_data_args_path):
        raise ValueError(
            f"{several} needs --valid-data-path or --per-split-data-args-path, with a prefix for "
            "each set"
        )
