"""Memory of core attention of trees, held against what a rank has before the model is built.

A kernel copies the keys of a branch's whole path, prompt included. Many branches of a long prompt
therefore need large buffers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from distca.cost.memory import plan_memory
from distca.plan import Plan
from distca.plan.paths import Paths
from distca.schedule import TilesScheduler, even_capacities
from megatron_patches.batches.blends import Split, check_blends
from megatron_patches.batches.dataset_factory import open_source
from megatron_patches.batches.shared_conversations import SharedConversations
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_from_args
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.planning import schedule_config


def check_tree_memory(
    config: DistcaConfig, args: Namespace, splits: Sequence[Split], memory: int
) -> None:
    """Checks that a rank has room for the buffers of each file's largest tree, planned alone.

    Args:
        config: our flags.
        args: Megatron-LM's arguments, and the tokenizer's `vocab_size`.
        splits: splits that the run would read.
        memory: bytes that a rank has.

    Raises:
        ValueError: there is no room.
    """
    sizes = ParallelSizes.from_args(args, config.head_parallel)
    planned_by = schedule_config(config, args, sizes.servers(config.dedicated))
    ranks = sizes.data // config.head_parallel
    for which, blend in check_blends(config.documents, args, splits).items():
        for name in blend.prefixes:
            source = open_source(config, args, name, which)
            if not isinstance(source, SharedConversations):
                continue
            document = source.largest
            paths = Paths.of(*source.tree(document))
            plan = _plan(TilesScheduler(planned_by), paths, ranks, args)
            needed = plan_memory(plan, planned_by.shape, config.backward).total(1)
            if needed > memory:
                raise ValueError(
                    f"{source.place(document)}: its tree of {len(paths.lengths)} branches needs "
                    f"at least {needed / 1e9:,.1f} GB of core attention's buffers on a rank, which "
                    f"has {memory / 1e9:,.1f} GB: use more ranks or a larger "
                    "--tensor-model-parallel-size, make packs shorter "
                    "(--distca-max-document-length), or remove --distca-share-prefixes"
                )


def _plan(scheduler: TilesScheduler, paths: Paths, ranks: int, args: Namespace) -> Plan:
    """Plans a tree over the ranks of a stage."""
    capacities = even_capacities(int((paths.lengths - paths.prefix).sum()), ranks)
    return scheduler.plan(paths.lengths, capacities, masks_from_args(args).masks[0], *paths.family)
