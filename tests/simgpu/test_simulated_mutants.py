"""Defects that are put back, and changes of what orders a GPU's work and of where tensors lie, are
seen on simulated GPUs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from support.simgpu.blockers import BLOCKERS
from support.simgpu.changes import Change, run_changes
from support.simgpu.machine import ROOT
from support.simgpu.mutants import Mutant, mutants

SHORT = 4
JOB_OF = {
    "distca/prefill/": "rows",
    "distca/inference/step_graphs.py": "alone",
    "distca/inference/": "answers",
    "distca/attention/pinned.py": "answers",
    "distca/attention/fused/experts.py": "experts",
    "distca/attention/": "training",
    "distca/runtime/serving/": "answers",
    "distca/runtime/": "training",
    "distca/transport/": "training",
    "megatron_patches/model/cuda_graphs.py": "graphs",
    "megatron_patches/pipeline/attention_server.py": "dedicated",
    "megatron_patches/pipeline/processes.py": "dedicated",
    "megatron_patches/pipeline/": "stages",
    "megatron_patches/": "training",
}
"""The job of each file, by how its path begins; the first that fits."""
LEFT_OUT = {
    "distca/attention/importance.py": "sparse prefills",
    "distca/attention/kernel_timing.py": "times kernels for the cost model",
    "distca/inference/model_runner.py ModelRunner._logits": "layers that ranks share",
    "distca/inference/model_runner.py ModelRunner._serve": "ranks without tokens in a step",
    "distca/inference/sparse_model.py": "sparse prefills",
    "distca/inference/worker.py Worker.read_rows": "rows for an engine",
    "distca/prefill/client.py": "waits for processes, not for GPUs",
    "distca/prefill/inbox.py": "runs in an engine's process",
    "distca/prefill/outbox.py NixlConnection._write": "NIXL is not simulated",
    "distca/prefill/outbox.py NixlConnection.__init__": "NIXL is not simulated",
    "distca/runtime/serving/importance.py": "sparse prefills",
    "distca/runtime/serving/kv_moves.py": "moves between groups of ranks",
    "distca/runtime/trace.py": "times of GPUs, which are not simulated",
    "distca/runtime/attention_times.py": "times of GPUs, which are not simulated",
    "distca/transport/ablation.py": "for measurements alone",
    "distca/transport/agreement.py": "of the nvshmem transport",
    "distca/transport/device.py": "of the nvshmem transport",
    "distca/transport/nvshmem.py": "NVSHMEM is not simulated",
    "distca/transport/symmetric_bytes.py": "of the nvshmem transport",
    "distca/transport/virtual.py": "one GPU for several ranks, for measurements alone",
    "megatron_patches/pipeline/planned_data.py": "of the whole loop",
    "megatron_patches/pipeline/processes.py Processes.share_places": "waits for a store",
    "megatron_patches/batches/packed.py": "of runs without --distca",
    "megatron_patches/batches/micro_batch.py sum_loss": "targets of shared conversations",
    "megatron_patches/loop/finite.py": "of the whole loop, over gloo",
    "megatron_patches/loop/late_ranks.py": "of the whole loop, over gloo",
    "megatron_patches/loop/step_log.py": "of the whole loop, over gloo",
    "megatron_patches/cpu.py": "never runs on a GPU",
}
"""Files, or parts of them, that the jobs do not run."""


@dataclass(frozen=True)
class Place:
    """A mutant of a file.

    Attributes:
        path: path of the file.
        mutant: the mutant.
        time: which one of those that are called alike.
    """

    path: str
    mutant: Mutant
    time: int = 1

    @property
    def change(self) -> Change:
        """See `support.simgpu.mutant_runs`."""
        job = next(name for begin, name in JOB_OF.items() if self.path.startswith(begin))
        return job, {self.path: self.mutant.source}

    def __str__(self) -> str:
        name = f"{self.path} {self.mutant.scope}: {self.mutant.what}"
        return name if self.time == 1 else f"{name} ({self.time})"


def _is_run(path: str, mutant: Mutant) -> bool:
    return path not in LEFT_OUT and f"{path} {mutant.scope}" not in LEFT_OUT


def _places() -> list[Place]:
    """All mutants of what the jobs run, in an order by a seed."""
    files = {
        str(file.relative_to(ROOT)) for begin in JOB_OF for file in (ROOT / begin).rglob("*.py")
    }
    found = [
        Place(path, mutant)
        for path in sorted(files)
        for mutant in mutants((ROOT / path).read_text())
        if _is_run(path, mutant)
    ]
    times = Counter[str]()
    for number, each in enumerate(found):
        times[str(each)] += 1
        found[number] = replace(each, time=times[str(each)])
    random.Random(0).shuffle(found)
    return found


PLACES = _places()
SEEN_FROM = 0.85
"""Least part of the mutants that must be seen."""
EXPLAINED = {
    "distca/inference/models.py ServedModel.load: on the host": (
        "weights get to the GPU by way of the host; tests/simgpu/test_simulated_loading.py sees it"
    ),
    "distca/transport/collective.py CollectiveTransport.__init__: no wait": (
        "it connects ranks before there is a step, and every exchange of the group comes after it"
    ),
    "distca/runtime/workspace.py Workspace.reserve: on the host": "empty, and replaced at once",
    "megatron_patches/model/cuda_graphs.py CudaGraphEngine.warm_up: no stream": (
        "libraries make room for themselves on that stream, which are not simulated"
    ),
    "megatron_patches/model/cuda_graphs.py CudaGraphEngine.warm_up: another stream": "likewise",
    "megatron_patches/model/cuda_graphs.py CudaGraphEngine.warm_up: no synchronize (2)": (
        "what warms up writes nothing that is read"
    ),
    "megatron_patches/pipeline/attention_server.py serve_global_batch: on the host": (
        "it has no elements, so that nothing reads them"
    ),
    "megatron_patches/pipeline/tick_pipeline.py _GlobalBatch.__init__: on the host (2)": (
        "empty, and read where embeddings are computed late, which the job does not do"
    ),
}
"""Mutants that nothing sees, and why."""


def test_mutants_are_other_programs() -> None:
    source = """
