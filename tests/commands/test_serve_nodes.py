"""Flags of a server's machines: what doesn't go together is said before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.commands.serve import build_parser
from distca.commands.serve_nodes import nodes_of
from distca.inference.transports import check_transport
from distca.serve.engine.settings import Nodes


def given(*flags: str) -> Nodes:
    return nodes_of(build_parser().parse(["MODEL", *flags]), 4)


def test_machines_share_the_ranks(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    assert given() == Nodes()
    flags = ["--nnodes", "2", "--master-addr", "10.0.0.1", "--job-key-file", str(key)]
    head = given(*flags)
    assert head == Nodes(2, 0, "10.0.0.1", 29501, b"0123456789abcdef")
    assert "0123456789abcdef" not in repr(head)
    assert given(*flags, "--headless", "--node-rank", "1").rank == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--nnodes 0", "at least 1 node"),
        ("--nnodes 2 --node-rank 2 --headless", "ranks from 0 on"),
        ("--headless", "give --nnodes and --node-rank"),
        ("--nnodes 2 --node-rank 1", "without --headless: node 0 is the head"),
        ("--nnodes 2 --headless", "with --headless: node 0 is the head"),
        ("--nnodes 3", "4 processes .* cannot be shared evenly by --nnodes 3"),
        ("--nnodes 2 --master-port 0", "give 1 to 65535"),
        ("--nnodes 2", "needs --job-key-file FILE: make one"),
        ("--nnodes 2 --job-key-file /nowhere/key", "No such file or directory: make one"),
        ("--nnodes 2 --job-key-file {short}", "has 3 bytes, and needs 16"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, flags: str, why: str) -> None:
    (tmp_path / "key").write_text("abc\n")
    with pytest.raises(ValueError, match=why):
        given(*flags.format(short=tmp_path / "key").split())


def test_transports_that_cannot_connect() -> None:
    check_transport(None, True)
    check_transport("shm", False)
    for name, on_gpus, nodes, why in (
        ("nccl", False, 1, "nccl is for GPUs"),
        ("gloo", True, 1, "gloo is for ranks on CPUs"),
        ("shm", False, 2, "memory of one machine"),
    ):
        with pytest.raises(ValueError, match=why):
            check_transport(name, on_gpus, nodes)  # type: ignore[arg-type]
