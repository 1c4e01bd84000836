"""Iterations of a serving engine that always has prompts waiting, and ways to run them.

Ranks keep their own prompts (data-parallel attention). The engine's scheduler decides what an
iteration feeds, so that all ways run the same chunks of the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.documents.lengths import LengthDistribution, Lognormal, Mixture, Zipf
from distca.plan import Mask
from distca.plan.span import Floats
from distca.schedule.serving.blocks import BlockPool, PrefixCache
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.schedule.serving.scheduler import Scheduler

Feeds = tuple[ScheduledTokens, ...]

CHAT = Lognormal(800, 1.0, 8192)
"""Prompts of chats: half of them have more than 800 tokens, one in a hundred more than 8,000."""

MIXES: dict[str, LengthDistribution] = {
    "chat": CHAT,
    "chat and long": Mixture(CHAT, Zipf(1.0, 16_384, 131_072), 0.1),
}
"""Lengths of prompts that are built in: chats, and chats with one long prompt (16K to 128K) in
ten."""

NEVER = 1 << 40
"""Tokens from which ranks would share a prompt: they never do."""

_SEQUENCES = 256
"""Most sequences of a rank that run."""


@dataclass(frozen=True)
class Load:
    """What an engine is asked for.

    Attributes:
        ranks: ranks of the engine.
        chunk: most tokens of an iteration for each rank.
        room: tokens whose keys and values a rank holds.
        answers: fewest and most tokens of an answer.
        block_size: tokens of a block.
    """

    ranks: int
    chunk: int
    room: int
    answers: tuple[int, int] = (4, 16)
    block_size: int = 128


def drawn(distribution: LengthDistribution, longest: int, seed: int) -> Iterator[int]:
    """Draws lengths of prompts without end, at most `longest` tokens each."""
    generator = np.random.default_rng(seed)
    while True:
        yield from np.minimum(distribution.sample(generator, 1024), longest).tolist()


def iterations(load: Load, lengths: Iterator[int], count: int, skipped: int) -> list[Feeds]:
    """Returns what an engine's iterations feed, from its first or from a later one on.

    Args:
        load: what it is asked for.
        lengths: lengths of the prompts.
        count: iterations that are returned.
        skipped: iterations before, in which ranks begin their first prompts.
    """
    blocks = BlockPool(load.ranks, load.room // load.block_size, load.block_size)
    limits = SchedulerConfig(
        _SEQUENCES * load.ranks,
        load.chunk * load.ranks,
        load.block_size,
        NEVER,
        prefix_caching=False,
        equal_shares=True,
    )
    most = limits.max_num_batched_tokens
    scheduler, chance = Scheduler(PrefixCache(blocks), limits), random.Random(0)
    found, number, waiting = list[Feeds](), 0, dict[int, int]()
    while len(found) < skipped + count:
        # More than an iteration feeds, however long a few of them are.
        while sum(min(each, load.chunk) for each in waiting.values()) < 2 * most:
            prompt = [0] * next(lengths)
            scheduler.add(Request(number, prompt, chance.randint(*load.answers)))
            waiting[number] = len(prompt)
            number += 1
        batch = scheduler.schedule()
        assert batch is not None
        found.append(batch.feeds)
        for each in batch.feeds:
            waiting.pop(each.sequence, None)
        scheduler.advance(batch, {each.sequence: 0 for each in batch.feeds if each.samples})
    return found[skipped:]


def whole_requests(
    feeds: Sequence[ScheduledTokens],
    ranks: int,
    cost_model: CostModel,
    linear: Callable[[int], float],
) -> Feeds:
    """Balances an iteration by moving whole chunks of prompts with all keys that they see, which
    costs nothing here; decoded tokens stay where they are.

    The chunk that takes longest goes first, to the rank that has least.

    Args:
        feeds: what the iteration feeds.
        ranks: ranks that there are.
        cost_model: seconds of core attention in a layer.
        linear: function from a number of tokens to the seconds of the rest of a layer.
    """
    start = np.array([each.start for each in feeds])
    count = np.array([each.count for each in feeds])
    pairs = Mask().pairs(start, start + count, np.zeros_like(start), start + count)
    seconds = cost_model.seconds(count, start + count, pairs)
    busy: Floats = np.zeros(ranks)
    found = [*feeds]
    chunks = []
    for number, each in enumerate(feeds):
        cost = float(seconds[number]) + linear(each.count)
        if each.count == 1 and each.start:
            busy[each.ranks[-1]] += cost
        else:
            chunks.append((-cost, number))
    for cost, number in sorted(chunks):
        rank = int(busy.argmin())
        busy[rank] -= cost
        found[number] = replace(feeds[number], ranks=np.full_like(feeds[number].ranks, rank))
    return tuple(found)
