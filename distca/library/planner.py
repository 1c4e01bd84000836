"""The planner of a loop: it plans micro-batches, places their tokens, and runs core attention."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from distca.cost.kernel_time import CostModel
from distca.cost.memory import CoreAttentionMemory, plan_memory
from distca.cost.volume import AttentionShape
from distca.library.agreed import agreed_values
from distca.library.arguments import (
    check_arguments,
    check_dtype,
    check_group,
    check_member,
    device_of,
    kernel_of,
    masks_of_layers,
)
from distca.library.batch import Batch, Predictions, Progress
from distca.library.compared import (
    Comparisons,
    Placed,
    compare_arguments,
    digest_of_bytes,
)
from distca.library.documents import IGNORED, Document
from distca.library.nodes import Nodes, rows_of_rank
from distca.library.plans import PlanDocuments, PlannedDocuments
from distca.library.share import Given, check_process_group
from distca.library.tree_memory import device_memory, without_room
from distca.library.trees import Tree
from distca.plan import BLOCK, Mask, Plan
from distca.runtime import AttentionCall, AttentionTimes, Buffers, EventCursor, Exchange, Trace
from distca.runtime.attention_call import CallResources
from distca.runtime.exchange import build_exchange
from distca.schedule import ScheduleConfig
from distca.transport import CollectiveTransport, new_exchange_group

_CAUSAL = Mask()


class Planner:
    """Plans micro-batches whose core attention the ranks of a group share. Collective to make.

    Every rank of the group owns tokens, and is an attention server for all of them. Each rank must
    hold the whole model, or its shard of FSDP, and run all layers in the same order.

    Args:
        shape: attention heads of a rank, and bytes of an element of queries, keys and values.
        group: ranks that share micro-batches; None: all ranks of the job.
        masks: masks of the model's layers, the widest first: its plan decides where tokens go. A
            window of transformers' `sliding_window=w` is `Mask(window_left=w - 1)`.
        softcap: bound of the attention scores, as in Gemma 2, or None.
        scheduler: name of the scheduler, one of those of `--distca-scheduler`.
        tolerance: a server may have this much more than the mean load; 0.1 is 10%.
        block: tokens in a kernel's block; cuts of documents fall on its multiples.
        cost_model: predicts kernels' seconds, by which loads are measured; None: loads are visible
            (query, key) pairs.
        device: device of the model; None: the current GPU, or the CPU where there is none.
        max_live_batches: how many batches the planner keeps. Finish a batch's backward pass before
            you place this many more.
        memory_bytes: most bytes of buffers on a rank; None: all of the device's memory.
        vocabulary: tokens that the model knows, which those of documents are below; None: tokens
            are not checked.

    Attributes:
        bytes_sent: bytes that this rank has sent so far, by phase.

    Raises:
        ValueError: an argument is out of range, or no kernel computes such heads on the device.
        RuntimeError: `torch.distributed` is not initialised.
        LostRankError: another rank has ended or does not answer. The other functions of the
            library that are collective raise it, too.
    """

    def __init__(
        self,
        shape: AttentionShape,
        group: dist.ProcessGroup | None = None,
        *,
        masks: Mask | Sequence[Mask] = _CAUSAL,
        softcap: float | None = None,
        scheduler: str = "tiles",
        tolerance: float = 0.1,
        block: int = BLOCK,
        cost_model: CostModel | None = None,
        device: torch.device | str | None = None,
        max_live_batches: int = 8,
        memory_bytes: float | None = None,
        vocabulary: int | None = None,
    ) -> None:
        check_process_group()
        check_member(group)
        arguments: dict[str, str] = {}
        wrong: Exception | None = None
        try:
            check_group(group)
            device, of_layers = device_of(device), masks_of_layers(masks)
            check_arguments(
                shape,
                scheduler,
                tolerance,
                block,
                cost_model,
                max_live_batches,
                memory_bytes,
                vocabulary,
            )
            check_dtype(shape, device)
            self._kernel = kernel_of(shape, softcap, device)
            config = ScheduleConfig(tolerance, shape, cost_model, block)
            # Those that a rank may choose for itself are missing.
            arguments = {
                "shape": str(shape),
                "masks": str(of_layers),
                "softcap": str(softcap and float(softcap)),
                "scheduler": scheduler,
                "tolerance": str(float(tolerance)),
                "block": str(int(block)),
                "cost_model": cost_model.description if cost_model else "None",
                "device": device.type,
                "max_live_batches": str(int(max_live_batches)),
                "vocabulary": str(vocabulary and int(vocabulary)),
            }
        except Exception as error:
            # Whatever it is, the other ranks must not wait for this one.
            wrong = error
        # Ranks that give no group at all meet those that give none of their own.
        compare_arguments(arguments, wrong, group if isinstance(group, dist.ProcessGroup) else None)
        assert isinstance(device, torch.device)
        self._arguments = digest_of_bytes(each.encode() for each in arguments.values())
        self.shape, self.masks, self.device = shape, of_layers, device
        self._group, self._softcap = group, softcap
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        exchanges = new_exchange_group(ranks, _timeout_of(group, device), alone=group is not None)
        assert exchanges is not None
        self._transport = CollectiveTransport(exchanges, device)
        self._buffers = Buffers(device)
        self._memory = device_memory(device) if memory_bytes is None else memory_bytes
        self._vocabulary = vocabulary
        self._trace, self._times = Trace(device), AttentionTimes(device)
        self._plan = PlanDocuments(scheduler, config, self.masks, len(ranks))
        # This rank's part of each batch's plans, one for each mask, and what was computed of it.
        self._placed: OrderedDict[int, tuple[tuple[Exchange, ...], Progress]] = OrderedDict()
        self._max_live, self._batches = max_live_batches, itertools.count()
        self._comparisons = Comparisons(group, device)
        self._compared, self._have_trees, self._agrees = 0, False, False
        self._number = next(_NUMBERS)
        _PLANNERS[self._number] = self

    @property
    def collate(self) -> PlanDocuments:
        """A function that plans a list of documents, for a data loader's `collate_fn`.

        It can be pickled and needs no process group, so that the loader's workers plan ahead. The
        loaders of all ranks must yield the same documents in the same order.
        """
        return self._plan

    @property
    def bytes_sent(self) -> dict[str, int]:
        return dict(self._transport.bytes_sent)

    def place(self, documents: PlannedDocuments | Sequence[Given]) -> Batch:
        """Places a micro-batch. Collective: all ranks of the group place the same documents.

        The ranks compare their documents and plans, and what they have called since the last batch.
        In the first 8 batches, in all from the first trees on, and on CPUs they do so before they
        go on. Otherwise a GPU would be waited for, and a difference is an error of the next call of
        `place`; until then outputs are wrong, or an exchange ends with an error of its own.

        Args:
            documents: documents, or their tokens alone, int64 `[tokens]`; rollouts, which share
                prefixes of 128 tokens or more; trees of `share_prefixes`, for another threshold;
                or what `collate` made of them before.

        Returns:
            This rank's tokens. It may have none where there are fewer tokens than ranks.

        Raises:
            ValueError: see `Document`; the plans are of another number of ranks or masks; the
                ranks' documents, plans or planners differ; they called `core_attention` or its
                backward pass in different orders; or buffers need more memory than there is.
        """
        find_planner(self._number * _BATCHES)
        made, needed = self._planned(documents)
        transport, rank = self._transport, self._transport.rank
        number = next(self._batches)
        nodes = Nodes(made.documents)
        self._buffers.reserve(needed, transport)
        exchanges = tuple(build_exchange(plan, rank) for plan in made.plans)
        if self.device.type != "cpu":
            # Of its own memory, since several batches may be under way.
            exchanges = tuple(each.map_indices(self._to_device) for each in exchanges)
        progress = Progress(first=not self._agrees)
        self._placed[number] = exchanges, progress
        while len(self._placed) > self._max_live:
            self._placed.popitem(last=False)
        placement = made.plans[0].placement
        rows = rows_of_rank(nodes, placement, rank)
        tokens, positions = (self._to_device(each) for each in rows)
        progress.positions = positions
        _, _, targets, weights = nodes.predictions
        mine, row = map(torch.from_numpy, nodes.predictions_of_rank(placement, rank))
        predictions = Predictions(row, targets[mine], weights[mine])
        return Batch(
            tokens,
            positions,
            Predictions(*map(self._to_device, predictions)),
            len(targets),
            nodes.num_trained,
            self._number * _BATCHES + number,
            made.plans,
            nodes,
            rank,
            progress,
            self._group,
        )

    def _planned(
        self, given: PlannedDocuments | Sequence[Given]
    ) -> tuple[PlannedDocuments, CoreAttentionMemory]:
        """Plans documents and compares them with those of other ranks. Collective.

        Returns:
            The documents and their plans, and the memory that these need.

        Raises:
            ValueError: see `place`.
        """
        made, wrong, mine, trees = None, None, Placed(), False
        needed = CoreAttentionMemory()
        try:
            made = given if isinstance(given, PlannedDocuments) else self._plan(given)
            self._check_plans(made.plans)
            self._check_vocabulary(made.documents)
            for plan in made.plans:
                needed = needed.union(plan_memory(plan, self.shape))
            if needed.total(1) > self._memory:
                nodes = Nodes(made.documents)
                raise ValueError(without_room(nodes, made.plans[0], needed.total(1), self._memory))
            # Rollouts are often sampled anew in each step.
            trees = any(isinstance(each, Tree) for each in made.documents)
            mine = Placed(*made.digests, self._arguments)
        except ValueError as error:
            wrong = error
        try:
            at_once = trees or self._have_trees or self._compared < _COMPARED
            self._comparisons.compare(mine, at_once)
        except ValueError:
            if wrong is None:
                raise
        self._compared += 1
        if wrong is not None:
            raise wrong
        assert made is not None
        # All ranks have them.
        self._have_trees |= trees
        return made, needed

    def _check_plans(self, plans: Sequence[Plan]) -> None:
        """Raises a `ValueError` if plans are of other ranks or masks."""
        ranks, masks = self._transport.world_size, tuple(plan.mask for plan in plans)
        if plans[0].world_size != ranks or masks != self.masks:
            raise ValueError(
                f"the plans are of {plans[0].world_size} ranks and the masks {masks}, the planner "
                f"of {ranks} and {self.masks}: plan with `planner.collate`"
            )

    def _check_vocabulary(self, documents: Sequence[Document | Tree]) -> None:
        """Raises a `ValueError` if a token or target is not in the vocabulary."""
        most = self._vocabulary
        if most is None:
            return
        given = list(Nodes(tuple(documents)).tokens)
        for each in documents:
            if isinstance(each, Document) and each.targets is not None:
                given.append(each.targets.masked_fill(each.targets == IGNORED, 0))
        tokens = torch.cat(given)
        wrong = tokens[(tokens < 0) | (tokens >= most)]
        if len(wrong):
            raise ValueError(
                f"token {int(wrong[0])} is not one of the model's {most}: use its tokenizer"
            )

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def call(self, number: int, mask: Mask, scale: float) -> tuple[AttentionCall, Exchange]:
        """Makes a call of core attention; see `core_attention`.

        Args:
            number: number of the batch.
            mask: mask of the layer.
            scale: factor of the scores.

        Returns:
            The call, and this rank's part of its plan.

        Raises:
            ValueError: the batch is gone, or no plan has the mask.
        """
        placed = self._placed.get(number)
        if placed is None:
            raise ValueError(
                f"batch {number} is gone, since {self._max_live} were placed after it: make the "
                "planner with a larger max_live_batches"
            )
        if mask not in self.masks:
            raise ValueError(f"a layer has {mask}, but the planner {self.masks}: give it as a mask")
        exchanges, progress = placed
        exchange = exchanges[self.masks.index(mask)]
        progress.attended = True
        resources = CallResources(
            self._transport,
            self._kernel,
            self._trace,
            self._times,
            self._buffers.workspaces[0],
            self._buffers.scratch,
            self._buffers.rows,
            keeps_inputs=False,
        )
        return AttentionCall(resources, EventCursor([exchange]), 0, 0, scale, {}), exchange

    def agree(self, check: Callable[[], torch.Tensor]) -> None:
        """Compares the dtype of queries, keys and values with other ranks, in the first call.
        Collective.

        Args:
            check: checks this rank's, and returns the queries.

        Raises:
            ValueError: `check` raised it on some rank, or dtypes differ; on all ranks.
        """
        if self._agrees:
            check()
            return
        agreed_values("core_attention", check, self.device, self._group)
        self._agrees = True

    def add_call(self, call: str) -> None:
        """Notes a call of core attention, in words, which `place` compares."""
        self._comparisons.add_call(call)

    def check_positions(self, number: int, given: torch.Tensor) -> None:
        """Checks positions that a model was called with. A GPU is waited for in a batch's first
        layer at most.

        Args:
            number: number of the batch.
            given: positions, `[…, rows]`.

        Raises:
            ValueError: they are not the batch's.
        """
        placed = self._placed.get(number)
        own = None if placed is None else placed[1].positions
        if placed is None or own is None or given.data_ptr() == own.data_ptr():
            return
        if own.device.type != "cpu" and placed[1].attended:
            return
        if given.shape[-1] != len(own) or not bool((given == own).all()):
            raise ValueError(
                "the model was called with other position_ids than those of inputs_of: leave them "
                "as they are"
            )

    def check_softcap(self, softcap: float) -> None:
        """Checks that a layer has the soft cap that the planner's kernel has.

        Args:
            softcap: bound of the layer's scores; 0.0: there is none.

        Raises:
            ValueError: it has another one.
        """
        if (softcap or None) != self._softcap:
            raise ValueError(
                f"a layer has the soft cap {softcap or None}, but the planner {self._softcap}: "
                "give it as `softcap`"
            )

    def close(self) -> None:
        """Frees the buffers. The planner cannot be used afterwards."""
        _PLANNERS.pop(self._number, None)
        self._placed.clear()
        self._transport.close()


_BATCHES = 2**40
"""A handle is the planner's number times this, plus the batch's number."""
_COMPARED = 8
"""First batches, in which ranks wait for the comparison of their documents also on GPUs."""

# torch's operations take tensors and numbers alone, so that a batch's handle has to name its
# planner. An entry ends with its planner.
_PLANNERS: weakref.WeakValueDictionary[int, Planner] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def find_planner(handle: int) -> tuple[Planner, int]:
    """Returns the planner that a handle names, and the batch's number there.

    Raises:
        ValueError: the planner was closed, or is gone.
    """
    number, batch = divmod(handle, _BATCHES)
    planner = _PLANNERS.get(number)
    if planner is None:
        raise ValueError("the batch's planner is gone: keep it as long as its batches are used")
    return planner, batch


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Returns the time limit of a group's operations, which torch doesn't give to new groups."""
    group = group or dist.group.WORLD
    assert group is not None
    limit: timedelta = group._get_backend(device).options._timeout
    return limit
