"""Common mistakes: each ends in a line that names what was wrong and says what to do."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.sizes import checkpoint_bytes
from megatron_patches.loop.preflight import check_boards, check_read, check_trace, lock_save
from megatron_patches.parts import parse_args
from support.checkpoints import write_checkpoint
from support.pretraining import FLAGS, TOKENIZER, kill_all, run, start

# Name, flags beside good ones (of a run on two ranks, with {folder} for files made below), what
# the line says was wrong, and what it says to do.
MISTAKES = [
    ("a misspelt flag", "--nm-layers 3", "there is no --nm-layers", "did you mean --num-layers"),
    ("a flag of no program", "--frobnicate", "there is no --frobnicate", "--help lists all flags"),
    ("no number", "--lr fast", "--lr: invalid float value: 'fast'", "invalid float"),
    ("a value alone", "--lr 1 twelve", "unrecognized arguments: twelve", "twelve"),
    ("another choice", "--normalization Norm", "invalid choice: 'Norm'", "choose from"),
    (
        "heads",
        "--num-attention-heads 6",
        "--hidden-size 64 is not a multiple of --num-attention-heads 6",
        "give --hidden-size 60 or 66, other heads, or --kv-channels",
    ),
    ("world size", "--tensor-model-parallel-size 4", "Megatron-LM refuses", "not divisible by"),
    (
        "a batch that ranks cannot share",
        "--global-batch-size 3",
        "--global-batch-size 3 is not a multiple of --micro-batch-size 1 times the data-parallel",
        "size 2: give 2 or 4",
    ),
    (
        "a small batch",
        "--global-batch-size 1",
        "--global-batch-size 1 is not a multiple",
        "size 2: give 2",
    ),
    ("window", "--seq-length 200", "--seq-length 200", "use 128"),
    (
        "positions",
        "--distca --position-embedding-type learned_absolute",
        "not learned_absolute",
        "needs --position-embedding-type rope",
    ),
    ("iterations of a trace", "--distca --distca-trace x", "must lie in 1 .. 2", "iterations of"),
    ("missing data", "--data-path {folder}/none", "none.idx does not exist", "distca prepare"),
    ("cut data", "--data-path {folder}/cut", "cut.bin has", "make both again"),
    ("other data", "--data-path {folder}/other", "vocabulary of 999", "give the tokenizer"),
    ("an empty split", "--eval-iters 1 --split 1,0,0", "split of", "give it a larger share"),
    ("no split", "--split 1,x", "--split '1,x'", "give three shares"),
    ("data named twice", "--test-data-path a", "Megatron-LM refuses", "A single data source"),
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
    (
        "--save is a file",
        "--save {folder}/profile.json --save-interval 2",
        "File exists",
        "give another place",
    ),
    (
        "--save without permission",
        "--save /proc/self/x --save-interval 2",
        "cannot be written",
        "give another place",
    ),
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
    ("servers", "--distca --distca-servers two", "'two'", "neither inplace nor dedicated:N"),
    ("too many servers", "--distca --distca-servers dedicated:2", "none of 2", "start more"),
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
    """Flags as the loop accepts them on the first of two ranks."""
    argv = [*TOKENIZER, *FLAGS, "--train-iters", "2", "--data-path", corpus, *flags]
    args = parse_args(argv, world_size=2)
    # Of the tokenizer, which only a run makes.
    args.padded_vocab_size = 258
    return args


def line_of(flags: list[str], corpus: str) -> str:
    """What a run with these flags says as it ends."""
    try:
        args = accepted(flags, corpus)
        config = DistcaConfig.from_args(args)
        check_read(config, args)
        check_boards(args)
        check_trace(config)
        if args.save is not None:
            lock_save(Path(args.save), checkpoint_bytes(args), {})
    except ValueError as error:
        return str(error)
    raise AssertionError("it was accepted")


@pytest.mark.parametrize(
    ("flags", "wrong", "remedy"),
    [pytest.param(*mistake[1:], id=mistake[0].replace(" ", "-")) for mistake in MISTAKES],
)
def test_a_mistake_ends_in_a_line_that_helps(flags, wrong, remedy, folder, corpus) -> None:
    line = line_of(flags.format(folder=folder).split(), corpus)
    assert wrong in line, line
    assert remedy in line, line
    assert "\n" not in line
    assert len(line) < 600


def test_good_flags_are_accepted(corpus, folder) -> None:
    """Else the mistakes would show nothing."""
    assert len(MISTAKES) > 20
    save = ["--save", str(folder / "new"), "--save-interval", "2", "--load", str(folder / "saved")]
    save += ["--train-iters", "8"]
    with pytest.raises(AssertionError, match="it was accepted"):
        line_of(save, corpus)


@pytest.mark.parametrize(
    ("flags", "message", "most"),
    [
        # Libraries warn as they are imported.
        ("--nm-layers 3", "error: there is no --nm-layers: did you mean --num-layers?", 12),
        # Megatron-LM prints much as it starts.
        ("--data-path {folder}/none", "error: {folder}/none.idx does not exist", 10_000),
    ],
    ids=["flag", "data"],
)
def test_two_ranks_tell_it_once_above_the_launcher_s_lines(
    flags, message, most, folder, corpus
) -> None:
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
    told = [i for i, line in enumerate(lines) if message.format(folder=folder) in line]
    assert len(told) == 2
    assert told[0] < launcher
    # The last line of the report but its border; a rank whose store has gone may warn after it.
    assert set(lines[told[1] + 1].strip()) == {"="}
    assert "traceback : error: " in lines[told[1]]
    assert launcher <= most, output


@pytest.mark.parametrize("distca", [[], ["--distca"]], ids=["plain", "distca"])
def test_a_file_of_flags_is_refused_before_it_is_read(distca, corpus, tmp_path) -> None:
    _, output = run(2, corpus, *distca, "--yaml-cfg", str(tmp_path / "flags.yaml"), status=2)
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, output
    assert "DistCA does not cover --yaml-cfg" in errors[0]