def send(a, b, x, device):
    a.wait_stream(b)
    with torch.cuda.stream(a):
        x.record_stream(a)
    y = torch.empty(3, device=device, pin_memory=True)
    x.pin_memory().to(self._device, non_blocking=True)
    return a.query(), a.record_event()
"""
    found = {(each.line, each.what) for each in mutants(source)}
    assert found == {
        *((3, "no wait_stream"), (3, "wait_stream turned round")),
        *((4, "no stream"), (4, "another stream")),
        *((5, "no record_stream"), (5, "record_stream of another stream")),
        *((6, "on the host"), (6, "pageable")),
        *((7, "pageable"), (7, "to the host"), (7, "to another GPU")),
        *((8, "no query"), (8, "no record_event")),
    }
    for each in mutants(source):
        compile(each.source, "mutant", "exec")
        assert each.source != source
        assert each.scope == "send"


def test_files_that_are_left_out_exist() -> None:
    assert all((ROOT / name.split()[0]).exists() for name in LEFT_OUT)


@pytest.fixture(scope="module")
def places(full: bool) -> list[Place]:
    """Some of the places, or with `--full` all."""
    return PLACES if full else PLACES[:SHORT]


@pytest.fixture(scope="module")
def why(places: list[Place], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each defect and mutant; all run in one process."""
    changes = {name: each.change for name, each in BLOCKERS.items()}
    changes |= {str(each): each.change for each in places}
    found = run_changes([*changes.values()], tmp_path_factory.mktemp("changes"))
    return dict(zip(changes, found, strict=True))


@pytest.mark.parametrize("name", BLOCKERS)
def test_a_blocker_is_seen(why: dict[str, str], name: str) -> None:
    assert BLOCKERS[name].says in why[name], why[name] or "nothing is seen"


def test_mutants_are_seen(why: dict[str, str], places: list[Place], full: bool) -> None:
    """All but those that are explained."""
    unseen = {name for name in map(str, places) if not why[name]}
    assert unseen <= EXPLAINED.keys(), unseen - EXPLAINED.keys()
    if full:
        assert len(unseen) <= (1 - SEEN_FROM) * len(PLACES), unseen
        assert unseen == EXPLAINED.keys(), f"they are seen: {EXPLAINED.keys() - unseen}"
