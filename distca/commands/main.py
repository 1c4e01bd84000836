"""The console command `distca`, whose subcommands are the modules of this folder."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "simulate": "say what a training job would gain on a cluster, and with which flags",
    "plan": "plan the core attention of a batch of documents: its balance and its bytes",
    "prepare": "turn text into the token files that training reads",
    "profile": "measure this machine's attention kernel, so that plans can go by its times",
    "build": "compile the transports' native code ahead of a run",
    "doctor": "say what is present, what is missing and what to install",
}
_EXAMPLES = """
examples:
  distca doctor
  distca plan --distribution pretrain --servers 16 --tokens-per-server 65536 --model llama-8b
  distca simulate --distribution pretrain --context 131072 --sequences 32 \\
      --model llama-8b --cluster dgx-h200 --gpus 64

`distca COMMAND --help` explains a command's flags. None of these commands trains: that is
`pretrain_gpt.py --distca`, and launch/demo.sh shows it.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        # Only this command's module is imported: some need torch, others start without it.
        command = importlib.import_module(f"distca.commands.{arguments[0]}")
        return int(command.main(arguments[1:]))
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    out = sys.stdout if asked else sys.stderr
    if arguments and not asked:
        out.write(f"distca: no command {arguments[0]!r}: choose one of those below\n\n")
    out.write("usage: distca COMMAND [FLAGS]\n\ncommands:\n")
    for name, what in COMMANDS.items():
        out.write(f"  {name:10} {what}\n")
    out.write(_EXAMPLES)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
