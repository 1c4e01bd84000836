"""The verdict of `distca simulate`: DistCA or what of Megatron, and the flags to train so."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from distca.simulate import DISTCA_SYSTEMS, MEGATRON, Candidate, Choice, Workload
from distca.simulate.dynamic import DYNAMIC
from distca.simulate.flags import (
    megatron_flags,
    sequences_of_a_window,
    training_flags,
    uneven_seq_length,
)
from distca.simulate.hybrid import HYBRID
from distca.simulate.speed_up import POOLS_ERROR, SIMULATORS_ERROR, SpeedUp
from distca.wording import counted

TITLES = {
    "plain": "plain Megatron",
    "cp-p2p": "context parallel, ring",
    "cp-a2a": "context parallel, all-to-all",
    "cp-a2a+p2p": "context parallel, a2a+p2p",
    "per-document-cp": "context parallel, all-gather",
    HYBRID: "hybrid context parallel",
    DYNAMIC: "dynamic context parallel",
    "wlb-llm": "WLB-LLM, ideal",
    "wlb-llm-paper": "WLB-LLM as in the paper",
    "greedy": "DistCA, greedy",
    "tiles": "DistCA, tiles",
}
"""Names of the systems for readers."""
_AS_FAST = 1.0001
"""Ratio of seconds up to which a simpler system counts as equally fast."""
_BESIDE = "besides those of the model, the data and the learning rate:"

_NOTHING = 0.005
"""Gain up to which DistCA counts as equally fast."""


@dataclass(frozen=True)
class Verdict:
    """What to train with.

    Attributes:
        distca: fastest of DistCA's schedulers; None: nothing of it fits, or none was asked for.
        megatron: fastest of what every user of Megatron has; None likewise.
        gain: how much faster DistCA is; None without one of both.
        asked, compared: whether DistCA was asked for, and what every user of Megatron has.
        divide: systems that have a layout for the job, whether it fits in memory or not.
        ideal: fastest of the systems that no release of Megatron has; None: nothing of them fits,
            or none was asked for.
    """

    distca: Choice | None
    megatron: Choice | None
    gain: SpeedUp | None
    asked: bool
    compared: bool
    divide: frozenset[str]
    ideal: Choice | None = None

    @staticmethod
    def of(choices: Sequence[Choice]) -> Verdict:
        """Holds DistCA against the fastest of Megatron's ways."""
        ours, had = (fastest(choices, systems) for systems in (DISTCA_SYSTEMS, MEGATRON))
        gain = None if ours is None or had is None else speed_up(ours, had)
        asked, compared = (
            any(choice.system in systems for choice in choices)
            for systems in (DISTCA_SYSTEMS, MEGATRON)
        )
        divide = frozenset(choice.system for choice in choices if choice.tried)
        others = {choice.system for choice in choices} - {*DISTCA_SYSTEMS, *MEGATRON}
        return Verdict(ours, had, gain, asked, compared, divide, fastest(choices, others))

    def __str__(self) -> str:
        """The answer in one line, with sentences on a difference within the simulator's error, and
        on a faster system that Megatron does not have.

        Such a difference is no reason to use DistCA, but one to stay with what is simpler.
        """
        return self._with_error() + self._of_ideal()

    def _of_ideal(self) -> str:
        """A sentence on a system that is faster than DistCA and that Megatron does not have."""
        if self.distca is None or self.ideal is None:
            return ""
        over = speed_up(self.ideal, self.distca)
        if over.mean < 1 + _NOTHING or over.faster is False:
            return ""
        name = TITLES[self.ideal.system]
        return (
            f" {name}, which no release of Megatron has, would be {over} times as fast as DistCA."
        )

    def _with_error(self) -> str:
        """The answer, with the sentence on the simulator's error."""
        gain = self.gain
        clear = gain is not None and gain.faster is not None and not self._gains_nothing(gain)
        if gain is None or not clear or not self._within_error(gain):
            return self._answer()
        return (
            f"{self._answer()} The difference is within the simulator's error: "
            f"{self.simulators_error:.1%} of a step in the median, against runs on CPUs."
        )

    @property
    def simulators_error(self) -> float:
        """The simulator's median error for layouts like DistCA's."""
        ours = None if self.distca is None else self.distca.candidate
        pooled = ours is not None and (ours.pool_size is not None or ours.head_parallel > 1)
        return POOLS_ERROR if pooled else SIMULATORS_ERROR

    def _within_error(self, gain: SpeedUp) -> bool:
        """Whether the end of the range that is nearer to 1 is within the simulator's error."""
        return min(abs(gain.low - 1), abs(gain.high - 1)) < self.simulators_error

    @property
    def faster(self) -> bool | None:
        """Whether DistCA is clearly faster, and not by next to nothing; None: it is not clear."""
        if self.gain is None:
            return None
        if self._gains_nothing(self.gain):
            return False
        return None if self.gain.faster and self._within_error(self.gain) else self.gain.faster

    @property
    def use_distca(self) -> bool | None:
        """Whether the answer is to use DistCA; None: no verdict, or no clear difference."""
        if not self.asked or not self.compared or not self.divide:
            return None
        if self.distca is None:
            return None if self.megatron is None else False
        if self.gain is None:
            return None if self.divide.isdisjoint(MEGATRON) else True
        return self.faster

    @staticmethod
    def _gains_nothing(gain: SpeedUp) -> bool:
        """Whether both are about equally fast: then Megatron's way, which is simpler, is better."""
        return gain.low > 1 - _NOTHING and gain.high < 1 + _NOTHING

    def _answer(self) -> str:
        """The answer without that sentence."""
        had = "" if self.megatron is None else title_of(self.megatron)
        if not self.divide:
            return "No verdict: nothing that was simulated can run this job; the table says why."
        if not self.asked:
            return f"Fastest of Megatron's: {had}." if had else "Nothing of Megatron's fits."
        if self.distca is None:
            if not had:
                return "Nothing fits in memory: use more GPUs, or a smaller model or vocabulary."
            undivided = self.divide.isdisjoint(DISTCA_SYSTEMS)
            why = "no layout of it divides this job" if undivided else "it does not fit in memory"
            return f"Don't use DistCA: {why}. Use {had}."
        if not self.compared:
            return "No verdict: --systems has nothing that every user of Megatron has."
        if self.gain is None:
            if self.divide.isdisjoint(MEGATRON):
                return (
                    "No verdict: nothing of Megatron's in --systems can run this job; the table "
                    "says why."
                )
            return "Use DistCA: nothing of Megatron's that was simulated fits in memory."
        if self._gains_nothing(self.gain):
            return f"Don't use DistCA: it is {self.gain} times as fast as {had}, which is simpler."
        if self.faster:
            return f"Use DistCA: {self.gain} times as fast as Megatron's best ({had})."
        if self.faster is None:
            return (
                f"No clear difference: DistCA is {self.gain} times as fast as Megatron's best "
                f"({had})" + (": one batch has no range." if math.isnan(self.gain.low) else ".")
            )
        return f"Don't use DistCA: {had} is {self.gain.inverse()} times as fast as it."

    def first_line(self, workload: Workload) -> str:
        """Returns the answer, and whether what it recommends cannot run as it was asked for."""
        nothing = self.asked and self.distca is None and self.megatron is None
        if nothing and self.divide:
            may_help = [] if workload.recompute == "full" else ["--recompute full"]
            if workload.may_share_more:
                size = workload.expert_parallel
                may_help.append(f"an --expert-model-parallel-size above {size}")
            if may_help:
                return f"{self} {' or '.join(may_help).capitalize()} may help."
        if self.faster and self.distca is not None and self.distca.candidate is not None:
            try:
                training_flags(self.distca.candidate, workload)
            except ValueError:
                return f"{self} It cannot run with these sizes, though: the last line says why."
        return str(self)

    def how_to_train(self, workload: Workload) -> list[str]:
        """Lines with the flags of what is recommended; of both where no difference is clear."""
        faster = self.faster
        lines: list[str] = []
        if self.megatron is not None and not faster:
            lines += _flags_of_megatron(self.megatron, workload)
        if self.distca is not None and faster is not False:
            lines += _flags_of_distca(self.distca, workload)
        return lines


