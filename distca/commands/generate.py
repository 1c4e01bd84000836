"""`distca generate`: a model answers, on ranks that share its attention."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.commands.chosen_sparsity import add_calibration_flags
from distca.commands.command_line import Parser, write_on
from distca.commands.described import add_selection_flags
from distca.commands.engine_flags import (
    add_block_size_flag,
    add_dtype_flag,
    add_exchange_flags,
    add_machine_flags,
    add_timeout_flag,
    check_counts,
    check_exchange,
    check_machine_flags,
    check_timeout,
    served_dtype,
)
from distca.commands.fewest_ranks import AUTO, add_ranks_flag, ranks_for_prompts
from distca.commands.rank_groups import add_group_flags, served_groups
from distca.commands.served_sparsity import add_sparsity_flags, refuse_check
from distca.commands.served_strategy import (
    served_owners,
    served_split,
    served_strategy,
    tell_of_lengths,
)
from distca.progress import progress
from distca.schedule.serving import STRATEGIES
from distca.schedule.serving.balanced import BalancedTiles
from distca.timeline import write_trace
from distca.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EPILOG = """
examples:
  distca generate path/to/Llama-3.2-1B --prompt "The sky is" --context-parallel-size 2
  distca generate MODEL --conversations chats.jsonl --context-parallel-size 4 --json
  distca generate MODEL --prompt-ids ids.json --check

