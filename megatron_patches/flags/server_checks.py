"""Checks of the flags that say which ranks are attention servers, and which share tasks."""

from __future__ import annotations

from argparse import Namespace

from distca.schedule import BALANCING
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.sizes import ModelSizes


def validate_servers(config: DistcaConfig, args: Namespace) -> None:
    """Checks server pools, shared heads and dedicated servers.

    Args:
        config: our flags.
        args: Megatron-LM's arguments with its derived values (`data_parallel_size`, ...).

    Raises:
        ValueError: some flags do not go together; the message says what to do.
    """
    _validate_pools(config, args)
    _validate_shared_heads(config, args)
    _validate_dedicated(config, args)


def _validate_pools(config: DistcaConfig, args: Namespace) -> None:
    """Checks that ranks can form server pools."""
    size = config.pool_size
    if size is None:
        for name, value in (
            ("token-pairs", config.token_pairs),
            ("wide-documents", config.wide_documents),
            ("memory-gb", config.memory_gb),
        ):
            if value is not None:
                raise ValueError(
                    f"--distca-{name} is for server pools: add --distca-pool-size, or remove it"
                )
        return
    flag, scheduling = f"--distca-pool-size {size}", config.scheduling
    if args.data_parallel_size % size:
        raise ValueError(
            f"{flag} must divide the {args.data_parallel_size} data-parallel ranks: give a divisor"
        )
    if config.wide_documents is not None and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            "--distca-wide-documents does not work with pipelines, whose ticks mix micro-batches: "
            "remove it, or --pipeline-model-parallel-size"
        )
    for other, given, why in (
        (f"--distca-chain {config.chain}", config.chain > 1, "a chain lies on all ranks"),
        (
            "--distca-placement sequential",
            not scheduling.free_placement,
            "pools choose their documents",
        ),
        (
            f"--distca-scheduler {scheduling.scheduler}",
            scheduling.scheduler not in BALANCING,
            "it balances no pool",
        ),
    ):
        if given:
            raise ValueError(f"{flag} does not go together with {other}, as {why}: remove one")
    pools, parts = args.data_parallel_size // size, args.tensor_model_parallel_size
    if config.dedicated % (pools * parts):
        raise ValueError(
            f"{flag} makes {pools} pools, which need equally many of the processes of "
            f"--distca-servers dedicated:{config.dedicated}: give a multiple of {pools * parts}"
        )


def _validate_shared_heads(config: DistcaConfig, args: Namespace) -> None:
    """Checks that neighbouring ranks can share heads."""
    size = config.head_parallel
    if size == 1:
        return
    flag, tensor = f"--distca-head-parallel-size {size}", args.tensor_model_parallel_size
    if args.data_parallel_size % size:
        raise ValueError(
            f"{flag} must divide the {args.data_parallel_size} data-parallel ranks: give a divisor"
        )
    kv_heads = ModelSizes.from_args(args).kv_heads // tensor
    if kv_heads % size:
        raise ValueError(
            f"{flag} must divide the {kv_heads} key-value heads of a tensor-parallel rank: give a "
            "divisor"
        )
    pool = config.pool_size
    if pool is not None and pool % size:
        raise ValueError(
            f"{flag} must divide --distca-pool-size {pool}: ranks that share heads are of one pool"
        )
    if config.dedicated:
        raise ValueError(
            f"{flag} does not go together with --distca-servers dedicated:{config.dedicated}, "
            "which have all heads: remove one"
        )
    if pool is None and (uneven := config.shares_tokens_unevenly) is not None:
        other, remedy = uneven
        raise ValueError(
            f"{flag} divides a server's tokens evenly, and {other} gives any number: {remedy}"
        )


def _validate_dedicated(config: DistcaConfig, args: Namespace) -> None:
    """Checks the flags that dedicated servers depend on."""
    number = config.dedicated
    if not number:
        return
    flag = f"--distca-servers dedicated:{number}"
    if number % args.tensor_model_parallel_size:
        raise ValueError(
            f"{flag}: a server is a process for each of the {args.tensor_model_parallel_size} "
            "tensor-parallel parts of the heads: use a multiple of that"
        )
    if config.scheduling.scheduler not in BALANCING:
        raise ValueError(
            f"{flag} needs a --distca-scheduler that shares tasks out over all servers "
            f"({', '.join(BALANCING)}), not {config.scheduling.scheduler}"
        )
    if config.backward != "resend":
        raise ValueError(f"{flag} needs --distca-backward resend: those servers keep nothing")
    if not config.scheduling.pool_stages:
        raise ValueError(f"{flag} shares the tasks of all stages: remove --no-distca-pool-stages")
