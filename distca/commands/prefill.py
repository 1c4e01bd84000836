"""`distca prefill`: ranks that share long prompts compute keys and values for a vLLM server."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distca.commands.chosen_sparsity import add_calibration_flags
from distca.commands.command_line import Parser
from distca.commands.described import add_selection_flags
from distca.commands.engine_flags import (
    add_dtype_flag,
    add_machine_flags,
    add_pool_flags,
    add_timeout_flag,
    check_counts,
    check_machine_flags,
    check_timeout,
    served_dtype,
)
from distca.commands.prefill_model import add_model_flags, read_prefill_model
from distca.commands.rank_groups import add_group_flags, served_groups
from distca.commands.served_sparsity import add_sparsity_flags
from distca.commands.served_strategy import served_owners, served_strategy
from distca.lifetime import check_processes, end_with_torchrun
from distca.prefill.address import check_host
from distca.torchrun import Torchrun, read_torchrun
from distca.wording import counted, install

if TYPE_CHECKING:
    from distca.inference.config import EngineConfig
    from distca.inference.models import ServedModel

logger = logging.getLogger(__name__)

_EPILOG = """
examples:
  distca prefill path/to/Llama-3.2-1B --context-parallel-size 2
  vllm serve path/to/Llama-3.2-1B --kv-transfer-config '{"kv_connector": "DistCAConnector",
      "kv_connector_module_path": "distca.vllm", "kv_role": "kv_consumer",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"distca_address": "tcp://127.0.0.1:8300"}}'

vLLM answers all requests. It asks the ranks for the keys and values of long prompts, and computes
the prompt itself if they are not there. The ranks start again if one of them fails. On several
machines torchrun starts them: torchrun --nnodes 2 --nproc-per-node 8 -m distca prefill MODEL
--host ADDRESS, where ADDRESS is one of the first machine.
"""


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("prefill", __doc__.splitlines()[0], _EPILOG)
    add_model_flags(parser)
    network = parser.add_argument_group("network")
    network.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Address at which vLLM reaches the ranks. Everyone who can reach this address is "
        "trusted. Default: reachable only from this machine.",
    )
    network.add_argument(
        "--port",
        type=int,
        default=8300,
        metavar="N",
        help="Port at which vLLM reaches the ranks. Default: 8300.",
    )
    network.add_argument(
        "--lease",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="If the ranks are silent for SECONDS, vLLM computes a prompt itself. One layer "
        "must take less time than this for --max-num-batched-tokens tokens. Default: 10.",
    )
    network.add_argument(
        "--transfer",
        choices=("auto", "nixl", "tcp"),
        default="auto",
        help="How keys and values reach vLLM. nixl: they are written into the memory of vLLM's "
        "device; tcp: they are sent through host memory; auto: nixl if vLLM and the ranks have "
        "it, else tcp.",
    )
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--context-parallel-size",
        type=int,
        metavar="N",
        help="Number of ranks that share a prompt. Default: 1; under torchrun, all of its "
        "processes.",
    )
    ranks.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="T",
        help="Number of neighbouring processes that split every layer of a rank. The number "
        "may differ from vLLM's; a divisor of vLLM's is best. Default: 1.",
    )
    ranks.add_argument(
        "--context-parallel-threshold",
        type=int,
        metavar="N",
        help="Minimum number of tokens in a prompt that several ranks share. Shorter prompts "
        "stay on one rank. Default: 0; with the strategy tiles, no prompt is shared.",
    )
    ranks.add_argument(
        "--max-restarts",
        type=int,
        default=1000,
        metavar="N",
        help="Maximum number of times that the ranks restart after a failure. Default: 1000.",
    )
    tables = "searched, a table that `distca tune partitions` wrote"
    add_selection_flags(ranks, "auto", tables, splits_weights=False, many_prompts=True)
    add_sparsity_flags(ranks)
    add_calibration_flags(ranks)
    add_machine_flags(ranks)
    add_group_flags(ranks)
    engine = parser.add_argument_group("engine")
    add_dtype_flag(engine)
    add_pool_flags(engine)
    engine.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="Maximum number of prompts that run at the same time.",
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="Maximum number of tokens in an iteration. Longer prompts are computed in chunks. "
        "With the strategy tiles, each rank gets an equal share of this number. Default: 8192.",
    )
    add_timeout_flag(engine, 60.0, "after which the ranks restart")
    engine.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Allow code from the model's folder to run.",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Starts the ranks, or is one of those that torchrun has started.

    Returns:
        The exit status: that of torchrun, which ends if the ranks fail too often.

    Raises:
        ValueError: the flags or the model cannot be used.
        ImportError: a package is missing.
    """
    args = build_parser().parse(argv)
    launched = read_torchrun()
    if launched is not None:
        end_with_torchrun()
    if args.context_parallel_size is None:
        args.context_parallel_size = 1 if launched is None else _ranks_of(launched, args)
    _check_flags(args)
    if launched is None:
        check_host(args.host, f"--host {args.host}")
    try:
        model, told, config = _configuration(args)
    except ImportError as error:
        raise ImportError(f"{error}: {install('inference')}") from error
    if launched is not None:
        return _serve(args, model, told, config)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    from distca.prefill.front import check_address

    check_address(_address(args))
    if args.transfer == "nixl":
        from distca.prefill.nixl import NixlAgent, NixlError

        try:
            NixlAgent()
        except NixlError as error:
            raise ValueError(f"--transfer nixl: {error}") from error
    sys.stderr.write(
        f"distca prefill: {told}\n"
        f"distca prefill: {_ranks(config)}; vLLM's address for them: "
        f"{_address(args)}\n"
    )
    try:
        torchrun(
            [
                "--standalone",
                *("--nproc-per-node", str(config.processes)),
                *("--max-restarts", str(args.max_restarts)),
                *("-m", "distca", "prefill", *argv),
            ]
        )
    except SignalException as error:
        # torchrun takes signals itself, and has ended the ranks by now.
        sys.stderr.write(f"distca prefill: ended by signal {error.sigval}\n")
        return 128 + int(error.sigval)
    return 0


