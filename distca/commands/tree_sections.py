"""Pictures and a table of a plan's trees: who owns their tokens, and who computes what they see."""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np

from distca.commands.html_page import Cell, drawing, swatch, table
from distca.commands.plan_plot import busiest_servers
from distca.palette import GREY, HIGHLIGHTS
from distca.plan import Plan
from distca.plan.span import Floats, Int64s
from distca.wording import counted

_MOST_DOCUMENTS = 200
"""Most documents that are drawn: those of the largest trees. The largest tree is drawn anyway."""
_MOST_TREES = 32
"""Most rows of the table of trees."""
_MOST_NAMED = 8
"""Most servers whose shares of a tree are named."""
_SIZE = 1000.0


def has_trees(plan: Plan) -> bool:
    """Returns whether documents of a plan share tokens."""
    return plan.parents is not None and bool((plan.parents >= 0).any())


@dataclass(frozen=True)
class TreeShapes:
    """What is drawn of some documents, in tokens.

    Attributes:
        documents: numbers of the documents, one row each, int64 `[rows]`.
        bars: rows, first and last position on the path, and owner of pieces, int64 `[pieces, 4]`.
        branches: position at which a row branches off, its parent's row and itself, int64
            `[branches, 3]`.
        corners: four corners of what queries see, as keys and queries, which are numbered row by
            row, `[shapes, 4, 2]`.
        servers: server that computes each of these, int64 `[shapes]`.
    """

    documents: Int64s
    bars: Int64s
    branches: Int64s
    corners: Floats
    servers: Int64s

    @property
    def tokens(self) -> float:
        """Tokens of all rows, once each."""
        return float(self.corners.max(initial=0.0))


def tree_shapes(plan: Plan, most: int = _MOST_DOCUMENTS) -> TreeShapes:
    """Returns what is drawn of the largest trees.

    Args:
        plan: a plan with parents.
        most: most documents that are drawn, if the largest tree has no more.
    """
    assert plan.parents is not None
    assert plan.cached_prefix is not None
    tree, own, p = plan.trees, plan.own_lengths, plan.placement
    tokens = np.bincount(tree, weights=own)
    order = np.argsort(-tokens, kind="stable")
    shown = order[: max(int((np.cumsum(np.bincount(tree)[order]) <= most).sum()), 1)]
    rows = np.flatnonzero(np.isin(tree, shown))
    row = np.full(len(own), -1)
    row[rows] = np.arange(len(rows))
    first = np.zeros(len(own), dtype=np.int64)
    first[rows] = np.cumsum(own[rows]) - own[rows]
    # From global positions to those of the rows that are shown.
    moved = first - (np.cumsum(own) - own)
    there = row[p.document] >= 0
    bars = np.stack([row[p.document], p.start, p.end, p.rank], axis=1)[there]
    children = rows[plan.parents[rows] >= 0]
    branches = np.stack(
        [plan.cached_prefix[children], row[plan.parents[children]], row[children]], axis=1
    )
    corners, servers = _seen(plan, row >= 0, moved)
    return TreeShapes(rows, bars, branches, corners, servers)


def _seen(plan: Plan, shown: np.ndarray, moved: Int64s) -> tuple[Floats, Int64s]:
    """Returns the corners of what tasks see, and their servers."""
    t, keys = plan.tasks, plan.key_ranges
    shapes, servers = [], []
    # Where the keys of each range lie on the path: ranges of a task follow each other.
    before = t.kv_start.copy()
    columns = keys.task, keys.document, keys.start, keys.end
    for task, document, start, end in zip(*(each.tolist() for each in columns), strict=True):
        low = int(before[task])
        before[task] += end - start
        of = int(t.document[task])
        if not shown[of]:
            continue
        query, last = int(t.q_start[task]), int(t.q_end[task])
        high, corner = int(before[task]), int(before[task])
        if t.ends_on_diagonal[task] and high > query:
            query = corner = max(query, low)
        across = start - low + int(moved[document])
        down = int(plan.query_offsets[of] + moved[of])
        corners = ((low, query), (corner, query), (high, last), (low, last))
        shapes.append([(key + across, position + down) for key, position in corners])
        servers.append(int(t.server[task]))
    return np.array(shapes, dtype=np.float64).reshape(-1, 4, 2), np.array(servers, dtype=np.int64)


