"""`distca verify` on CPUs: stages that work, and faults that fail them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.commands.described import add_cluster_flags, cluster_of
from distca.commands.main import main
from distca.commands.verify import (
    apart,
    cost_model,
    dying_peer,
    environment,
    kernels,
    memory,
    overlap,
    predictions,
    ranks,
    training,
)
from distca.commands.verify.stage import Context, Fault, Line, Stage
from distca.cost.model_sizes import ModelSize
from distca.simulate import CLUSTERS, Cluster
from distca.transport import collective
from distca.whole_file import write_text
from support.full_disk import full_disk
from support.ranks import Ranks

CHEAP = "environment links kernels transports answers overlap costs memory serving".split()


@pytest.mark.usefixtures("forked_ranks")
def test_cpus_that_work_end_with_0(tmp_path: Path, capsys) -> None:
    """Two processes, which the command starts."""
    assert main(["verify", "--stages", *CHEAP, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.split()[:2] for line in lines[:-2]] == [["ok", name] for name in CHEAP], printed
    assert lines[CHEAP.index("serving")].endswith(predictions.NO_PREDICTION)
    assert lines[-2] == "nothing failed in 9 of 10 stages; not run: training"
    assert lines[-1] == f"the report, which is what to send us: {tmp_path}/verify.json"
    words = ["--distribution", "fixed", "--context", "1024", "--sequences", "2", "--gpus", "2"]
    sizes = "--layers 2 --hidden-size 64 --heads 8 --kv-heads 2 --head-dim 128"
    sizes += " --ffn-hidden-size 96 --vocab-size 128 --batches 1 --systems plain tiles"
    cluster = ["--cluster", str(tmp_path / "cluster.json")]
    assert main(["simulate", *words, *sizes.split(), *cluster, "--baseline-ideal"]) == 0
    assert "2 GPUs of this machine" in capsys.readouterr().out
    profile = ["--profile", str(tmp_path / "profile.json"), "--dtype-bytes", "4"]
    heads = ["--heads", "8", "--kv-heads", "2", "--servers", "2", "--tokens-per-server", "1024"]
    assert main(["plan", "--distribution", "fixed", *heads, *profile]) == 0
    report = json.loads((tmp_path / "verify.json").read_text())
    assert [line["stage"] for line in report["stages"]] == CHEAP
    assert report["failed"] is None
    assert report["packages"]["numpy"] == np.__version__
    printed = report["printed"]
    assert "torch" in printed["distca doctor"]
    assert len(printed["git rev-parse HEAD"]) == 41 or "not a git" in printed["git rev-parse HEAD"]
    assert printed.keys() == {
        *("distca doctor", "nvidia-smi", "nvidia-smi topo -m", "git rev-parse HEAD")
    }


def line_of(
    check: Callable[[Context], Any], folder: str, replaced: str, other: object
) -> tuple[str, str]:
    """What a stage's fault says on this rank, with something replaced. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place = Path(folder) / str(rank)
    place.mkdir()
    device, control = torch.device("cpu"), dist.new_group(backend="gloo")
    assert control is not None
    # The peer that dies has a test of its own.
    context = Context(rank, size, max(rank, 1), size, device, control, place, None, {})
    with mock.patch(replaced, other):
        try:
            return "ok", check(context).text
        except Fault as fault:
            return fault.text, fault.cure


class _Swapped(collective._Collective):
    """Messages of two peers come in each other's place."""

    def wait(self) -> torch.Tensor:
        received = super().wait()
        half = len(received) // 2
        return torch.cat([received[half:], received[:half]])


def test_a_transport_that_swaps_two_peers(ranks: Ranks, tmp_path: Path) -> None:
    from distca.commands.verify.transports import check_transports

    replaced = "distca.transport.collective._Collective"
    found = ranks.run(line_of, check_transports, str(tmp_path), replaced, _Swapped, world_size=3)
    for rank, (text, cure) in enumerate(found):
        assert text.startswith("gloo with all ranks: ")
        assert text.endswith(f"bytes that rank {rank} received are not what was sent")
        assert "choose another --distca-transport" in cure


def other_version() -> str:
    return f"0.{dist.get_rank()}"


