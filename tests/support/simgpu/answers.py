"""Ranks that answer with small models on simulated GPUs, and what that asked of the GPUs.

The argument is a file with jobs and prompts (token ids), as JSON. A job is a list: folders of
models, number of ranks, and packages of kernels that are installed. For each job a list is written
to standard output, as JSON: what each rank found of each model, or in its place why one failed.
Ranks are forks of this process. Without simulated GPUs they answer on the CPU, and nothing is
logged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.simgpu import cuda
from support.simgpu.forked import import_transformers, run_ranks
from support.simgpu.machine import Machine, packages_at
from support.simgpu.races import count, races

TOKENS = 5


class _Tokens:
    """Takes a rank's tokens, and cuts the log at each: what lies between two is a step."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []

    def start(self) -> None:
        """Begins a log."""
        if cuda.native is not None:
            cuda.native.start()

    def stop(self) -> list[Any]:
        """Ends the log and returns it."""
        return [] if cuda.native is None else cuda.native.stop()

    def take(self, sequence: int, token: int) -> None:
        """Takes a token."""
        self.steps.append(self.stop())
        self.start()


SECONDS = 400
"""Time after which a job hangs."""


def main(argv: list[str]) -> None:
    """Runs each job in turn."""
    jobs, prompts = json.loads(Path(argv[0]).read_text())
    import_transformers()
    found = [_ranks_of(*job, prompts) for job in jobs]
    sys.stdout.write(json.dumps(found))


def _ranks_of(
    models: list[str], ranks: int, packages: list[str], prompts: list[list[int]]
) -> list[dict[str, Any]] | str:
    """What the ranks of a job found, or why one failed."""

    def answer(rank: int, folder: Path) -> dict[str, Any]:
        sys.path[:0] = packages_at(packages)
        stores = str(folder)
        return {Path(each).name: answers_of(each, rank, ranks, stores, prompts) for each in models}

    return run_ranks(ranks, SECONDS, answer)


def answers_of(
    folder: str,
    rank: int,
    ranks: int,
    stores: str,
    prompts: list[list[int]],
    at_once: bool = False,
    penalties: Mapping[str, float] | None = None,
    room: int | None = None,
    eager: bool = False,
) -> dict[str, Any]:
    """Answers with a model; returns tokens, races and what each step asked of the GPU.

    Args:
        folder: folder of the model.
        rank: number of this rank.
        ranks: ranks that answer together.
        stores: folder that they share.
        prompts: prompts as token ids.
        at_once: whether the prompts are answered together, and not one after the other.
        penalties: fields of `Penalties`, for all answers.
        room: free bytes of a GPU. The pool takes what is left of them, but for a MiB; None: the
            pool is small, and the GPU has more.
        eager: whether decode steps run without graphs.
    """
    import torch
    import torch.distributed as dist

    from distca.attention import torch_cpu
    from distca.commands.engine_flags import served_dtype
    from distca.inference import rank_processes
    from distca.inference.defaults import configure
    from distca.inference.messages import AddRequest
    from distca.inference.models import DTYPES, read_model
    from distca.inference.sampling import Penalties, SamplingParams

    if cuda.native is None:
        # The CPU's own decodes round bfloat16 less often than torch's, which GPUs stand for here.
        torch_cpu.load_paged = lambda: None  # type: ignore[assignment]
    dtype = torch.bfloat16 if cuda.native is None else DTYPES[served_dtype(None)]
    model = read_model(folder, dtype, 1)
    config = configure(
        model,
        ranks,
        block_size=256,
        cache_bytes=1 << 24 if room is None else None,
        gpu_utilization=1 - 2**20 / Machine().capacity,
        max_num_seqs=8,
        enforce_eager=eager,
    )
    others = None
    if room is not None:
        free, _ = torch.cuda.mem_get_info(rank)
        others = torch.empty(free - room, dtype=torch.uint8, device=torch.device("cuda", rank))
    sampling = SamplingParams(TOKENS, 0.0, 0, frozenset())
    told = _Tokens()
    store = f"{stores}/{Path(folder).name}"
    llm, _ = rank_processes.start_rank(config, False, rank, store)
    # The first answer captures graphs and makes what is made once.
    tokens: list[list[int]] = []
    log: list[Any] = []
    steps: list[list[Any]] = []
    changed = Penalties(**(penalties or {}))  # type: ignore[arg-type]
    requests = [AddRequest(each, prompt, sampling, changed) for each, prompt in enumerate(prompts)]
    for batch in [requests] if at_once else [[each] for each in requests]:
        told.steps = []
        told.start()
        tokens += [each.token_ids for each in llm.answer(batch, told.take).values()]
        rest = told.stop()
        steps = told.steps
        log += [record for step in (*steps, rest) for record in step]
    dist.destroy_process_group()
    del others
    return {"tokens": tokens, "races": races(log), "steps": [_told(step) for step in steps]}


def _told(step: list[Any]) -> dict[str, Any]:
    counts = count(step)
    return {
        "launches": counts.launches,
        "syncs": dict(counts.syncs),
        "operators": dict(counts.operators.most_common()),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
