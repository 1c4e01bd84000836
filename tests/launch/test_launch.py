"""The launch scripts: what they print, what that does on this machine, and when a job goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.training import compare_speeds
from distca.cost.model_sizes import MODELS, Experts
from distca.simulate import CLUSTERS
from distca.simulate.costs import ModelCosts
from support.launches import ROOT, TINY, launch, pretrain_flags, slurm_environment

SMALL = ("llama-8b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-8b")
LARGE = ("llama-34b", "qwen3-32b", "llama-70b", "llama-3.1-70b")
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b")
LARGEST = ("llama-405b", "llama-3.1-405b")
NODES = {
    **{(f"slurm/pretrain_{way}.sh", "qwen3-235b-a22b"): 16 for way in ("3d", "4d")},
    **{("slurm/pretrain_3d.sh", model): 36 for model in LARGEST},
    **{("slurm/pretrain_4d.sh", model): 144 for model in LARGEST},
}
"""Nodes of 8 GPUs that docs/launching.md asks for; others are the scripts' own."""
SCRIPTS = ("pretrain_3d", "pretrain_4d", "benchmark")


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The environment of a job of two tasks on one node."""
    return slurm_environment(tmp_path / "bin")


def free_port() -> str:
    """A port below those that the system gives to connections, as other tests make them."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no port is free")


