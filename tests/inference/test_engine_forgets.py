"""An engine forgets a sequence when it ends, whatever is under way then."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from distca.inference.engine import Engine
from distca.inference.messages import AddRequest, Iteration, Output
from distca.inference.sampling import SamplingParams
from support.token_engine import TokenWorkers, right_answer, right_scores, token_settings

BLOCKS = 5


class Interleaving(RuleBasedStateMachine):
    """Sequences that come, run, end and are aborted, in any order.

    Some are scored, and some share a prompt. Pools are so small that sequences lose their blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = token_settings(tokens=10, sequences=4)
        self.workers, self.engine = TokenWorkers(sizes), Engine(sizes, BLOCKS)
        self.begun: Iteration | None = None
        self.alive: dict[int, AddRequest] = {}
        self.told: dict[int, list[Output]] = {}
        self.number = 0

    def check_answer(self, submit: AddRequest) -> None:
        told = self.told[submit.number]
        assert [each.token for each in told] == right_answer(submit)
        scores = right_scores(submit, 0, len(submit.tokens) - 1) if submit.scored else {}
        assert told[0].scores == [scores[position] for position in sorted(scores)]

    @rule(
        length=st.integers(1, 20),
        alike=st.booleans(),
        answers=st.integers(1, 3),
        new=st.integers(1, 6),
        scored=st.booleans(),
    )
    def arrive(self, length: int, alike: bool, answers: int, new: int, scored: bool) -> None:
        """A prompt with one answer or more; the one that computes the prompt comes last."""
        first = self.number
        tokens = [7] * length if alike else [first % 200] * length
        for choice in (*range(1, answers), 0):
            leader = first if choice else None
            is_scored = scored and not choice
            number = first + choice
            each = AddRequest(
                number,
                tokens,
                SamplingParams(new),
                logprobs=1,
                leader=leader,
                scored=is_scored,
            )
            self.alive[number] = each
            self.engine.add(each)
        self.number += answers

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            number = data.draw(st.sampled_from(sorted(self.alive)))
            self.engine.abort(number)
            del self.alive[number]

    @rule()
    def abort_what_has_ended(self) -> None:
        for number in {*range(self.number)} - self.alive.keys():
            self.engine.abort(number)

    @rule()
    def start(self) -> None:
        if self.begun is None:
            self.begun = self.engine.schedule()
        assert self.begun or not self.alive, "it hangs"

    @rule()
    def finish(self) -> None:
        begun, self.begun = self.begun, None
        if begun is None:
            return
        outputs, _ = self.engine.finish(self.workers.run(begun))
        for output in outputs:
            self.told.setdefault(output.number, []).append(output)
            if output.finish:
                self.check_answer(self.alive.pop(output.number))

    @invariant()
    def knows_no_others(self) -> None:
        for name, known in self.by_sequence().items():
            assert known.keys() <= self.alive.keys(), name

    def by_sequence(self) -> dict[str, dict[int, Any]]:
        known = vars(self.engine)
        return {name: each for name, each in known.items() if isinstance(each, dict)}

    def teardown(self) -> None:
        while self.begun or self.engine.busy or self.alive:
            self.start()
            self.finish()
        assert not self.alive
        assert not any(self.by_sequence().values())
        # Workers hear of the ends with the next iteration.
        last = AddRequest(self.number, [1], SamplingParams(1))
        self.alive[self.number] = last
        self.engine.add(last)
        self.start()
        self.finish()
        assert {*self.workers.held} == {self.number}
        scheduler: Any = self.engine.scheduler
        assert not scheduler._aborted
        assert not scheduler._followers
        assert (scheduler.running, scheduler.waiting) == (0, 0)
        cache: Any = self.engine.cache
        assert [cache.referenced(rank) for rank in range(2)] == [0, 0]


def test_scores_of_a_prompt_that_is_aborted_in_its_iteration_are_forgotten() -> None:
    run = Interleaving()
    run.arrive(length=8, alike=False, answers=1, new=2, scored=True)
    run.start()
    run.engine.abort(0)
    del run.alive[0]
    run.finish()
    run.knows_no_others()


def test_nothing_is_known_of_a_sequence_that_has_ended(full: bool) -> None:
    run_state_machine_as_test(
        Interleaving,
        settings=settings(max_examples=2000 if full else 150, stateful_step_count=40),
    )