def fastest(choices: Sequence[Choice], systems: Collection[str]) -> Choice | None:
    """Returns the fastest choice among some systems, the first of those that are as fast; None:
    none fits.

    Baselines come first where they are simpler: groups of one rank are plain Megatron.
    """
    some = [c for c in choices if c.system in systems and c.candidate is not None]
    least = min((choice.seconds for choice in some), default=0.0)
    return next((choice for choice in some if choice.seconds <= _AS_FAST * least), None)


def speed_up(ours: Choice, other: Choice) -> SpeedUp:
    """Returns how much faster a choice is than another."""
    return SpeedUp.of(ours.seconds_of_batches, other.seconds_of_batches)


def is_plain(choice: Choice) -> bool:
    """Whether a kind of Megatron's context parallelism has groups of one rank, which is none."""
    candidate = choice.candidate
    grouped = choice.system in MEGATRON and choice.system not in ("plain", HYBRID)
    return grouped and candidate is not None and candidate.context == 1


def title_of(choice: Choice) -> str:
    """Returns a system's name; groups of one rank are plain Megatron."""
    return TITLES["plain" if is_plain(choice) else choice.system]


def _flags_of_megatron(choice: Choice, workload: Workload) -> list[str]:
    return _flags_of(choice, workload, "Megatron-LM", title_of(choice), megatron_flags)


