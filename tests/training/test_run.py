"""Whole runs of the command: resuming, resharding, being killed, bad input."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from distca.plan.span import Int64s
from megatron_patches.flags.sizes import checkpoint_bytes
from megatron_patches.parts import parse_args
from support.pretraining import FLAGS, TOKENIZER, descendants, kill_all, run, start


def wait_for(process: subprocess.Popen[str], pattern: str) -> Iterator[str]:
    """Lines of the output until one matches, that one included."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if re.search(pattern, line):
            return
    raise AssertionError(f"{pattern} was never printed")


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory) -> tuple[dict[int, str], Path]:
    """Losses of six iterations on two ranks, and a folder with the checkpoint of the third."""
    return six_iterations(corpus, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def without_dropout(corpus, tmp_path_factory) -> tuple[dict[int, str], Path]:
    """The same where no random number is drawn, so that other layouts can be compared."""
    return six_iterations(corpus, tmp_path_factory.mktemp("plain"), "--hidden-dropout", "0")


def six_iterations(corpus: str, save: Path, *more: str) -> tuple[dict[int, str], Path]:
    flags = ["--distca", "--use-distributed-optimizer", "--train-iters", "6", *more]
    losses, _ = run(2, corpus, *flags, "--save", str(save), "--save-interval", "3")
    assert sorted(losses) == [1, 3, 4, 5, 6]
    assert float(losses[6]) < float(losses[1])
    tracker = save / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "6"
    tracker.write_text("3")
    check_size(save / "iter_0000003", corpus, flags)
    return losses, save


def check_size(checkpoint: Path, corpus: str, flags: list[str]) -> None:
    """What a run makes room for before its first step is what its checkpoints then take."""
    args = parse_args([*TOKENIZER, *FLAGS, "--data-path", corpus, *flags], world_size=2)
    args.padded_vocab_size = 258
    expected = checkpoint_bytes(args)
    found = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert expected < found < 1.5 * expected


def test_resuming_reproduces_the_losses_exactly(corpus, uninterrupted) -> None:
    losses, save = uninterrupted
    flags = ["--distca", "--use-distributed-optimizer", "--train-iters", "6"]
    resumed, _ = run(2, corpus, *flags, "--load", str(save))
    assert resumed == {i: losses[i] for i in (4, 6)}


def test_weights_are_saved_as_they_are_where_gathering_overlaps(
    corpus, uninterrupted, tmp_path
) -> None:
    """The next forward pass would gather what the last step changed, but none has come."""
    flags = ["--distca", "--use-distributed-optimizer", "--train-iters", "6"]
    flags += ["--overlap-grad-reduce", "--overlap-param-gather", "--exit-interval", "3"]
    run(2, corpus, *flags, "--save", str(tmp_path), "--save-interval", "6")
    _, expected = uninterrupted
    weights, others = (saved_weights(folder / "iter_0000003") for folder in (tmp_path, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-5, atol=1e-6, msg=name)


def saved_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(checkpoint)
    found = {
        name: torch.empty(tensor.size)
        for name, tensor in reader.read_metadata().state_dict_metadata.items()
        if name.endswith(".weight") and not name.startswith(("optimizer", "chained"))
    }
    assert found
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def test_resuming_in_bf16_with_a_whole_optimizer_on_each_rank(corpus, tmp_path) -> None:
    flags = ["--distca", "--bf16", "--train-iters", "4"]
    flags += ["--save", str(tmp_path), "--save-interval", "2"]
    losses, _ = run(2, corpus, *flags)
    check_size(tmp_path / "iter_0000002", corpus, flags)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed, _ = run(2, corpus, *flags, "--load", str(tmp_path))
    assert resumed == {3: losses[3]}


@pytest.mark.parametrize(
    ("processes", "flags", "tolerance"),
    [
        (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--distca"], 1e-4),
        # Without --distca documents end where a rank's tokens end: nearly the same losses.
        (1, [], 0.05),
    ],
    ids=["TP2-SP-DP2", "one plain process"],
)
def test_a_checkpoint_loads_at_other_sizes(
    corpus, without_dropout, processes, flags, tolerance
) -> None:
    losses, save = without_dropout
    common = ["--train-iters", "6", "--load", str(save), "--hidden-dropout", "0"]
    sharded = ["--use-distributed-optimizer"]
    resumed, output = run(processes, corpus, *common, *sharded, *flags)
    assert ("RNG state will be ignored" in output) == (processes == 4)
    assert sorted(resumed) == [4, 6]
    for i, loss in resumed.items():
        assert float(loss) == pytest.approx(float(losses[i]), rel=tolerance)


def test_a_checkpoint_of_another_shape_is_refused(corpus, uninterrupted) -> None:
    _, save = uninterrupted
    flags = ["--train-iters", "6", "--load", str(save), "--num-layers", "4"]
    _, output = run(2, corpus, *flags, status=1)
    assert "another model, trained with --num-layers 2 (now 4)" in output


def test_sigterm_saves_and_exits(corpus, tmp_path) -> None:
    flags = ["--distca", "--train-iters", "100000", "--save", str(tmp_path)]
    flags += ["--save-interval", "100000"]
    process = start(2, corpus, *flags, "--exit-signal-handler")
    try:
        list(wait_for(process, r"iteration +2/"))
        for pid in descendants(process.pid):
            if "pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_all(process)
    assert process.returncode == 0, output[-3000:]
    assert "exiting program after receiving SIGTERM" in output
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) >= 2


def test_bad_data_is_refused_on_every_rank(corpus, tmp_path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus + suffix, tmp_path / f"broken{suffix}")
    index = tmp_path / "broken.idx"
    index.write_bytes(index.read_bytes()[:-40])
    _, output = run(2, str(tmp_path / "broken"), "--train-iters", "2", "--distca", status=1)
    assert "corrupt or cut off" in output


def test_bad_flags_are_refused_before_anything_starts(corpus) -> None:
    start_time = time.monotonic()
    flags = ["--distca", "--train-iters", "2", "--distca-max-in-flight", "2"]
    _, output = run(2, corpus, *flags, status=2)
    assert "--distca-max-in-flight bounds a pipeline's stages, but there is only one" in output
    assert output.count("error: --distca") == 1
    assert time.monotonic() - start_time < 60


def test_a_plain_run_names_the_flags_that_have_no_effect_in_it(corpus) -> None:
    flags = ["--distca-tolerance", "0.2", "--distca-max-document-length", "64"]
    _, output = run(2, corpus, "--train-iters", "2", *flags)
    (line,) = (line for line in output.splitlines() if "no effect without --distca" in line)
    assert line.endswith("no effect without --distca: --distca-tolerance")


VIRTUAL = ["--num-layers-per-virtual-pipeline-stage", "1"]


@pytest.mark.parametrize("distca", [[], ["--distca"]], ids=["plain", "distca"])
@pytest.mark.parametrize("virtual", [[], VIRTUAL], ids=["PP2", "PP2-VPP2"])
def test_pipelines_go_on_from_one_process(corpus, one_process, virtual, distca, tmp_path) -> None:
    """Two stages load one process's checkpoint and have its losses; four then load theirs."""
    losses, save = one_process
    flags = ["--train-iters", "6", "--num-layers", "4", "--hidden-dropout", "0", *distca]
    stages = ["--pipeline-model-parallel-size", "2", *virtual, "--load", str(save)]
    reshard = distca and not virtual
    stages += ["--save", str(tmp_path), "--save-interval", "4"] if reshard else []
    found, _ = run(2, corpus, *flags, *stages)
    assert sorted(found) == [4, 6]
    results = list(found.items())
    if reshard:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
        stages = ["--pipeline-model-parallel-size", "4", "--load", str(tmp_path)]
        found, _ = run(4, corpus, *flags, *stages)
        assert sorted(found) == [5]
        results += found.items()
    for i, loss in results:
        assert float(loss) == pytest.approx(float(losses[i]), rel=1e-4)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (
            3,
            "--pipeline-model-parallel-size 2 --distca-servers dedicated:1 "
            "--distca-scheduler greedy --no-distca-ping-pong "
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        ),
        (
            4,
            "--tensor-model-parallel-size 2 --sequence-parallel --distca-servers dedicated:2 "
            "--distca-scheduler greedy --no-distca-ping-pong",
        ),
    ],
    ids=["PP2", "TP2-SP"],
)
def test_dedicated_servers_go_on_from_one_process(corpus, one_process, processes, flags) -> None:
    """Processes without a model take part from a checkpoint on: the losses are the same.

    With ping-pong a rank has a single block here, of which there is nothing to share.
    """
    losses, save = one_process
    common = ["--train-iters", "6", "--num-layers", "4", "--hidden-dropout", "0", "--distca"]
    found, output = run(processes, corpus, *common, "--load", str(save), *flags.split())
    check_dedicated(found, losses, output, servers={3: 3, 4: 2}[processes])


