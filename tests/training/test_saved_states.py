"""Checkpoints of other optimizers, of a step that is to run again, and with checksums, load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_patches.loop.checkpoint_folder import TRACKER
from support.own_loop import FLAGS, sizes
from support.pretraining import LOSS, run_command
from support.whole_runs import write_documents


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    documents = write_documents(folder / "documents", [500, 470, 130, 300] * 20)
    return [*FLAGS, *sizes(256, data_parallel=2), "--data-path", documents]


def losses(output: str) -> dict[int, str]:
    return {int(iteration): loss for iteration, loss in LOSS.findall(output)}


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["float32", "bf16"])
def test_sgd_goes_on_with_its_momentum(data, tmp_path: Path, precision: list[str]) -> None:
    flags = [*data, "--distca", "--optimizer", "sgd", "--lr", "0.1", "--train-iters", "3"]
    flags += ["--save-interval", "2", *precision]
    whole = losses(run_command(2, [*flags, "--save", str(tmp_path)]))
    (tmp_path / TRACKER).write_text("2")
    assert losses(run_command(2, [*flags, "--load", str(tmp_path)])) == {3: whole[3]}


def test_sgd_is_refused_with_the_distributed_optimizer(data) -> None:
    output = run_command(
        2, [*data, "--distca", "--optimizer", "sgd", "--use-distributed-optimizer"], 1
    )
    assert re.search(r"error: --optimizer sgd .*: remove --use-distributed-optimizer", output)
    assert "Traceback" not in output


@pytest.mark.parametrize("distca", [[], ["--distca"]], ids=["plain", "distca"])
def test_a_checkpoint_of_a_step_that_is_to_run_again_loads(data, tmp_path, distca) -> None:
    """Megatron-LM saves it where a step's gradient is NaN; the micro-batches are read anew."""
    flags = [*data, *distca, "--train-iters", "6", "--lr", "1e30", "--save", str(tmp_path)]
    run_command(2, flags, 1)
    saved = int((tmp_path / TRACKER).read_text())
    output = run_command(2, [*flags, "--load", str(tmp_path)], 1)
    assert f"successfully loaded checkpoint from {tmp_path}" in output
    assert re.search(rf"at iteration {saved}$", output, re.M)
    # Megatron-LM wants to run it again on another device.
    assert "Please resume the job from the same checkpoint to rerun the last iteration" in output


def test_verify_integrity_finds_a_changed_byte_and_a_shard_of_another_iteration(
    data, tmp_path
) -> None:
    save, one_line = tmp_path / "save", r"error: .*iter_0000002 cannot be loaded: .*"
    flags = [*data, "--distca", "--verify-integrity"]
    run_command(2, [*flags, "--save", str(save)])
    shard = save / "iter_0000002" / "__0_0.distcp"
    kept = shard.read_bytes()
    changed = bytearray(kept)
    changed[len(kept) // 2] ^= 1
    load = [*flags, "--train-iters", "3", "--override-opt_param-scheduler", "--load", str(save)]
    for content in (bytes(changed), (save / "iter_0000001" / shard.name).read_bytes()):
        shard.write_bytes(content)
        output = run_command(2, load, 1)
        assert re.search(one_line + r"__0_0\.distcp: hash mismatch.*--ckpt-step 1$", output, re.M)
        assert "Traceback" not in output
    shard.write_bytes(kept)
    assert sorted(losses(run_command(2, load))) == [3]


def test_stages_of_a_pipeline_without_distca_have_micro_batches_of_several_samples(data) -> None:
    """The same losses as of micro-batches of one sample."""
    stages = ["--pipeline-model-parallel-size", "2"]
    one = losses(run_command(2, [*data, *stages]))
    two = losses(run_command(2, [*data, *stages, "--micro-batch-size", "2"]))
    assert list(map(float, two.values())) == pytest.approx(list(map(float, one.values())), rel=2e-6)


@pytest.mark.parametrize(("batch", "last"), [(8, 3), (2, 6)])
def test_a_run_of_samples_ends_with_these_at_another_batch_size(
    data, tmp_path, batch, last
) -> None:
    at = data.index("--train-iters")
    flags = [*data[:at], *data[at + 2 :], "--distca", "--train-samples", "16"]
    run_command(2, [*flags, "--save", str(tmp_path), "--exit-interval", "2"])
    found = losses(
        run_command(2, [*flags, "--load", str(tmp_path), "--global-batch-size", str(batch)])
    )
    assert sorted(found) == list(range(3, last + 1))
