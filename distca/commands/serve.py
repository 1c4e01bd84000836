"""`distca serve`: a model answers requests as OpenAI's clients make them, on several ranks."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distca.commands.chosen_sparsity import add_calibration_flags, chosen_sparsity
from distca.commands.command_line import Parser
from distca.commands.described import RUNAHEAD, add_partition_flag
from distca.commands.engine_flags import add_machine_flags, add_pool_flags
from distca.commands.fewest_ranks import AUTO, add_ranks_flag, ranks_for_positions
from distca.commands.serve_nodes import add_node_flags, nodes_of
from distca.commands.serve_roles import add_role_flags, roles_of
from distca.commands.served_chain import served_chain, tell_of_lengths
from distca.commands.served_dtype import add_dtype_flag, served_dtype
from distca.commands.served_layouts import SP_NTP, SP_TP, served_split
from distca.commands.served_sparsity import CSPS, add_sparsity_flags, near_to_far
from distca.cost.profile import Profile
from distca.inference.transports import TRANSPORTS, check_transport
from distca.schedule.serving import SELECTORS, STRATEGIES
from distca.schedule.serving.cdsp import PREFILL_STRATEGIES
from distca.serve.engine.settings import Nodes

_EPILOG = """
examples:
  distca serve path/to/Llama-3.2-1B --context-parallel-size 2
  distca serve MODEL --max-model-len 32768 --kv-cache-memory-bytes 4000000000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "The sky is", "max_tokens": 16}'

