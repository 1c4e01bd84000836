"""The benchmarks that are meant for GPUs, and those of whole steps, in a small form."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import sources
from benchmarks.kernels.layer import idle_share
from benchmarks.training.run import steps_lengths
from benchmarks.training.setting import (
    PLAIN,
    SHORT,
    Setting,
    document_lengths,
    pairs_of_ranks,
)
from benchmarks.training.summary import Step, summarize
from benchmarks.training.throughput import build_parser, setting_of, table
from distca.attention.reference import document_visibility
from distca.cost.model_sizes import ModelSize
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.plan import Mask
from distca.simulate import peak_tflops

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "benchmarks").rglob("*.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run(script: str, output: Path, *flags: str, launcher: Sequence[str] = ()) -> str:
    # As typed from the repository's root: Python is not told where the repository is.
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *launcher, f"benchmarks/{script}.py", *flags, "--output", str(output)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_command_finds_the_repository() -> None:
    """Before it imports any of it; and Python finds that through the first of its paths."""
    for path in MODULES:
        folders = len(path.relative_to(ROOT).parts) - 1
        found = f"sys.path.insert(0, str(Path(__file__).parents[{folders}]))"
        text = path.read_text()
        ours = re.search(r"^from (benchmarks|distca|megatron_patches)\b", text, re.MULTILINE)
        if "__main__" in text and ours is not None:
            assert found in text[: ours.start()], path


def test_no_module_hides_an_installed_one() -> None:
    """Python looks in a command's own folder before it looks where packages are installed."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for path in MODULES:
        if path.parent.parent == ROOT / "benchmarks":
            assert path.stem not in sys.stdlib_module_names, path
            assert PathFinder.find_spec(path.stem, installed) is None, path


def test_the_rate_of_short_shards(tmp_path) -> None:
    sizes = ["--tokens", "512", "--keys", "1024", "--shards", "8", "512", "--repeats", "3"]
    printed = run("kernels/attention", tmp_path, "--device", "cpu", *sizes)
    written = json.loads((tmp_path / "kernels_cpu.json").read_text())
    assert written["kernel"] == "TorchCpuKernel"
    rows = written["rows"]
    assert [row["shard_length"] for row in rows] == [8, 512]
    assert max(row["of_best"] for row in rows) == 1
    assert min(row["backward_tflops"] for row in rows) > 0
    assert (tmp_path / "kernels_cpu.png").stat().st_size > 1000
    assert "| 512 |" in printed


def test_one_layer_on_virtual_servers(tmp_path) -> None:
    """All ways compute the same; the benchmark itself holds bytes against the plans'."""
    sizes = ["--servers", "3", "--seq-length", "512", "--hidden-size", "64", "--heads", "4"]
    run("kernels/layer", tmp_path, "--device", "cpu", *sizes, "--repeats", "1")
    rows = {
        row["way"]: row for row in json.loads((tmp_path / "layer_cpu.json").read_text())["rows"]
    }
    assert set(rows) == {"packed", "whole", "ping-pong, one stream", "ping-pong"}
    sums = [row["sum_of_outputs"] for row in rows.values()]
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-5)
    assert rows["ping-pong"]["bytes"] > 0
    assert rows["whole"]["max_over_mean"] <= rows["packed"]["max_over_mean"]
    assert {row["idle"] for row in rows.values()} == {None}
    timeline = json.loads((tmp_path / "layer_ping-pong_one_stream.trace.json").read_text())
    assert any("flash_attention" in event.get("name", "") for event in timeline["traceEvents"])


def test_rollouts(tmp_path) -> None:
    pytest.importorskip("transformers")
    mix = "one prompt"
    run("training/rollouts", tmp_path, "--ranks", "2", "--rounds", "1", "--mixes", mix)
    found = json.loads((tmp_path / "rollouts.json").read_text())
    tokens = {(case["way"], case["ranks"]): case["tokens"] for case in found}
    assert tokens["one by one", 2] == 8 * (2048 + 512)
    assert tokens["whole trees", 2] == tokens["shared out", 2] == 2048 + 8 * 512
    assert tokens["unsent", 2] == tokens["shared out", 2]
    assert tokens["alone", 2] == 2 * tokens["shared out", 2]
    assert all(min(map(min, case["seconds"])) >= 0 for case in found)
    sent = {case["way"]: case["sent"] for case in found}
    assert sent["shared out"] > 0
    assert sent["unsent"] == sent["whole trees"] == sent["alone"] == 0
    text = (tmp_path / "rollouts.md").read_text()
    assert "| one prompt | 2 | 6,144 | 3.33 |" in text
    assert "*One prompt*: 2,048 tokens with 8 responses of 512. *Six prompts*: of 318 to" in text
    assert "Measured on" not in text
    # Written anew, it says which run measured.
    again = tmp_path / "again"
    for earlier in (tmp_path, again):
        run("training/rollouts", again, "--earlier", str(earlier))
        newer = (again / "rollouts.md").read_text()
        assert f"Measured on {sources.run_of(text)}; the line below" in newer
        assert newer.split("\n\nMeasured")[0] == text.split("\n\n*Made")[0].replace(
            f" --ranks 2 --rounds 1 --mixes '{mix}'", ""
        )


