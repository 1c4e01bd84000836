"""Flags of the machines that a server runs on, spelled as vLLM's."""

from __future__ import annotations

import argparse
from pathlib import Path

from distca.commands.command_line import Parser
from distca.serve.engine.settings import Nodes

LEAST_KEY_BYTES = 16
"""Bytes of a job's key, below which it could be guessed."""


def add_node_flags(parser: Parser) -> None:
    """Adds the flags of `nodes_of`."""
    nodes = parser.add_argument_group(
        "machines (give each the same flags, but its own --node-rank)"
    )
    nodes.add_argument(
        "--nnodes", type=int, default=1, metavar="N", help="Machines, with as many ranks each."
    )
    nodes.add_argument(
        "--node-rank", type=int, default=0, metavar="R", help="This machine; 0 is the head."
    )
    nodes.add_argument(
        "--master-addr",
        default="127.0.0.1",
        metavar="A",
        help="Address of the head, the only one that it listens on for other machines.",
    )
    nodes.add_argument(
        "--master-port", type=int, default=29501, metavar="P", help="Port of the head for them."
    )
    nodes.add_argument(
        "--headless",
        action="store_true",
        help="Run only ranks, without a server: on every machine but the head.",
    )
    nodes.add_argument(
        "--job-key-file",
        type=Path,
        metavar="FILE",
        help="Key by which machines know each other, the same on all: `openssl rand -hex 32 > "
        "FILE`.",
    )


def nodes_of(args: argparse.Namespace, processes: int) -> Nodes:
    """Returns the machines that the flags describe.

    Args:
        args: flags.
        processes: processes of all ranks.

    Raises:
        ValueError: the flags don't go together, or there is no key.
    """
    count, rank = args.nnodes, args.node_rank
    if count < 1 or not 0 <= rank < count:
        raise ValueError(
            f"--nnodes {count} --node-rank {rank}: give at least 1 node, and ranks from 0 on"
        )
    if args.headless and count == 1:
        raise ValueError("--headless is for further machines: give --nnodes and --node-rank, too")
    if args.headless != (rank > 0):
        raise ValueError(
            f"--node-rank {rank} {'with' if args.headless else 'without'} --headless: node 0 is "
            "the head, which answers requests, and all others are headless"
        )
    if count == 1:
        return Nodes()
    if processes % count:
        raise ValueError(
            f"{processes} processes (ranks times --tensor-parallel-size) cannot be shared evenly "
            f"by --nnodes {count}: give a number that divides them"
        )
    if not 0 < args.master_port < 65536:
        raise ValueError(f"--master-port {args.master_port}: give 1 to 65535")
    return Nodes(count, rank, args.master_addr, args.master_port, _read_key(args.job_key_file))


def _read_key(path: Path | None) -> bytes:
    """Reads the job's key.

    Raises:
        ValueError: there is none, or it could be guessed.
    """
    how = "make one by `openssl rand -hex 32 > FILE`, and give it to all nodes"
    if path is None:
        raise ValueError(f"--nnodes needs --job-key-file FILE: {how}")
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--job-key-file {path}: {error.strerror}: {how}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(
            f"--job-key-file {path} has {len(key)} bytes, and needs {LEAST_KEY_BYTES}: {how}"
        )
    return key
