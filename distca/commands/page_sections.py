"""Sections that several reports in HTML have: documents, servers and bytes of a plan."""

from __future__ import annotations

import html

import numpy as np

from distca.commands.html_page import Cell, drawing, heat_map, swatch, table
from distca.commands.plan_plot import busiest_servers, shapes_of_tasks
from distca.cost.volume import plan_bytes
from distca.palette import GREY, HIGHLIGHTS
from distca.plan import Plan
from distca.plan.span import Int64s
from distca.schedule import ScheduleConfig, loads_over_mean
from distca.wording import counted

_MOST_SERVERS = 64
"""Most rows of the table of servers."""
_MOST_DOCUMENTS = 32
"""Most rows of the table of documents."""
_MOST_CELLS = 32
"""Most rows and columns of a heat map; of more servers each row has several."""
_MOST_NAMED = 8
"""Most servers whose shares of a document are named."""


def documents_by_length(tokens: Int64s) -> str:
    """A table of the documents by their length: how many there are, and what they make up."""
    lengths = tokens.astype(np.float64)
    pairs = lengths * (lengths + 1) / 2
    powers = np.floor(np.log2(lengths)).astype(int)
    rows = []
    for power in range(powers.min(), powers.max() + 1):
        its = powers == power
        of_tokens, of_pairs = lengths[its].sum() / lengths.sum(), pairs[its].sum() / pairs.sum()
        rows.append(
            (
                f"{2**power:,} to {2 ** (power + 1) - 1:,}",
                [
                    Cell(f"{its.sum():,}"),
                    Cell(f"{of_tokens:.1%}", of_tokens),
                    Cell(f"{of_pairs:.1%}", of_pairs),
                ],
            )
        )
    caption = "Core attention grows with the square of a document's length."
    heads = ["tokens", "documents", "share of tokens", "share of core attention"]
    return table(caption, heads, rows)


def servers(plan: Plan, config: ScheduleConfig) -> str:
    """Returns a table of the servers' loads, tokens, bytes and memory."""
    before, after = loads_over_mean(plan, config)
    forward = plan_bytes(plan, config.shape).forward()
    sent, received = forward.sent() / 1e6, forward.received() / 1e6
    held = forward.messages["dispatch"].received() / 1e6
    tokens = plan.placement.tokens_per_rank()
    shown = np.sort(np.argsort(-after, kind="stable")[:_MOST_SERVERS])
    most = max(float(before.max()), float(after.max())) or 1.0
    most_bytes = max(float(sent.max()), float(received.max())) or 1.0
    rows = [
        (
            f"server {server}",
            [
                Cell(f"{before[server]:.3f}", before[server] / most),
                Cell(f"{after[server]:.3f}", after[server] / most),
                Cell(f"{tokens[server]:,}"),
                Cell(f"{sent[server]:,.2f}", sent[server] / most_bytes),
                Cell(f"{received[server]:,.2f}", received[server] / most_bytes),
                Cell(f"{held[server]:,.2f}", held[server] / most_bytes),
            ],
        )
        for server in shown.tolist()
    ]
    left_out = f" The {len(shown)} busiest of {plan.world_size:,}." * (len(shown) < len(after))
    heads = ["server", "load over the mean, plain data parallelism", "load over the mean"]
    heads += ["tokens", "MB sent", "MB received", "MB of received inputs in memory"]
    caption = f"Loads are of core attention; MB are of one layer's forward pass.{left_out}"
    return table(caption, heads, rows)


def bytes_between(plan: Plan, config: ScheduleConfig) -> str:
    """Returns a heat map of the bytes of a plan that each server sends to each other."""
    sent = np.sum([*plan_bytes(plan, config.shape).forward().phases.values()], axis=0)
    caption = "MB that the server of a row sends to that of a column: one layer, forward pass."
    return map_of_bytes(sent, caption)


