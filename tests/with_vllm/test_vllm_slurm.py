"""Prefill ranks on two nodes of a real Slurm, and vLLM that asks them for long prompts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from support.byte_tokenizer import chat_tokenizer
from support.ports import free_port
from support.prefills import free_address, prompt
from support.real_slurm import cluster, missing
from support.small_models import save_small_model
from support.vllm_server import MIN_TOKENS, POSITIONS, Server, environment, vllm_serve

NODES = 2


def prefill_job(folder: Path, address: str) -> str:
    """What each node runs: torchrun, as docs/vllm.md starts ranks on several machines."""
    return " ".join(
        [
            *("srun", "--ntasks-per-node=1", sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(NODES), "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "distca", "prefill"),
            *(str(folder), "--dtype", "float32", "--host", "127.0.0.1"),
            *("--port", address.rpartition(":")[2], "--max-num-batched-tokens", "1024"),
            *("--lease", "10"),
        ]
    )


def loaded(server: Server) -> float:
    return server.metrics().get("loads_total" + 'outcome="loaded"', 0.0)


@pytest.mark.full
def test_ranks_on_two_nodes_compute_vllm_s_prompts(tmp_path: Path) -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    sizes = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": POSITIONS}
    folder = save_small_model("llama", tmp_path / "model", **sizes, end=2)
    chat_tokenizer().save_pretrained(folder)
    address, log = free_address(), tmp_path / "ranks.log"
    tokens = [prompt(number, 4 * MIN_TOKENS + 100 * number) for number in range(8)]
    bodies = [
        {"model": "model", "prompt": each, "max_tokens": 8, "temperature": 0} for each in tokens
    ]
    with (
        vllm_serve(folder, address, free_port(), tmp_path / "vllm.log") as server,
        cluster(NODES) as slurm,
    ):
        # Nobody prefills yet: vLLM computes all.
        expected = server.answers(bodies)
        assert None not in expected
        assert loaded(server) == 0
        slurm.env |= {name: environment()[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        submit = ["sbatch", "--parsable", "--nodes", str(NODES), "--output", str(log)]
        job = slurm.run(*submit, "--wrap", prefill_job(folder, address)).strip()
        slurm.wait_for(lambda: log.exists() and "ready at" in log.read_text(), 240)
        due = time.monotonic() + 240
        while loaded(server) < len(bodies) and time.monotonic() < due:
            # vLLM looks for the ranks again from time to time.
            server.reset()
            assert server.answers(bodies) == expected
        assert loaded(server) >= len(bodies)
        assert slurm.job(job)["JobState"] == "RUNNING"
        # Without one of its nodes the job ends, and vLLM computes all again.
        slurm.kill_node("127.0.0.2")
        server.reset()
        assert server.answers(bodies) == expected
