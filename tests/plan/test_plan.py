"""The vocabulary: masks, placements, plans, and which rows a plan needs where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distca.plan import Mask, Placement, Plan, Tasks, place_sequentially, validate_plan
from distca.plan.plan import max_over_mean
from distca.plan.span import covered, numbered, order_by
from support.random_plans import random_lengths, random_plan

CHUNKS = [Mask(None, size) for size in (1, 32, 50, 1000)]
MASKS = st.sampled_from([Mask(), Mask(0), Mask(7), Mask(40), Mask(1000), *CHUNKS])


def visible_matrix(length: int, mask: Mask) -> np.ndarray:
    """Bool `[query, key]`, from the definition of the mask alone."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = distance >= 0
    if mask.window_left is not None:
        visible &= distance <= mask.window_left
    if mask.attention_chunk is not None:
        chunk = np.arange(length) // mask.attention_chunk
        visible &= chunk[:, None] == chunk[None, :]
    return visible


def is_valid_by_force(plan: Plan) -> bool:
    """What `validate` should find about the tasks, with one matrix for each document."""
    t, at = plan.tasks, plan.placement
    rows = zip(t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, strict=True)
    visible = [visible_matrix(int(length), plan.mask) for length in plan.lengths]
    times = [np.zeros(matrix.shape, dtype=int) for matrix in visible]
    for document, q_start, q_end, kv_start, kv_end in rows:
        length = plan.lengths[document]
        if not (0 <= q_start < q_end <= length and 0 <= kv_start < kv_end <= length):
            return False
        rectangle = np.s_[q_start:q_end, kv_start:kv_end]
        if q_end != kv_end and not visible[document][rectangle].all():
            return False
        hidden = visible_matrix(int(length), Mask()) & ~visible[document]
        if plan.mask.attention_chunk is not None and hidden[rectangle].any():
            return False
        first_key = int(np.flatnonzero(visible[document][q_start])[0])
        cuts = {*range(0, length + 1, plan.block), length, *at.start[at.document == document]}
        cuts |= {*range(0, length, plan.mask.attention_chunk or length)}
        if not ({q_start, q_end, kv_end} <= cuts and kv_start in {*cuts, first_key}):
            return False
        times[document][rectangle] += visible[document][rectangle]
    return all(np.array_equal(n, v) for n, v in zip(times, visible, strict=True))


def shuffled(placement: Placement, rng: np.random.Generator) -> Placement:
    """The same pieces on other ranks, in another order of the table."""
    order = rng.permutation(len(placement.rank))
    return Placement(
        placement.document[order],
        placement.start[order],
        placement.end[order],
        rng.permutation(placement.world_size)[placement.rank[order]],
        placement.world_size,
    )


def some_plan(seed: int, mask: Mask, world_size: int = 3, tokens: int = 96) -> Plan:
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, world_size * tokens)
    plan = random_plan(rng, lengths, world_size, tokens, mask, block=32)
    return replace(plan, placement=shuffled(plan.placement, rng))


@given(
    st.lists(st.integers(0, 30), min_size=4, max_size=4),
    st.sampled_from([*map(Mask, (None, 0, 1, 3, 9, 100)), *(Mask(None, n) for n in (1, 2, 7, 40))]),
)
def test_the_mask_counts_pairs_as_a_matrix_does(edges: list[int], mask: Mask) -> None:
    (q_start, q_end), (kv_start, kv_end) = sorted(edges[:2]), sorted(edges[2:])
    seen = visible_matrix(31, mask)
    rectangle = seen[q_start:q_end, kv_start:kv_end]
    assert mask.pairs(q_start, q_end, kv_start, kv_end) == rectangle.sum()
    assert mask.first_key(q_start) == np.flatnonzero(seen[q_start])[0]
    if rectangle.size:
        columns = (np.array([x]) for x in (q_start, q_end, kv_start, kv_end))
        assert bool(mask.is_full(*columns)[0]) == rectangle.all()


@pytest.mark.parametrize(("kv_end", "full"), [(4, True), (5, False)])
def test_a_full_rectangle_ends_with_the_first_query(kv_end: int, full: bool) -> None:
    columns = (np.array([x]) for x in (3, 6, 0, kv_end))
    assert Mask().is_full(*columns).tolist() == [full]


