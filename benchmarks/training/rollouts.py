"""What ranks compute for rollouts that share tokens: one by one, whole trees on ranks, shared out.

    python benchmarks/training/rollouts.py --output benchmarks/results

A small Llama of transformers runs forward and backward on real processes. Their CPU seconds are
counted, since processes share the cores: a step takes what the busiest one computes. Plans are made
before. *One by one* has no token shared, and `tiles` balances it. *Whole trees* lie on one rank
each, the largest first on the rank with least work, as masks for one rank's kernel have it.

The ideal is what one rank takes for all trees, over the number of ranks. It is measured in the same
processes: each of them computes all trees *alone*, beside the others. *Unsent* is the shared-out
plan without its exchanges; what ranks would receive is zeros.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages, sources
from benchmarks.arguments import Parser
from distca.library import Planner, Rollout, Tree, hugging_face, share_prefixes
from distca.library.nodes import Nodes
from distca.machine import cpu_name
from distca.plan import Mask
from distca.progress import progress
from distca.transport import Channel, MessageSizes, Pending, Signal

WAYS = ("one by one", "whole trees", "shared out", "unsent", "alone")
_WIDTH = 128
"""Width of the model."""
_VOCABULARY, _LAYERS, _HEADS, _KV_HEADS = 512, 2, 8, 2
_TOLERANCE = 0.02
_LINEAR_PAIRS = 400
"""Visible pairs that take about as long as the other work on a token of the model."""


@dataclass(frozen=True)
class Case:
    """CPU seconds of a step.

    Attributes:
        mix: name of the rollouts.
        way: one of `WAYS`.
        ranks: number of ranks.
        width: width of the model.
        tokens: tokens that all ranks compute.
        sent: most bytes that a rank sends.
        seconds: CPU seconds of each rank, of each round.
    """

    mix: str
    way: str
    ranks: int
    width: int
    tokens: int
    sent: int
    seconds: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> list[float]:
        """Median over the rounds, of each rank."""
        return [statistics.median(each) for each in self.seconds]

    @property
    def busiest(self) -> float:
        return max(self.medians)

    @property
    def ideal(self) -> float:
        """What each of the ranks would take of what this case's ranks take alone."""
        return statistics.mean(self.medians) / self.ranks

    def rounds(self) -> list[Case]:
        return [
            Case(**{**vars(self), "seconds": tuple((each,) for each in found)})
            for found in zip(*self.seconds, strict=True)
        ]


class _Unsent(Signal):
    """A transport that sends nothing, and hands out zeros as what was received. Ranks do not wait
    for each other."""

    def start(self, phase: str, channel: Channel, sizes: MessageSizes) -> Pending:
        return _Zeros(self._zeros[: sizes.received])


class _Zeros(Pending):
    def __init__(self, zeros: torch.Tensor) -> None:
        self._zeros = zeros

    def wait(self) -> torch.Tensor:
        return self._zeros

    def release(self) -> None:
        pass


