"""Choice of a prefill's strategy by the paper's rules.

The rules are those of context parallelism of Meta's, Section 3.4 and Appendices C and D. They are
closed forms of one ring step: a rank has `T / N` queries and `(T + P) / N` keys of one sequence
with `T` new and `P` cached tokens, all of the ring's keys are seen, and nothing else takes time.
`distca.simulate.serving` predicts the actual plans instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan import Placement, SteppedPlan
from distca.schedule.serving.steps import Strategy

SelectorName = Literal["simulated", "paper"]
"""Way to choose a strategy: by the predicted seconds of both plans, or by the paper's rule."""

SELECTORS: tuple[SelectorName, ...] = get_args(SelectorName)


Planned = Callable[[Strategy], SteppedPlan]


class Selector(Protocol):
    """A choice between strategies: a pure function, so that all ranks make the same choice."""

    def choose(self, held: Placement, new: Placement, planned: Planned) -> Strategy:
        """Chooses the strategy of a prefill.

        Args:
            held: ranks that hold the keys and values of earlier tokens of its sequences.
            new: owners of its new tokens.
            planned: makes its plan with a strategy, as it would be run.
        """
        ...


@dataclass(frozen=True)
class PaperRule:
    """The paper's rules, whose terms are ratios of message sizes and rates.

    Attributes:
        shape: heads of one tensor-parallel rank, or of all of them.
        ranks: N, ranks that share the attention.
        flops_per_second: C, rate of the GPUs that have these heads.
        bytes_per_second: BW, speed of their links.
        all_to_all: whether pass-Q is charged for its outputs' way back: Algorithm 5, else 1.
    """

    shape: AttentionShape
    ranks: int
    flops_per_second: float
    bytes_per_second: float
    all_to_all: bool = True

    @property
    def smaller_queries(self) -> float:
        """Eq. 1: share of new tokens up to which a rank's queries are no larger than its keys and
        values."""
        return 2 * self.shape.kv_heads / self.shape.heads

    @property
    def tokens_that_hide_keys(self) -> float:
        """Eq. 2: new tokens from which kernels take as long as keys and values travel."""
        bytes_of_keys = self.ranks * self.flops_per_second * self.shape.dtype_bytes
        return bytes_of_keys * self.smaller_queries / (4 * self.bytes_per_second)

    @property
    def tokens_that_hide_queries(self) -> float:
        """Eq. 3: tokens, with cached ones, from which kernels take as long as queries travel."""
        bytes_of_queries = self.ranks * self.flops_per_second * self.shape.dtype_bytes
        return bytes_of_queries / (4 * self.bytes_per_second)

    def pass_q_below(self, new: float) -> float:
        """Share of new tokens up to which pass-Q is as fast: Eq. 1, or Eq. 5, in which keys that
        are not hidden take as long as queries and their outputs' way back."""
        if not self.all_to_all:
            return self.smaller_queries
        return self.smaller_queries - new / self.tokens_that_hide_queries

    def of_tokens(self, new: int, cached: int) -> Strategy:
        """Algorithm 1, or 5: the choice for one sequence."""
        if new >= self.tokens_that_hide_keys:
            return "pass-kv"
        return "pass-q" if new / (new + cached) <= self.pass_q_below(new) else "pass-kv"

    def choose(self, held: Placement, new: Placement, planned: Planned) -> Strategy:
        """See `Selector.choose`. Several sequences count as one of all their tokens."""
        return self.of_tokens(
            *(int((each.end - each.start).sum()) for each in (new, _of_same(held, new)))
        )


def _of_same(held: Placement, new: Placement) -> Placement:
    return held.select(np.isin(held.document, new.document))