def test_a_window_is_not_negative() -> None:
    with pytest.raises(ValueError, match="window_left is -1"):
        Mask(-1)
    for wrong in (1.5, True, "8"):
        with pytest.raises(ValueError, match=f"window_left is {wrong!r}: give the number"):
            Mask(wrong)
        with pytest.raises(ValueError, match=f"attention_chunk is {wrong!r}: give at least 1"):
            Mask(None, wrong)
    assert Mask(np.int64(4)) == Mask(4)
    with pytest.raises(ValueError, match="attention_chunk is 0"):
        Mask(None, 0)
    with pytest.raises(ValueError, match="one of the two"):
        Mask(5, 8)


def test_documents_are_placed_one_after_the_other() -> None:
    at = place_sequentially([[100, 300, 1, 111], [512]], world_size=4, tokens_per_rank=128)
    rows = [tuple(map(int, row)) for row in zip(at.document, at.start, at.end, at.rank)]  # noqa: B905
    assert rows == [
        (0, 0, 100, 0),
        (1, 0, 28, 0),
        (1, 28, 156, 1),
        (1, 156, 284, 2),
        (1, 284, 300, 3),
        (2, 0, 1, 3),
        (3, 0, 111, 3),
        (4, 0, 128, 0),
        (4, 128, 256, 1),
        (4, 256, 384, 2),
        (4, 384, 512, 3),
    ]
    assert at.first_rows().tolist() == [0, 100, 0, 0, 0, 16, 17, 128, 128, 128, 128]
    assert at.tokens_per_rank().tolist() == [256] * 4
    assert at.of_rank(3).document.tolist() == [1, 2, 3, 4]


def test_windows_must_be_full_and_documents_must_have_tokens() -> None:
    with pytest.raises(
        ValueError, match="window 1: the documents have 7 tokens, but 2 ranks own 8"
    ):
        place_sequentially([[8], [7]], world_size=2, tokens_per_rank=4)
    with pytest.raises(ValueError, match="window 0: a document has 0 tokens"):
        place_sequentially([[8, 0]], world_size=2, tokens_per_rank=4)
    column = np.zeros(2, dtype=np.int64)
    with pytest.raises(ValueError, match="differ in length"):
        Placement(column, column, column, column[:1], 2)
    with pytest.raises(ValueError, match="at least one rank"):
        Placement(column, column, column, column, 0)


def good_plan() -> Plan:
    """Three documents on four ranks, block 32; document 1 spans all ranks, one rectangle in it."""
    lengths = np.array([100, 300, 112])
    rows = [
        (0, 0, 100, 0, 100, 2),
        (1, 0, 28, 0, 28, 0),
        (1, 28, 156, 0, 28, 3),
        (1, 28, 156, 28, 156, 1),
        (1, 156, 284, 0, 284, 2),
        (1, 284, 300, 0, 300, 3),
        (2, 0, 64, 0, 64, 0),
        (2, 64, 112, 0, 64, 1),
        (2, 64, 112, 64, 112, 1),
    ]
    return Plan(lengths, place_sequentially([lengths], 4, 128), Tasks.from_rows(rows), block=32)


def test_a_good_plan_is_valid_and_its_loads_add_up() -> None:
    plan = good_plan()
    validate_plan(plan)
    assert is_valid_by_force(plan)
    pairs = [visible_matrix(int(n), Mask()).sum() for n in plan.lengths]
    assert plan.loads().sum() == plan.loads_at_home().sum() == sum(pairs)
    # Server 1: 128 queries on their own diagonal; 48 queries over 64 keys, and their diagonal.
    assert plan.loads()[1] == 128 * 129 // 2 + 48 * 64 + 48 * 49 // 2
    assert plan.loads_at_home()[0] == pairs[0] + 28 * 29 // 2
    assert max_over_mean(np.array([1, 3, 2])) == 1.5
    assert max_over_mean(np.zeros(3, dtype=np.int64)) == 1.0


