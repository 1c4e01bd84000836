"""The ways to compute a prefill that `distca simulate prefill` compares.

Without `--prefill-strategy` these are all exact strategies that the GPUs and the model's heads
allow, and the same number of GPUs by tensor parallelism alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distca.commands.described import RUNAHEAD
from distca.commands.served_sparsity import CSPS
from distca.commands.served_strategy import SEARCHED, SP_NTP, layout_choice
from distca.commands.serving_case import DATA_PARALLEL, StepCase, StepStrategy, read_case
from distca.progress import track
from distca.schedule.serving import STRATEGIES
from distca.schedule.serving.balanced import NAME as TILES
from distca.schedule.serving.csps.layouts import LAYOUTS, Layout, LayoutChoice
from distca.simulate import Outcome
from distca.simulate.serving import described_split, simulate_shared, simulate_step

PLAIN_TP = "plain TP"
"""Name of tensor parallelism alone: no rank has rows of its own."""
ONE_GPU = "one GPU"

_OF_RANKS = (*STRATEGIES, "all-gather", SP_NTP, RUNAHEAD, CSPS)
_OF_PROMPTS = (DATA_PARALLEL, TILES)


@dataclass(frozen=True)
class Way:
    """A way to compute a prefill.

    Attributes:
        name: how reports call it.
        case: what is computed.
        strategy: what travels between ranks.
        layout: how GPUs that split the weights share rows; None: they don't.
    """

    name: str
    case: StepCase
    strategy: StepStrategy
    layout: Layout | None = None

    def simulated(self, recording: bool) -> Outcome:
        """Simulates it; `recording` keeps spans for `save_trace`."""
        case, layers = self.case, self.case.layers(self.strategy)
        if self.layout is None:
            return simulate_step(layers, case.costs, case.cost_model, recording)
        split = described_split(case.costs, self.layout)
        shared = split.share(int(case.new.tokens_per_rank().sum()))
        assert shared is not None, "there are tokens for every GPU"
        return simulate_shared(split, shared, layers, case.costs, case.cost_model, recording)


@dataclass(frozen=True)
class Compared:
    """Ways to compute a prefill, and the one that flags choose.

    Attributes:
        ways: ways by their names.
        chosen: name of the one that flags ask for, or that auto chooses by bytes; None: a selector
            chooses between `STRATEGIES`.
        misfits: why others cannot be used here, by their names.
        alternatives: whether there are all exact ways, rather than that which flags ask for.
    """

    ways: Mapping[str, Way]
    chosen: str | None
    misfits: Mapping[str, str]
    alternatives: bool

    def simulated(self, recording: bool) -> dict[str, Outcome]:
        """Simulates all ways; `recording` keeps the spans of those that may be chosen."""
        names = track([*self.ways], "distca simulate prefill", "strategies")
        recorded = STRATEGIES if self.chosen is None else (self.chosen,)
        return {name: self.ways[name].simulated(recording and name in recorded) for name in names}


def compared(args: argparse.Namespace, case: StepCase) -> Compared:
    """Returns the ways that are compared.

    Args:
        args: flags of `distca simulate prefill`.
        case: what they describe, a prefill.

    Raises:
        ValueError: the strategy that flags ask for does not fit.
    """
    asked, tokens = args.prefill_strategy, int(case.new.tokens_per_rank().sum())
    ranks, size = args.context_parallel_size, args.tensor_parallel_size
    every, misfits = asked == "auto", dict[str, str]()
    layout = layout_choice(asked, args.selector, ranks, size)
    if tokens < size:
        layout = None
    if layout is not None:
        ways = [*_alone(args), *_layouts(case)] if every else [*_layouts(case)]
        chosen: str | None = _chosen_layout(case, layout, tokens)
    elif ranks == 1:
        chosen = PLAIN_TP if size > 1 else ONE_GPU
        ways = [Way(chosen, case, "pass-kv" if every else case.chosen(args))]
    elif not every:
        chosen, ways = asked, [Way(asked, case, case.chosen(args))]
    else:
        ways = [*_of_ranks(args, case, misfits), *_alone(args, misfits)]
        chosen = None
    return Compared({way.name: way for way in ways}, chosen, misfits, every)


def _of_ranks(args: argparse.Namespace, case: StepCase, misfits: dict[str, str]) -> Iterator[Way]:
    """Yields the strategies of ranks that share prompts, and those of ranks that have their own."""
    names: Sequence[str] = (*_OF_RANKS, *(_OF_PROMPTS if case.sequences > 1 else ()))
    for name in names:
        if name in STRATEGIES:
            yield from (Way(name, case, each) for each in STRATEGIES if each == name)
            continue
        given = {"prefill_strategy": name, "selector": "simulated"}
        if name == RUNAHEAD:
            given["partition"] = SEARCHED
        try:
            other = _read(args, **given)
            strategy = other.chosen(argparse.Namespace(**vars(args) | given))
            other.plan(strategy)
        except ValueError as error:
            misfits[name] = str(error)
        else:
            yield Way(name, other, strategy)


def _alone(args: argparse.Namespace, misfits: dict[str, str] | None = None) -> Iterator[Way]:
    """Yields tensor parallelism alone, on as many GPUs."""
    size = args.context_parallel_size * args.tensor_parallel_size
    given = {"context_parallel_size": 1, "tensor_parallel_size": size}
    try:
        case = _read(args, **given, prefill_strategy="pass-kv", selector="simulated")
    except ValueError as error:
        if misfits is None:
            raise
        misfits[PLAIN_TP] = str(error)
    else:
        yield Way(PLAIN_TP, case, "pass-kv")


def _layouts(case: StepCase) -> Iterator[Way]:
    """Yields the layouts of GPUs that split the weights and share rows."""
    for layout in LAYOUTS:
        yield Way(layout, case, "pass-kv", layout)


def _chosen_layout(case: StepCase, layout: LayoutChoice, tokens: int) -> Layout:
    shared = described_split(case.costs, layout).share(tokens)
    assert shared is not None, "there are tokens for every GPU"
    return shared.layout


def _read(args: argparse.Namespace, **given: object) -> StepCase:
    return read_case(argparse.Namespace(**vars(args) | given), "prefill")
