"""Which transport the flags give; without a GPU, NVSHMEM never starts."""

from __future__ import annotations

import logging
from argparse import Namespace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.transport import TransportError
from distca.wording import install
from megatron_patches.flags.config import DistcaConfig, TransportConfig
from megatron_patches.flags.parallel import ParallelSizes


def choose(transport: str, device: str, ablation: str = "none") -> tuple[str, str, list[str]]:
    """The class of the transport (and of what it wraps) or the error, and what was logged."""
    from megatron_patches.pipeline import transports

    config = TransportConfig(kind=transport, ablation=ablation)  # type: ignore[arg-type]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_patches.pipeline.transports")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        made = transports.make_transport(
            config, dist.group.WORLD, torch.device(device), timedelta(minutes=1)
        )
        names = type(made).__name__, type(getattr(made, "_inner", None)).__name__
        made.close()
    except TransportError as error:
        names = "TransportError", str(error)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return *names, said


def test_on_cpus(ranks) -> None:
    for transport, name in (
        ("auto", "CollectiveTransport"),
        ("collective", "CollectiveTransport"),
        ("shm", "SharedMemoryTransport"),
    ):
        results = ranks.run(choose, transport, "cpu", world_size=2)
        assert [result[0] for result in results] == [name] * 2
    assert "since there is no GPU" in ranks.run(choose, "auto", "cpu", world_size=2)[0][2][0]


@pytest.mark.parametrize(
    ("ablation", "name"), [("single-stream", "SingleStream"), ("signal", "Signal")]
)
def test_ablations_wrap_any(ranks, ablation: str, name: str) -> None:
    results = ranks.run(choose, "shm", "cpu", ablation, world_size=2)
    assert [result[:2] for result in results] == [(name, "SharedMemoryTransport")] * 2


def test_only_auto_falls_back(ranks) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for name, _, said in ranks.run(choose, "auto", "cuda:0", world_size=2):
        assert name == "CollectiveTransport"
        assert "since nvshmem does not start: rank 0: " in said[0]
    errors = ranks.run(choose, "nvshmem", "cuda:0", world_size=2)
    assert errors[0] == errors[1]
    assert errors[0][0] == "TransportError"
    if "cannot be imported" in errors[0][1]:
        assert install("nvshmem-cu13") in errors[0][1]


@pytest.mark.parametrize("dedicated", [0, 1])
def test_an_exchange_takes_as_many_of_a_gpus_blocks_as_the_flag_says(
    monkeypatch, dedicated
) -> None:
    """With a stand-in for NCCL: the group that exchanges is made with these options."""
    from megatron_patches.pipeline import servers
    from megatron_patches.pipeline.processes import Processes
    from support.arguments import parse

    made: list[Any] = []

    class Nccl:
        Options = partial(Namespace, config=Namespace(max_ctas=None))

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append(options)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", lambda places, place: None)
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **how: made.append(how["pg_options"]) or "a group"
    )
    for which in ("rank", "world_size"):
        for kind in ("tensor_model_parallel", "pipeline_model_parallel", "data_parallel"):
            number = int(which == "world_size")
            name = f"get_{kind}_{which}"
            monkeypatch.setattr(servers.parallel_state, name, lambda number=number: number)
    processes = (
        Processes(dist.HashStore(), 0, 1, 1, 1, timedelta(minutes=10)) if dedicated else None
    )
    for flags, blocks in (((), 8), (("--distca-nccl-max-ctas", "16"), 16)):
        args = parse("--distca", *flags, world_size=1)
        config, sizes = DistcaConfig.from_args(args), ParallelSizes.from_args(args)
        servers.find_servers(config, sizes, torch.device("cpu"), processes)
        assert made[-1].config.max_ctas == blocks
        assert made[-1].is_high_priority_stream
        assert made[-1]._timeout == timedelta(minutes=args.distributed_timeout_minutes)


@pytest.mark.parametrize(
    ("flags", "machines", "warns"),
    [
        ("", "aaaabbbb", True),
        ("--distca-gpus-per-node 4", "aaaabbbb", False),
        ("--distca-scheduler greedy", "aaaabbbb", False),
        ("--tensor-model-parallel-size 4", "aaaabbbb", False),
        ("", "aaaa", False),
        ("", "abcd", False),
    ],
)
def test_a_scheduler_that_knows_no_machines_is_warned_of(caplog, flags, machines, warns) -> None:
    from megatron_patches.pipeline.servers import warn_of_distances
    from support.arguments import parse

    args = parse("--distca", *flags.split(), world_size=len(machines))
    scheduling = DistcaConfig.from_args(args).scheduling
    warn_of_distances(scheduling, args.tensor_model_parallel_size, machines)
    assert ("give --distca-gpus-per-node 4" in caplog.text) == warns