def trees_of(plan: Plan) -> tuple[str, str, str]:
    """Returns a picture of the owners of the largest trees' tokens, one of what queries see, and a
    table of the largest trees."""
    shapes, highlighted = tree_shapes(plan), busiest_servers(plan)
    colours = dict(zip(highlighted, HIGHLIGHTS, strict=False))
    key = " &nbsp; ".join(swatch(f"server {each}", colours[each]) for each in colours)
    assert plan.parents is not None
    count = len(np.unique(plan.trees))
    drawn = len(np.unique(plan.trees[shapes.documents]))
    some = f"The largest {drawn} of {counted(count, 'tree')}" if drawn < count else "All trees"
    owners = (
        f"{some}: each bar is a document, from left to right by position on its path; its colour "
        "is the owner of the tokens. A line shows where a document branches off."
    )
    seen = "What queries see (queries down, keys right), by the server that computes it."
    return (
        f"<p>{html.escape(owners)}</p><p aria-hidden=true>{key}</p>"
        + drawing(owners, _SIZE, _SIZE, _bars(shapes, plan, colours)),
        f"<p>{html.escape(seen)}</p>" + drawing(seen, _SIZE, _SIZE, _tasks(shapes, colours)),
        _largest_trees(plan),
    )


def _bars(shapes: TreeShapes, plan: Plan, colours: dict[int, str]) -> list[str]:
    across, down = (
        _SIZE / float(plan.lengths[shapes.documents].max()),
        _SIZE / len(shapes.documents),
    )
    found = [
        f'<line x1="{at * across:.2f}" x2="{at * across:.2f}" y1="{(parent + 0.5) * down:.2f}" '
        f'y2="{(row + 0.5) * down:.2f}" stroke="black" vector-effect="non-scaling-stroke"/>'
        for at, parent, row in shapes.branches.tolist()
    ]
    return found + [
        f'<rect x="{start * across:.2f}" y="{(row + 0.1) * down:.2f}" '
        f'width="{(end - start) * across:.2f}" height="{0.8 * down:.2f}" '
        f'fill="{colours.get(rank, GREY)}"><title>document {shapes.documents[row]}, tokens '
        f"{start:,} to {end - 1:,}: rank {rank}</title></rect>"
        for row, start, end, rank in shapes.bars.tolist()
    ]


def _tasks(shapes: TreeShapes, colours: dict[int, str]) -> list[str]:
    corners = shapes.corners * (_SIZE / (shapes.tokens or 1.0))
    return [
        f'<polygon points="{" ".join(f"{x:.2f},{y:.2f}" for x, y in each)}" '
        f'fill="{colours.get(server, GREY)}"><title>server {server}</title></polygon>'
        for each, server in zip(corners.tolist(), shapes.servers.tolist(), strict=True)
    ]


def _largest_trees(plan: Plan) -> str:
    assert plan.parents is not None
    tree, own, p = plan.trees, plan.own_lengths, plan.placement
    tokens = np.bincount(tree, weights=own).astype(np.int64)
    assert plan.cached_prefix is not None
    children = np.flatnonzero(plan.parents >= 0)
    above = plan.parents[children]
    # A document ends with a leaf, unless another one goes on from there.
    is_leaf = np.ones(len(own), dtype=bool)
    is_leaf[above[plan.cached_prefix[children] == plan.lengths[above]]] = False
    pairs = plan.tasks.pairs(plan.mask)
    rows = []
    for number in np.argsort(-tokens, kind="stable")[:_MOST_TREES].tolist():
        documents = np.flatnonzero(tree == number)
        its = tree[plan.tasks.document] == number
        work = np.bincount(plan.tasks.server[its], weights=pairs[its], minlength=plan.world_size)
        total = float(work.sum()) or 1.0
        busiest = [s for s in np.argsort(-work, kind="stable").tolist() if work[s] > 0]
        owners = np.unique(p.rank[tree[p.document] == number]).tolist()
        computed = [f"{s}: {work[s] / total:.0%}" for s in busiest]
        rows.append(
            (
                str(documents[0]),
                [
                    Cell(f"{len(documents):,}"),
                    Cell(f"{tokens[number]:,}"),
                    Cell(f"{plan.lengths[documents[is_leaf[documents]]].sum():,}"),
                    Cell(_named(list(map(str, owners))), is_text=True),
                    Cell(_named(computed), is_text=True),
                ],
            )
        )
    heads = ["first document", "documents", "tokens", "tokens of its sequences one by one"]
    heads += ["ranks that own its tokens", "servers that compute its attention"]
    caption = "The largest trees" if len(rows) < len(tokens) else "All trees"
    return table(caption, heads, rows)


def _named(each: list[str]) -> str:
    """Lists the first few."""
    more = len(each) - _MOST_NAMED
    return ", ".join(each[:_MOST_NAMED]) + f", and {counted(more, 'other')}" * (more > 0)
