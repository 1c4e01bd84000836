"""Document lengths: distributions, files, Megatron's index."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from distca import json_files
from distca.documents.index import read_index
from distca.documents.lengths import (
    DISTRIBUTIONS,
    MOST_TOKENS,
    Capped,
    Collection,
    Fixed,
    Lognormal,
    Zipf,
    draw,
    read_lengths,
)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_seeded_full_and_begin_alike(name: str) -> None:
    some = draw(DISTRIBUTIONS[name], 1_000_003, seed=3)
    assert some.sum() == 1_000_003
    assert some.min() >= 1
    assert np.array_equal(some, draw(DISTRIBUTIONS[name], 1_000_003, seed=3))
    more = draw(DISTRIBUTIONS[name], 60_000_000, seed=3)
    assert np.array_equal(more[: len(some) - 1], some[:-1])
    if name != "fixed":
        assert not np.array_equal(some, draw(DISTRIBUTIONS[name], 1_000_003, seed=4))


def test_the_named_distributions_are_what_they_say() -> None:
    generator = np.random.default_rng(0)
    pretrain = DISTRIBUTIONS["pretrain"].sample(generator, 400_000)
    # One in ten of the short ones was kept.
    assert 0.80 < (pretrain < 10_000).mean() < 0.85
    assert pretrain.max() <= 131_072
    assert pretrain[pretrain >= 65_536].sum() / pretrain.sum() > 0.35
    prolong = DISTRIBUTIONS["prolong"].sample(generator, 400_000)
    assert np.median(prolong) == pytest.approx(1913, rel=0.05)
    assert np.quantile(prolong, 0.99) == pytest.approx(16_262, rel=0.1)
    assert 200_000 < prolong.max() <= 340_000
    lognormal = DISTRIBUTIONS["lognormal"].sample(generator, 400_000)
    assert np.median(lognormal) == pytest.approx(4096, rel=0.02)
    # A standard deviation above: 4096 * e ** 1.5.
    assert np.quantile(lognormal, 0.8413) == pytest.approx(18_357, rel=0.02)
    assert lognormal.max() == 131_072
    long_tail = DISTRIBUTIONS["long-tail"].sample(generator, 400_000)
    assert np.median(long_tail) == pytest.approx(4096, rel=0.02)
    assert np.quantile(long_tail, 0.8413) == pytest.approx(4096 * np.e**2, rel=0.02)
    zipf = DISTRIBUTIONS["zipf"].sample(generator, 400_000)
    assert (zipf.min(), zipf.max() <= 131_072) == (256, True)
    # (1024 ** -0.5 - 131072 ** -0.5) / (256 ** -0.5 - 131072 ** -0.5)
    assert (zipf >= 1024).mean() == pytest.approx(0.477, abs=0.005)
    assert set(DISTRIBUTIONS["fixed"].sample(generator, 5).tolist()) == {8192}


def test_parameters_matter() -> None:
    generator = np.random.default_rng(0)
    assert np.median(Lognormal(1000, 0.5, 10**6).sample(generator, 10_000)) == pytest.approx(
        1000, rel=0.05
    )
    log_uniform = Zipf(1.0, 16, 4096).sample(generator, 100_000)
    assert np.median(log_uniform) == pytest.approx(256, rel=0.05)
    steep = Zipf(2.0, 16, 4096).sample(generator, 100_000)
    assert np.median(steep) == pytest.approx(32, rel=0.05)
    capped = Capped(Collection((5, 700)), 100).sample(generator, 1000)
    assert set(capped.tolist()) == {5, 100}
    with pytest.raises(ValueError, match="0 tokens"):
        draw(Fixed(3), 0, 0)


def test_a_list_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[3, 1, 70000]")
    assert read_lengths(path).tolist() == [3, 1, 70000]
    for text, message in (
        ("[3, 0]", "document 1 has 0 tokens"),
        ("[3, -5]", "document 1 has -5 tokens"),
        ("[3, 2.5]", "document 1 has the length 2.5, which is no integer"),
        ("[true]", "no integer"),
        ("[]", "no list of document lengths"),
        ('{"a": 1}', "no list of document lengths"),
        ("[3,", "is not JSON"),
        ("[" + "9" * 5000 + "]", "lengths.json has a number of too many digits: give a list"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_lengths(path)
    with pytest.raises(ValueError, match="does not exist"):
        read_lengths(tmp_path / "none.json")
    path.write_text("\ufeff[3]")
    assert read_lengths(path).tolist() == [3]


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch) -> None:
    """Not a failure to write, which `distca` takes an error without a file's name for."""
    for name, message in (
        ("/proc/self/mem", "/proc/self/mem cannot be read: Input/output error: give a file with"),
        ("x" * 300, "cannot be read: File name too long: give a file with a JSON list"),
    ):
        with pytest.raises(ValueError, match=message):
            read_lengths(tmp_path / name)
    monkeypatch.setattr(json_files, "_MOST_BYTES", 1 << 22)
    with pytest.raises(ValueError, match="/dev/zero has more than 4,194,304 bytes: give a file"):
        read_lengths(Path("/dev/zero"))
    (tmp_path / "full").write_text("[1]" + " " * ((1 << 22) - 3))
    assert read_lengths(tmp_path / "full").tolist() == [1]