def test_more_ranks(tmp_path) -> None:
    """The command, in a small form; what it computes is in test_more_ranks.py."""
    sizes = ["--ranks", "4", "--ranks-of-longest", "1", "2", "--seq-length", "512", "--seeds", "2"]
    printed = run("training/more_ranks", tmp_path, *sizes, "--runs", "1", "--mixes", "fixed")
    found = json.loads((tmp_path / "more_ranks.json").read_text())
    assert found["rates"]["token"] > 0
    assert found["rates"]["pair"] > 0
    ways = {case["way"] for case in found["cases"]}
    assert {"plain Megatron", "hybrid CP of 2", "DistCA, ping-pong, tolerance 0.02"} <= ways
    assert {(case["longest"], case["seed"]) for case in found["cases"]} == {
        *((1, 0), (1, 1), (2, 0), (2, 1))
    }
    for case in found["cases"]:
        # Two layers, and all other work.
        assert case["step"] > 2 * case["attention"] > 0
        assert case["over_mean"] >= 1
    page = (tmp_path / "more_ranks.md").read_text()
    assert "| fixed | plain Megatron |" in page
    assert "## 4 ranks, documents of at most 2 ranks' tokens" in page
    # It ends with a mark of its sources.
    assert page.startswith(printed[printed.index("# More ranks") :].strip())


def test_a_gpu_idles_where_nothing_runs() -> None:
    """Kernels of two streams overlap, one lies within another, and they are told in any order."""
    assert idle_share([(60, 100), (10, 40), (20, 30), (35, 50)]) == pytest.approx(10 / 90)
    assert idle_share([(10, 20)]) == 0


def test_throughput_under_torchrun(tmp_path) -> None:
    """Two processes that torchrun started, with Megatron's own flags for all ways."""
    sizes = ["--seq-length", "512", "--hidden-size", "64", "--num-layers", "1", "--batches", "1"]
    sizes += ["--rounds", "1", "--mixes", "pretrain", "--schedulers", "tiles", "--seed", "4"]
    megatron = ["--num-query-groups", "2", "--use-distributed-optimizer", "--overlap-grad-reduce"]
    megatron += ["--overlap-param-gather", "--bf16", "--peak-tflops", "0.5"]
    printed = run("training/throughput", tmp_path, *sizes, *megatron, launcher=TORCHRUN)
    written = (tmp_path / "throughput.md").read_text()
    assert "torchrun ... benchmarks/training/throughput.py --seq-length 512" in written
    assert str(tmp_path) not in written
    assert "--output DIR\n" in written
    assert printed.strip().endswith(written.split("\n\n")[-3].strip())
    found = json.loads((tmp_path / "throughput.json").read_text())
    setting = Setting.of_json(found["setting"])
    assert (setting.processes, found["model"]["kv_heads"]) == (2, 2)
    summary = found["mixes"]["pretrain"]
    plain = summary["ways"][PLAIN]
    assert [*summary["ways"]] == [PLAIN, "tiles, ping-pong", "tiles, whole"]
    assert plain["pairs_max_over_mean"] > 1.3
    assert "| MB sent |" in printed
    for name, way in [*summary["ways"].items()][1:]:
        assert f"| {sum(way['bytes_sent_of_ranks']) / 1e6:.1f} |" in next(
            line for line in printed.splitlines() if f"| {name} |" in line
        )
        assert way["pairs_max_over_mean"] < 1.1
        assert way["kernels_max_over_mean"] >= 1
        assert 0 < way["exposed_share"] < 1
        assert way["peak_bytes"] > 0
        assert max(way["bytes_sent_of_ranks"]) > 0
        assert way["ratio"] == pytest.approx(plain["seconds"] / way["seconds"])
        # Half a TFLOP/s of each of two processes.
        assert way["mfu"] == pytest.approx(summary["model_flops"] / way["seconds"] / 1e12)


