"""Checkpoints of no iteration, named `release`, as converters write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patches.loop.checkpoint_folder import TRACKER
from support.own_loop import FLAGS, sizes
from support.pretraining import LOSS, run_command
from support.whole_runs import write_documents

# A converter's has consumed no samples.
WEIGHTS_ALONE = ["--finetune", "--no-load-optim", "--no-load-rng"]


def test_a_release_loads_with_and_without_distca(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "documents", [512] * 40)

    def train(*flags: str) -> dict[int, float]:
        given = [*FLAGS, "--data-path", data, *sizes(256, data_parallel=2), *flags]
        found = LOSS.findall(run_command(2, given))
        return {int(iteration): float(loss) for iteration, loss in found}

    begun = tmp_path / "begun"
    before = train("--distca", "--save", str(begun))
    (begun / "iter_0000002").rename(begun / "release")
    (begun / TRACKER).write_text("release")
    load = ["--load", str(begun), *WEIGHTS_ALONE]
    with_distca = train("--distca", *load)
    # Iterations count from the first.
    assert sorted(with_distca) == [1, 2]
    assert with_distca[1] < before[2]
    # Without, each rank cuts documents at its tokens' end: one has them whole.
    one = [*sizes(512), *load]
    given = [*FLAGS, "--data-path", data, *one]
    plain = {int(n): float(loss) for n, loss in LOSS.findall(run_command(1, given))}
    assert plain == pytest.approx(with_distca, rel=2e-6)
    # Other ranks pad the vocabulary alike, or are refused.
    shards = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    given = [*FLAGS, "--data-path", data, *sizes(512), "--distca", *load, *shards]
    sharded = {int(n): float(loss) for n, loss in LOSS.findall(run_command(2, given))}
    assert sharded == pytest.approx(with_distca, rel=2e-6)
    output = run_command(2, [*given, "--make-vocab-size-divisible-by", "128"], status=2)
    lines = [line for line in output.splitlines() if "] error: " in line]
    assert len(lines) == 1, output[-3000:]
    assert "release was trained with a vocabulary padded to 128 rows, but this run" in lines[0]
