"""Text to token files and back, tokenizers, and the demo corpus."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import demo_corpus
from distca.commands import prepare
from distca.commands.main import main
from distca.documents import dataset
from distca.documents.tokenizer import ByteLevelTokenizer, HuggingFaceTokenizer, build_tokenizer
from megatron_patches.batches.stream import Corpus

TEXTS = ["def f(x):\n    return x\n", "naïve café, 日本\n", "x", "a b a b a b\n" * 50]


def documents_of(prefix: Path) -> list[list[int]]:
    corpus = Corpus(str(prefix))
    return [corpus.read(n, 0, int(length)).tolist() for n, length in enumerate(corpus.lengths)]


@pytest.fixture
def text_folder(tmp_path) -> Path:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / ".git").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / ("below" if number == 3 else "") / f"{number}.txt").write_text(text)
    (folder / "empty.txt").write_text("")
    (folder / ".git" / "hidden").write_text("hidden")
    return folder


@pytest.fixture
def jsonl(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "body": text}) + "\n\n" for text in TEXTS))
    return path


def command(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


def test_a_text_folder_to_bytes_and_back(text_folder, tmp_path, capsys):
    prefix = tmp_path / "out" / "bytes"
    assert (
        command(
            "--input", text_folder, "--output-prefix", prefix, "--tokenizer-type=ByteLevelTokenizer"
        )
        == 0
    )
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    found = documents_of(prefix)
    assert all(document[-1] == tokenizer.eod for document in found)
    # In the order of the paths; the empty and the hidden file are no documents.
    assert [tokenizer.detokenize(document) for document in found] == TEXTS
    noted = json.loads(Path(f"{prefix}.json").read_text())
    assert noted["tokenizer_type"] == "ByteLevelTokenizer"
    assert (noted["vocab_size"], noted["eod"], noted["documents"]) == (257, 256, 4)
    assert noted["tokens"] == sum(map(len, found))
    assert "4 documents" in capsys.readouterr().out
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "bytes.bin",
        "bytes.idx",
        "bytes.json",
    ]


def test_json_lines_to_a_tokenizer_trained_on_the_spot(jsonl, tmp_path):
    prefix = tmp_path / "bpe"
    command("--input", jsonl, "--json-key=body", "--output-prefix", prefix, "--train-tokenizer=280")
    # The folder and its file alone give the same ids again, and so does the library itself.
    model = f"{prefix}_tokenizer/tokenizer.json"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model)
    of_folder = build_tokenizer("HuggingFaceTokenizer", f"{prefix}_tokenizer")
    assert [of_folder.tokenize(t) for t in TEXTS] == [tokenizer.tokenize(t) for t in TEXTS]
    assert (of_folder.eod, of_folder.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)
    assert tokenizer.vocab_size == 280
    assert documents_of(prefix) == [[*tokenizer.tokenize(t), tokenizer.eod] for t in TEXTS]
    import tokenizers

    library = tokenizers.Tokenizer.from_file(model)
    assert [library.encode(text).ids for text in TEXTS] == [tokenizer.tokenize(t) for t in TEXTS]
    assert [tokenizer.detokenize(tokenizer.tokenize(text)) for text in TEXTS] == TEXTS
    Corpus(str(prefix), vocab_size=280)
    with pytest.raises(ValueError, match="vocabulary of 280"):
        Corpus(str(prefix), vocab_size=281)


def test_a_trained_tokenizer_is_not_replaced_either(tmp_path, capsys):
    given = ["--input", __file__, "--output-prefix", tmp_path / "bpe", "--train-tokenizer=300"]
    command(*given)
    tokenizer = (tmp_path / "bpe_tokenizer" / "tokenizer.json").read_bytes()
    for suffix in (".bin", ".idx", ".json"):
        Path(f"{tmp_path / 'bpe'}{suffix}").unlink()
    with pytest.raises(SystemExit):
        command(*given[:-1], "--train-tokenizer=290")
    assert "bpe_tokenizer/tokenizer.json exists: give --force" in capsys.readouterr().err
    assert (tmp_path / "bpe_tokenizer" / "tokenizer.json").read_bytes() == tokenizer
    # This one writes no tokenizer.
    command(*given[:-1], "--tokenizer-model", tmp_path / "bpe_tokenizer")


def test_a_smaller_vocabulary_than_wanted_is_told(tmp_path, capsys):
    (tmp_path / "few.txt").write_text("a few words, a few words")
    given = ["--input", tmp_path / "few.txt", "--output-prefix", tmp_path / "few"]
    command(*given, "--train-tokenizer", 32000)
    entries = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "few_tokenizer")).vocab_size
    assert 257 < entries < 300
    assert (
        f"distca prepare: the tokenizer has {entries} entries instead of 32,000, as the text has "
        "no more pairs of tokens to merge; training reads the number from the tokenizer, so no "
        "flag changes\n"
    ) in capsys.readouterr().err
    command(*given, "--train-tokenizer", entries, "--force")
    assert "entries" not in capsys.readouterr().err


def test_megatron_s_own_tokenizer_gives_the_ids_of_ours(tmp_path):
    pytest.importorskip("transformers")
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import (
        HuggingFaceTokenizer as MegatronTokenizer,
    )

    command("--input", __file__, "--output-prefix", tmp_path / "bpe", "--train-tokenizer=300")
    folder = str(tmp_path / "bpe_tokenizer")
    ours, theirs = build_tokenizer("HuggingFaceTokenizer", folder), MegatronTokenizer(folder)
    assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)
    # An end in the text is the end token, in both.
    for text in [*TEXTS, " a , b . <|endoftext|> it 's  "]:
        ids = ours.tokenize(text)
        assert ids == theirs.text_to_ids(text)
        assert ours.detokenize(ids) == text


def test_token_ids_as_text(tmp_path):
    (tmp_path / "ids.txt").write_text("0 70000\n5")
    prefix = tmp_path / "ids"
    command(
        *("--input", tmp_path / "*.txt", "--output-prefix", prefix),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 70001),
    )
    assert documents_of(prefix) == [[0, 70000, 5, 70001]]


def test_the_number_of_workers_changes_nothing(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n} " * n}) + "\n" for n in range(1, 200)))
    files = []
    for workers in (1, 3):
        prefix = tmp_path / f"with{workers}"
        command(
            *("--input", path, "--output-prefix", prefix, "--workers", workers),
            "--train-tokenizer=280",
        )
        files.append([Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "no/such/file"], "no/such/file does not exist"),
        (["--input", "empty"], "holds no file"),
        (["--input", "ids.txt", "--workers", "0"], "--workers 0"),
        (["--input", "bad.jsonl", "--tokenizer-type", "ByteLevelTokenizer"], "line 2"),
        (["--input", "number.jsonl", "--tokenizer-type", "ByteLevelTokenizer"], "is not a text"),
        (["--input", "blank.txt", "--tokenizer-type", "ByteLevelTokenizer"], "holds no text"),
        (["--input", "ids.txt"], "--tokenizer-model"),
        (
            ["--input", "ids.txt", "--tokenizer-model", "ids.txt"],
            "is not a readable tokenizer.json",
        ),
        (["--input", "ids.txt", "--tokenizer-model", "none.json"], "none.json does not exist"),
        (["--input", "ids.txt", "--train-tokenizer", "100"], "at least 257"),
        (
            ["--input", "ids.txt", "--train-tokenizer", "300", "--tokenizer-model", "ids.txt"],
            "neither",
        ),
        (["--input", "ids.txt", "--vocab-size", "9", "--train-tokenizer", "300"], "--vocab-size"),
        (["--input", "ids.txt", "--tokenizer-type", "NullTokenizer"], "--vocab-size"),
        (
            ["--input", "ids.txt", "--tokenizer-type", "NullTokenizer", "--vocab-size", "5"],
            "token id 5 .*--vocab-size 5",
        ),
        (
            ["--input", "words.txt", "--tokenizer-type", "NullTokenizer", "--vocab-size", "5"],
            "token ids separated by blanks",
        ),
        (
            ["--input", "ids.txt", "--tokenizer-type=NullTokenizer", "--vocab-size", "2147483648"],
            "--vocab-size 2147483648: .* at most 2147483647",
        ),
        (
            ["--input=ids.txt", "--tokenizer-type=ByteLevelTokenizer", "--tokenizer-model=ids.txt"],
            "--tokenizer-model is for HuggingFaceTokenizer, not for ByteLevelTokenizer",
        ),
        (
            ["--input", "old.json", "--tokenizer-type", "ByteLevelTokenizer"],
            "would be overwritten",
        ),
    ],
)
def test_bad_input_is_told_and_leaves_the_older_dataset(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("ids.txt").write_text("1 2 5")
    Path("blank.txt").write_text("")
    Path("words.txt").write_text("1 two")
    Path("empty").mkdir()
    Path("bad.jsonl").write_text('{"text": "good"}\nno json\n')
    Path("number.jsonl").write_text('{"text": 3}\n')
    Path("older.txt").write_text("older")
    command("--input=older.txt", "--output-prefix=old", "--tokenizer-type=ByteLevelTokenizer")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("old*")}
    with pytest.raises(SystemExit) as exit_status:
        command(*arguments, "--output-prefix", "old", "--force")
    assert exit_status.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("old*")} == before
    assert not list(tmp_path.glob(".old*"))


def test_a_name_that_another_process_writes_is_refused(tmp_path, monkeypatch, capsys):
    """Whoever comes second is refused before it reads anything; the first one's files are whole."""
    monkeypatch.chdir(tmp_path)
    Path("first.txt").write_text("first" * 1000)
    Path("second.txt").write_text("second")
    flags = ["--output-prefix=s", "--tokenizer-type=ByteLevelTokenizer"]
    second = [sys.executable, "-m", "distca", "prepare", "--input=second.txt", *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    refused = []

    class Meanwhile(ByteLevelTokenizer):
        def tokenize(self, text: str) -> list[int]:
            run = subprocess.run(second, capture_output=True, text=True, env=environment)
            refused.append((run.returncode, run.stdout, run.stderr))
            return super().tokenize(text)

    monkeypatch.setattr(prepare, "build_tokenizer", lambda *_: Meanwhile())
    assert command("--input=first.txt", *flags) == 0
    said = "another process writes s: wait until it ends, or choose another name"
    assert refused == [(2, "", f"distca prepare: {said}\n")]
    assert documents_of(Path("s")) == [[*b"first" * 1000, 256]]
    assert sorted(path.name for path in tmp_path.glob("*s.*")) == ["s.bin", "s.idx", "s.json"]
    # The lock went with its holder.
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert command("--input=second.txt", *flags, "--force") == 0
    assert documents_of(Path("s")) == [[*b"second", 256]]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".s.unfinished-x", ".s.unfinished-[y]", ".other.unfinished-x"):
        Path(name).mkdir()
        Path(name, "s.bin").write_text("cut off")
    Path(".s.lock").write_text("")
    Path("a.txt").write_text("a")
    command("--input=a.txt", "--output-prefix=s", "--tokenizer-type=ByteLevelTokenizer")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a.txt", "s.bin", "s.idx", "s.json", ".other.unfinished-x"}


