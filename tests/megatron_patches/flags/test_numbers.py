"""Numbers of all flags: any value is accepted, or refused in one line."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import random
import warnings
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator
from functools import cache

import pytest

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.followed import what_becomes_of
from megatron_patches.flags.numbers import RANGES, Range, check_numbers, ranges
from megatron_patches.loop.run import checked
from megatron_patches.parts import build_parser
from support.arguments import GOOD
from support.pretraining import run
from support.versions import NEWER_FLAGS
from support.whole_runs import write_documents

VALUES = """
    0 -1 1 2 3 5 7 64 1000 0.5 -0.5 1.5 1e-30 1e30 1e308 1e309 -1e308 nan inf -inf 2147483647
    2147483648 4294967296 9223372036854775807 9223372036854775808 99999999999999999999
    -99999999999999999999 1e5 0x10 1_0 true [1] [0]*4 [1]*4 [1]*[2] () - 1,0
""".split()
MEMORY = 64 << 30
"""Bytes that a rank has."""
_KINDS = ("int", "float", "moe_freq_type", "no_rope_freq_type", "tuple_type")


@cache
def parser() -> ArgumentParser:
    def refuse(message: str) -> None:
        raise ValueError(message)

    made = build_parser()
    made.error = refuse  # type: ignore[method-assign,assignment]
    return made


@cache
def numeric() -> dict[str, Action]:
    """Flags with numbers, by name."""
    return {
        action.option_strings[0].removeprefix("--"): action
        for action in parser()._actions
        if getattr(action.type, "__name__", None) in _KINDS and action.option_strings
    }


def kind_of(name: str) -> str:
    what = what_becomes_of(f"--{name}")
    return "ours" if what is None else what[0]


def accept(*flags: str) -> Namespace:
    """Reads and checks a command line as a run does, on the first of two ranks.

    Raises:
        ValueError: it is refused.
    """
    arguments = importlib.import_module("megatron.training.arguments")
    length = [] if "--train-samples" in flags else ["--train-iters", "10"]
    args = parser().parse_args([*GOOD, *length, *flags])
    args.rank, args.world_size = 0, 2
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = DistcaConfig.from_args(args)
        checked(arguments.validate_args, config, args, memory=MEMORY)
    return args


def tried(full: bool) -> Iterator[tuple[str, str]]:
    """Flags with values: all of them, or some of each flag, always the same ones."""
    chosen = random.Random(0)
    for name in sorted(numeric()):
        for value in VALUES if full else chosen.sample(VALUES, 4):
            yield name, value


@pytest.mark.parametrize("distca", [[], ["--distca"]], ids=["plain", "distca"])
def test_any_value_of_any_flag_is_accepted_or_refused_in_one_line(distca, full: bool) -> None:
    lines = []
    for name, value in tried(full):
        several = {2: 2, 3: 3}.get(numeric()[name].nargs, 1)  # type: ignore[call-overload]
        try:
            # A value may begin with a dash.
            given = [f"--{name}={value}"] if several == 1 else [f"--{name}", *[value] * several]
            accept(*distca, *given)
        except ValueError as error:
            lines.append(str(error))
    assert len(lines) > 300
    for line in lines:
        assert "\n" not in line
        assert len(line) < 600


def test_every_number_has_a_range() -> None:
    """Of flags that Megatron-LM or we follow; others change nothing, or are refused."""
    followed = [n for n in numeric() if kind_of(n) in ("passed on", "done", "ours")]
    assert len(followed) > 150
    names = ranges()
    aliases = {name: numeric()[name].option_strings for name in followed}
    missing = [name for name in followed if not {f"--{n}" for n in names} & {*aliases[name]}]
    # A window is checked with its mask, and servers are read by a function of ours.
    assert missing == ["window-size"]
    listed = [name for names in RANGES.values() for name in names.split()]
    assert len(listed) == len({*listed})


def test_defaults_are_in_range() -> None:
    check_numbers(parser().parse_args([]))


@pytest.mark.parametrize(
    "flags",
    """
    --train-iters 0|--make-vocab-size-divisible-by 0|--rope-scaling-factor 0|--kv-channels 7
    |--init-method-std nan|--distributed-timeout-minutes 0|--seed 12345678901234567890
    |--distca-gpus-per-node 99999999999|--eval-iters -1|--clip-grad nan|--clip-grad -1|--lr inf
    |--norm-epsilon -1|--rotary-percent 2|--ffn-hidden-size 0|--exit-duration-in-mins -1|--lr 1e39
    |--moe-layer-freq [2]*4|--distca-server-speeds 1 nan|--rotary-seq-len-interpolation-factor 0
    |--moe-router-bias-update-rate 3e38|--eval-micro-batch-size 0
    """.replace("\n", "").split("|")[: None if NEWER_FLAGS else -1],
)
def test_what_was_a_traceback_or_taken_in_silence_is_a_line(flags: str) -> None:
    name, *values = flags.split()
    with pytest.raises(ValueError, match=f"{name} .*(is out of range: give|give an even)"):
        accept("--distca", name, *values)


@pytest.mark.parametrize(
    "pattern", ["[1]*10**9", "[1]*9**9**9", "[1]*99999999", "([1]*65536+[0])", "[9**9**9]"]
)
@pytest.mark.parametrize("flag", ["moe-layer-freq", "window-attn-skip-freq", "no-rope-freq"])
def test_a_list_that_no_memory_holds_is_not_evaluated(flag: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag}: .* is larger than 65,536"):
        accept("--distca", f"--{flag}", pattern)


@pytest.mark.parametrize(
    ("pattern", "wanted"), [("([1]*3+[0]*1)*2", [1, 1, 1, 0] * 2), ("[0]*2**3", [0] * 8), ("2", 2)]
)
def test_other_lists_are_read_as_megatron_reads_them(pattern: str, wanted: object) -> None:
    assert parser().parse_args(["--moe-layer-freq", pattern]).moe_layer_freq == wanted


def test_a_value_that_megatron_itself_fails_on_is_told_in_a_line() -> None:
    args = parser().parse_args([*GOOD, "--train-iters", "1", "--eval-iters", "0"])
    args.rank, args.world_size = 0, 2

    def validate_args(args: Namespace) -> None:
        assert 8 % args.eval_iters == 0

    refused = r"cannot check the flags: ZeroDivisionError.* in `assert 8 % args.eval_iters == 0`"
    with pytest.raises(ValueError, match=refused):
        checked(validate_args, DistcaConfig.from_args(parser().parse_args(GOOD)), args)


@pytest.mark.parametrize("distca", [[], ["--distca"]], ids=["plain", "distca"])
@pytest.mark.parametrize(
    "flags",
    """
    --num-layers 1000000000|--hidden-size 1073741824|--ffn-hidden-size 2147483647
    |--kv-channels 1073741824|--vocab-size 2147483647
    |--seq-length 2147483520 --max-position-embeddings 2147483647
    |--make-vocab-size-divisible-by 2147483647|--micro-batch-size 1073741824
    |--num-layers 100000 --hidden-size 8192
    |--seq-length 67108864 --max-position-embeddings 67108864 --hidden-size 4096
    |--num-experts 2147483646 --moe-router-topk 1 --moe-ffn-hidden-size 64
    |--position-embedding-type learned_absolute --max-position-embeddings 2147483647
    """.replace("\n", "").split("|"),
)
def test_what_no_memory_holds_is_refused_before_any_work(distca, flags: str) -> None:
    with pytest.raises(ValueError, match=r"^a rank needs at least [0-9,.]+ GB of") as refused:
        accept(*distca, *flags.split())
    assert str(refused.value).count("but has 68.7 GB: make the model, --seq-length or") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--seed 1073741824 --clip-grad 0 --distributed-timeout-minutes 1000000 "
            "--norm-epsilon 1 --adam-beta1 0 --weight-decay 0 --distca-tolerance 0 "
            "--distca-gpus-per-node 4096 --distca-max-buffer-bytes 4611686018427387904 "
            "--init-method-std 0",
            None,
        ),
        # Adam divides 0 by 0.
        ("--init-method-std 0 --adam-eps 0", "weight of embedding.word_embeddings.weight is not"),
        ("--train-iters 2147483647", "lower --train-iters"),
        ("--lr nan", "--lr nan is out of range: give a number from 0 to"),
        ("--num-layers 1000000000", "GB of memory (GB of weights "),
    ],
)
def test_whole_runs_end_well_or_with_one_line(flags: str, said: str | None, tmp_path) -> None:
    data = write_documents(tmp_path / "documents", [500, 470, 130, 300] * 20)
    given = ["--train-iters", "3", "--distca", *flags.split()]
    _, output = run(2, data, *given, status=0 if said is None else 2)
    errors = [line for line in output.splitlines() if "] error: " in line]
    assert len(errors) == (said is not None), output[-3000:]
    assert all(said in line for line in errors)


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "text"),
    [
        (Range(1, 5, whole=True), [1, 5], [0, 6, 2.0, math.nan], "a whole number from 1 to 5"),
        (Range(0, 1), [0, 1.0, 0.5], [-1e-9, 1.1, math.nan, math.inf], "a number from 0 to 1"),
        (Range(0, 1, above=True), [1e-9, 1], [0, 0.0], "a number above 0 and at most 1"),
        (Range(0, 1, below=True), [0], [1, 1.0], "a number from 0 and below 1"),
    ],
)
def test_ranges(allowed: Range, inside, outside, text: str) -> None:
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == text