def _ranks_of(launched: Torchrun, args: argparse.Namespace) -> int:
    """Ranks of torchrun's processes.

    Raises:
        ValueError: they are not whole ranks.
    """
    processes, size = launched.world_size, max(args.tensor_parallel_size, 1)
    if processes % size:
        raise ValueError(
            f"--tensor-parallel-size {size} does not divide torchrun's {processes} processes: "
            "start a multiple of it"
        )
    return processes // size


def _ranks(config: EngineConfig) -> str:
    """Says how many ranks there are."""
    ranks, size = counted(config.parallel.world_size, "rank"), config.parallel.tensor_parallel_size
    return ranks if size == 1 else f"{ranks} of {size} processes each"


def _address(args: argparse.Namespace) -> str:
    return f"tcp://{args.host}:{args.port}"


def _configuration(args: argparse.Namespace) -> tuple[ServedModel, str, EngineConfig]:
    """Returns the model, whose code computes it, and the configuration of the engine.

    Raises:
        ValueError: the flags don't fit the model or this machine.
    """
    import torch

    from distca.attention.choice import check_block_size, default_block_size
    from distca.inference.defaults import configure
    from distca.inference.pool_size import blocks_in

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    args.dtype = served_dtype(args.dtype)
    model, told = read_prefill_model(args)
    size = args.block_size or default_block_size()
    check_block_size(size, model.shape.head_dim)
    cache_bytes = args.kv_cache_memory_bytes or (None if gpus else 1 << 30)
    if cache_bytes is not None:
        blocks_in(cache_bytes, model, size)
    strategy = served_strategy(args, model)
    config = configure(
        model,
        args.context_parallel_size,
        strategy=strategy,
        chain=served_owners(args, model, strategy),
        growing=served_groups(args, model),
        block_size=size,
        cache_bytes=cache_bytes,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        threshold=args.context_parallel_threshold,
        prefix_caching=args.enable_prefix_caching,
        step_timeout=args.step_timeout,
        gpu_utilization=args.gpu_memory_utilization,
    )
    positions = args.max_model_len or model.positions
    config = replace(config, model=replace(config.model, positions=min(positions, model.positions)))
    # torchrun's ranks may lie on several machines.
    if read_torchrun() is None:
        check_processes(config.processes, gpus, f"{config.processes} processes of ranks")
    return model, told, config


def _serve(args: argparse.Namespace, model: ServedModel, told: str, config: EngineConfig) -> int:
    """Serves as one of the ranks."""
    import torch.distributed as dist

    from distca.prefill.facts import model_facts, model_folder
    from distca.prefill.front import Front
    from distca.prefill.messages import Welcome
    from distca.prefill.ranks import PrefillRank

    # Nothing is left to clean up, and whoever starts the ranks anew should not wait.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.basicConfig(format="distca prefill: %(message)s", level=logging.INFO)
    rank = PrefillRank(config, model, args.max_num_batched_tokens, args.lease, args.transfer)
    if dist.get_rank() == 0:
        folder = model_folder(args.model)
        facts = model_facts(model.config, folder, args.dtype, model.frequencies, model.quantization)
        welcome = Welcome(
            "",
            config.processes,
            args.max_num_batched_tokens,
            len(model.windows),
            rank.capacity,
            args.lease,
            agents=rank.agents,
        )
        front = Front(_address(args), facts, welcome, rank.slices, rank.transfers)
        rank.listen(front)
        logger.info("ready at %s; %s", front.address, told)
    try:
        rank.serve()
    finally:
        rank.close()


def _check_flags(args: argparse.Namespace) -> None:
    check_counts(
        args,
        "context_parallel_size",
        "tensor_parallel_size",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "max_model_len",
    )
    check_counts(args, "context_parallel_threshold", "max_restarts", least=0)
    if not 0 < args.lease < float("inf"):
        raise ValueError(f"--lease {args.lease}: give seconds above 0, not infinity")
    check_timeout(args)
    if not 0 < args.port < 65536:
        raise ValueError(f"--port {args.port}: give 1 to 65535")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ValueError(
            f"--gpu-memory-utilization {args.gpu_memory_utilization}: give more than 0, at most 1"
        )
    check_machine_flags(args)
