"""Copies by the tensor memory accelerator: their order of loads, waits and stores.

It runs on a model (`weak/bulk_copy.cpp`) that is as late as it may be. No hardware has run it yet.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.native import run
from distca.transport.compiled import PROTOCOL, compiler
from support.bulk_sizes import BULK_LEAST, CHUNK, RING

MODEL = Path(__file__).parents[1] / "weak" / "bulk_copy.cpp"
UNIT = 16

# Not optimised: most of the time here goes into compiling.
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[..., ctypes.CDLL]:
    """Builds the model with `bulk_copy.h` as it is, or with one change."""
    built: dict[tuple[str, str], ctypes.CDLL] = {}

    def build(before: str = "", after: str = "") -> ctypes.CDLL:
        if (before, after) not in built:
            folder = tmp_path_factory.mktemp("bulk")
            shutil.copy(PROTOCOL / "words.h", folder)
            text = (PROTOCOL / "bulk_copy.h").read_text()
            if before:
                assert text.count(before) == 1, f"{before!r} is not in bulk_copy.h once"
                text = text.replace(before, after)
            (folder / "bulk_copy.h").write_text(text)
            target = folder / "model.so"
            run([compiler(), *FLAGS, f"-I{folder}", str(MODEL), "-o", str(target)])
            built[before, after] = ctypes.CDLL(str(target))
            built[before, after].bulk_copies.restype = ctypes.c_char_p
        return built[before, after]

    return build


def copies(
    library: ctypes.CDLL, wanted: Sequence[tuple[int, int, int]], seed: int = 0, eager: float = 0.0
) -> tuple[str | None, int, list[int]]:
    """What was breached, how many bytes are wrong, and how many of each copy went in bulk.

    A copy of which none did is left undone.

    Args:
        library: the model.
        wanted: where each copy begins modulo 16, in source and target, and its bytes.
        seed: seed of what is done early.
        eager: how likely that is.
    """
    rng = np.random.default_rng(seed)
    room = [-(-(nbytes + 2 * UNIT) // UNIT) * UNIT for *_, nbytes in wanted]
    words = [rng.integers(0, 2**63, n // 8) for n in room]
    sources = [np.concatenate([each, each[:2]]).view(np.uint8) for each in words]
    targets = [np.full(len(source), 0xEE, np.uint8) for source in sources]
    froms: list[np.ndarray] = []
    tos: list[np.ndarray] = []
    for (from_, to, nbytes), source, target in zip(wanted, sources, targets, strict=True):
        for array, begin, into in ((source, from_, froms), (target, to, tos)):
            first = -array.ctypes.data % UNIT + begin
            into.append(array[first : first + nbytes])
    addresses = lambda arrays: (ctypes.c_void_p * len(arrays))(  # noqa: E731
        *(array.ctypes.data for array in arrays)
    )
    in_bulk = (ctypes.c_uint64 * len(wanted))()
    sizes = (ctypes.c_uint64 * len(wanted))(*(nbytes for *_, nbytes in wanted))
    breach = library.bulk_copies(
        *(len(wanted), addresses(tos), addresses(froms), sizes, in_bulk),
        *(ctypes.c_uint(seed), ctypes.c_double(eager)),
    )
    wrong = 0
    for source, target, to, moved in zip(froms, targets, tos, in_bulk, strict=True):
        expected = np.full(len(target), 0xEE, np.uint8)
        begin = to.ctypes.data - target.ctypes.data
        if moved:
            expected[begin : begin + len(to)] = source
        wrong += int((target != expected).sum())
    return breach and breach.decode(), wrong, list(in_bulk)


near = st.builds(
    lambda whole, more: max(0, whole + more),
    st.sampled_from([0, CHUNK, BULK_LEAST, RING, RING + CHUNK, 2 * RING, 3 * RING]),
    st.integers(-40, 40),
)
lengths = st.one_of(near, st.integers(0, 4 * RING))


@settings(max_examples=150)
@given(
    wanted=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15), lengths), max_size=6),
    alike=st.booleans(),
    seed=st.integers(0, 1000),
    eager=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
)
def test_every_byte_arrives(model, wanted, alike: bool, seed: int, eager: float) -> None:
    if alike:
        wanted = [(begin, begin, nbytes) for begin, _, nbytes in wanted]
    breach, wrong, in_bulk = copies(model(), wanted, seed, eager)
    assert breach is None
    assert wrong == 0
    for (from_, to, nbytes), moved in zip(wanted, in_bulk, strict=True):
        assert (moved > 0) == (from_ == to and nbytes >= BULK_LEAST)
        assert moved % UNIT == 0
        assert not moved or moved > nbytes - 2 * UNIT


def test_sizes_that_tests_on_gpus_use(model) -> None:
    found = (ctypes.c_uint64 * 3)()
    model().bulk_constants(found)
    assert list(found) == [CHUNK, RING, BULK_LEAST]


MUTANTS = {
    "a slot is loaded too early": (
        "wait_read<kBulkSlots - kLoadsAhead>()",
        "wait_read<kBulkSlots - kLoadsAhead + 1>()",
    ),
    "no wait for the store of a slot": (
        "engine_.template wait_read<kBulkSlots - kLoadsAhead>();",
        "",
    ),
    "no wait for loads": ("engine_.wait_loaded(fill % kBulkSlots, fill / kBulkSlots & 1);", ""),
    "always the same parity": ("fill / kBulkSlots & 1", "0"),
    "each copy begins with parity 0": ("fills_ += unsigned(chunks);", ""),
    "no wait for stores": ("engine_.wait_stored();", ""),
    "no last bytes": ("left < kBulkChunk ? left : kBulkChunk", "kBulkChunk"),
    "unaligned ends": ("if (!aligned || bytes", "if (bytes"),
    "no first edge": ("-Word(to) & (kBulkUnit - 1)", "0"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(model, mutant: str) -> None:
    """The test above would not pass without any one of these."""
    sizes = [3 * RING + 5000, RING, 2 * RING + CHUNK + 16, BULK_LEAST + 3]
    changed = model(*MUTANTS[mutant])
    caught = False
    for eager in (0.0, 0.5):
        for from_, to in ((0, 0), (3, 3), (3, 7)):
            breach, wrong, _ = copies(
                changed, [(from_, to, nbytes) for nbytes in sizes], seed=1, eager=eager
            )
            caught = caught or breach is not None or wrong > 0
    assert caught
