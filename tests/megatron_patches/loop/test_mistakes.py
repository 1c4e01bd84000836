"""Common mistakes: each ends in a line that names what was wrong and says what to do."""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from megatron_patches.loop.choice import choose_loop
from megatron_patches.loop.gpt_job import GPT_JOB
from megatron_patches.loop.lean.training import LaunchedProcess, _arguments_or_exit
from megatron_patches.loop.preflight import check_read, check_written, lock_save
from support.checkpoints import write_checkpoint
from support.pretraining import FLAGS, TOKENIZERS, kill_all, start

MOST_LINES = 5
# Name, flags beside good ones (of a run on two ranks, with {folder} for files made below), what
# the line says was wrong, and what it says to do.
MISTAKES = [
    ("a misspelt flag", "--nm-layers 3", "there is no --nm-layers", "did you mean --num-layers"),
    ("a flag of no program", "--frobnicate", "there is no --frobnicate", "--help lists all flags"),
    ("another dtype", "--fp16", "--fp16", "--training-loop megatron has it"),
    ("no number", "--lr fast", "--lr: invalid float value: 'fast'", "invalid float"),
    ("a value alone", "--lr 1 twelve", "twelve belongs to no flag", "belongs to no flag"),
    ("another choice", "--normalization Norm", "invalid choice: 'Norm'", "choose from"),
    ("no length", "--train-samples 8", "--train-iters or --train-samples", "not both"),
    ("heads", "--num-attention-heads 6 --num-query-groups 2", "--hidden-size 64", "change one"),
    (
        "tensor parallelism",
        "--num-attention-heads 1 --num-query-groups 1 --tensor-model-parallel-size 2",
        "does not divide --num-attention-heads 1",
        "use a size that does",
    ),
    ("world size", "--tensor-model-parallel-size 4", "2 processes", "start a multiple of that"),
    (
        "pipeline",
        "--num-layers 3 --pipeline-model-parallel-size 2",
        "does not divide --num-layers 3",
        "use a multiple of 2",
    ),
    ("batch size", "--global-batch-size 5", "--global-batch-size 5", "use 4"),
    (
        "too few positions",
        "--max-position-embeddings 128",
        "less than --seq-length 256",
        "raise it",
    ),
    ("window", "--seq-length 200", "--seq-length 200", "use 128"),
    (
        "positions",
        "--position-embedding-type learned_absolute",
        "'learned_absolute'",
        "choose from",
    ),
    ("minimum rate", "--min-lr 1", "--min-lr 1.0", "must lie in"),
    ("warm-up", "--lr-warmup-iters 9", "--lr-warmup-iters 9", "must be less than"),
    ("an interval without --save", "--save-interval 2", "--save-interval", "needs --save"),
    ("iterations of a trace", "--distca --distca-trace x", "must lie in 1 .. 2", "iterations of"),
    ("no tokenizer", "--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model", "needs"),
    (
        "a missing tokenizer",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/none",
        "/none does not exist",
        "give a tokenizer.json, or its folder",
    ),
    ("missing data", "--data-path {folder}/none", "none.idx does not exist", "distca prepare"),
    ("cut data", "--data-path {folder}/cut", "cut.bin has", "make both again"),
    ("other data", "--data-path {folder}/other", "vocabulary of 999", "give the tokenizer"),
    ("an empty split", "--eval-iters 1 --split 1,0,0", "split of", "give it a larger share"),
    ("no split", "--split 1,x", "--split '1,x'", "give three shares"),
    ("data named twice", "--test-data-path a", "--data-path and --test-data-path", "give one of"),
    ("a weight without data", "--data-path 0.3 a b", "--data-path 0.3 a b", "a weight before each"),
    (
        "a missing profile",
        "--distca --distca-profile {folder}/none",
        "none does not exist",
        "distca profile",
    ),
    (
        "a profile of another model",
        "--distca --distca-profile {folder}/profile.json",
        "was measured for",
        "profile that",
    ),
    ("--save is a file", "--save {folder}/profile.json", "File exists", "give another place"),
    ("--save without permission", "--save /proc/self/x", "cannot be written", "give another place"),
    (
        "a trace into nowhere",
        "--distca --distca-trace-iterations 1 2 --distca-trace /proc/x/y",
        "--distca-trace /proc/x/y cannot be written to",
        "give another place",
    ),
    (
        "--load without checkpoints",
        "--load {folder}/none --exit-on-missing-checkpoint",
        "has no checkpoint",
        "give another folder",
    ),
    (
        "a missing iteration",
        "--load {folder}/saved --ckpt-step 8",
        "iter_0000008 is not there",
        "--load has iter_0000007",
    ),
    ("another model", "--load {folder}/saved --num-layers 4", "another model", "give those flags"),
    ("a step without --load", "--ckpt-step 8", "--ckpt-step 8", "needs --load"),
    ("servers", "--distca --distca-servers two", "'two'", "neither inplace nor dedicated:N"),
    ("too many servers", "--distca --distca-servers dedicated:2", "0 processes", "start a mult"),
]


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory) -> Path:
    """Files of which each is wrong in one way."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("cut", "other"):
        for suffix in (".bin", ".idx", ".json"):
            shutil.copy(corpus + suffix, folder / f"{name}{suffix}")
    with (folder / "cut.bin").open("r+b") as file:
        file.truncate(1000)
    described = json.loads((folder / "other.json").read_text())
    (folder / "other.json").write_text(json.dumps(described | {"vocab_size": 999}))
    ones = ((1.0, 1.0), (1.0, 1.0))
    Profile((128, 256), ones, ones, AttentionShape(1, 1, 8, 2), {}).save(folder / "profile.json")
    args = accepted([], corpus)
    write_checkpoint(folder / "saved", Namespace(**plain(args)))
    return folder


def plain(args: Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(args).items() if isinstance(value, int | str)}


def accepted(flags: list[str], corpus: str) -> Namespace:
    """Flags as the lean loop accepts them on the first of two ranks."""
    argv = [*TOKENIZERS["lean"], *FLAGS, "--train-iters", "2", "--data-path", corpus, *flags]
    return _arguments_or_exit(GPT_JOB, argv, LaunchedProcess(world_size=2))


def lines_of(flags: list[str], corpus: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a run with these flags logs as it ends."""
    try:
        args = accepted(flags, corpus)
        check_read(args)
        check_written(args)
        lock_save(args, {})
    except SystemExit:
        return "\n".join(record.getMessage() for record in caplog.records).splitlines()
    except ValueError as error:
        return f"error: {error}".splitlines()
    raise AssertionError("it was accepted")