class _UnsentPlanner(Planner):
    """A planner whose exchanges send nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._transport = _Unsent(self._transport)  # type: ignore[assignment]


def _text(random: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(random.integers(0, _VOCABULARY, int(count)))


def _groups(random: np.random.Generator, prompts: Sequence[int], each: int, answer: Any) -> Any:
    found = []
    for prompt in prompts:
        shared = _text(random, prompt)
        for _ in range(each):
            response = _text(random, answer())
            weights = torch.cat([torch.zeros(len(shared)), torch.ones(len(response))])
            found.append(Rollout(torch.cat([shared, response]), weights))
    return found


def one_prompt(random: np.random.Generator) -> list[Rollout]:
    """Eight answers of 512 tokens to a prompt of 2,048."""
    return _groups(random, [2048], 8, lambda: 512)  # type: ignore[no-any-return]


def six_prompts(random: np.random.Generator) -> list[Rollout]:
    """Six prompts of very different lengths, with eight answers each."""
    prompts = np.clip(random.lognormal(6.3, 1.0, 6), 64, 4096).astype(int).tolist()
    answer = lambda: np.clip(random.lognormal(5.0, 0.6), 16, 1024)  # noqa: E731
    return _groups(random, prompts, 8, answer)  # type: ignore[no-any-return]


def conversation(random: np.random.Generator) -> list[Rollout]:
    """A conversation of six turns. Each has four answers, and goes on from the first."""
    found, history = [], _text(random, 600)
    for _ in range(6):
        answers = [_text(random, int(random.integers(100, 400))) for _ in range(4)]
        found += [Rollout(torch.cat([history, answer])) for answer in answers]
        history = torch.cat([history, answers[0], _text(random, 150)])
    return found


MIXES: dict[str, Callable[[np.random.Generator], list[Rollout]]] = {
    "one prompt": one_prompt,
    "six prompts": six_prompts,
    "conversation": conversation,
}


def work(tree: Tree) -> float:
    """Work of a tree, in visible pairs."""
    nodes = Nodes((tree,))
    prefix = nodes.lengths - nodes.own_lengths
    pairs = Mask().pairs(prefix, nodes.lengths, np.zeros_like(prefix), nodes.lengths)
    return float(pairs.sum()) + _LINEAR_PAIRS * tree.tokens


def whole_trees(trees: Sequence[Tree], ranks: int) -> list[list[Tree]]:
    """Gives each tree to a rank, the largest first to the rank with least work."""
    given: list[list[Tree]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for tree in sorted(trees, key=work, reverse=True):
        rank = loads.index(min(loads))
        given[rank].append(tree)
        loads[rank] += work(tree)
    return given


def _model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=16384,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=hugging_face.IMPLEMENTATION)


@dataclass(frozen=True)
class Job:
    """What the processes of a measurement do.

    Attributes:
        ranks: number of processes.
        mixes: names of mixes.
        rounds: rounds that count; one before them warms up.
        seed: seed of the rollouts.
    """

    ranks: int
    mixes: tuple[str, ...]
    rounds: int
    seed: int


def _measure(rank: int, job: Job, port: int, found: Any) -> None:
    """Measures all ways on a rank; what it finds is `{(mix, way): (tokens, bytes, seconds)}`."""
    torch.set_num_threads(1)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=job.ranks)
    hugging_face.register()
    model = _model()
    arguments = hugging_face.planner_arguments(model.config, torch.float32)
    alone = [dist.new_group([each]) for each in range(job.ranks)][rank]
    together = Planner(**arguments, tolerance=_TOLERANCE)
    unsent = _UnsentPlanner(**arguments, tolerance=_TOLERANCE)
    by_itself = Planner(**arguments, group=alone)
    measured: dict[tuple[str, str], tuple[int, int, list[float]]] = {}
    for mix in job.mixes:
        rollouts = MIXES[mix](np.random.default_rng(job.seed))
        trees = share_prefixes(rollouts)
        mine = whole_trees(trees, job.ranks)[rank]
        given = {
            "one by one": (together, together.collate(share_prefixes(rollouts, 1 << 40))),
            "whole trees": (by_itself, by_itself.collate(mine) if mine else None),
            "shared out": (together, together.collate(trees)),
            "unsent": (unsent, unsent.collate(trees)),
            "alone": (by_itself, by_itself.collate(trees)),
        }
        for number in range(job.rounds + 1):
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                planner, planned = given[way]
                batch = None if planned is None else planner.place(planned)
                before = sum(planner.bytes_sent.values())
                dist.barrier()
                begin = time.process_time()
                if batch is not None:
                    loss = batch.loss(model(**hugging_face.inputs_of(batch)).logits)
                    loss.backward()
                seconds = time.process_time() - begin
                tokens = 0 if batch is None else len(batch.tokens)
                sent = sum(planner.bytes_sent.values()) - before
                of_way = measured.setdefault((mix, way), (tokens, sent, []))[-1]
                # The first round warms up.
                of_way += [seconds] if number else []
                model.zero_grad()
    found.put((rank, measured))
    dist.barrier()
    dist.destroy_process_group()


def measure(job: Job) -> list[Case]:
    """Measures mixes in some ways on a number of processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    started = torch.multiprocessing.start_processes(
        _measure, (job, port, found), nprocs=job.ranks, join=False, start_method="spawn"
    )
    # It raises what a rank raises. The figures are few, so that ranks need not wait for a reader.
    while not started.join():
        pass
    of_ranks = dict(found.get() for _ in range(job.ranks))
    cases = []
    for mix, way in of_ranks[0]:
        tokens, sent, seconds = zip(*(of_ranks[n][mix, way] for n in range(job.ranks)), strict=True)
        of_way = tuple(map(tuple, seconds))
        cases.append(Case(mix, way, job.ranks, _WIDTH, sum(tokens), max(sent), of_way))
    return cases


def _share(alone: Case, case: Case) -> float:
    """Returns which part of the ideal a case reaches."""
    return alone.ideal / case.busiest


def _lengths(seed: int) -> str:
    """Says what the mixes are, with the lengths of a seed."""
    random = np.random.default_rng
    (prompt,) = share_prefixes(one_prompt(random(seed)))
    trees = share_prefixes(six_prompts(random(seed)))
    roots = [len(tree.nodes[0]) for tree in trees if len(tree.nodes) > 1]
    answers = [len(node) for tree in trees for node in tree.nodes[1:]]
    talk = [len(each.tokens) for each in conversation(random(seed))]
    return (
        f"*One prompt*: {len(prompt.nodes[0]):,} tokens with {len(prompt.nodes) - 1} responses of "
        f"{len(prompt.nodes[1])}. *Six prompts*: of {min(roots):,} to {max(roots):,} tokens, "
        f"each with 8 responses of {min(answers):,} to {max(answers):,}. "
        f"*Conversation*: {len(talk)} rollouts of {min(talk):,} to {max(talk):,} tokens, with four "
        "answers in each of six turns. The next turn continues the first of the four."
    )