def test_an_index_that_megatron_wrote(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = str(tmp_path / "corpus")
    builder = indexed.IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    # The second document has two sequences, the third none.
    builder.add_document(torch.arange(5), [5])
    builder.add_document(torch.arange(9), [4, 5])
    builder.add_document(torch.arange(3), [3])
    builder.finalize(prefix + ".idx")
    index = read_index(Path(prefix + ".idx"))
    assert index.token_bytes == 2
    assert index.lengths.tolist() == [5, 4, 5, 3]
    assert index.document_lengths().tolist() == [5, 9, 3]
    assert read_lengths(Path(prefix + ".idx")).tolist() == [5, 9, 3]
    whole = Path(prefix + ".idx").read_bytes()
    for wrong in (whole[:-1], whole[:20], b"X" + whole[1:]):
        Path(prefix + ".idx").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"cut off|not an index"):
            read_lengths(Path(prefix + ".idx"))
    # A multimodal dataset has the mode of each sequence behind its tables.
    Path(prefix + ".idx").write_bytes(whole + bytes(4))
    assert read_lengths(Path(prefix + ".idx")).tolist() == [5, 9, 3]
    for longer in (whole + bytes(3), whole + bytes(8), whole + whole):
        Path(prefix + ".idx").write_bytes(longer)
        with pytest.raises(ValueError, match=rf"has {len(longer)} bytes, but .* take {len(whole)}"):
            read_lengths(Path(prefix + ".idx"))


def test_published_lists_can_be_drawn_from(tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text(json.dumps([10, 20, 30]))
    lengths = draw(Collection(tuple(read_lengths(path).tolist())), 1000, seed=0)
    assert set(lengths[:-1].tolist()) == {10, 20, 30}


def test_lengths_whose_pairs_are_no_int64_are_refused(tmp_path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([4611686018427387904] * 3))
    with pytest.raises(ValueError, match=r"has 13,835,058,055,282,163,712 tokens, with more than"):
        read_lengths(path)
    # The longest document, alone; and one token more.
    longest = 4_294_967_295
    path.write_text(json.dumps([longest]))
    assert read_lengths(path).tolist() == [longest]
    path.write_text(json.dumps([longest + 1]))
    with pytest.raises(ValueError, match="give shorter documents"):
        read_lengths(path)


def test_lengths_come_through_a_pipe(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("[5, 6]",))
    writer.start()
    assert read_lengths(pipe).tolist() == [5, 6]
    writer.join()


def test_more_tokens_than_can_be_planned_are_not_drawn() -> None:
    for total in (0, MOST_TOKENS + 1):
        with pytest.raises(ValueError, match="cannot draw documents"):
            draw(DISTRIBUTIONS["fixed"], total, 0)
