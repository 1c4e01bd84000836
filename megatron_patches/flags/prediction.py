"""Checks of multi-token prediction, whose layers are behind those of the model."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.package_info import MAJOR, MINOR

from megatron_patches.flags.config import DistcaConfig

FIRST = (0, 19)
"""First version of megatron-core whose functions are those that ours stand in for."""


def validate_prediction(config: DistcaConfig, args: Namespace) -> None:
    """Checks the flags of multi-token prediction against others.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.

    Raises:
        ValueError: some do not go together; the message says what to do.
    """
    if not args.mtp_num_layers:
        return
    flag, local = f"--mtp-num-layers {args.mtp_num_layers}", args.transformer_impl == "local"
    if (MAJOR, MINOR) < FIRST:
        raise ValueError(
            f"{flag} needs megatron-core {FIRST[0]}.{FIRST[1]}, not {MAJOR}.{MINOR}: install that, "
            "or remove it"
        )
    backend = args.attention_backend.name
    for found, why, remedy in (
        (
            not config.enabled and local and backend in ("local", "unfused"),
            f"--attention-backend {backend}, for which Megatron-LM takes a rank's tokens for one "
            "document",
            "remove one of the two",
        ),
        (
            args.overlap_grad_reduce
            and args.pipeline_model_parallel_size > 1
            and not args.untie_embeddings_and_output_weights,
            "--overlap-grad-reduce in a pipeline with tied embeddings, where Megatron-LM waits for "
            "the gradient of an output layer that it does not use",
            "add --untie-embeddings-and-output-weights, or remove --overlap-grad-reduce",
        ),
        (args.spec is not None, "layers of --spec", "remove one of the two"),
        (
            config.documents.share_prefixes,
            "tokens that several others follow",
            "remove --distca-share-prefixes",
        ),
        (
            args.recompute_method == "uniform" and args.recompute_num_layers != 1,
            f"--recompute-num-layers {args.recompute_num_layers}, as each of these layers is "
            "recomputed alone",
            "give --recompute-num-layers 1",
        ),
        (
            config.pool_size is not None,
            "--distca-pool-size, whose bound of memory does not count these layers",
            "remove it",
        ),
        (config.cuda_graphs, "--distca-cuda-graphs", "remove it"),
        (
            config.chain > 1 and args.mtp_use_repeated_layer,
            "--distca-chain with --mtp-use-repeated-layer, one layer whose keys are several "
            "layers'",
            "remove one of the two",
        ),
        (
            config.ping_pong and bool(args.fp8 or args.fp4),
            "two nano-batches in layers of fp8 or fp4",
            "give --no-distca-ping-pong",
        ),
    ):
        if found:
            raise ValueError(f"{flag} does not go together with {why}: {remedy}")
