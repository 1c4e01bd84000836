"""The console command `distca`, whose subcommands are the modules of this folder."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from distca import __version__
from distca.lifetime import EndAtSignals, Ended

COMMANDS = {
    "simulate": "predict a training job's speed and best flags; a prefill's or decode step's time",
    "plan": "plan the core attention of documents, a prefill or a decode step: balance and bytes",
    "generate": "answer prompts with a model, on ranks that share its attention",
    "prefill": "compute keys and values of long prompts for a vLLM server, on several ranks",
    "tune": "measure or search settings: chains, groups of ranks, sparsity, overlap",
    "convert": "convert a Hugging Face model to a Megatron checkpoint, or back",
    "prepare": "convert text to the token files that training reads",
    "profile": "measure this machine's attention kernel, for plans",
    "build": "compile the native code of transports ahead of a run",
    "report": "summarize training runs from their logs, boards and timelines",
    "doctor": "show what is installed, what is missing and what to install",
    "verify": "check and measure this machine, one line a stage",
}
_GONE = {
    "serve": "`vllm serve` answers requests, and `distca prefill` computes its long prompts: "
    "docs/vllm.md explains both",
}
"""Commands that there were, and what replaces them."""
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write for which there is no room."""

_EXAMPLES = """
examples:
  distca doctor
  distca plan --distribution pretrain --servers 16 --tokens-per-server 65536 --model llama-8b
  distca simulate --distribution pretrain --context 131072 --sequences 32 \\
      --model llama-8b --cluster dgx-h200 --gpus 64
  distca simulate prefill --new-tokens 131072 --context-parallel-size 8 --model llama-8b

`distca COMMAND --help` explains a command's flags, `distca --version` prints the version.
None of these commands trains: that is
`python -m megatron_patches.launch --nproc-per-node N -m megatron_patches.pretrain --distca`.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns its exit status.

    What a command refuses, or cannot do, is a line on standard error. So are SIGINT and SIGTERM,
    which end the process with status 130 and 143.

    Args:
        argv: arguments; None: those of this process, which then also ends at signals.
    """
    if argv is not None or threading.current_thread() is not threading.main_thread():
        return _written(sys.argv[1:] if argv is None else argv, None)
    ending = EndAtSignals(_name(sys.argv[1:]))
    return ending.run(lambda: _written(sys.argv[1:], ending))


def _name(arguments: Sequence[str]) -> str:
    """Returns the name of the command, with which its lines on standard error begin."""
    return f"distca {arguments[0]}" if arguments and arguments[0] in COMMANDS else "distca"


def _written(arguments: Sequence[str], ending: EndAtSignals | None) -> int:
    """Runs a subcommand, and writes what standard output still holds back."""
    if sys.stdout is None:
        # Python has none where the file is closed. Standard error may be closed, too.
        if sys.stderr is not None:
            sys.stderr.write(f"{_name(arguments)}: standard output is closed\n")
        return 2
    status = 0
    try:
        try:
            status = _told(arguments, ending)
            return status
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            raise
        finally:
            # Flushed here, where the failure can be reported, rather than when Python ends.
            sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            # Else Python would fail again as it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader such as `head` has read enough; a command that has failed before has failed.
        if isinstance(error, BrokenPipeError):
            return status
        why = error.strerror or error
        sys.stderr.write(f"{_name(arguments)}: standard output cannot be written: {why}\n")
        return 2


def _told(arguments: Sequence[str], ending: EndAtSignals | None) -> int:
    """Runs a subcommand, and tells its errors."""
    name = _name(arguments)
    try:
        return _run(arguments)
    except (BrokenPipeError, Ended):
        raise
    except (ValueError, ImportError, OSError, MemoryError) as error:
        if ending is not None and ending.asked:
            raise
        if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITTEN:
            # Of standard output: errors of files name the file.
            raise
        sys.stderr.write(f"{name}: {str(error) or 'not enough memory'}\n")
        sys.exit(2)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        sys.stderr.write(f"{name}: not enough memory: {str(error).splitlines()[0]}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        return 128 + signal.SIGINT


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Returns whether torch, which this module does not import, found no memory on a GPU or a
    CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        # Only this command's module is imported: some need torch, others start without it.
        command = importlib.import_module(f"distca.commands.{arguments[0]}")
        return int(command.main(arguments[1:]))
    if arguments and arguments[0] == "--version":
        sys.stdout.write(f"distca {__version__}\n")
        return 0
    if len(arguments) > 1 and arguments[0] == "help":
        return _run([*arguments[1:], "--help"])
    asked = bool(arguments) and arguments[0] in ("-h", "--help", "help")
    if arguments and arguments[0] in _GONE:
        sys.stderr.write(
            f"distca: there is no {arguments[0]} any more: {_GONE[arguments[0]]} "
            "(see `distca --help`)\n"
        )
        return 2
    if arguments and not asked:
        import difflib

        near = difflib.get_close_matches(arguments[0], COMMANDS, 1)
        meant = f": is {near[0]} meant?" if near else ""
        sys.stderr.write(f"distca: no command {arguments[0]!r}{meant} (see `distca --help`)\n")
        return 2
    out = sys.stdout if asked else sys.stderr
    out.write("usage: distca COMMAND [FLAGS]\n\ncommands:\n")
    for name, what in COMMANDS.items():
        out.write(f"  {name:10} {what}\n")
    out.write(_EXAMPLES)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