def map_of_bytes(sent: Int64s, caption: str) -> str:
    """Returns a heat map of bytes in MB.

    Args:
        sent: bytes that each server sends to each other, `[servers, servers]`.
        caption: what the cells are.
    """
    servers = len(sent)
    each = -(-servers // _MOST_CELLS)
    firsts = np.arange(0, servers, each)
    megabytes = np.add.reduceat(np.add.reduceat(sent, firsts, axis=0), firsts, axis=1) / 1e6
    ends = np.minimum(firsts + each, servers) - 1
    names = [
        str(first) if first == last else f"{first} to {last}"
        for first, last in zip(firsts.tolist(), ends.tolist(), strict=True)
    ]
    values = [
        [value if value or a != b else None for b, value in enumerate(row)]
        for a, row in enumerate(megabytes.tolist())
    ]
    texts = [[f"{value:,.2f}" for value in row] for row in megabytes.tolist()]
    return heat_map(caption, "from, to", names, names, values, texts)


def documents_of(plan: Plan) -> tuple[str, str]:
    """Returns a picture of the documents' tasks, and a table of the longest documents: who owns
    their tokens, and who computes their attention."""
    longest, tasks, corners = shapes_of_tasks(plan)
    highlighted = busiest_servers(plan)
    colours = dict(zip(highlighted, HIGHLIGHTS, strict=False))
    width, height = float(plan.lengths[longest].sum()), float(plan.lengths.max())
    # Coordinates are small numbers, so that pages are.
    scale = np.array([1000 / width, 1000 / height])
    shapes = [
        f'<polygon points="{" ".join(f"{x:.2f},{y:.2f}" for x, y in points)}" '
        f'fill="{colours.get(server, GREY)}"><title>document {document}, server {server}: queries '
        f"{q_start:,} to {q_end - 1:,}, keys {kv_start:,} to {kv_end - 1:,}</title></polygon>"
        for points, document, server, q_start, q_end, kv_start, kv_end in zip(
            (corners * scale).tolist(),
            *(column.tolist() for column in (tasks.document, tasks.server)),
            *(column.tolist() for column in (tasks.q_start, tasks.q_end)),
            *(column.tolist() for column in (tasks.kv_start, tasks.kv_end)),
            strict=True,
        )
    ]
    name = (
        "Each triangle is a document's causal attention (queries down, keys right). In colour: "
        f"{', '.join(f'server {server}' for server in highlighted)}."
    )
    key = " &nbsp; ".join(swatch(f"server {each}", colours[each]) for each in colours)
    drawn = f"<p>{html.escape(name)}</p><p aria-hidden=true>{key}</p>"
    return drawn + drawing(name, 1000, 1000, shapes), _longest_documents(
        plan, longest[:_MOST_DOCUMENTS]
    )


def _longest_documents(plan: Plan, shown: Int64s) -> str:
    pairs = plan.tasks.pairs(plan.mask)
    rows = []
    for document in shown.tolist():
        owners = np.unique(plan.placement.rank[plan.placement.document == document])
        its = plan.tasks.document == document
        work = np.bincount(plan.tasks.server[its], weights=pairs[its], minlength=plan.world_size)
        total = float(work.sum()) or 1.0
        busiest = [s for s in np.argsort(-work, kind="stable").tolist() if work[s] > 0]
        computed = ", ".join(f"{s}: {work[s] / total:.0%}" for s in busiest[:_MOST_NAMED])
        more = len(busiest) - _MOST_NAMED
        computed += f", and {counted(more, 'other')}" * (more > 0)
        owned = ", ".join(map(str, owners[:_MOST_NAMED].tolist()))
        owned += f", and {counted(len(owners) - _MOST_NAMED, 'other')}" * (
            len(owners) > _MOST_NAMED
        )
        length = f"{plan.lengths[document]:,}"
        rows.append(
            (str(document), [Cell(length), Cell(owned, is_text=True), Cell(computed, is_text=True)])
        )
    count = len(plan.lengths)
    caption = "The longest documents" if len(shown) < count else "All documents"
    caption += f", of {counted(count, 'document')} with {counted(int(plan.lengths.sum()), 'token')}"
    heads = [
        "document",
        "tokens",
        "ranks that own its tokens",
        "servers that compute its attention",
    ]
    return table(caption, heads, rows)
