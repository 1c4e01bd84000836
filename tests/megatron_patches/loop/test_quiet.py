"""What users can do nothing about is not told: a resumed run and a conversion."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

from megatron_patches import mcore_fixes
from support.forks import ROOT
from support.pretraining import FLAGS, TOKENIZER, run_command
from support.whole_runs import write_documents

CONVERT = [sys.executable, "-m", "distca.commands.main", "convert", "--checkpoint"]


def test_a_resume_and_a_conversion_tell_what_a_user_needs(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", [400, *[40] * 30] * 4)
    save, model = str(tmp_path / "save"), tmp_path / "model"
    flags = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--distca", "--hidden-dropout", "0"]
    flags += ["--save", save, "--load", save, "--train-iters", "2"]
    run_command(2, [*flags, "--exit-interval", "1"])
    resumed = run_command(2, flags)
    assert "iteration 2/2" in resumed
    # torch's and megatron-core's of their own calls come from every rank.
    assert re.findall(r".*Warning: .*|.*IS DEPRECATED.*", resumed) == []
    # Its messages for each split and rank appear once.
    assert resumed.count("Load the _IndexReader from") == 1
    assert resumed.count("Extract the document indices") == 1
    assert resumed.count("MCore's async save") == 0

    def converted(checkpoint: str) -> list[str]:
        command = [*CONVERT, checkpoint, "--to", str(model)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        told = done.stderr.splitlines()
        return [line for line in told if not re.match(r"distca convert: \d+:\d\d, ", line)]

    assert converted(save) == [
        "NullTokenizer has no files: the model is written without a tokenizer",
        f"converted iteration 2 of {save} to {model}",
    ]
    assert converted(save) == [
        f"distca convert: --to {model} has files already: give another folder, or --force to "
        "replace them"
    ]


def test_other_warnings_stay() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        mcore_fixes.leave_out_warnings_of_calls()
        warnings.warn(
            "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed. Its",
            UserWarning,
            stacklevel=1,
        )
        warnings.warn("The .grad attribute is gone", UserWarning, stacklevel=1)
        warnings.warn("something of ours will change", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in seen] == [
        "The .grad attribute is gone",
        "something of ours will change",
    ]
