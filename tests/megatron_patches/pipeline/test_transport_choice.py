"""Which transport the flags give; without a GPU, NVSHMEM never starts."""

from __future__ import annotations

import logging
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

from distca.transport import TransportError


def choose(transport: str, device: str, ablation: str = "none") -> tuple[str, str, list[str]]:
    """The class of the transport (and of what it wraps) or the error, and what was logged."""
    from megatron_patches.pipeline import transports

    args = Namespace(
        distca_transport=transport,
        distca_nvshmem_mode="kernel",
        distca_ablation=ablation,
        distributed_timeout_minutes=1,
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_patches.pipeline.transports")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        made = transports.make_transport(args, dist.group.WORLD, torch.device(device))
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
        assert "pip install 'distca[nvshmem-cu13]'" in errors[0][1]
