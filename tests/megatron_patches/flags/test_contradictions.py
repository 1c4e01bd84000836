"""Flags that Megatron-LM refuses without a word are refused in words."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.loop.run import checked
from megatron_patches.parts import parse_args
from support.pretraining import FLAGS, TOKENIZER

OVERLAP = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
# Flags beside good ones, and the whole line about them.
REFUSED = [
    (
        "--num-attention-heads 6",
        "--hidden-size 64 is not a multiple of --num-attention-heads 6: give --hidden-size 60 or "
        "66, other heads, or --kv-channels, the size of a head",
    ),
    (
        "--num-attention-heads 65",
        "--hidden-size 64 is not a multiple of --num-attention-heads 65: give --hidden-size 65, "
        "other heads, or --kv-channels, the size of a head",
    ),
    ("--lr 1e-4 --min-lr 1e-3", "--min-lr 0.001 is more than --lr 0.0001: give a smaller --min-lr"),
    (
        "--save x --save-interval 4 --save-retain-interval 6",
        "--save-retain-interval 6 is not a multiple of --save-interval 4: give 8",
    ),
    (
        f"--save x --save-interval 4 --save-params-interval 6 {OVERLAP}",
        "--save-params-interval does not work with --overlap-param-gather: remove one",
    ),
    (
        "--log-memory-interval 3 --log-interval 2",
        "--log-memory-interval 3 is not a multiple of --log-interval 2: give 4",
    ),
    (
        "--fp16 --bf16",
        "--fp16 and --bf16 are two formats of the same numbers: remove one of the two",
    ),
    (
        "--weight-decay-incr-style linear --end-weight-decay 0.1",
        "--weight-decay-incr-style linear needs --start-weight-decay",
    ),
    (
        "--start-weight-decay 0.1",
        "--start-weight-decay is for a weight decay that changes: add --weight-decay-incr-style "
        "linear or cosine, or remove the flag",
    ),
    (
        "--use-distributed-optimizer --disable-gloo-process-groups --ckpt-format torch",
        "--use-distributed-optimizer saves with --ckpt-format torch by way of gloo: give "
        "--ckpt-format torch_dist, or remove --disable-gloo-process-groups",
    ),
    (
        "--data-path a --data-args-path b",
        "--data-path and --data-args-path both name the data: remove one of the two",
    ),
    (
        "--train-data-path a --per-split-data-args-path b",
        "--per-split-data-args-path names the data of all splits: remove it, or "
        "--train-data-path, --valid-data-path and --test-data-path",
    ),
    ("--num-dataset-builder-threads 0", "--num-dataset-builder-threads 0: give at least 1"),
    (
        "--ckpt-convert-format torch --load x",
        "--ckpt-convert-format needs --load, and --ckpt-convert-save for what it writes",
    ),
    (
        "--decoder-seq-length 9999",
        "--decoder-seq-length 9999 is more than --max-position-embeddings 4096: remove "
        "--decoder-seq-length, which a GPT does not use",
    ),
    (
        "--encoder-seq-length 128",
        "--seq-length and --encoder-seq-length say the same: remove --encoder-seq-length",
    ),
]


@pytest.mark.parametrize(("flags", "line"), REFUSED)
def test_a_line_says_what_does_not_go_together(flags: str, line: str) -> None:
    with pytest.raises(ValueError, match="--") as refused:
        parse_args([*TOKENIZER, *FLAGS, "--train-iters", "2", *flags.split()], world_size=2)
    assert str(refused.value) == line


def test_values_that_go_together_pass(corpus: str) -> None:
    good = "--save x --save-interval 4 --save-retain-interval 8 --log-memory-interval 2"
    good += " --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1"
    good += " --num-attention-heads 6 --kv-channels 16 --num-query-groups 6 --bf16"
    given = [*TOKENIZER, *FLAGS, "--train-iters", "2", "--data-path", corpus, *good.split()]
    assert parse_args(given, world_size=2).kv_channels == 16


def test_other_assertions_without_words_show_their_condition(corpus: str, tmp_path: Path) -> None:
    # pytest gives words to assertions of this file.
    script = tmp_path / "theirs.py"
    script.write_text("def check(args):\n    assert args.hidden_size == 0\n")
    given = [*TOKENIZER, *FLAGS, "--train-iters", "2", "--data-path", corpus]
    args = parse_args(given, world_size=2)
    # As before the check, which derives these.
    args.encoder_seq_length = args.start_weight_decay = args.end_weight_decay = None
    with pytest.raises(ValueError, match=r"refuses the flags: it needs `args\.hidden_size == 0`"):
        checked(runpy.run_path(str(script))["check"], DistcaConfig.from_args(args), args)
