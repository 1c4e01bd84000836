"""The console command `distca`."""

from __future__ import annotations

import sys


def _profile(argv: list[str]) -> int:
    from distca.cost import profile

    return profile.main(argv)


def _plan(argv: list[str]) -> int:
    from distca import plan_command

    return plan_command.main(argv)


def _build(argv: list[str]) -> int:
    from distca import build_command

    return build_command.main(argv)


def _doctor(argv: list[str]) -> int:
    from distca import doctor

    return doctor.main(argv)


def _simulate(argv: list[str]) -> int:
    from distca import simulate_command

    return simulate_command.main(argv)


_COMMANDS = {
    "plan": (_plan, "plan the core attention of a batch of documents"),
    "profile": (_profile, "measure this machine's attention kernel"),
    "build": (_build, "compile the transports' native code ahead of a run"),
    "doctor": (_doctor, "say what is present, what is missing and what to install"),
    "simulate": (_simulate, "what a training job would gain on a cluster, and how to run it"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]][0](arguments[1:])
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    out = sys.stdout if asked else sys.stderr
    if arguments and not asked:
        out.write(f"distca: no command {arguments[0]!r}\n")
    out.write("usage: distca COMMAND [ARGUMENTS]\n")
    for name, (_, what) in _COMMANDS.items():
        out.write(f"  {name:10} {what}\n")
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