Each rank is a process of this machine, with a GPU of its own where there are any. Blocks of a
prompt's tokens are shared out evenly, and each rank keeps the keys and values of its own.
"""


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("generate", __doc__.splitlines()[0], _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="Folder of a Hugging Face model.")
    what = parser.add_argument_group("input (one of these)")
    what.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="Text to continue. The flag may be repeated.",
    )
    what.add_argument(
        "--prompt-ids",
        type=Path,
        metavar="FILE",
        help="JSON file with a list of prompts, each a list of token ids.",
    )
    what.add_argument(
        "--conversations",
        type=Path,
        metavar="FILE",
        help="File of JSON lines. Each line is a conversation: a list of messages {role, "
        "content}. Every user message without an answer is answered. Later turns reuse the "
        "cached keys and values of earlier turns.",
    )
    how = parser.add_argument_group("ranks and answers")
    add_ranks_flag(how, "the longest prompt and its answer", default=1)
    how.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="T",
        help="Number of processes per rank. They split each layer.",
    )
    tables = "searched, a table that `distca tune partitions` wrote"
    add_selection_flags(how, "auto", tables, many_prompts=True)
    add_sparsity_flags(how)
    add_calibration_flags(how)
    add_machine_flags(how)
    add_group_flags(how)
    add_exchange_flags(how)
    how.add_argument(
        "--cp-kv-cache-interleave-size",
        type=int,
        metavar="N",
        help="Number of consecutive decoded tokens that one rank owns, a multiple of "
        "--block-size. The next rank owns the next N. Default: --block-size.",
    )
    how.add_argument(
        "--even-out",
        action="store_true",
        help="After each prefill, move cached blocks until all ranks hold equal shares. "
        "runahead leaves unequal shares.",
    )
    add_block_size_flag(how)
    how.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="Maximum number of prompts that run at the same time.",
    )
    how.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="Maximum number of tokens in an iteration. Longer prompts are computed in chunks. "
        "With the strategy tiles, each rank gets an equal share of this number. Default: the "
        "length of the longest prompt, at least 2048; with tiles, this number times the ranks.",
    )
    how.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="Size of each rank's KV cache in bytes. Default: enough for all prompts and their "
        "answers; for conversations, at most 4 GiB.",
    )
    add_dtype_flag(how)
    how.add_argument(
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="Maximum number of tokens in an answer.",
    )
    how.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="Sampling temperature. 0 takes the most likely token.",
    )
    how.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="Sample only from the N most likely tokens. Default: all.",
    )
    how.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="Sample only from the most likely tokens whose probabilities sum to P.",
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of sampling.")
    how.add_argument(
        "--enforce-eager",
        action="store_true",
        help="Decode without CUDA graphs on GPUs.",
    )
    add_timeout_flag(how, 600.0, "after which the command ends")
    how.add_argument(
        "--ignore-eos",
        action="store_true",
        help="Ignore end tokens: answers end only at --max-tokens.",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="Print the answers as a JSON list.")
    out.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Write a timeline of all ranks, for ui.perfetto.dev.",
    )
    out.add_argument(
        "--check",
        action="store_true",
        help="Compare logits and tokens with those of one process that runs transformers' own "
        "attention.",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        The exit status: 1 if `--check` finds a difference, else 2 if a turn was not answered.

    Raises:
        ValueError: the flags, the model or the prompts cannot be used, or logits are not finite.
        ImportError: a package is missing.
    """
    args = build_parser().parse(argv)
    _check_flags(args)
    check_exchange(args)
    args.dtype = served_dtype(args.dtype)
    with progress("distca generate", doing="loads libraries and the model"):
        from distca.attention.choice import check_block_size, default_block_size
        from distca.inference.conversations import (
            Conversations,
            Prompts,
            read_conversations,
            read_prompt_ids,
        )
        from distca.inference.defaults import configure
        from distca.inference.models import DTYPES, load_tokenizer, read_model
        from distca.inference.pool_size import DEFAULT_BYTES, bytes_needed, check_room, check_stripe
        from distca.inference.rank_processes import RankError, RankProcesses
        from distca.inference.sampling import SamplingParams
        from distca.inference.verify import compare

        model = read_model(args.model, DTYPES[args.dtype], args.tensor_parallel_size)
    size = args.block_size = args.block_size or default_block_size()
    check_block_size(size, model.shape.head_dim)
    check_stripe(args.cp_kv_cache_interleave_size or size, size)
    tokenizer = None if args.prompt_ids else load_tokenizer(args.model)
    most = args.max_tokens
    work: Prompts | Conversations
    if args.conversations is not None:
        work = Conversations(model, tokenizer, read_conversations(args.conversations), most)
    elif args.prompt_ids is not None:
        work = Prompts(model, read_prompt_ids(args.prompt_ids), most)
    else:
        assert tokenizer is not None
        work = Prompts(model, _tokens_of(args.prompt, tokenizer, args.model), most)
    known = work.lengths if isinstance(work, Prompts) else []
    if args.context_parallel_size == AUTO:
        args.context_parallel_size = ranks_for_prompts(args, model, known)
    split = served_split(args, model)
    strategy = served_strategy(args, model, max(known, default=None))
    refuse_check(args, strategy)
    ranks = args.context_parallel_size
    chain = served_owners(args, model, strategy, known)
    tell_of_lengths("generate", chain, args.partition, known)
    # Ranks that keep their own prompts are fed equal shares of an iteration.
    whole = isinstance(strategy, BalancedTiles)
    longest = max(2048, *work.lengths) * (ranks if whole else 1)
    cache_bytes = args.kv_cache_memory_bytes
    if cache_bytes is None:
        # Later turns may be as long as the model can read.
        lengths = known or [model.positions] * len(work.lengths)
        cache_bytes = bytes_needed(model, lengths, most, ranks, size, chain, whole=whole)
        cache_bytes = cache_bytes if known else min(cache_bytes, DEFAULT_BYTES)
    holding = ranks + args.attention_servers
    check_room(model, max(work.lengths), most, holding, size, cache_bytes)
    config = configure(
        model,
        ranks,
        strategy=strategy if split is None else STRATEGIES[0],
        chain=chain,
        growing=served_groups(args, model),
        attention_servers=args.attention_servers,
        transport=args.transport,
        split=split,
        block_size=size,
        stripe=args.cp_kv_cache_interleave_size,
        cache_bytes=cache_bytes,
        max_num_seqs=min(args.max_num_seqs, len(work)),
        max_num_batched_tokens=args.max_num_batched_tokens or longest,
        evens_out=args.even_out,
        enforce_eager=args.enforce_eager,
        keeps_logits=args.check,
        step_timeout=args.step_timeout,
    )
    stops: frozenset[int] | None = frozenset() if args.ignore_eos else None
    sampling = SamplingParams(most, args.temperature, args.seed, stops, args.top_k, args.top_p)
    # A difference counts, whether or not somebody reads the answers.
    write = write_on if args.check else _write
    shown = _Shown(tokenizer, args.json or len(work) > 1, write)
    begin = time.perf_counter()
    try:
        with contextlib.ExitStack() as held:
            started = f"starts {counted(config.parallel.world_size, 'rank')}"
            with progress("distca generate", doing=started):
                running = RankProcesses(config, records=args.trace is not None)
                processes = held.enter_context(running)
            loaded = time.perf_counter()
            done = work.run(processes, sampling, shown.token)
            seconds = time.perf_counter() - loaded
            timelines = [] if args.trace is None else processes.timelines()
    except RankError as error:
        sys.stderr.write(f"distca generate: {error}\n")
        return 2
    finally:
        shown.end_line()
    if args.trace is not None:
        write_trace(args.trace, timelines)
    if not known:
        prompts = [len(each.prompt_token_ids) for each in done]
        tell_of_lengths("generate", chain, args.partition, prompts)
    answers = [answer for each in done for answer in each.outputs]
    rows: list[dict[str, Any]] = [
        {
            "token_ids": answer.token_ids,
            "text": tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            if tokenizer
            else None,
            "finish_reason": answer.finish_reason,
            "ttft_seconds": answer.ttft_seconds,
            "bytes_moved": answer.bytes_moved,
        }
        for answer in answers
    ]
    if isinstance(work, Conversations):
        rows = [place | row for place, row in zip(work.places, rows, strict=True)]
    if args.json:
        write(json.dumps(rows, indent=2) + "\n")
    else:
        shown.answers(rows)
        tokens = sum(len(answer.token_ids) for answer in answers)
        write(
            f"{tokens} tokens on {counted(config.parallel.world_size, 'rank')}, "
            f"{tokens / seconds:.1f} "
            f"tokens/s; first token after {max(r['ttft_seconds'] for r in rows):.3f} s; "
            f"{sum(r['bytes_moved'] for r in rows):,} bytes moved; ranks started in "
            f"{loaded - begin:.1f} s\n"
        )
    ended = work.ended.values() if isinstance(work, Conversations) else ()
    for why in ended:
        sys.stderr.write(f"distca generate: {why}\n")
    if args.check:
        found = compare(model, done, args.temperature == 0)
        (sys.stderr.write if args.json else write)(f"{found.line}\n")
        if not found.holds:
            return 1
    return 2 if ended else 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tokens_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: str
) -> list[list[int]]:
    """Token ids of texts.

    Raises:
        ValueError: a text has no token, as with the empty tokenizer that transformers makes of some
            models' configurations where the tokenizer's files are missing.
    """
    found = [tokenizer.encode(text) for text in texts]
    for number, (text, ids) in enumerate(zip(texts, found, strict=True)):
        if text.strip() and not ids:
            raise ValueError(
                f"prompt {number} becomes no token, so the tokenizer of {model} is missing or "
                "empty: add its tokenizer.json, or give token ids by --prompt-ids"
            )
    return found


