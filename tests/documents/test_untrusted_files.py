"""Files of unknown origin beside checkpoints: none runs as code, each bad one ends in a line."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distca.cost.profile import Profile
from distca.documents.index import read_index
from distca.documents.lengths import read_lengths
from distca.documents.tokenizer import build_tokenizer
from distca.plan.saved import load_plan
from support.malicious import Runs

DEEP = b"[" * 200_000
HUGE = str(1 << 70).encode()
PROFILE = b"""{"format": 1, "lengths": [128, %s], "full_seconds": [[1, 1], [1, 1]],
"diagonal_seconds": [[1, 1], [1, 1]], "shape": {"heads": 1, "kv_heads": 1, "head_dim": 8,
"dtype_bytes": 2}, "provenance": {}}"""
PLAN = b"""{"format": 1, "documents": [%s], "placement": [[[0, 0, 128]]],
"tasks": [[0, 0, 128, 0, 128, 0]], "configuration": {"block": 128}}"""


def tokenizer(path: Path) -> Any:
    return build_tokenizer("HuggingFaceTokenizer", str(path))


READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": load_plan,
    "profile.json": Profile.load,
    "lengths.json": read_lengths,
    "lengths.idx": read_lengths,
    "tokenizer.json": tokenizer,
}
WRONG = {
    "plan.json": PLAN % HUGE,
    "profile.json": PROFILE % b"1e999",
    "lengths.json": b"[%s]" % HUGE,
    # Sizes of 2**60 sequences, of which nothing is there.
    "lengths.idx": b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1 << 60, 1 << 60),
    "tokenizer.json": b'{"model": {"type": "BPE", "vocab": 7}}',
}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_unknown_origin_is_data(kind, tmp_path) -> None:
    trace, file = tmp_path / "ran", tmp_path / kind
    for content in (pickle.dumps(Runs(trace)), DEEP, WRONG[kind]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=kind) as refused:
            READERS[kind](file)
        assert len(str(refused.value).splitlines()) == 1
        assert not trace.exists()


def test_the_examples_are_wrong_in_one_place_alone(tmp_path) -> None:
    """Else the test above would show nothing."""
    (tmp_path / "plan.json").write_bytes(PLAN % b"128")
    load_plan(tmp_path / "plan.json")
    (tmp_path / "profile.json").write_bytes(PROFILE % b"256")
    Profile.load(tmp_path / "profile.json")


def test_a_tokenizer_s_configuration_is_data(tmp_path) -> None:
    from distca.documents.dataset import train_tokenizer

    train_tokenizer(["some text"], 300, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for content in (DEEP, pickle.dumps(Runs(tmp_path / "ran"))):
        config.write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
            tokenizer(tmp_path)
    # Code that it names is not read.
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config.write_text('{"eos_token": "<|endoftext|>", "auto_map": {"AutoTokenizer": "evil.Evil"}}')
    tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("pointers", "documents"),
    [(((1 << 63) - 8, 0), (0, 1, 2)), ((0, 0), (0, 1 << 40, 2)), ((-8, 0), (0, 1, 2))],
)
def test_an_index_points_into_its_tokens(pointers, documents, tmp_path) -> None:
    """Positions whose bytes overflow, too."""
    pytest.importorskip("megatron.core")
    from megatron_patches.batches.stream import Corpus

    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 5, 2, 3)
    tables = struct.pack("<2i2q3q", (1 << 31) - 1, 4, *pointers, *documents)
    (tmp_path / "c.idx").write_bytes(header + tables)
    (tmp_path / "c.bin").write_bytes(bytes(64))
    with pytest.raises(ValueError, match=r"c\.(idx|bin)"):
        Corpus(str(tmp_path / "c"))


def test_an_index_of_many_sequences_takes_no_memory(tmp_path) -> None:
    (tmp_path / "c.idx").write_bytes(WRONG["lengths.idx"])
    with pytest.raises(ValueError, match="corrupt or cut off"):
        read_index(tmp_path / "c.idx")
