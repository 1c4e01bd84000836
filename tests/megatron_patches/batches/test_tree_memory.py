"""A tree of many branches is held against a rank's memory before the run begins, and named."""

from __future__ import annotations

import json

import pytest

from megatron_patches.batches.dataset_factory import open_source
from megatron_patches.batches.tree_memory import check_tree_memory
from megatron_patches.flags.config import DistcaConfig
from support.arguments import parse
from support.chats import message, save_tokenizer


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("trees")
    lines = [
        {"messages": [message("user", "a" * 300), message("assistant", "b" * 900)]},
        {
            "prompt": [message("user", "c" * 400)],
            "completions": [f"{n} " * 10 for n in range(30)],
        },
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    given = "--sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format default"
    given += " --distca --distca-share-prefixes --seq-length 4096 --eval-iters 0 --split 1,0,0"
    tokenizer = save_tokenizer(folder / "tokenizer")
    data = str(folder / "train.jsonl")
    return [*given.split(), "--tokenizer-model", tokenizer, "--data-path", data]


def test_a_tree_without_room_is_named(flags: list[str]) -> None:
    args = parse(*flags)
    args.vocab_size = 262
    config = DistcaConfig.from_args(args)
    check_tree_memory(config, args, ["train"], 10**9)
    source = open_source(config, args, args.data_path[0], "train")
    assert source.largest == 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"line 2.*: its tree of 30 branches needs at least 0\.0"):
        check_tree_memory(config, args, ["train"], 10**5)