@pytest.mark.parametrize(
    ("replaced", "rows", "message"),
    [
        ([0], [], "document's visible pairs are not all covered"),
        ([2], [], "document's visible pairs are not all covered"),
        ([], [(2, 0, 64, 0, 64, 3)], "a query meets a key in two tasks"),
        ([], [(2, 64, 112, 0, 32, 3)], "a query meets a key in two tasks"),
        ([0], [(0, 0, 50, 0, 50, 0)], "q_end is neither on a block"),
        ([0], [(0, 50, 100, 0, 100, 0)], "q_start is neither on a block"),
        ([2], [(1, 28, 156, 0, 20, 0)], "kv_end is neither on a block"),
        ([2], [(1, 28, 156, 20, 28, 0)], "kv_start is neither on a block"),
        ([7], [(2, 64, 112, 0, 96, 1)], "neither a full rectangle nor ends on the diagonal"),
        ([0], [(0, 0, 100, 0, 100, 4)], "a task has no such server"),
        ([0], [(0, 0, 100, 0, 100, -1)], "a task has no such server"),
        ([0], [(3, 0, 100, 0, 100, 0)], "no such document has a task"),
        ([0], [(0, 0, 101, 0, 101, 0)], "queries are empty or outside"),
        ([0], [(0, 100, 100, 0, 100, 0)], "queries are empty or outside"),
        ([7], [(2, 64, 112, 64, 64, 1)], "keys are empty or outside"),
        ([7], [(2, 64, 112, -32, 64, 1)], "keys are empty or outside"),
    ],
)
def test_each_kind_of_broken_task_is_refused(
    replaced: list[int], rows: list[tuple[int, int, int, int, int, int]], message: str
) -> None:
    plan = good_plan()
    t = plan.tasks
    table = [t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server]
    kept = [tuple(map(int, row)) for row in np.delete(np.stack(table, 1), replaced, axis=0)]
    broken = replace(plan, tasks=Tasks.from_rows(kept + rows))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        validate_plan(broken)


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("start", 2, 20, "leaves out or repeats tokens"),
        ("start", 2, 30, "leaves out or repeats tokens"),
        ("end", 1, 20, "leaves out or repeats tokens"),
        ("end", 5, 111, "leaves out the last tokens"),
        ("end", 0, 101, "empty or outside its document"),
        ("end", 0, 0, "empty or outside its document"),
        ("start", 0, -1, "empty or outside its document"),
        ("rank", 0, 4, "placed on no rank"),
        ("rank", 0, -1, "placed on no rank"),
        ("document", 0, 3, "no such document is placed"),
    ],
)
def test_each_kind_of_broken_placement_is_refused(
    column: str, row: int, value: int, message: str
) -> None:
    plan = good_plan()
    changed = getattr(plan.placement, column).copy()
    changed[row] = value
    broken = replace(plan, placement=replace(plan.placement, **{column: changed}))
    with pytest.raises(ValueError, match=message):
        validate_plan(broken)


def test_a_document_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="a document has no tokens"):
        validate_plan(replace(good_plan(), lengths=np.array([100, 300, 112, 0])))


@settings(max_examples=60)
@given(st.integers(0, 10**6), MASKS)
def test_random_plans_cover_every_pair_once(seed: int, mask: Mask) -> None:
    plan = some_plan(seed, mask)
    validate_plan(plan)
    assert is_valid_by_force(plan)


@settings(max_examples=200)
@given(st.integers(0, 10**6), MASKS, st.data())
def test_validate_finds_what_a_matrix_finds(seed: int, mask: Mask, data: st.DataObject) -> None:
    plan = some_plan(seed, mask)
    row = data.draw(st.integers(0, len(plan.tasks) - 1))
    names = st.sampled_from(["q_start", "q_end", "kv_start", "kv_end", "document"])
    columns = {}
    for name in data.draw(st.lists(names, min_size=1, max_size=2, unique=True)):
        columns[name] = getattr(plan.tasks, name).copy()
        step = 1 if name == "document" else data.draw(st.sampled_from([1, 32, 64]))
        columns[name][row] += step * data.draw(st.sampled_from([-1, 1]))
    document = columns.get("document", plan.tasks.document)
    columns["document"] = document.clip(0, len(plan.lengths) - 1)
    changed = replace(plan, tasks=replace(plan.tasks, **columns))
    try:
        validate_plan(changed)
        accepted = True
    except ValueError:
        accepted = False
    if mask.window_left is None:
        assert accepted == is_valid_by_force(changed)
    else:
        # Key ranges may not overlap even where the window hides the overlap: it costs bytes.
        assert not accepted or is_valid_by_force(changed)