def test_a_dedicated_server_beside_two_ranks(corpus, without_dropout) -> None:
    """It takes part in evaluations, too, and in what comes after them."""
    losses, save = without_dropout
    flags = ["--distca", "--use-distributed-optimizer", "--hidden-dropout", "0"]
    flags += ["--distca-servers", "dedicated:1", "--eval-interval", "5", "--eval-iters", "1"]
    found, output = run(3, corpus, *flags, "--train-iters", "6", "--load", str(save))
    check_dedicated(found, losses, output, servers=3)
    assert "validation loss at iteration 5" in output


def check_dedicated(
    found: dict[int, str], losses: dict[int, str], output: str, servers: int
) -> None:
    assert sorted(found) == [4, 6]
    for i, loss in found.items():
        assert float(loss) == pytest.approx(float(losses[i]), rel=1e-5)
    assert f"for {servers} servers" in output
    (moved,) = re.findall(r"MB a layer +(\S+) forward", output)
    assert float(moved) > 0


@pytest.fixture(scope="module")
def one_process(corpus, tmp_path_factory) -> tuple[dict[int, str], Path]:
    """Six iterations of a plain process, and a folder with the checkpoint of the third."""
    save = tmp_path_factory.mktemp("one")
    flags = ["--train-iters", "6", "--num-layers", "4", "--hidden-dropout", "0"]
    losses, _ = run(1, corpus, *flags, "--save", str(save), "--save-interval", "3")
    (save / "latest_checkpointed_iteration.txt").write_text("3")
    return losses, save


def document_lengths(prefix: str) -> Int64s:
    from megatron_patches.batches.stream import Corpus

    return np.asarray(Corpus(prefix).lengths)


def test_the_corpus_has_documents_that_span_ranks(corpus) -> None:
    """Otherwise these runs would show little."""
    assert (document_lengths(corpus) > 512).any()
