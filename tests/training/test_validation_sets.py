"""Fine-tuning, and validation on whole sets, at several numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.chats import save_tokenizer, some_conversations, write_lines
from support.versions import EVALUATES_BY_ITS_OWN_SIZE, NAMES_VALIDATION_SETS
from support.whole_runs import RunSeen, whole_run

FLAGS = """
    --sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format default
    --make-vocab-size-divisible-by 262 --train-iters 2 --eval-interval 2 --eval-iters 0
    --full-validation --multiple-validation-sets --distca-max-document-length 768
""".split()
SETS = ["0", "1"]
if NAMES_VALIDATION_SETS:
    SETS = ["short", "long"]
    FLAGS += ["--validation-set-names", *SETS]
OTHER_SIZE = "--eval-global-batch-size 3" * EVALUATES_BY_ITS_OWN_SIZE
# As many tokens in a window, and in a global batch.
LAYOUTS = {
    "dense": (1, "--seq-length 768 --global-batch-size 2 --attention-backend unfused"),
    "DP2": (2, "--seq-length 384 --global-batch-size 4 --distca"),
    "DP2, whole": (2, "--seq-length 384 --global-batch-size 4 --distca --no-distca-ping-pong"),
    "DP2, pools": (2, "--seq-length 384 --global-batch-size 4 --distca --distca-pool-size 1"),
    "DP3": (3, f"--seq-length 256 --global-batch-size 6 --distca {OTHER_SIZE}"),
}


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory) -> dict[str, list[RunSeen]]:
    """Two steps in each layout, and then an evaluation, as each rank saw them."""
    folder: Path = tmp_path_factory.mktemp("chats")
    sets = {
        name: write_lines(folder / f"{name}.jsonl", some_conversations(count, seed))
        for name, count, seed in (("train", 30, 0), ("short", 2, 1), ("long", 9, 2))
    }
    flags = [*FLAGS, "--tokenizer-model", save_tokenizer(folder / "tokenizer")]
    blends = {"train": sets["train"], "valid": [sets["short"], sets["long"]], "test": None}
    (folder / "blends.json").write_text(json.dumps(blends))
    flags += ["--per-split-data-args-path", str(folder / "blends.json")]
    return {
        name: ranks.run(whole_run, [*flags, *layout.split()], world_size=size)
        for name, (size, layout) in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dense"])
def test_losses_of_answers_equal_plain_megatron_s(runs, layout: str) -> None:
    (expected,) = runs["dense"]
    for rank in runs[layout]:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)


def test_no_thread_outlives_the_loop(runs) -> None:
    assert all(rank.threads_left == [] for of_ranks in runs.values() for rank in of_ranks)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dense"])
def test_each_set_has_one_loss_whatever_the_ranks(runs, layout: str) -> None:
    """Also where the evaluation's batches are of other sizes, and most of them is padding."""
    (expected,) = runs["dense"]
    at = ("iteration 2", "iteration 2 on validation set")
    names = [f"{where}-{name}" for where in at for name in SETS]
    assert [where for where, _ in expected.validation] == names
    losses = dict(expected.validation)
    assert losses[names[0]] == losses[names[2]] != losses[names[1]] == losses[names[3]]
    for rank in runs[layout]:
        found = dict(rank.validation)
        assert found == pytest.approx(losses, rel=1e-5)
        # The second evaluation reads the same.
        assert found[names[0]] == found[names[2]]