@settings(max_examples=40)
@given(st.integers(0, 10**6), MASKS, st.data())
def test_a_key_met_twice_does_not_make_up_for_one_that_is_missed(
    seed: int, mask: Mask, data: st.DataObject
) -> None:
    """In the same document, so that its pairs still add up: of one task, or of two alike."""
    plan = some_plan(seed, mask)
    t, pairs = plan.tasks, plan.tasks.pairs(mask)
    columns = [t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server]
    rows = [tuple(map(int, row)) for row in zip(*columns, strict=True)]
    full = mask.is_full(t.q_start, t.q_end, t.kv_start, t.kv_end)
    defects: list[list[tuple[int, ...]]] = []
    for number, (document, q, q_end, kv, kv_end, server) in enumerate(rows):
        others = rows[:number] + rows[number + 1 :]
        # The first half twice, the second never.
        if full[number] and (q_end - q) % 2 == 0:
            half = (document, q, (q + q_end) // 2, kv, kv_end)
            defects.append([*others, (*half, server), (*half, (server + 1) % 3)])
        if full[number] and (kv_end - kv) % 2 == 0:
            half = (document, q, q_end, kv, (kv + kv_end) // 2)
            defects.append([*others, (*half, server), (*half, (server + 1) % 3)])
        # Another task's pairs twice, this one's never.
        defects += [
            [*others, (*row[:5], server)]
            for other, row in enumerate(rows)
            if other != number and row[0] == document and pairs[other] == pairs[number]
        ]
    assume(defects)
    tasks = Tasks.from_rows(data.draw(st.sampled_from(defects)))  # type: ignore[arg-type]
    # A block of one: the cuts are all allowed, so it is the cover that is refused.
    broken = replace(plan, tasks=tasks, block=1)
    validate_plan(replace(plan, block=1))
    of_documents = [np.zeros(len(plan.lengths), dtype=np.int64) for _ in range(2)]
    for total, made in zip(of_documents, (t, tasks), strict=True):
        np.add.at(total, made.document, made.pairs(mask))
    assert np.array_equal(*of_documents)
    with pytest.raises(ValueError, match="a query meets a key in two tasks"):
        validate_plan(broken)


@settings(max_examples=60)
@given(st.integers(0, 10**6), MASKS)
def test_needed_segments_are_the_sets_of_needed_rows(seed: int, mask: Mask) -> None:
    plan = some_plan(seed, mask)
    at, t = plan.placement, plan.tasks
    home: dict[tuple[int, int], tuple[int, int]] = {}  # (document, position) -> (rank, row)
    rows = [0] * at.world_size
    for document, start, end, rank in zip(at.document, at.start, at.end, at.rank, strict=True):
        for position in range(start, end):
            home[int(document), position] = (int(rank), rows[rank])
            rows[rank] += 1
    for which, starts, ends in (("q", t.q_start, t.q_end), ("kv", t.kv_start, t.kv_end)):
        needed = {
            (
                int(server),
                int(plan.document_offsets[document]) + position,
                *home[document, position],
            )
            for document, start, end, server in zip(
                t.document.tolist(), starts, ends, t.server, strict=True
            )
            for position in range(start, end)
        }
        segments = getattr(plan, f"{which}_segments")
        found = [
            (int(server), int(start) + i, int(owner), int(row) + i)
            for server, owner, start, end, row in zip(
                segments.server,
                segments.owner,
                segments.start,
                segments.end,
                segments.owner_row,
                strict=True,
            )
            for i in range(end - start)
        ]
        assert len(found) == len(set(found))
        assert set(found) == needed
        keys = list(zip(segments.server, segments.owner, segments.start, strict=True))
        assert keys == sorted(keys)
        moved = np.zeros((at.world_size, at.world_size), dtype=int)
        for server, _, owner, _ in needed:
            moved[owner, server] += server != owner
        assert np.array_equal(segments.moved_rows(at.world_size), moved)


@pytest.mark.parametrize("seed", range(3))
def test_positions_that_several_ranges_contain(seed: int) -> None:
    rng, times = np.random.default_rng(seed), (1, 2, 3)
    groups, starts = rng.integers(0, 4, 40), rng.integers(0, 60, 40)
    ends = starts + rng.integers(0, 12, 40)
    depth = np.zeros((5, 80), dtype=np.int64)
    for group, start, end in zip(groups, starts, ends, strict=True):
        depth[group, start:end] += 1
    expected = [(depth >= each).sum(axis=1).tolist() for each in times]
    assert covered(groups, starts, ends, 5, times).tolist() == expected
    assert covered(groups[:0], starts[:0], ends[:0], 2, times).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("most", [3, 10, 2**21, 2**40])
def test_rows_in_the_order_of_their_columns(most: int) -> None:
    """As NumPy sorts them, whether they fit in one number or not; equal ones keep their order."""
    rng = np.random.default_rng(most)
    columns = rng.integers(-most, most, (3, 200))
    columns[:, ::2] = columns[:, 1::2]
    for some in (columns[:1], columns, (columns[0] > 0, columns[1])):
        assert np.array_equal(order_by(*some), np.lexsort(tuple(some)[::-1]))
    assert order_by(columns[0][:0]).tolist() == []
    _, *expected = np.unique(columns[0], return_index=True, return_inverse=True)
    assert all(map(np.array_equal, numbered(columns[0]), expected))