def test_without_locks_writers_are_warned_and_have_their_own_files(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with dataset.sole_writer(tmp_path / "s") as first, dataset.sole_writer(tmp_path / "s") as other:
        assert first != other
        assert first.is_dir()
    assert "no locks (No locks available): let no other process write there" in caplog.text
    assert not list(tmp_path.iterdir())


def test_what_is_no_utf_8_text_is_named_and_left_out_or_refused(tmp_path, monkeypatch, capsys):
    """Each with its file and line, in the order of the files; all else is there."""
    monkeypatch.chdir(tmp_path)
    faults = {
        "in/a.png": (b"\x89PNG\r\n\0\0", "in/a.png: binary, not text"),
        "in/b.txt": ("caf\u00e9\n".encode("utf-16"), "in/b.txt: UTF-16, not UTF-8"),
        "in/c.txt": ("caf\u00e9\n".encode("utf-32"), "in/c.txt: UTF-32, not UTF-8"),
        "in/d.txt": (b"one\ntwo caf\xe9\n", "in/d.txt, line 2: byte 0xe9 is not UTF-8"),
        "in/e.jsonl": (
            b'\xef\xbb\xbf{"text": "good"}\n{"text": "half \\ud83d"}\n{"text": "\xff"}\n'
            b'{"text": "\\ud83d\\ude00"}\n',
            "in/e.jsonl, line 2: a lone surrogate, which is half a character\n"
            "in/e.jsonl, line 3: byte 0xff is not UTF-8",
        ),
        "in/f.txt": (b"\xef\xbb\xbfmarked", ""),
    }
    Path("in").mkdir()
    for name, (content, _) in faults.items():
        Path(name).write_bytes(content)
    given = ["--input", "in", "--output-prefix", "out"]
    assert command(*given, "--train-tokenizer=300") == 0
    captured = capsys.readouterr()
    assert re.match(r"out: 3 documents, \d+ tokens; left out: 6; --split ", captured.out)
    listed = [fault for _, told in faults.values() for fault in told.splitlines()]
    assert Path("out_left_out.txt").read_text().splitlines() == listed
    told = captured.err.partition("distca prepare: left out ")[2]
    assert len(told.splitlines()) == 4
    assert listed[0] in captured.err
    tokenizer = build_tokenizer("HuggingFaceTokenizer", "out_tokenizer")
    texts = [tokenizer.detokenize(ids[:-1]) for ids in documents_of(Path("out"))]
    assert texts == ["good", "\U0001f600", "marked"]
    # The same again replaces the files if it is to, and says so.
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*.*")}
    with pytest.raises(SystemExit):
        command(*given, "--train-tokenizer=300")
    assert capsys.readouterr().err == (
        "distca prepare: out.bin exists: give --force to replace it, or another --output-prefix\n"
    )
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*.*")} == before
    assert command(*given, "--train-tokenizer=300", "--force") == 0
    assert capsys.readouterr().out.endswith("; the files of an earlier run were replaced\n")

    for name, (_, told) in faults.items():
        if told:
            for kind in ("--tokenizer-type=ByteLevelTokenizer", "--train-tokenizer=300"):
                with pytest.raises(SystemExit):
                    command(
                        *("--input", name, "--output-prefix", "new", "--bad-text", "refuse", kind)
                    )
                assert f"distca prepare: {told.splitlines()[0]}; " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("--input", "in/a.png", "--output-prefix", "new", "--train-tokenizer=300")
    assert "in/a.png: binary, not text\ndistca prepare: the input holds no" in (
        capsys.readouterr().err
    )
    # A list that is no longer true does not stay.
    command("--input", "in/f.txt", "--output-prefix", "out", "--train-tokenizer=300", "--force")
    assert not Path("out_left_out.txt").exists()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    ids = tokenizer.tokenize(text)
    assert max(ids, default=0) < tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text


def test_the_end_token_is_the_one_that_the_configuration_names(tmp_path):
    dataset.train_tokenizer(TEXTS, 300, tmp_path)
    usual = build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod
    config = tmp_path / "tokenizer_config.json"
    for eos in ("a", {"content": "a"}):
        config.write_text(json.dumps({"eos_token": eos}))
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        assert tokenizer.eod == tokenizer.tokenize("a")[0] != usual
    config.write_text(json.dumps({"eos_token": "<|not there|>"}))
    with pytest.raises(ValueError, match="not there"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    config.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")


def test_unknown_tokenizers_are_refused():
    with pytest.raises(ValueError, match="TikTokenizer: choose from"):
        build_tokenizer("TikTokenizer")


def test_the_demo_corpus_is_made_once_and_of_what_was_asked_for(tmp_path, capsys):
    names = ("python_packages", "python_functions")

    def make(*arguments: str) -> tuple[list[bytes], list[int]]:
        arguments = ("--output-dir", str(tmp_path), "--vocab-size", "600", *arguments)
        assert demo_corpus.main(list(arguments)) == 0
        made = [(tmp_path / f"{name}.idx").stat().st_mtime_ns for name in names]
        return [(tmp_path / f"{name}.bin").read_bytes() for name in names], made

    tokens, made = make("--max-megabytes", "0.5", "--histogram")
    assert "of tokens  ####" in capsys.readouterr().out
    assert make("--max-megabytes", "0.5") == (tokens, made)
    (tmp_path / "python_packages.json").unlink()
    again, made_again = make("--max-megabytes", "0.5")
    assert (again == tokens, made_again > made) == (True, True)
    forced, made_by_force = make("--max-megabytes", "0.5", "--force")
    assert (forced == tokens, made_by_force > made_again) == (True, True)
    smaller, _ = make("--max-megabytes", "0.3")
    assert [len(less) < len(more) for less, more in zip(smaller, tokens, strict=True)] == [True] * 2

    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer"))
    documents = [documents_of(tmp_path / name) for name in names]
    packages, functions = (
        [tokenizer.detokenize(document[:-1]) for document in each] for each in documents
    )
    assert sum(map(len, packages)) == sum(map(len, functions)) == 300_000
    assert all(text.startswith("# file: ") for text in packages)
    lengths, short = (np.array([len(document) for document in each]) for each in documents)
    assert lengths.max() > 10 * lengths.min() > 0
    assert np.median(lengths) > 20 * np.median(short)
    for name in names:
        Corpus(str(tmp_path / name), vocab_size=600)


def test_functions_of_the_demo_corpus_have_their_decorators():
    texts = demo_corpus.function_documents(300_000)
    decorated = [text for text in texts if text.lstrip().startswith("@")]
    assert len(decorated) > 5
    assert all("def " in text or "class " in text for text in decorated)
    assert not any(text.rstrip().rsplit("\n", 1)[-1].lstrip().startswith("@") for text in texts)


def test_a_demo_corpus_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="leaves no text"):
        demo_corpus.build_demo_corpus(tmp_path, max_megabytes=0)


def test_the_histogram_counts_all_documents():
    lines = demo_corpus.histogram(np.array([1, 2, 3, 8], dtype=np.int64)).splitlines()
    assert [line.split("documents")[0].split() for line in lines] == [
        ["1", "-", "1", "1"],
        ["2", "-", "3", "2"],
        ["4", "-", "7", "0"],
        ["8", "-", "15", "1"],
    ]