Each rank is a process of this machine, with a GPU of its own where there are any. A page to chat
with the model is at http://localhost:8000/.
"""

_CPU_CACHE_BYTES = 1 << 30
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("serve", __doc__.splitlines()[0], _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="Folder of a model of transformers.")
    http = parser.add_argument_group("requests")
    http.add_argument("--host", default="127.0.0.1", help="Name or address to listen on.")
    http.add_argument("--port", type=int, default=8000, metavar="N", help="Port to listen on.")
    http.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="Key that requests need; repeatable. Others can see it in the list of processes: "
        "--api-key-file hides it.",
    )
    http.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="Keys that requests need, one a line."
    )
    http.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="Names of the model in requests. Default: MODEL.",
    )
    http.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of conversations, a file or the text itself. Default: the model's.",
    )
    http.add_argument(
        "--max-queued-requests",
        type=int,
        default=1024,
        metavar="N",
        help="Sequences that may wait; requests beyond get the status 429.",
    )
    http.add_argument(
        "--disable-uvicorn-access-log", action="store_true", help="Do not log each request."
    )
    model = parser.add_argument_group("model")
    add_dtype_flag(model)
    model.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="Most tokens of a sequence, its answer included. Default: the model's positions.",
    )
    model.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Let code of the model's folder run. Without it none does.",
    )
    model.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed for requests that give none."
    )
    ranks = parser.add_argument_group("ranks")
    add_ranks_flag(ranks, "--max-model-len tokens", default=1)
    ranks.add_argument(
        "--attention-servers",
        type=int,
        default=0,
        metavar="K",
        help="Further ranks, which hold keys and values of long sequences and have no weights.",
    )
    ranks.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="Processes of each rank, which share its layers.",
    )
    ranks.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="What moves rows between ranks: gloo and shm (memory that processes of one machine "
        "share) on CPUs, nccl and nvshmem on GPUs. Default: gloo, or nccl.",
    )
    ranks.add_argument(
        "--prefill-strategy",
        metavar="NAME",
        help=f"{', '.join(STRATEGIES)} or auto: what travels in chunks of long prompts, keys and "
        "values (default) or queries and outputs; auto chooses for each iteration. With runahead "
        "keys travel down a chain of ranks, which have contiguous parts of a chunk; with csps from "
        "near ranks to far ones, and of far keys only some; with sp-ntp heads are scattered over "
        "ranks, and with sp-tp processes that split the weights (--tensor-parallel-size alone) "
        "share a chunk, between which two auto chooses there, too. With --prefill-ranks who gets "
        "which ranks: "
        f"{', '.join(PREFILL_STRATEGIES)} (default; fixed-N for each power of two).",
    )
    ranks.add_argument(
        "--selector",
        choices=SELECTORS,
        default="simulated",
        help="How auto chooses: by the least predicted seconds of both plans, or the rule of the "
        "paper (Algorithm 5).",
    )
    add_machine_flags(ranks)
    add_partition_flag(ranks, "searched, a table that `distca tune partitions` wrote")
    add_sparsity_flags(ranks)
    add_calibration_flags(ranks)
    ranks.add_argument(
        "--context-parallel-threshold",
        type=int,
        default=1024,
        metavar="N",
        help="Tokens from which a sequence is shared out over ranks; shorter ones stay on one.",
    )
    ranks.add_argument(
        "--cp-kv-cache-interleave-size",
        type=int,
        metavar="N",
        help="Consecutive decoded positions of a long sequence that one rank owns, a multiple of "
        "--block-size. Default: --block-size.",
    )
    engine = parser.add_argument_group("engine")
    add_pool_flags(engine)
    engine.add_argument(
        "--max-num-seqs", type=int, default=64, metavar="N", help="Most sequences that run."
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="Most tokens of an iteration: longer prompts are fed in chunks.",
    )
    engine.add_argument(
        "--enforce-eager",
        action="store_true",
        help="Decode without CUDA graphs, which GPUs have otherwise.",
    )
    engine.add_argument(
        "--step-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="Time after which an iteration has failed.",
    )
    add_node_flags(parser)
    add_role_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command until it is asked to end.

    Returns:
        The exit status: 1 if the engine failed.

    Raises:
        ValueError: the flags or the model cannot be used.
        ImportError: a package is missing.
    """
    args = build_parser().parse(argv)
    gpus = _gpus()
    args.dtype = served_dtype(args.dtype)
    from distca.attention.choice import default_block_size

    args.block_size = args.block_size or default_block_size()
    _check_flags(args)
    check_transport(args.transport, gpus > 0, args.nnodes)
    roles = roles_of(args)
    if roles is None:
        args.prefill_strategy = args.prefill_strategy or STRATEGIES[0]
        able = (*STRATEGIES, "auto", RUNAHEAD, SP_NTP, SP_TP, CSPS)
        if args.prefill_strategy not in able:
            raise ValueError(
                f"--prefill-strategy {args.prefill_strategy}: choose from {', '.join(able)}, or "
                "give --prefill-ranks and --decode-ranks"
            )
    keys = tuple(args.api_key) + _read_keys(args.api_key_file)
    if not all(keys):
        raise ValueError("--api-key is empty: give a key, or leave the flag out")
    try:
        from distca.serve.api.app import Bounds
        from distca.serve.api.model import ApiModel
        from distca.serve.api.server import Address, log_lines, serve
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'distca[serve]'") from error
    from distca.attention.choice import check_block_size
    from distca.inference.models import DTYPES, load_tokenizer, read_model
    from distca.serve.engine.node import Node

    served = read_model(
        args.model, DTYPES[args.dtype], args.tensor_parallel_size, args.trust_remote_code
    )
    if args.context_parallel_size == AUTO:
        args.context_parallel_size = ranks_for_positions(args, served, _cache_bytes(args, gpus))
    ranks = args.context_parallel_size + args.attention_servers
    processes = ranks * args.tensor_parallel_size if roles is None else roles.processes
    nodes = nodes_of(args, processes)
    listening = None if args.headless else Address(args.host, args.port).bind()
    check_block_size(args.block_size, served.shape.head_dim)
    chain = served_chain(args, served)
    settings = _settings(args, served, nodes, roles, gpus, chain)
    if listening is None:
        log_lines()
        return _status(Node(settings).run())
    lengths = [args.context_parallel_threshold, settings.positions]
    tell_of_lengths("serve", chain, args.partition, lengths)
    tokenizer = load_tokenizer(args.model, args.trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{args.model} has no tokenizer.json, by which answers are streamed: add it"
        )
    given = served.generation.to_diff_dict()
    model = ApiModel(
        tuple(args.served_model_name or [args.model]),
        tokenizer,
        settings.positions,
        served.vocab_size,
        served.stops,
        {name: given[name] for name in _DEFAULTS if given.get(name) is not None},
        _read_template(args.chat_template) or getattr(tokenizer, "chat_template", None),
        random.Random(args.seed),
    )
    bounds = Bounds(args.max_num_seqs + args.max_queued_requests, keys)
    why = asyncio.run(
        serve(listening, model, settings, bounds, not args.disable_uvicorn_access_log)
    )
    return _status(why)