def page(cases: Sequence[Case], command: str, seed: int) -> str:
    """Formats the page.

    Args:
        cases: figures of all ways.
        command: what measured them.
        seed: seed of the rollouts.
    """
    of = {(case.mix, case.way, case.ranks): case for case in cases}
    rows = []
    for (mix, way, ranks), case in of.items():
        if way != "shared out":
            continue
        apart, whole, alone, unsent = (
            of[mix, each, ranks] for each in ("one by one", "whole trees", "alone", "unsent")
        )
        by_round = [_share(*each) for each in zip(alone.rounds(), case.rounds(), strict=True)]
        rows.append(
            (
                *(mix, ranks, f"{case.tokens:,}", f"{apart.tokens / case.tokens:.2f}"),
                *(f"{each.busiest:.2f}" for each in (apart, whole, case)),
                f"{alone.ideal:.2f}",
                *(f"{each.busiest / case.busiest:.2f}" for each in (apart, whole)),
                f"{_share(alone, case):.2f} ({min(by_round):.2f} to {max(by_round):.2f})",
                f"{_share(alone, unsent):.2f}",
                f"{case.sent / 1e6:.1f}",
            )
        )
    head = (
        *("rollouts", "ranks", "tokens of trees", "tokens one by one over those of trees"),
        *("one by one", "whole trees", "shared out", "ideal"),
        *("one by one over shared out", "whole trees over shared out"),
        *("share of the ideal", "share of the ideal, nothing sent", "MB sent"),
    )
    rounds = " or ".join(map(str, sorted({len(case.seconds[0]) for case in cases})))
    return (
        "# Rollouts that share tokens\n\n"
        f"`{command}` runs a Llama of width {_WIDTH} with {_LAYERS} layers, {_HEADS} query heads "
        f"and {_KV_HEADS} key-value heads on {cpu_name()}, torch {torch.__version__}. Times are "
        "CPU seconds of the busiest rank in a step, forward and backward, medians of "
        f"{rounds} rounds. {_lengths(seed)}\n\n"
        "*Trees*: rollouts in which shared tokens appear once. *One by one*: rollouts share no "
        "tokens, and `tiles` balances them over all ranks. *Whole trees*: each tree runs on one "
        "rank. *Shared out*: all ranks share the tokens and attention of the trees. *Ideal*: what "
        "one rank takes for all trees, divided by the number of ranks. To measure it, all ranks "
        "compute all trees at the same time, in the same rounds, since processes slow each other "
        "down. *Share of the ideal*: the ideal over *shared out*; in brackets the lowest and the "
        "highest of any round. *Nothing sent*: the same plan without exchanges. Its distance "
        "from 1 comes from uneven work, smaller kernel calls, merges, and copies of keys. The "
        "difference between the two shares comes from exchanges: "
        "processes of one machine spend CPU seconds on them, also on polling while a rank waits. "
        "*MB sent*: by the rank that sends most.\n\n" + pages.table(head, rows)
    )


def _run_of(text: str) -> str:
    """Returns the date and the commit of the run that measured a page's figures."""
    found = re.search(r"^Measured on (.*?); the line below", text, re.MULTILINE)
    return sources.run_of(text) if found is None else found.group(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and writes the page."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=[*MIXES])
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--earlier", type=Path, nargs="+", metavar="DIR", help="Join these runs; measure nothing."
    )
    args = parser.parse_args(argv)
    cases: list[Case] = []
    runs: list[str] = []
    if args.earlier is not None:
        runs = [_run_of((each / "rollouts.md").read_text()) for each in args.earlier]
        for folder in args.earlier:
            for each in json.loads((folder / "rollouts.json").read_text()):
                cases.append(Case(**{**each, "seconds": tuple(map(tuple, each["seconds"]))}))
    mixes = tuple(dict.fromkeys(args.mixes))
    jobs = [
        Job(ranks, mixes, args.rounds, args.seed)
        for ranks in dict.fromkeys(args.ranks)
        if args.earlier is None
    ]
    with progress("rollouts.py", "measurements", len(jobs)) as shown:
        for job in jobs:
            cases += measure(job)
            shown.update()
    command = pages.typed("benchmarks/training/rollouts.py")
    text = page(cases, command.replace(" --earlier DIR ...", ""), args.seed)
    if runs:
        text += (
            f"\n\nMeasured on {' and '.join(dict.fromkeys(runs))}; the line below says when this "
            "table was written."
        )
    pages.save(args.output, "rollouts", text, __file__, [asdict(case) for case in cases])


if __name__ == "__main__":
    main()