@pytest.mark.parametrize(
    ("flags", "wrong", "remedy"),
    [pytest.param(*mistake[1:], id=mistake[0].replace(" ", "-")) for mistake in MISTAKES],
)
def test_a_mistake_ends_in_a_line_that_helps(flags, wrong, remedy, folder, corpus, caplog) -> None:
    with caplog.at_level(logging.ERROR):
        lines = lines_of(flags.format(folder=folder).split(), corpus, caplog)
    (line,) = lines
    assert line.startswith("error: ")
    assert wrong in line, line
    assert remedy in line, line
    assert len(line) < 600


def test_another_loop_ends_in_few_lines(capsys) -> None:
    with pytest.raises(SystemExit):
        choose_loop({}, ["--training-loop", "own"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= MOST_LINES
    assert "choose from" in lines[-1]


def test_good_flags_are_accepted(corpus, folder, caplog) -> None:
    """Else the mistakes would show nothing."""
    assert len(MISTAKES) > 20
    with pytest.raises(AssertionError, match="it was accepted"):
        lines_of(["--save", str(folder / "new"), "--load", str(folder / "saved")], corpus, caplog)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nm-layers 3", "error: there is no --nm-layers: did you mean --num-layers?"),
        ("--data-path {folder}/none", "error: {folder}/none.idx does not exist"),
    ],
    ids=["flag", "data"],
)
def test_two_ranks_tell_it_once_above_the_launcher_s_lines(flags, message, folder, corpus) -> None:
    """In a whole run, which also tells what libraries print."""
    given = flags.format(folder=folder).split()
    process = start(2, corpus, "--train-iters", "2", *given)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        kill_all(process)
    assert process.returncode
    lines = output.splitlines()
    launcher = next(i for i, line in enumerate(lines) if "torch/distributed/elastic" in line)
    assert sum(message.format(folder=folder) in line for line in lines) == 1
    assert message.format(folder=folder) in "\n".join(lines[:launcher])
    assert launcher <= MOST_LINES, output