def setting_from(*flags: str, started: int = 2) -> Setting:
    return setting_of(*build_parser().parse_known_args(flags), started)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes", "4"], "--processes 4, but the launcher started 2"),
        (["--tensor-model-parallel-size", "4"], "2 processes are not a multiple of tensor x"),
        (["--distca-scheduler=tiles"], "--distca-scheduler is not for this benchmark: give --sch"),
        (["--save", "x"], "--save does nothing here"),
        (["--num-query-groups", "3"], "8 query heads are not a multiple of 3 key-value heads"),
    ],
)
def test_throughput_refuses(flags, message) -> None:
    with pytest.raises(ValueError, match=message):
        setting_from(*flags)


def test_steps_of_a_mix_follow_each_other() -> None:
    """One that warms up, each batch in all rounds, one for the memory: of one stream."""
    setting = setting_from("--seq-length", "512", "--batches", "2", "--rounds", "3")
    lengths = np.array(document_lengths(setting, "long-tail"))
    first, second = np.split(lengths, [np.searchsorted(np.cumsum(lengths), setting.tokens) + 1])
    expected = np.concatenate([first, *[first] * 3, *[second] * 3, first])
    assert steps_lengths(setting, "long-tail") == expected.tolist()


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
@pytest.mark.parametrize("ranks_of_longest", [1, 4])
def test_mixes_are_what_was_drawn(mix: str, ranks_of_longest: int) -> None:
    """Documents end where drawn ones do, in scale, or where sequences end: none is left out."""
    setting = setting_from("--seq-length", "512", "--batches", "16", "--rounds", "1")
    ranks = setting.batches * setting.micro_batches * setting.data_parallel_size
    drawn = np.cumsum(draw(DISTRIBUTIONS[mix], ranks * 65536, setting.seed)) * 512 // 65536
    found = np.cumsum(document_lengths(setting, mix, ranks_of_longest)).tolist()
    cuts = range(512 * ranks_of_longest, 512 * ranks + 1, 512 * ranks_of_longest)
    assert found == sorted({*drawn.tolist(), *cuts} - {0})


def test_the_peak_is_known_of_some_gpus() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 990
    assert peak_tflops("NVIDIA H100 PCIe") is None


