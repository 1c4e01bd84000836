"""The greedy scheduler with documents that span ranks in mirrored pieces, as the paper has them.

    python benchmarks/plans/mirrored_placement.py --published DIR --output results/

`greedy` places documents in turn, so that a rank's piece of a document is contiguous. In Appendix B
of the paper, and in its authors' public planner, a rank that a document does not end on owns tokens
from both ends of what is left of it: a range and its mirror image, which together have as much work
as the same rank's tokens elsewhere in the document. This script plans the same batches both ways
and counts bytes exactly. Without `--published` lengths are drawn from distributions like the
paper's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.plans.schedulers import TOKENS_PER_SERVER, document_sets
from distca.cost.model_sizes import MODELS
from distca.plan import Mask, Placement, Plan, validate_plan
from distca.plan.plan import max_over_mean
from distca.plan.span import Int64s
from distca.progress import track
from distca.schedule import ScheduleConfig, describe, even_capacities, make_scheduler
from distca.schedule.greedy import GreedyScheduler, Parts

LONGEST = 131_072
MODEL = "llama-34b"
TOLERANCE = 0.1


def mirrored_parts(lengths: Int64s, capacities: Int64s, block: int) -> tuple[Parts, Int64s, Int64s]:
    """Places documents in turn, those that span ranks in mirrored pieces.

    Args:
        lengths: tokens of each document, int64.
        capacities: tokens that each rank owns, int64; as many in all.
        block: multiple of tokens on which a last piece is divided, as `whole_pieces` does it.

    Returns:
        Heads and tails of all pieces, and the document and the rank of each, int64 `[pieces]`.
    """
    found: list[tuple[int, int, int, int, int, int]] = []
    rank, room = 0, int(capacities[0])
    for document, length in enumerate(lengths.tolist()):
        start, end = 0, length
        while start < end:
            while not room:
                rank += 1
                room = int(capacities[rank])
            tokens = min(end - start, room)
            head = tokens - tokens // 2
            if tokens == end - start:
                head = max((start + end) // (2 * block) * block - start, 0) or tokens
            tail = tokens - head
            found.append((start, start + head, end - tail, end, document, rank))
            start, end, room = start + head, end - tail, room - tokens
    h0, h1, t1, t0, documents, ranks = np.array(found, dtype=np.int64).T.copy()
    return Parts(h0, h1, t1, t0), documents, ranks


def mirrored_plan(lengths: Int64s, capacities: Int64s, config: ScheduleConfig) -> Plan:
    """Makes the plan of the greedy scheduler from mirrored pieces."""
    parts, document, rank = mirrored_parts(lengths, capacities, config.block)
    documents, starts, ends, ranks = (
        np.stack(both, axis=1).ravel()
        for both in ((document,) * 2, (parts.h0, parts.t1), (parts.h1, parts.t0), (rank,) * 2)
    )
    both = Placement(documents, starts, ends, ranks, len(capacities))
    placement = both.select(both.end > both.start).joined()
    greedy = GreedyScheduler(config)
    return greedy.move_parts(lengths, placement, parts, document, rank, Mask())


def figures(plan: Plan, config: ScheduleConfig) -> dict[str, float]:
    """Balance before and after, and GB of a layer's forward pass."""
    validate_plan(plan)
    found = describe(plan, config)
    return {
        "before": max_over_mean(plan.loads_at_home()),
        "after": found.load_max_over_mean,
        "GB": found.bytes_total / 1e9,
        "busiest": max(found.bytes_max_sent, found.bytes_max_received) / 1e9,
    }


def compare(make: Any, servers: int, batches: int) -> list[dict[str, dict[str, float]]]:
    """Plans batches in both ways; figures by batch and way."""
    config = ScheduleConfig(tolerance=TOLERANCE, shape=MODELS[MODEL].attention_shape())
    found = []
    for seed in range(batches):
        lengths = make(servers * TOKENS_PER_SERVER, LONGEST, seed)
        capacities = even_capacities(int(lengths.sum()), servers)
        contiguous = make_scheduler("greedy", config).plan(lengths, capacities, Mask())
        mirrored = mirrored_plan(lengths, capacities, config)
        found.append(
            {
                "contiguous": figures(contiguous, config),
                "mirrored": figures(mirrored, config),
            }
        )
    return found


def span(ratios: list[float]) -> str:
    """Formats a mean and its range."""
    return f"{np.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def row(
    documents: str, servers: int, found: list[dict[str, dict[str, float]]]
) -> tuple[list[str], list[float], list[float]]:
    """A row of the table, and the ratios of all bytes and of the busiest rank's."""
    ways = ("contiguous", "mirrored")
    before = [f"{np.mean([each[way]['before'] for each in found]):.2f}" for way in ways]
    after = [f"{np.mean([each[way]['after'] for each in found]):.3f}" for way in ways]
    ratios = [
        [each["mirrored"][name] / each["contiguous"][name] for each in found]
        for name in ("GB", "busiest")
    ]
    sizes = [f"{np.mean([each['contiguous'][n] for each in found]):.2f}" for n in ("GB", "busiest")]
    cells = [documents, str(servers), *before, *after, *sizes, *map(span, ratios)]
    return cells, ratios[0], ratios[1]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--published", type=Path, metavar="DIR")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--servers", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--batches", type=int, default=3, help="of each row")
    args = parser.parse_args()
    sets = document_sets(args.published)
    cases = [(name, servers) for name in sets for servers in args.servers]
    rows, total, busiest = [], [], []
    for name, servers in track(cases, "mirrored_placement", "rows"):
        cells, *ratios = row(name, servers, compare(sets[name], servers, args.batches))
        rows.append(cells)
        total += ratios[0]
        busiest += ratios[1]
    published = "--published DIR " if args.published else ""
    head = ["documents", "servers", "max/mean before: contiguous", "mirrored"]
    head += ["after: contiguous", "mirrored", "contiguous: GB", "busiest rank, GB"]
    head += ["mirrored / contiguous: GB", "busiest rank"]
    page = [
        "# The greedy scheduler with mirrored pieces",
        "",
        f"`python benchmarks/plans/mirrored_placement.py {published}--batches {args.batches} "
        "--output DIR`: counted, not timed.",
        "",
        f"{MODEL}, bf16, tolerance {TOLERANCE}, {TOKENS_PER_SERVER:,} tokens a server, documents "
        f"up to 128K; bytes of one layer, forward, before tensor-parallel division; "
        f"{args.batches} batch(es) of each row, means with their ranges.",
        "",
        pages.table(head, rows),
        "",
        f"Mirrored pieces, the paper's, move {span(total)} times the bytes of contiguous ones, "
        f"which `greedy` has, and {span(busiest)} times as many on the busiest rank, over all "
        f"{len(total)} batches. They are better balanced before anything moves, since a rank has "
        "early and late tokens of a document; but a server that takes work from them needs keys "
        "from further on in the document.",
    ]
    pages.save(args.output, "mirrored_placement", "\n".join(page), __file__)


if __name__ == "__main__":
    main()
