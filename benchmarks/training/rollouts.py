"""What ranks compute for rollouts that share tokens: one by one, whole trees on ranks, shared out.

    python benchmarks/training/rollouts.py --output benchmarks/results

A small Llama of transformers runs forward and backward on real processes. Their CPU seconds are
counted, since processes share the cores: a step takes what the busiest one computes. Plans are made
before. *One by one* has no token shared, and `tiles` balances it. *Whole trees* lie on one rank
each, the largest first on the rank with least work, as masks for one rank's kernel have it. The
ideal is a part of what one rank takes for all trees.
"""

from __future__ import annotations

import json
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
from distca.cost.volume import AttentionShape
from distca.library import Planner, Rollout, Tree, hugging_face, share_prefixes
from distca.library.nodes import Nodes
from distca.library.plans import PlanDocuments
from distca.machine import cpu_name
from distca.plan import Mask
from distca.progress import progress
from distca.schedule import ScheduleConfig

WAYS = ("one by one", "whole trees", "shared out")
_VOCABULARY, _HIDDEN, _LAYERS, _HEADS, _KV_HEADS = 512, 128, 2, 8, 2
_TOLERANCE = 0.02
_LINEAR_PAIRS = 400
"""Visible pairs that take about as long as the other work on a token of this model."""


@dataclass(frozen=True)
class Case:
    """CPU seconds of a step.

    Attributes:
        mix: name of the rollouts.
        way: one of `WAYS`, or "ideal".
        ranks: number of ranks.
        tokens: tokens that all ranks compute.
        busiest: CPU seconds of the busiest rank, of each round.
    """

    mix: str
    way: str
    ranks: int
    tokens: int
    busiest: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.busiest)


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
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=16384,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=hugging_face.IMPLEMENTATION)