@pytest.mark.parametrize("window", [None, 9])
def test_operations_of_a_step(window) -> None:
    """Against torch's own count of a layer, and pairs counted one by one."""
    tokens, hidden, heads, kv_heads, head_dim, ffn, vocabulary = 6, 20, 4, 2, 8, 24, 40
    model = ModelSize(3, hidden, heads, kv_heads, head_dim, ffn, vocabulary)

    def linear(x: torch.Tensor, width: int) -> torch.Tensor:
        return x @ torch.randn(x.shape[-1], width, requires_grad=True)

    with FlopCounterMode(display=False) as counter:
        x = torch.randn(tokens, hidden, requires_grad=True)
        for _ in range(model.layers):
            q, k, v = (linear(x, n * head_dim) for n in (heads, kv_heads, kv_heads))
            q, k, v = (each.view(tokens, -1, head_dim).transpose(0, 1) for each in (q, k, v))
            k, v = (each.repeat_interleave(heads // kv_heads, dim=0) for each in (k, v))
            out = (q @ k.transpose(1, 2)).softmax(-1) @ v
            x = linear(out.transpose(0, 1).reshape(tokens, -1), hidden)
            x = linear(linear(x, ffn) * linear(x, ffn), hidden)
        linear(x, vocabulary).sum().backward()
    # Every query saw every key.
    assert model.training_flops(tokens, tokens**2) == counter.get_total_flops()

    setting = setting_from("--seq-length", "128", "--batches", "2", "--micro-batches", "2")
    lengths = document_lengths(setting, "pretrain")
    visible = document_visibility(lengths, window).numpy()
    # Samples in turn: of a batch's micro-batches, each rank's tokens.
    counts = visible.sum(axis=1).reshape(2, 2, 2, 128).sum(axis=-1)
    np.testing.assert_array_equal(pairs_of_ranks(setting, "pretrain", Mask(window)), counts)


def timeline(waits: Sequence[int], kernels: Sequence[int], pairs: int) -> list[dict]:
    """A forward and a backward tick of 10 seconds each; seconds of their spans."""
    events = []
    for tick, phase in enumerate(("forward", "backward")):
        labels = {"tick": tick, "phase": phase, "pairs": pairs}
        for name, lane, seconds in (
            (f"{phase}: micro-batch 0", "ticks", 10),
            ("wait for dispatch", "exchange", waits[tick]),
            ("wait for combine", "exchange", waits[tick]),
            ("combine", "exchange", 3),
            ("core attention", "kernels", kernels[tick]),
            ("pass on", "pipeline", 1),
        ):
            times = {"dur": seconds * 1e6, "tdur": seconds * 5e5}
            events.append({"name": name, "cat": lane, "args": labels} | times)
    return events


def test_imbalance_and_exposed_communication() -> None:
    """Two ranks, by hand."""
    setting = setting_from(
        *("--seq-length", "128", "--schedulers", "tiles", "--modes", "whole"),
        *("--batches", "1", "--rounds", "2", "--mixes", "pretrain"),
    )
    ranks = []
    for waits, kernels, pairs in (((1, 2), (2, 4), 100), ((0, 1), (4, 2), 300)):
        step = Step(seconds=20.0)
        step.read_timeline(timeline(waits, kernels, pairs))
        assert (step.ticks, step.pairs) == ([5.0, 5.0], [pairs])
        assert step.kernel_seconds == [*kernels]
        plain, short = ([[Step(seconds=seconds)] * 2] for seconds in (25.0, 5.0))
        ranks.append({PLAIN: plain, "tiles": [[step, step]], SHORT: short})
    model = ModelSize(1, 8, 1, 1, 8, 8, 8)
    summary = summarize(setting, "pretrain", ranks, model, Mask())
    plain, way = summary["ways"][PLAIN], summary["ways"]["tiles"]
    # Rank 0 waits six of twenty seconds, rank 1 two.
    assert way["exposed_share"] == pytest.approx((6 + 2) / 2 / 20)
    assert way["pairs_max_over_mean"] == pytest.approx(300 / 200)
    # In each tick all wait for the slower, though both ranks have six seconds of work.
    assert way["kernels_max_over_mean"] == pytest.approx((4 + 4) / (3 + 3))
    assert way["ratio"] == pytest.approx(25 / 20)
    assert way["mfu"] is None
    loads = pairs_of_ranks(setting, "pretrain", Mask())[0, 0]
    assert plain["pairs_max_over_mean"] == pytest.approx(loads.max() / loads.mean())
    head, _, first, second = table(setting, {"pretrain": summary}).splitlines()
    assert "MFU" not in head
    assert "exposed" in head
    assert first.startswith("| pretrain | plain | ")
    assert "| 20.0% |" in second


def can_make_namespaces() -> bool:
    """Root, with the tools, on a kernel that lets links be slowed."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"distcatest{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    slow = f"ip netns exec {name} tc qdisc replace dev lo root tbf rate 1mbit burst 9kb latency 1s"
    able = subprocess.run(slow.split(), capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False)
    return able


def test_a_slow_link(tmp_path) -> None:
    if not can_make_namespaces():
        pytest.skip("needs root, iproute2 and network namespaces with token buckets")
    small = ["--seq-lengths", "256", "--busy", "0.5", "--layers", "1", "--rounds", "1"]
    before = {"command": "another run", "setting": "elsewhere", "rounds": 1, "rows": []}
    (tmp_path / "slow_link.json").write_text(json.dumps([before]))
    run("links/slow_link", tmp_path, *small, "--append")
    there, found = json.loads((tmp_path / "slow_link.json").read_text())
    whole, row = found["rows"]
    assert there == before
    # Documents that are whole in a nano-batch need fewer keys of other ranks.
    assert (whole["documents"], row["documents"]) == (2, 1)
    assert whole["ways"]["ping-pong"]["bytes"] < row["ways"]["ping-pong"]["bytes"]
    assert "another run" in (tmp_path / "slow_link.md").read_text()
    ways = row["ways"]
    # Overlap moves the same bytes; signals hardly any.
    assert ways["single-stream"]["bytes"] == ways["ping-pong"]["bytes"]
    assert 0 < ways["signal"]["bytes"] < 1000 < ways["ping-pong"]["bytes"]
    link = ways["ping-pong"]["bytes"] * 8 / 1e6 / row["mbit_per_s"]
    assert row["link_seconds"] == pytest.approx(link)
    assert "over signal: single-stream" in (tmp_path / "slow_link.md").read_text()
    assert (tmp_path / "slow_link.png").stat().st_size > 0


def test_the_chain_of_the_paper() -> None:
    from benchmarks.serving import runahead

    text = "\n".join(runahead.alone_text())
    assert "| 12k | 3.95 | 3.936 | -0.4% |" in text
    assert runahead.searched(runahead.costs_of("Falcon 7B", 4), 4096).sum() == 4096


def test_the_turns_of_the_context_parallel_paper() -> None:
    """One efficiency, fitted at 5% new tokens, tells the faster strategy at 2.5% and at 10%."""
    from benchmarks.serving import context_parallel

    rows = [line for line in context_parallel.turns_text() if line.endswith(("KV |", "Q |"))]
    assert [row.split("|")[-3:-1] for row in rows if "| 5.0%" not in row] == [
        [" pass-Q ", " pass-Q "],
        [" pass-KV ", " pass-KV "],
    ]
    assert "| 4,000 | 4,000 |" in "\n".join(context_parallel.thresholds_text())