@pytest.mark.parametrize(
    ("script", "model"),
    [
        *itertools.product(
            ["slurm/pretrain_3d.sh", "slurm/pretrain_4d.sh"], SMALL + LARGE + EXPERTS + LARGEST
        ),
        *itertools.product(["slurm/benchmark.sh"], SMALL + LARGE[:2]),
        *itertools.product(["local.sh"], SMALL),
    ],
)
def test_the_printed_flags_are_accepted(script, model) -> None:
    """Every model in every script: sizes that divide, flags that go together, and 80 GB GPUs that
    hold them."""
    from megatron_patches.flags.config import DistcaConfig
    from megatron_patches.parts import parse_args

    here = ["--processes", "8"] if script == "local.sh" else []
    nodes = NODES.get((script, model), {"slurm/pretrain_4d.sh": 8}.get(script, 4))
    given = ["--dry-run", *here, "--model", model, "--data-path", "a b", "--save", "s"]
    done = launch(script, *given, env=os.environ | {"SLURM_JOB_NUM_NODES": str(nodes)})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "pretrain_gpt.py" in line]
    assert len(lines) == (10 if "benchmark" in script else 1)
    ranks = 8 if script == "local.sh" else 8 * nodes
    size = MODELS[model]
    for line in lines:
        flags = [*pretrain_flags(line), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
        args = parse_args(flags, world_size=ranks)
        assert args.data_path == ["a b"]
        assert (args.num_layers, args.hidden_size) == (size.layers, size.hidden_size)
        assert (args.num_attention_heads, args.num_query_groups) == (size.heads, size.kv_heads)
        if size.experts is not None:
            found = args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size
            assert Experts(*found) == size.experts
        else:
            assert args.ffn_hidden_size == size.ffn_hidden_size
        assert args.kv_channels == size.head_dim
        longest = DistcaConfig.from_args(args).documents.max_length
        assert longest is None or longest <= args.data_parallel_size * args.seq_length
        assert args.qk_layernorm == model.startswith("qwen3")
        assert args.untie_embeddings_and_output_weights == (not model.startswith("llama-3.2"))
        assert least_bytes(args, size) < CLUSTERS["dgx-h100"].usable_bytes


def test_models_that_the_simulator_knows() -> None:
    """All but made-up layouts; those that a script does not start are refused in a line."""
    known = {*SMALL, *LARGE, *EXPERTS, *LARGEST}
    assert known == {name for name in MODELS if not name.endswith("-like")}
    for name in ("help", "gemma3-27b-like", "llama", ""):
        refused = launch("slurm/pretrain_3d.sh", "--dry-run", f"--model={name}", "--save", "s")
        assert refused.returncode == 2
        listed = refused.stderr.partition(": give one of ")[2].partition(". ")[0]
        assert set(listed.split()) == known - {""}
    for script in ("slurm/benchmark.sh", "slurm/throughput.sh"):
        refused = launch(script, "--dry-run", "--model", "mixtral-8x7b")
        assert "mixtral-8x7b has experts" in refused.stderr
    refused = launch("slurm/benchmark.sh", "--dry-run", "--model", "llama-405b")
    assert "llama-405b fits no GPU" in refused.stderr
    page = (ROOT / "docs" / "launching.md").read_text()
    for nodes in set(NODES.values()):
        assert re.search(rf"\b{nodes}\b", page)


@pytest.mark.parametrize("script", ["local.sh", "slurm/pretrain_3d.sh", "slurm/throughput.sh"])
def test_torch_s_allocator_joins_pieces_unless_told_otherwise(script: str) -> None:
    names = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    clean = {name: value for name, value in os.environ.items() if name not in names}
    for own, value in (
        ({}, "expandable_segments:True"),
        ({names[0]: "backend:native"}, "backend:native"),
        ({names[1]: "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ):
        done = launch(script, "--dry-run", "--save", "s", env=clean | own)
        assert done.returncode == 0, done.stderr
        assert f"{names[0]}={value}" in shlex.split(done.stdout)


@pytest.mark.parametrize(
    ("processes", "tensor"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4), (12, 4), (16, 4)]
)
def test_one_machine_with_any_number_of_gpus(processes: int, tensor: int, tmp_path: Path) -> None:
    """As many as CUDA shows, and tensor parallelism that divides them, if nothing is told."""
    from megatron_patches.flags.config import DistcaConfig
    from megatron_patches.parts import parse_args

    smi = tmp_path / "nvidia-smi"
    listed = "".join(f"echo 'GPU {n}: A GPU'\necho '  MIG 1g'\n" for n in range(processes))
    smi.write_text(f"#!/usr/bin/env bash\n{listed}")
    smi.chmod(0o755)
    env = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    visible = env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes)))}
    given = ["--dry-run", "--data-path", "a", "--save", "s"]
    printed = [
        launch("local.sh", *given, env=env).stdout,
        launch("local.sh", *given, env=visible).stdout,
        launch("local.sh", *given, "--processes", str(processes), env=env).stdout,
    ]
    assert printed[1:] == printed[:1] * 2
    assert f" --nproc-per-node {processes} " in printed[0]
    flags = [*pretrain_flags(printed[0]), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    args = parse_args(flags, world_size=processes)
    assert args.tensor_model_parallel_size == tensor
    assert args.data_parallel_size == processes // tensor
    assert DistcaConfig.from_args(args).scheduling.gpus_per_node == processes
    told = [*flags, "--tensor-model-parallel-size", "1"]
    assert parse_args(told, world_size=processes).data_parallel_size == processes


@pytest.mark.parametrize(("gpus", "binds"), [("0,1", True), ("", False)])
def test_processes_keep_near_their_gpus(gpus: str, binds: bool, tmp_path: Path) -> None:
    """By torchrun, which calls numactl."""
    numactl = tmp_path / "numactl"
    numactl.write_text("#!/usr/bin/env bash\n")
    numactl.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": gpus}
    done = launch("local.sh", "--dry-run", "--processes", "2", env=env)
    assert (" --numa-binding node " in done.stdout) == binds


@pytest.mark.parametrize("visible", ["", "-1", None])
def test_one_machine_without_gpus(visible: str | None, tmp_path: Path) -> None:
    """One process for each core, also where the driver does not run."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/usr/bin/env bash\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    smi.chmod(0o755)
    env = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = launch("local.sh", "--dry-run", env=env)
    assert f" --nproc-per-node {os.cpu_count()} " in done.stdout


def test_the_demo_sees_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes, four of them in float32, are the CPU's on every machine.

    The run as plain Megatron is of the same model and windows.
    """
    from megatron_patches.parts import parse_args

    seen = """#!/usr/bin/env bash
[[ "$*" == *megatron_patches.launch* ]] || exit 0
echo "${CUDA_VISIBLE_DEVICES-unset}"
printf "%q " "$@"
echo
if [[ "$*" == *--exit-interval* ]]; then
    echo "iteration 5/80 | lm loss: 1.0 |"
    sleep 10
fi
"""
    stand_ins = {"launch/setup.sh": "#!/usr/bin/env bash\n", ".venv/bin/python": seen}
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copy(ROOT / "pretrain_gpt.py", tmp_path)
    for name in ("launch", "megatron_patches/flags"):
        shutil.copytree(
            *(ROOT / name, tmp_path / name),
            dirs_exist_ok=True,
            ignore=lambda _, names: set(names) & {"setup.sh", "__pycache__"},
        )
    of_an_earlier_demo = tmp_path / "demo" / "checkpoints" / "iter_0000080"
    of_an_earlier_demo.mkdir(parents=True)
    more = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--train-iters", "12"]
    done = subprocess.run(
        ["bash", str(tmp_path / "launch" / "demo.sh"), *more],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not of_an_earlier_demo.exists()
    plain = (tmp_path / "demo" / "plain.log").read_text()
    # As it is where none are visible.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runs = []
    # The run that writes to a file is not silent.
    assert ", plain Megatron: 5 of 12 iterations are done\n" in done.stderr
    for output in (done.stdout, plain):
        devices, command, *_ = output.splitlines()
        assert devices == ""
        args = parse_args(pretrain_flags(command), world_size=4)
        assert args.data_parallel_size == 4
        runs.append(vars(args))
    distca, plain_megatron = runs
    assert {name for name, value in distca.items() if plain_megatron[name] != value} == {
        *("distca", "exit_interval", "eval_iters", "save", "tensorboard_dir")
    }
    assert (distca["distca"], plain_megatron["distca"]) == (True, False)


def least_bytes(args, size) -> float:
    """What the busiest GPU needs for weights, optimizer, activations and logits."""
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    sharing = args.expert_model_parallel_size
    costs = ModelCosts(size, CLUSTERS["dgx-h100"], tensor, expert_parallel=sharing)
    # Norms' inputs and outputs are whole on each rank without sequence parallelism.
    whole = 0 if args.sequence_parallel else 4 * size.hidden_size * 2 * (tensor - 1) / tensor
    layer = costs.activation_bytes() + whole
    kept = layer
    if args.recompute_granularity == "full":
        kept = size.hidden_size * 2 / (tensor if args.sequence_parallel else 1)
    else:
        layer = 0
    needs = []
    for stage, in_flight in ((0, 2 * stages - 1), (stages - 1, 1)):
        state = costs.state_bytes(stage, stages, args.data_parallel_size)
        logits = costs.logit_bytes() if stage == stages - 1 else 0
        of_token = in_flight * size.layers / stages * kept + layer + logits
        needs.append(state + args.seq_length * of_token)
    return max(needs)


@pytest.mark.parametrize(
    ("nodes", "more", "size"),
    [
        (4, "", 2),
        (1, "", 1),
        (3, "", 3),
        (4, "--pipeline-model-parallel-size=4", 1),
        (9, "--tensor-model-parallel-size 4", 2),
        (4, "--distca-context-parallel-size 4", 4),
    ],
)
def test_baselines_share_documents_in_groups(nodes: int, more: str, size: int) -> None:
    """Left to themselves they take one rank where documents fit it, and are the same as packed."""
    from benchmarks.training.throughput import build_parser, setting_of

    env = os.environ | {"SLURM_NTASKS": str(8 * nodes)}
    done = launch("slurm/benchmark.sh", "--dry-run", *more.split(), env=env)
    assert done.returncode == 0, done.stderr
    ways = {}
    for line in done.stdout.splitlines():
        if "pretrain_gpt.py" in line:
            flags = pretrain_flags(line)
            taken = [f for f in itertools.pairwise(flags) if "context-parallel" in f[0]]
            way = flags[flags.index("--distca-scheduler") + 1] if "--distca" in flags else "plain"
            ways[way] = [int(value) for _, value in taken][-1:]
    given = [4] if "context" in more else []
    shared = [size]
    assert ways == {
        "plain": given,
        "per-document-cp": shared,
        "wlb-llm": shared,
        "greedy": given,
        "tiles": given,
    }
    done = launch("slurm/throughput.sh", "--dry-run", *more.split(), env=env)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.splitlines()[1])
    flags = words[words.index("benchmarks/training/throughput.py") + 1 :]
    # Checks the flags of all ways, as a run does.
    setting = setting_of(*build_parser().parse_known_args(flags), 8 * nodes)
    taken = setting.megatron_flags
    place = len(taken) - 1 - taken[::-1].index("--distca-context-parallel-size")
    assert taken[place + 1] == str(size)
    assert setting.data_parallel_size % size == 0


def test_the_folder_of_a_model_says_what_it_is() -> None:
    done = launch("local.sh", "--dry-run", "--from-hf", "folder", "--data-path", "a")
    assert "--from-hf folder" in done.stdout
    assert "--num-layers" not in done.stdout
    assert "--num-layers 32" in launch("local.sh", "--dry-run", "--data-path", "a").stdout


def test_one_machine_is_for_the_small_model() -> None:
    done = launch("local.sh", "--dry-run", "--model=llama-70b", "--data-path", "a", "--save", "s")
    assert done.returncode == 2
    assert "one machine does not hold llama-70b" in done.stderr


def test_launchers_take_values_after_an_equals_sign() -> None:
    options = ["--dry-run", "--model=llama-34b", "--port=123", "--interface=ib0"]
    done = launch("slurm/pretrain_3d.sh", *options, "--data-path", "a", "--save", "s")
    assert done.returncode == 0, done.stderr
    assert "MASTER_PORT=123" in done.stdout
    for name in ("GLOO_SOCKET", "NCCL_SOCKET", "NVSHMEM_BOOTSTRAP_UID_SOCK"):
        assert f" {name}_IFNAME=ib0" in done.stdout
    assert "--port" not in done.stdout
    assert "--num-layers 48" in done.stdout


def test_elsewhere_than_in_the_repository(tmp_path) -> None:
    for script in SCRIPTS:
        command = ["bash", str(ROOT / "launch" / "slurm" / f"{script}.sh"), "--dry-run"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (
            2,
            "error: submit from the repository's root\n",
        )


@pytest.mark.parametrize("model", ["llama-8b", "llama-34b", "llama-70b"])
def test_the_benchmark_takes_the_printed_flags(model) -> None:
    from benchmarks.training.run import model_size, parsed
    from benchmarks.training.throughput import build_parser, setting_of

    flags = ["--model", model, "--schedulers", "tiles", "--output", "o", "--num-layers=4"]
    done = launch("slurm/throughput.sh", "--dry-run", *flags)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.splitlines()[1])
    flags = words[words.index("benchmarks/training/throughput.py") + 1 :]
    args, megatron_flags = build_parser().parse_known_args(flags)
    setting = setting_of(args, megatron_flags, 32)
    assert (setting.data_parallel_size, setting.schedulers) == (4, ("tiles",))
    found, size = model_size(parsed(setting, [])), MODELS[model]
    assert (found.layers, found.heads, found.kv_heads) == (4, size.heads, size.kv_heads)
    assert found.ffn_hidden_size == size.ffn_hidden_size
    assert args.output == Path("o")


def test_the_printed_command_trains(slurm, tmp_path) -> None:
    """The dry run's output, run by a shell: two processes over gloo, two iterations."""
    from distca.commands.prepare import main

    prefix = tmp_path / "source"
    given = ["--input", str(ROOT / "distca" / "plan"), "--tokenizer-type", "ByteLevelTokenizer"]
    assert main([*given, "--output-prefix", str(prefix)]) == 0
    save = tmp_path / "checkpoints"
    options = ["--dry-run", "--python", sys.executable, "--port", free_port(), "--interface", "lo"]
    options += ["--logs", str(tmp_path / "logs")]
    flags = [*TINY, "--data-path", str(prefix), "--save", str(save), "--train-iters", "2"]
    printed = launch("slurm/pretrain_4d.sh", *options, *flags, env=slurm)
    assert printed.returncode == 0, printed.stderr
    assert "GLOO_SOCKET_IFNAME=lo" in printed.stdout
    process = subprocess.Popen(
        ["bash", "-ec", printed.stdout],
        cwd=ROOT,
        env=slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-3000:]
    assert re.findall(r"iteration +(\d+)/2 ", output) == ["1", "2"]
    assert re.search(r"global_batch_size \.+ 2$", output, re.MULTILINE)
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    logs = [(tmp_path / "logs" / "17" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert [bool(re.search(r"iteration +2/ *2 ", log)) for log in logs] == [False, True]


def test_a_job_goes_on_while_checkpoints_are_added(slurm, tmp_path) -> None:
    """A stand-in for Python that only leaves checkpoints behind shows what the script decides."""
    save, training = tmp_path / "save", tmp_path / "training"
    save.mkdir()
    tracker = save / "latest_checkpointed_iteration.txt"
    training.write_text(
        "#!/usr/bin/env bash\ncase $* in *check_run*) exit ;; esac\n"
        f'echo "$@"\n[ -z "$REACHES" ] || echo "$REACHES" >{tracker}\n'
        'exit "$STATUS"\n'
    )
    training.chmod(0o755)

    def job(reaches: str, status: str = "0") -> subprocess.CompletedProcess[str]:
        flags = ["--python", str(training), "--save", str(save), "--train-iters=9", *TINY]
        flags += ["--logs", str(tmp_path / "logs")]
        env = slurm | {"REACHES": reaches, "STATUS": status}
        return launch("slurm/pretrain_3d.sh", "--from", "llama", *flags, env=env)

    requeue = "scontrol requeue 17"
    crashed = job("", status="3")
    assert crashed.returncode == 3
    assert requeue not in crashed.stdout
    loads = "--load llama --finetune --exit-on-missing-checkpoint --exit-signal-handler"
    assert loads in crashed.stdout
    # Weights alone, as a conversion leaves them, are no iteration.
    tracker.write_text("release")
    nothing_done = job("")
    assert (nothing_done.returncode, nothing_done.stderr) == (0, "")
    assert requeue not in nothing_done.stdout
    first = job("4")
    assert first.returncode == 0
    assert requeue in first.stdout
    second = job("9")
    assert f"--load {save} --exit-signal-handler" in second.stdout
    assert "--finetune" not in second.stdout
    assert requeue not in second.stdout


@pytest.mark.parametrize(
    ("container", "wanted"),
    [
        ("image", ["--container-image=image", f"--container-mounts={ROOT}:{ROOT},/data:/data"]),
        ("image.sif", ["apptainer exec --nv", f"--bind {ROOT},/data:/data image.sif"]),
    ],
)
def test_containers(container, wanted) -> None:
    options = ["--dry-run", "--container", container, "--mounts", "/data:/data", "--save", "s"]
    printed = launch("slurm/pretrain_3d.sh", *options).stdout
    command = " ".join(shlex.split(printed.splitlines()[1]))
    assert all(part in command for part in wanted)


def test_speeds_of_a_sweep(tmp_path, capsys) -> None:
    line = "iteration {}/12 | lm loss: 1.000000 | s: 0.1 | tokens/s: {:.0f} | GB: 0.4 |\n"
    for name, speeds in {
        "plain-1": (1, 1, 100, 100),
        "plain-2": (1, 1, 100, 90),
        "tiles-1": (1, 1, 120, 130),
        "greedy-1": (1,),
    }.items():
        text = "".join(line.format(i, speed) for i, speed in enumerate(speeds, 1))
        (tmp_path / f"{name}.log").write_text(text)
    assert compare_speeds.main([str(log) for log in sorted(tmp_path.glob("*.log"))]) == 1
    out, err = capsys.readouterr()
    assert "| tiles | 125 | 120 | 130 | 1.250 |" in out
    assert "greedy" not in out
    assert "greedy-1.log has 1 lines" in err