def _measure(
    rank: int, ranks: int, port: int, mixes: Sequence[str], rounds: int, seed: int, found: Any
) -> None:
    """Measures all ways on a rank; what it finds is `{(mix, way): (tokens, seconds)}`."""
    torch.set_num_threads(1)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    hugging_face.register()
    model = _model()
    arguments = hugging_face.planner_arguments(model.config, torch.float32)
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    together = Planner(**arguments, tolerance=_TOLERANCE)
    by_itself = Planner(**arguments, group=alone)
    measured: dict[tuple[str, str], tuple[int, list[float]]] = {}
    for mix in mixes:
        rollouts = MIXES[mix](np.random.default_rng(seed))
        trees = share_prefixes(rollouts)
        mine = whole_trees(trees, ranks)[rank]
        given = {
            "one by one": (together, together.collate(share_prefixes(rollouts, 1 << 40))),
            "whole trees": (by_itself, by_itself.collate(mine) if mine else None),
            "shared out": (together, together.collate(trees)),
        }
        for number in range(rounds + 1):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                planner, planned = given[way]
                batch = None if planned is None else planner.place(planned)
                dist.barrier()
                begin = time.process_time()
                if batch is not None:
                    loss = batch.loss(model(**hugging_face.inputs_of(batch)).logits)
                    loss.backward()
                seconds = time.process_time() - begin
                tokens = 0 if batch is None else len(batch.tokens)
                _, of_way = measured.setdefault((mix, way), (tokens, []))
                # The first round warms up.
                of_way += [seconds] if number else []
                model.zero_grad()
    found.put((rank, measured))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, mixes: Sequence[str], rounds: int, seed: int) -> list[Case]:
    """Measures mixes in all ways on a number of processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    started = torch.multiprocessing.start_processes(
        _measure,
        (ranks, port, mixes, rounds, seed, found),
        nprocs=ranks,
        join=False,
        start_method="spawn",
    )
    # It raises what a rank raises. The figures are few, so that ranks need not wait for a reader.
    while not started.join():
        pass
    of_ranks = dict(found.get() for _ in range(ranks))
    cases = []
    for mix, way in of_ranks[0]:
        each = [of_rank[mix, way] for of_rank in of_ranks.values()]
        seconds = zip(*(times for _, times in each), strict=True)
        tokens = sum(tokens for tokens, _ in each)
        cases.append(Case(mix, way, ranks, tokens, tuple(max(times) for times in seconds)))
    return cases


def copied_keys(mix: str, ranks: int, seed: int) -> int:
    """Counts the keys that kernels copy on all ranks, in a layer: those of each branch's path, on
    each rank that computes a part of the branch."""
    trees = share_prefixes(MIXES[mix](np.random.default_rng(seed)))
    config = ScheduleConfig(_TOLERANCE, AttentionShape(_HEADS, _KV_HEADS, _HIDDEN // _HEADS, 4))
    (plan,) = PlanDocuments("tiles", config, (Mask(),), ranks)(trees).plans
    return int((plan.tasks.kv_end - plan.tasks.kv_start).sum())


def page(cases: Sequence[Case], command: str, seed: int, run: str) -> str:
    """Formats the page.

    Args:
        cases: figures of all ways.
        command: what made it.
        seed: seed of the rollouts.
        run: date and commit of the run that measured.
    """
    of = {(case.mix, case.way, case.ranks): case for case in cases}
    rows = []
    for (mix, way, ranks), case in of.items():
        if ranks == 1 or way != "shared out":
            continue
        ideal = of[mix, "shared out", 1]
        apart, whole = of[mix, "one by one", ranks], of[mix, "whole trees", ranks]
        least = min(ideal.busiest) / ranks / max(case.busiest)
        most = max(ideal.busiest) / ranks / min(case.busiest)
        rows.append(
            (
                mix,
                ranks,
                f"{apart.tokens:,}",
                f"{case.tokens:,}",
                f"{apart.median:.2f}",
                f"{whole.median:.2f}",
                f"{case.median:.2f}",
                f"{apart.median / case.median:.2f}",
                f"{whole.median / case.median:.2f}",
                f"{ideal.median / ranks / case.median:.2f} ({least:.2f} to {most:.2f})",
                f"{copied_keys(mix, ranks, seed) / copied_keys(mix, 1, seed):.2f}",
            )
        )
    head = (
        *("rollouts", "ranks", "tokens one by one", "tokens of trees", "one by one"),
        *("whole trees", "shared out", "one by one over shared out"),
        *("whole trees over shared out", "of the ideal", "keys copied, over one rank's"),
    )
    rounds = len(cases[0].busiest)
    return (
        "# Rollouts that share tokens\n\n"
        f"`{command}`: CPU seconds of the busiest rank in a step, forward and backward, medians of "
        f"{rounds} rounds, of a Llama with {_LAYERS} layers of width {_HIDDEN} on {cpu_name()}, "
        f"torch {torch.__version__}. *Of the ideal* is what one rank takes for all trees, over the "
        "number of ranks, over what the busiest rank takes; in brackets the least and the greatest "
        "of any two rounds. Exchanges between processes of one machine count as the CPU seconds "
        "that they take. *Keys copied*: a kernel copies the keys of a branch's path, and each rank "
        "that computes a part of a branch has a copy of its own. Copies and exchanges are what the "
        "ideal leaves out.\n\n"
        + pages.table(head, rows)
        + f"\n\nMeasured on {run}, beside other work. The line below dates this table."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and writes the page."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=[*MIXES])
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--earlier", type=Path, metavar="DIR", help="Measure nothing anew.")
    args = parser.parse_args(argv)
    cases: list[Case] = []
    run = sources.run_of(sources.provenance())
    if args.earlier is not None:
        run = sources.run_of((args.earlier / "rollouts.md").read_text())
        for each in json.loads((args.earlier / "rollouts.json").read_text()):
            cases.append(Case(**{**each, "busiest": tuple(each["busiest"])}))
    numbers = [] if cases else list(dict.fromkeys([1, *args.ranks]))
    with progress("rollouts.py", "numbers of ranks", len(numbers)) as shown:
        for ranks in numbers:
            cases += measure(ranks, args.mixes, args.rounds, args.seed)
            shown.update()
    text = page(cases, pages.typed("benchmarks/training/rollouts.py"), args.seed, run)
    pages.save(args.output, "rollouts", text, __file__, [asdict(case) for case in cases])


if __name__ == "__main__":
    main()