def _flags_of_distca(choice: Choice, workload: Workload) -> list[str]:
    what = f"{TITLES[choice.system]}, on {counted(workload.gpus, 'GPU')}"
    lines = _flags_of(choice, workload, "pretrain_gpt.py", what, training_flags)
    # Where there are no flags, the only line says why.
    if len(lines) > 1 and choice.candidate is not None:
        lines += [what_a_sample_is(choice.candidate, workload), *_notes(choice.candidate, workload)]
    return lines


def _flags_of(
    choice: Choice,
    workload: Workload,
    script: str,
    what: str,
    make: Callable[[Candidate, Workload], list[str]],
) -> list[str]:
    """Lines with flags, or one that says why there are none."""
    assert choice.candidate is not None
    try:
        flags = make(choice.candidate, workload)
    except ValueError as error:
        return [f"No flags of {script} for {what}: {error}"]
    return [f"Flags of {script} for {what}, {_BESIDE}", format_flags(flags)]


def what_a_sample_is(candidate: Candidate, workload: Workload) -> str:
    """Returns a sentence on what samples are in the flags of DistCA, beside sequences."""
    if (tokens := uneven_seq_length(candidate, workload)) is not None:
        size = candidate.data * tokens
        alone = ", and a longer document has one alone" if size < workload.context else ""
        return (
            "In these flags a sample is --seq-length tokens of one rank, the mean of its "
            f"micro-batches. Server pools divide the documents into {candidate.micro_batches:,} "
            f"micro-batches of about {size:,} tokens on all ranks{alone}."
        )
    held = counted(sequences_of_a_window(candidate, workload), "sequence")
    window = f"One sample of each of the {candidate.data:,} data-parallel ranks makes a window"
    makes = f"{window}, which holds"
    if candidate.chain > 1:
        makes = f"{window}. The {candidate.chain} windows of a chain hold"
    return (
        f"In these flags a sample is --seq-length tokens of one rank. {makes} {held} of "
        f"{workload.context:,} tokens."
    )


def _notes(candidate: Candidate, workload: Workload) -> list[str]:
    """Sentences on values of DistCA's flags that a reader may not expect."""
    efficiency, divisor = workload.cluster.charges.link_efficiency, candidate.network_divisor
    speeds = f"{efficiency:.0%} of the links' speeds (--link-efficiency)"
    if divisor > 1:
        speeds += (
            f", the network's divided by {divisor}: plans for a slower network move fewer bytes "
            "between nodes"
        )
    return [
        f"--distca-node-gb-per-s and --distca-network-gb-per-s are {speeds}.",
        "With --hidden-dropout above 0, Megatron's default, losses differ from plain Megatron's: "
        "other random numbers drop other elements.",
    ]


def format_flags(flags: Sequence[str], width: int = 96) -> str:
    """Formats flags for a shell: indented lines, joined by backslashes."""
    lines = [""]
    for flag in flags:
        if lines[-1] and len(lines[-1]) + 1 + len(flag) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {flag}".strip()
    return " \\\n".join(f"    {line}" for line in lines)