def _status(why: str | None) -> int:
    """Says why the server ended, unless it was asked to, and returns the exit status."""
    if why is None:
        return 0
    sys.stderr.write(f"distca serve: {why}\n")
    return 1


def _settings(
    args: argparse.Namespace, served: Any, nodes: Nodes, roles: Any, gpus: int, chain: Any
) -> Any:
    """Returns the settings of the engine, which are the same on all machines.

    Raises:
        ValueError: the flags don't fit the model or this machine.
    """
    from distca.inference.models import model_digest
    from distca.inference.tensor_parallel import check_divides
    from distca.schedule.serving.blocks import block_bytes
    from distca.schedule.serving.csps.head_scatter import head_groups
    from distca.schedule.serving.limits import SchedulerConfig
    from distca.serve.engine.settings import ServerConfig

    positions = args.max_model_len or served.positions
    if positions > served.positions:
        raise ValueError(
            f"--max-model-len {positions:,}: the model has {served.positions:,} positions"
        )
    ranks = args.context_parallel_size + args.attention_servers
    split = None if roles is not None else served_split(args, served, args.nnodes)
    if roles is not None:
        check_divides(served.config, roles.decode_tensor, "--decode-tensor-parallel-size")
        ranks = roles.prefill + roles.decode
    near = _near_to_far(args, served, nodes, ranks)
    settings = ServerConfig(
        args.model,
        args.dtype,
        served.windows,
        model_digest(served),
        positions,
        ranks,
        args.tensor_parallel_size,
        near or (STRATEGIES[0] if roles or chain or split else _strategy(args, served)),
        SchedulerConfig(
            args.max_num_seqs,
            args.max_num_batched_tokens,
            args.cp_kv_cache_interleave_size or args.block_size,
            args.context_parallel_threshold,
            args.attention_servers,
            chain if near is None else near.levels,
        ),
        args.block_size,
        _cache_bytes(args, gpus),
        args.gpu_memory_utilization,
        args.enable_prefix_caching,
        args.step_timeout,
        args.enforce_eager,
        args.transport,
        args.trust_remote_code,
        head_groups(served.shape.heads, served.shape.kv_heads, ranks),
        split,
        nodes=nodes,
        roles=roles,
    )
    if 0 < gpus < len(settings.own_processes):
        raise ValueError(
            f"{len(settings.own_processes)} processes need a GPU each, but there are {gpus}: use "
            "fewer ranks, or CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    if settings.cache_bytes is not None:
        size = block_bytes(served.shape, len(served.windows), settings.block_size)
        settings.check_pools(settings.cache_bytes // size, size)
    return settings


def _cache_bytes(args: argparse.Namespace, gpus: int) -> int | None:
    """Returns the bytes of keys and values on each rank; None: what a GPU has left."""
    return args.kv_cache_memory_bytes or (None if gpus else _CPU_CACHE_BYTES)


def _near_to_far(args: argparse.Namespace, served: Any, nodes: Nodes, ranks: int) -> Any:
    """How keys travel from near to far; None: they don't.

    Raises:
        ValueError: the flags contradict each other, or don't fit the model or the ranks.
    """
    heads = served.kv_heads, served.tensor_parallel_size
    chosen, of_machine = partial(chosen_sparsity, args, served, None), max(ranks // nodes.count, 1)
    near = near_to_far(args, served.windows, *heads, ranks, of_machine, chosen)
    if near is not None and args.attention_servers:
        raise ValueError(
            f"--attention-servers {args.attention_servers} hold keys of any rank, and {CSPS} goes "
            "by where keys are: leave one out"
        )
    return near


def _strategy(args: argparse.Namespace, served: Any) -> Any:
    """What travels in chunks of prompts, or who chooses it."""
    if args.prefill_strategy != "auto":
        return STRATEGIES[0] if args.prefill_strategy == SP_TP else args.prefill_strategy
    from distca.inference.machine import Machine

    profile = None if args.profile is None else Profile.load(args.profile)
    machine = Machine.described(_gpus() > 0, args.node_gb_per_s, profile)
    ranks = args.context_parallel_size + args.attention_servers
    layers = len(served.windows)
    return machine.selector(args.selector, served.shape, ranks, args.nnodes, hurried=layers)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _read_keys(path: Path | None) -> tuple[str, ...]:
    """Reads keys, one a line.

    Raises:
        ValueError: there are none.
    """
    if path is None:
        return ()
    keys = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    if not keys:
        raise ValueError(f"--api-key-file {path} has no key: write one a line")
    return keys


def _read_template(given: str | None) -> str | None:
    """Reads a chat template; text with braces is one itself, as vLLM has it.

    Raises:
        ValueError: there is no such file.
    """
    if given is None or "{" in given:
        return given
    if not Path(given).is_file():
        raise ValueError(f"--chat-template {given}: there is no such file")
    return Path(given).read_text(encoding="utf-8")


def _check_flags(args: argparse.Namespace) -> None:
    checked: tuple[tuple[str, Any], ...] = (
        ("--context-parallel-size", args.context_parallel_size),
        ("--block-size", args.block_size),
        ("--max-num-seqs", args.max_num_seqs),
        ("--max-num-batched-tokens", args.max_num_batched_tokens),
        ("--max-model-len", args.max_model_len),
        ("--kv-cache-memory-bytes", args.kv_cache_memory_bytes),
        ("--cp-kv-cache-interleave-size", args.cp_kv_cache_interleave_size),
    )
    for flag, value in checked:
        if value not in (None, AUTO) and value < 1:
            raise ValueError(f"{flag} {value}: give at least 1")
    for flag, value in (
        ("--context-parallel-threshold", args.context_parallel_threshold),
        ("--max-queued-requests", args.max_queued_requests),
        ("--attention-servers", args.attention_servers),
    ):
        if value < 0:
            raise ValueError(f"{flag} {value}: give 0 or more")
    if args.attention_servers and args.transport in ("shm", "nvshmem"):
        raise ValueError(
            f"--attention-servers need messages between two ranks, which --transport "
            f"{args.transport} has not: leave one out"
        )
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port {args.port}: give 0 to 65535, 0 for any that is free")
    from distca.inference.pool_size import check_stripe

    check_stripe(args.cp_kv_cache_interleave_size or args.block_size, args.block_size)
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ValueError(
            f"--gpu-memory-utilization {args.gpu_memory_utilization}: give more than 0, at most 1"
        )
    if args.node_gb_per_s is not None and not 0 < args.node_gb_per_s < float("inf"):
        raise ValueError(f"--node-gb-per-s {args.node_gb_per_s}: give a speed above 0")
    if not 0 < args.step_timeout < float("inf"):
        raise ValueError(f"--step-timeout {args.step_timeout}: give more than 0")
