"""Checks a run's flags, starts its ranks as torchrun does, and says why a rank failed.

`python -m megatron_patches.launch` runs it. The flags of `pretrain_gpt.py`, and the files that they
name, are checked in one process before any rank starts. When a rank has failed, the last line says
why, and the exit status is that rank's, where torchrun's own command ends in its traceback and 1.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
    run,
)

from distca.progress import progress
from distca.wording import counted
from megatron_patches.check_run import STEP

_SCRIPT = Path(__file__).parents[1] / "pretrain_gpt.py"
_MODULE = "megatron_patches.pretrain"
_GRACE = 29
"""Whole seconds that the launcher surely leaves ranks between SIGTERM and SIGKILL, of its 30."""


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, and returns the exit status when they have ended.

    Args:
        argv: torchrun's options, the script and its flags; None: those of this process.
    """
    args = get_args_parser().parse_args(argv)
    # What it says of ranks that fail is said below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        refused = _check(args)
        if refused:
            sys.stderr.write(refused)
            return 2
        run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        first = min(failure.timestamp for failure in error.failures.values())
        rank, failure = min(error.failures.items(), key=lambda ended: _order(ended[1], first))
        sys.stderr.write(_report(args.training_script, rank, failure))
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (SignalException, KeyboardInterrupt) as error:
        number = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        name = signal.Signals(number).name
        sys.stderr.write(f"error: {args.training_script} was ended by {name}\n")
        return 128 + number
    except (DistError, RendezvousError, ValueError) as error:
        sys.stderr.write(f"error: the ranks cannot be started: {error}\n")
        return 2
    return 0


def _check(args: Namespace) -> str:
    """Checks the flags of pretraining in a process of its own; returns what is wrong, or ""."""
    if args.no_python or args.run_path:
        return ""
    script = args.training_script
    if script != _MODULE if args.module else Path(script).resolve() != _SCRIPT:
        return ""
    least, most = parse_min_max_nnodes(args.nnodes)
    if least != most:
        return ""
    ranks = most * determine_local_world_size(args.nproc_per_node)
    command = [sys.executable, "-m", "megatron_patches.check_run", "--ranks", str(ranks), "--"]
    sys.stderr.write("checking flags and files\n")
    written = []
    with (
        progress("python -m megatron_patches.launch", doing="checking") as shown,
        subprocess.Popen(
            [*command, *args.training_script_args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            written.append(line)
            if line.startswith(STEP):
                shown.describe(line.strip())
    # What a check cannot tell, the ranks do.
    _, found, message = "".join(["\n", *written]).rpartition("\nerror: ")
    if found and process.returncode == 2:
        return f"error: {message}"
    sys.stderr.write(f"starting {counted(ranks, 'rank')}, which import Megatron-LM first\n")
    return ""


def _order(failure: ProcessFailure, first: int) -> tuple[bool, bool, bool, bool, int]:
    """Orders failures of ranks by how likely each was the first.

    The launcher ends ranks by SIGTERM, and after `_GRACE` by SIGKILL. Ranks that lost one end
    without an error file, or say that they lost it, or torch aborts them.

    Args:
        failure: how it ended.
        first: time of the first failure of any rank, in seconds.
    """
    late = failure.exitcode == -signal.SIGKILL and failure.timestamp - first >= _GRACE
    terminated = failure.exitcode == -signal.SIGTERM or late
    killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT and not terminated
    unexplained = not _message(failure)
    return not killed, unexplained, terminated, failure.exitcode > 0, failure.timestamp


def _message(failure: ProcessFailure) -> str:
    """Returns what a rank left in its error file, or ""."""
    return str(failure.message["message"]) if isinstance(failure.message, dict) else ""


def _report(script: str, rank: int, failure: ProcessFailure) -> str:
    """Says in one line why a rank ended, below the traceback of a Python error."""
    cause, trace = _message(failure).removeprefix("error: "), ""
    if isinstance(failure.message, dict):
        trace = str(failure.message.get("extraInfo", {}).get("py_callstack", ""))
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            cause = cause or "the machine may have run out of memory"
    else:
        how = f"ended with exit code {failure.exitcode}"
        cause = cause or "its messages are above"
    shown = f"{trace.rstrip()}\n" if trace.startswith("Traceback") else ""
    why = f": {cause}" if cause else ""
    return f"{shown}error: rank {rank} of {script} {how}{why}\n"