def test_ranks_with_other_versions(ranks: Ranks, tmp_path: Path) -> None:
    from distca.commands.verify.environment import check_environment

    replaced = "distca.commands.verify.environment.platform.python_version"
    found = ranks.run(
        line_of, check_environment, str(tmp_path), replaced, other_version, world_size=2
    )
    assert all(text.startswith("rank 1 has distca") for text, _ in found)
    assert all("Python 0.1, and rank 0" in text for text, _ in found)


def test_what_does_not_fit_together(monkeypatch) -> None:
    problem = SimpleNamespace(state="problem", name="greenlet", found="not installed", cure="pip")
    monkeypatch.setattr(environment, "examine", lambda: [problem])
    with pytest.raises(Fault) as raised:
        environment.check_environment(mock.Mock())
    assert (raised.value.text, raised.value.cure) == ("greenlet: not installed", "pip")


def test_both_that_take_less_than_one_are_noise() -> None:
    assert str(overlap._Times(0.01518, 0.003, 0.01516)).endswith(
        "100% of the shorter is hidden (times vary by at least 0.02 ms)"
    )
    assert str(overlap._Times(0.015, 0.003, 0.016)).endswith("67% of the shorter is hidden")


def test_a_kernel_that_refuses_a_call_is_named(monkeypatch) -> None:
    """By an assertion, too, as those of FlashAttention 4 do."""

    def refuse(*_: Any) -> None:
        raise AssertionError("no heads of this size\nmore")

    monkeypatch.setattr(kernels.TorchCpuKernel, "forward_paged", refuse)
    context = mock.Mock(on_gpu=False, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(Fault, match=r"^torch's CPU kernel: GQA: no heads of this size$"):
        kernels.check_kernels(context)


@pytest.mark.parametrize(
    ("survivor", "says"),
    [("sleep 60", "waits for 0.2 s and longer for a peer that died"), ("true", "goes on without")],
)
def test_a_rank_that_does_not_see_its_peer_die(
    monkeypatch, tmp_path: Path, survivor: str, says: str
) -> None:
    theirs = subprocess.Popen

    def popen(words: list[str], **more: Any) -> Any:
        return theirs(["sh", "-c", "kill -9 $$" if words[5] == "1" else survivor], **more)

    monkeypatch.setattr(dying_peer.subprocess, "Popen", popen)
    with pytest.raises(Fault, match=says):
        dying_peer.lose_a_peer(tmp_path, on_gpus=False, most_waited=0.2)


def test_a_peer_that_cannot_start_says_why(monkeypatch, tmp_path: Path) -> None:
    theirs = subprocess.Popen
    fails = "echo more >&2; echo 'ImportError: no libnccl' >&2; exit 1"
    monkeypatch.setattr(
        dying_peer.subprocess, "Popen", lambda _, **more: theirs(["sh", "-c", fails], **more)
    )
    says = "two ranks cannot exchange .* of their own: ImportError: no libnccl$"
    with pytest.raises(Fault, match=says) as found:
        dying_peer.lose_a_peer(tmp_path, on_gpus=False)
    assert "rank 1 printed:\nmore\nImportError: no libnccl\n" in found.value.printed
    assert not list(tmp_path.iterdir())


def _training(tmp_path: Path) -> Any:
    context = mock.Mock(rank=0, local_size=2, folder=tmp_path, found={}, is_fast=False)
    context.on_gpu, context.dtype, context.gather = False, torch.float32, lambda mine: [mine]
    return context


def test_losses_and_gradients_that_differ(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    for other, says in (
        (training.Ran([5.0, 4.1], [2.0, 1.0], 1.0), r"losses of 5 steps are 2.5e-02 .*\(0.0001 is"),
        (training.Ran([5.0, 4.0], [1.9, 1.0], 1.0), r"gradients' norms are 5.0e-02 .*\(0.01 is"),
        (
            training.Ran([5.0, math.nan], [2.0, 1.0], 1.0),
            r"losses of 5 steps are not finite: 5.0000, nan with --distca .*, 5.0000, 4.0000 with",
        ),
        (training.Ran([5.0, 4.0], [2.0, math.inf], 1.0), "gradients' norms are not finite: 2.0"),
    ):
        runs = iter([training.Ran([5.0, 4.0], [2.0, 1.0], 1.0), other])
        monkeypatch.setattr(training, "_train", lambda *_, runs=runs: next(runs))
        with pytest.raises(Fault, match=says):
            training.check_training(_training(tmp_path))


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_prediction_is_told_where_the_job_is_large(monkeypatch, tmp_path, is_fast: bool) -> None:
    pytest.importorskip("megatron.training")
    ran = training.Ran([5.0, 4.0], [2.0, 1.0], 1.0)
    monkeypatch.setattr(training, "_train", lambda *_: ran)
    monkeypatch.setattr(training, "_write_documents", lambda *_: None)
    monkeypatch.setattr(training, "measured_cluster", lambda _: CLUSTERS["dgx-h200"])
    context = _training(tmp_path)
    context.is_fast = is_fast
    text = training.check_training(context).text
    assert ("(simulated: " in text, text.endswith(predictions.NO_PREDICTION)) == (
        is_fast,
        not is_fast,
    )


def test_losses_that_are_not_finite_on_both_sides(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    same = training.Ran([5.0, math.nan], [2.0, 1.0], 1.0)
    monkeypatch.setattr(training, "_train", lambda *_: same)
    with pytest.raises(Fault, match="losses of 5 steps are not finite"):
        training.check_training(_training(tmp_path))


def test_a_larger_job_whose_losses_are_not_finite(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    fine, wrong = (training.Ran([each], [2.0], 1.0) for each in (5.0, math.nan))
    runs = iter([fine, fine, wrong])
    monkeypatch.setattr(training, "_train", lambda *_: next(runs))
    monkeypatch.setattr(training, "_write_documents", lambda *_: None)
    context = _training(tmp_path)
    context.is_fast = True
    with pytest.raises(Fault, match="of a larger job are not finite: nan; 2"):
        training.check_training(context)


def test_a_run_that_fails(monkeypatch, tmp_path: Path) -> None:
    """The last line of what it printed is the reason."""
    pytest.importorskip("megatron.training")
    theirs = subprocess.Popen
    say = "import sys; print('more'); sys.exit('error: no such flag')"
    monkeypatch.setattr(
        apart.subprocess, "Popen", lambda _, **more: theirs([sys.executable, "-c", say], **more)
    )
    with pytest.raises(Fault, match="a run of plain Megatron failed: error: no such flag") as found:
        training.check_training(_training(tmp_path))
    command, _, printed = found.value.printed.partition("\n")
    assert "--data-path" in command
    assert printed == "more\nerror: no such flag\n"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 16])
def test_sizes_for_any_number_of_ranks(count: int) -> None:
    """What the stages of training and memory ask of Megatron, the simulator and the engine."""
    window = training.window_of(count)
    assert window >= 384
    assert window // count % 128 == 0
    cluster = replace(CLUSTERS["dgx-h200"], gpus_per_node=max(count, 8))
    job = training.Job(ModelSize(2, 64, 4, 2, 16, 96, 128), window)
    sequences = [np.array(training._lengths(job))] * 2
    assert sequences[0].sum() == window
    assert predictions.training_seconds(job.model, cluster, sequences, count) > 0
    for block in (16, 256):
        assert memory.positions_for(count, block) >= 3 * block * count + 6


def test_under_torchrun() -> None:
    """Ranks that torchrun starts make one report."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "distca", "verify", "--json", "--stages", "links"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    [line] = json.loads(done.stdout)["stages"]
    assert line["state"] == "ok"
    assert line["figures"]["node_gb_per_s"] > 0


@pytest.mark.full
def test_training_against_plain_megatron() -> None:
    pytest.importorskip("megatron.training")
    assert main(["verify", "--stages", "training"]) == 0


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    """The other rank is in the stage that follows the last line."""
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    theirs[0].send(Line("environment", "ok", "", "", 0.0, {}))
    theirs[1].close()
    told: list[Line] = []
    dead = mock.Mock(exitcode=-11, pid=None)
    ranks._follow(
        [mock.Mock(pid=None), dead], ours, ["environment", "links"], tmp_path, told.append
    )
    assert [line.stage for line in told] == ["environment", "links"]
    assert told[1].text == "rank 1: its process ended with exit code -11"


def test_others_fail_of_a_process_that_dies(tmp_path: Path) -> None:
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    theirs[0].send(Line("links", "failed", "connection reset by peer", "do", 0.0, {}))
    theirs[1].close()
    told: list[Line] = []
    dead = mock.Mock(exitcode=-9, pid=None)
    ranks._follow([mock.Mock(pid=None), dead], ours, ["links"], tmp_path, told.append)
    assert [line.text for line in told] == [
        f"rank 1: its process ended with exit code -9: {ranks._KILLED}"
    ]


def test_links_of_an_older_file_count_until_they_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    costs = {"memory_gb": 80.0, "peak_tflops": 2.0, "product_tflops": 1.0}
    costs |= {"attention_tflops": 0.5, "backward_over_forward": 2.5}
    context = mock.Mock(found={}, local_size=8)
    assert cost_model._older(path) is None
    assert predictions.described_cluster(context, costs).node_gb_per_s == 1.0
    measured = {"node_gb_per_s": 400.0, "network_gb_per_s": 50.0, "copy_gb_per_s": 900.0}
    context.found = {"links": measured}
    predictions.described_cluster(context, costs).save(path)
    context.found = {}
    again = predictions.described_cluster(context, costs, older=cost_model._older(path))
    assert {name: getattr(again, name) for name in measured} == measured
    context.found = {"links": {"node_gb_per_s": 300.0}}
    again = predictions.described_cluster(context, costs, older=cost_model._older(path))
    assert (again.node_gb_per_s, again.network_gb_per_s) == (300.0, 300.0)


def test_the_lowest_rank_that_failed_is_told(tmp_path: Path) -> None:
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    for rank in (1, 0):
        theirs[rank].send(Line("links", "failed", f"of {rank}", "do", 0.0, {}))
    told: list[Line] = []
    ranks._follow([mock.Mock(pid=None)] * 2, ours, ["links"], tmp_path, told.append)
    assert [line.text for line in told] == ["rank 0: of 0"]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda: Fault("wrong", "do", "what it printed\n"), "what it printed"),
        (lambda: KeyError("unknown"), "KeyError: 'unknown'"),
    ],
)
def test_a_failure_has_details(wrong: Any, where: str, tmp_path: Path) -> None:
    def run(_: Context) -> Any:
        raise wrong()

    told: list[Line] = []
    its = Stage("kernels", 60, run, "cure")
    context = Context(0, 1, 0, 1, torch.device("cpu"), mock.Mock(), tmp_path, None, {})
    ranks.run_stages([its], context, None, told.append, told.append)
    [line] = told
    assert line.state == "failed"
    assert where in line.details
    assert "test_verify.py" in line.details


def test_a_stage_that_does_not_end_says_where_it_is(tmp_path: Path) -> None:
    told: list[Line] = []
    its = Stage("kernels", 0.05, lambda _: time.sleep(0.5), "cure")  # type: ignore[arg-type,return-value]
    context = mock.Mock(folder=tmp_path, gather=lambda mine: [mine])
    ranks._run_stage(its, context, told.append)
    assert told[0].text == "it did not end in 0.05 s"
    assert "time.sleep(0.5)" in told[0].details


def test_a_full_disk_fails_the_costs(monkeypatch, tmp_path: Path) -> None:
    profile = mock.Mock(flops_per_second=1e12, description="", save=lambda path: write(path))

    def write(path: Path) -> None:
        write_text(path, "a profile")

    for name, found in (
        ("profile_kernel", profile),
        ("held_out_errors", [0.1]),
        ("backward_over_forward", 2.0),
        ("_product_tflops", 1.0),
    ):
        monkeypatch.setattr(cost_model, name, lambda *_, found=found, **__: found)
    context = mock.Mock(on_gpu=False, dtype=torch.float32, output=tmp_path, found={}, local_size=1)
    with pytest.raises(Fault, match=r"profile.json cannot be written"), full_disk():
        cost_model._measure(context, 64, torch.zeros(1, 1))
    assert not list(tmp_path.iterdir())


def test_a_described_cluster(tmp_path: Path) -> None:
    from distca.commands.command_line import Parser

    path = tmp_path / "cluster.json"
    CLUSTERS["dgx-h200"].save(path)
    assert Cluster.load(path) == CLUSTERS["dgx-h200"]
    parser = Parser("simulate", "", "")
    add_cluster_flags(parser)
    for broken in ("{}", "[", '{"charges": 1}', "[1]"):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"cluster.json describes no cluster .*distca verify"):
            cluster_of(parser.parse(["--cluster", str(path)]))