class _Shown:
    """Answers on the terminal: a single one streams, several are printed at their ends.

    Args:
        tokenizer: tokenizer of the model; None: token ids are shown.
        quiet: whether nothing streams.
        write: function that writes to the terminal.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, quiet: bool, write: Callable[[str], object]
    ) -> None:
        self._tokenizer, self._quiet, self._to = tokenizer, quiet, write
        self._ids: list[int] = []
        self._written = 0

    def token(self, sequence: int, token: int) -> None:
        """Writes what a token adds to the text, unless it may be part of a character."""
        if self._quiet:
            return
        self._ids.append(token)
        text = self._text(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._write(text)

    def end_line(self) -> None:
        """Ends the line of a streamed answer, whole or not."""
        if self._ids:
            self._write(self._text(self._ids))
            self._to("\n")

    def answers(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the answers that were not streamed."""
        if not self._quiet:
            return
        for number, row in enumerate(rows):
            self._to(f"[{number}] {self._text(row['token_ids'])}\n")

    def _text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _write(self, text: str) -> None:
        self._to(text[self._written :])
        self._written = len(text)


def _check_flags(args: argparse.Namespace) -> None:
    given = [
        flag
        for flag, value in (
            ("--prompt", args.prompt),
            ("--prompt-ids", args.prompt_ids),
            ("--conversations", args.conversations),
        )
        if value is not None
    ]
    if len(given) != 1:
        raise ValueError(
            f"{' and '.join(given) or 'nothing'} is given: give one of --prompt, --prompt-ids and "
            "--conversations"
        )
    check_counts(
        args,
        "context_parallel_size",
        "cp_kv_cache_interleave_size",
        "block_size",
        "max_tokens",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
    )
    check_timeout(args)
    check_machine_flags(args)
    if args.trace is not None and (args.trace.is_dir() or not args.trace.parent.is_dir()):
        raise ValueError(f"--trace {args.trace}: give a file in a folder that there is")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature}: give 0 or more")
    if args.top_k < 0:
        raise ValueError(f"--top-k {args.top_k}: give at least 1, or 0 for all tokens")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}: give a number above 0 and at most 1")
