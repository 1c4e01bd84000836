"""Blocks of an engine, whose rows are followed by what they hold: answers are right, none leaks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from distca.inference.config import EngineConfig
from distca.inference.engine import Engine
from distca.inference.messages import AddRequest, Iteration, ModelOutput
from distca.inference.sampling import Penalties, SamplingParams
from distca.schedule.serving.blocks import Block
from support.token_engine import TokenWorkers, right_answer, token_settings

RANKS = 2
STATES = ("waiting", "prefilling", "decoding", "preempted", "ended")


class Run:
    """An engine that is told of sequences, and what it answers.

    Attributes:
        told: tokens of each answer.
        ended: sequences that have come to their end, of which nothing more may be told.
    """

    def __init__(self, settings: EngineConfig, blocks: int) -> None:
        self.workers = TokenWorkers(settings)
        self.engine = Engine(settings, blocks)
        self.told: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self._begun: Iteration | None = None

    def begin(self) -> bool:
        """Begins an iteration; returns whether there is one."""
        self._begun = self.engine.schedule()
        return self._begun is not None

    def finish(self) -> None:
        """Runs the iteration, and takes in what it has brought."""
        assert self._begun is not None
        outputs, failed = self.engine.finish(self.workers.run(self._begun))
        assert not failed
        for output in outputs:
            assert output.number not in self.ended
            self.told.setdefault(output.number, []).append(output.token)
            if output.finish:
                self.ended.add(output.number)

    def answer(self, submits: list[AddRequest]) -> list[list[int]]:
        """Answers sequences that arrive together."""
        for submit in submits:
            self.engine.add(submit)
        while self.begin():
            self.finish()
        return [self.told[submit.number] for submit in submits]

    def abort(self, number: int) -> None:
        """Aborts a sequence."""
        self.engine.abort(number)
        self.ended.add(number)

    def state(self, number: int) -> str:
        """What a sequence is doing."""
        if number in self.ended:
            return "ended"
        if number not in self.workers.held:
            return "preempted" if self.workers.admitted[number] else "waiting"
        return "decoding" if number in self.told else "prefilling"

    def referenced(self) -> list[int]:
        """Blocks of each rank that sequences have."""
        return [self.engine.cache.referenced(rank) for rank in range(RANKS)]

    def leaked(self) -> int:
        """Blocks that are held though no sequence is left; none is once the cache is reset."""
        cache, held = self.engine.cache, sum(self.referenced())
        cache.reset()
        return held + sum(cache.referenced(rank) + cache.cached(rank) for rank in range(RANKS))


def submits_of(seed: int, count: int, longest: int = 44, most_new: int = 8) -> list[AddRequest]:
    """Sequences of all lengths, many of which begin alike, drawn and greedy."""
    chance = random.Random(seed)
    shared = [chance.choices(range(250), k=longest) for _ in range(3)]
    submits = []
    for number in range(count):
        length = chance.randint(1, longest)
        alike = chance.choice([0, length // 2, length])
        tokens = chance.choice(shared)[:alike] + chance.choices(range(250), k=length - alike)
        sampling = SamplingParams(max_tokens=chance.randint(1, most_new), stops=frozenset({7, 8}))
        if number % 3:
            sampling = replace(sampling, temperature=0.9, seed=number, top_k=50, top_p=0.9)
        penalties = Penalties(0.5, 0.5, 1.2) if number % 5 == 0 else Penalties()
        submits.append(AddRequest(number, tokens, sampling, penalties))
    return submits


def test_answers_are_the_same_however_they_are_computed() -> None:
    """With the cache or without, in chunks of any size, with too few blocks, alone or among 64."""
    submits = submits_of(0, 64)
    expected = [right_answer(submit) for submit in submits]
    for caching, chunk, few in itertools.product((True, False), (16, 64, 512), (True, False)):
        settings = token_settings(tokens=chunk, caching=caching)
        # Pools for 1.5 of the longest prompts, or for all.
        blocks = 9 if few else 500
        run = Run(settings, blocks)
        assert run.answer(submits) == expected, (caching, chunk, few)
        assert (run.engine.scheduler.preemptions > 0) == few
        assert (run.engine.scheduler.found > 0) == caching
        assert run.leaked() == 0
        for submit, answer in zip(submits[::8], expected[::8], strict=True):
            assert Run(settings, blocks).answer([submit]) == [answer]


def storm(seed: int, count: int) -> Counter[tuple[str, bool]]:
    """Answers sequences of which half are aborted; returns what these were doing then.

    Each is with a flag: whether an iteration was under way.
    """
    chance = random.Random(seed)
    run, blocks = Run(token_settings(tokens=16), 9), 9
    submits = submits_of(seed, count)
    aborted = set(chance.sample(range(count), count // 2))
    # The state in which each is aborted, unless it has ended before.
    left = {number: chance.choice(STATES) for number in sorted(aborted)}
    struck: Counter[tuple[str, bool]] = Counter()

    def strike(under_way: bool) -> None:
        for number in [each for each in left if each < arrived]:
            state = run.state(number)
            if state in (left[number], "ended") and chance.random() < 0.3:
                struck[state, under_way] += 1
                run.abort(number)
                del left[number]

    def outstanding() -> set[int]:
        return {*range(arrived)} - run.ended

    arrived, busy = 0, True
    while arrived < count or left or busy:
        for _ in range(chance.randint(0, 2)):
            if arrived < count and len(outstanding()) < 16:
                run.engine.add(submits[arrived])
                arrived += 1
        busy = run.begin()
        assert busy or not outstanding(), "it hangs"
        strike(under_way=True)
        if busy:
            run.finish()
        strike(under_way=False)
    for submit in submits:
        answer = run.told.get(submit.number, [])
        right = right_answer(submit)
        assert answer == right[: len(answer)]
        assert submit.number in aborted or answer == right
    assert run.referenced() == [0, 0], "blocks are used and not cached"
    after = AddRequest(count, submits[0].tokens, SamplingParams(max_tokens=5))
    assert run.answer([after]) == [right_answer(after)]
    assert {*run.workers.held} <= {count}, "workers keep what has ended"
    assert run.leaked() == 0
    assert [run.engine.cache.free(rank) for rank in range(RANKS)] == [blocks, blocks]
    return struck


def test_a_storm_of_aborts_leaks_nothing(full: bool) -> None:
    struck: Counter[tuple[str, bool]] = Counter()
    for seed in range(10 if full else 1):
        struck += storm(seed, 2000 if full else 400)
    assert sum(struck.values()) == (10_000 if full else 200)
    for state in ("waiting", "prefilling", "decoding", "ended"):
        assert min(struck[state, True], struck[state, False]) > 0, struck
    assert struck["preempted", True] + struck["preempted", False] > 0, struck


def test_a_wrong_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' rows: a block that two sequences are given gives a wrong answer."""
    run = Run(token_settings(caching=False), 500)
    correct = run.workers.run

    def give_again(begun: Iteration) -> dict[int, ModelOutput]:
        feeds = [
            replace(feed, new_blocks=tuple(Block(each.rank, 0) for each in feed.new_blocks))
            for feed in begun.batch.feeds
        ]
        return correct(replace(begun, batch=replace(begun.batch, feeds=tuple(feeds))))

    monkeypatch.setattr(run.workers, "run", give_again)
    submits = submits_of(0, 8)
    assert run.answer(submits) != [right_answer(submit) for submit in submits]
