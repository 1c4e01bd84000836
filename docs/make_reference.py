"""Writes docs/reference.md from the parsers, so that it says what they say.

python docs/make_reference.py
python docs/make_reference.py --check
"""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from distca.commands import (
    serving_requests,
    serving_step,
    simulate_rollouts,
    tune_groups,
    tune_overlap,
    tune_sparsity,
)
from distca.commands.main import COMMANDS
from megatron_patches.flags.distca import add_distca_arguments

PAGE = Path(__file__).parent / "reference.md"
_HEADER = """# Flags

`python docs/make_reference.py` writes this page from the parsers. A flag without a default is off,
or its description says what happens without it. Other pages explain when to use DistCA's flags:

| what the flags set | flags | page |
| --- | --- | --- |
| who computes which task | `--distca-scheduler`, `--distca-placement`, \
`--distca-context-parallel-size` | [planning](planning.md#schedulers) |
| how work and bytes are measured | `--distca-profile`, `--distca-gpus-per-node`, \
`--distca-node-gb-per-s`, `--distca-network-gb-per-s`, `--distca-server-speeds` | \
[tuning](performance.md) |
| the trade-off between equal work and few bytes | `--distca-tolerance` | \
[tuning](performance.md#the-tolerance) |
| overlap of communication and compute | `--distca-ping-pong`, `--distca-ablation` | \
[ping-pong](pipelines.md#ping-pong-hides-communication) |
| memory of exchanges | `--distca-max-buffer-bytes`, `--distca-backward` | \
[tuning](performance.md#memory-of-exchanges) |
| memory of micro-batches | `--distca-memory-gb` | [tuning](performance.md#server-pools) |
| sending latents instead of keys and values | `--distca-latent-rows` | \
[multi-latent attention](moving_a_job.md#multi-latent-attention) |
| transport | `--distca-transport`, `--distca-nvshmem-mode`, \
`--distca-nccl-max-ctas` | \
[tuning](performance.md#transports) |
| metrics for Prometheus | `--distca-metrics` | [operating](launching.md#what-to-watch) |
| dedicated servers | `--distca-servers` | [pipelines](pipelines.md#dedicated-servers) |
| server pools | `--distca-pool-size`, `--distca-wide-documents`, `--distca-token-pairs` | \
[tuning](performance.md#server-pools) |
| heads shared by ranks | `--distca-head-parallel-size` | \
[tuning](performance.md#heads-shared-inside-a-node) |
| pipelines | `--distca-pool-stages`, `--distca-max-in-flight` | [pipelines](pipelines.md) |
| micro-batches smaller than a document | `--distca-chain` | \
[pipelines](pipelines.md#micro-batches-smaller-than-a-document) |
| SMs for exchanges | `--distca-sm-margin` | \
[tuning](performance.md#transports) |
| CUDA graphs | `--distca-cuda-graphs` | [tuning](performance.md#cuda-graphs) |
| a timeline | `--distca-trace`, `--distca-trace-iterations` | \
[tuning](performance.md#read-a-timeline) |
| length and source of documents | `--distca-max-document-length`, `--distca-whole-documents`, \
`--distca-documents` | [concepts](concepts.md#windows), [fine-tuning](fine_tuning.md) |
| prefixes that are computed once | `--distca-share-prefixes` | \
[shared prefixes](shared_prefixes.md) |

For `pretrain_gpt.py`, this page lists only DistCA's own flags. Its `--help` also lists those of
Megatron-LM, and [some of these are refused](troubleshooting.md#refused-flags).
"""


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(part) for part in value)
    return str(value)


def _flag(action: argparse.Action) -> str:
    """A flag with what it takes, or an argument that has no flag."""
    if not action.option_strings:
        more = " ..." if action.nargs in ("+", "*") else ""
        return f"`{_shown(action.metavar)}{more}`"
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"`--[no-]{action.option_strings[0].removeprefix('--')}`"
    name = action.option_strings[-1]
    if action.nargs == 0:
        return f"`{name}`"
    if action.choices is not None:
        takes = r"\|".join(str(choice) for choice in action.choices)
    elif action.metavar is None:
        takes = action.dest.rsplit("_", maxsplit=1)[-1].upper()
    else:
        takes = _shown(action.metavar).replace("|", r"\|")
    more = " ..." if action.nargs in ("+", "*") else ""
    return f"`{name} {takes}{more}`"


def _default(action: argparse.Action) -> str:
    if action.required and action.nargs != "*":
        return "required"
    if isinstance(action, argparse.BooleanOptionalAction):
        return "on" if action.default else "off"
    # If the meaning states the default, the value only stands for it.
    if action.nargs == 0 or action.default in (None, []) or "Default:" in (action.help or ""):
        return ""
    return f"`{_shown(action.default)}`"


def _tables(parser: ArgumentParser, first: str | None = None) -> list[str]:
    """A heading and a table for each group of a parser, the one named `first` before the others."""
    titles = {"options": "general", "positional arguments": "arguments"}
    lines = []
    for group in sorted(parser._action_groups, key=lambda group: group.title != first):
        actions = [
            action for action in group._group_actions if "--help" not in action.option_strings
        ]
        # argparse keeps exclusive groups inside others, and lists their flags there, too.
        if not actions:
            continue
        title = titles.get(group.title or "", group.title)
        lines += ["", f"### {title}", "", "| flag | default | meaning |", "| --- | --- | --- |"]
        for action in actions:
            meaning = " ".join((action.help or "").split()).replace("|", r"\|")
            lines.append(f"| {_flag(action)} | {_default(action)} | {meaning} |")
    return lines


def page() -> str:
    """The whole page."""
    lines = [_HEADER, "## pretrain_gpt.py"]
    lines += _tables(add_distca_arguments(ArgumentParser(allow_abbrev=False)), first="distca")
    for name in COMMANDS:
        command = importlib.import_module(f"distca.commands.{name}")
        lines += ["", f"## distca {name}"]
        lines += _tables(command.build_parser())
        for kind in serving_step.KINDS if name in ("plan", "simulate") else ():
            lines += ["", f"## distca {name} {kind}"]
            lines += _tables(serving_step.build_parser(name, kind))
        if name == "tune":
            for other in (tune_groups, tune_overlap, tune_sparsity):
                parser = other.build_parser()
                lines += ["", f"## {parser.prog}"]
                lines += _tables(parser)
        if name == "simulate":
            lines += ["", "## distca simulate rollouts"]
            lines += _tables(simulate_rollouts.build_parser())
            lines += ["", "## distca simulate --serving"]
            lines += _tables(serving_requests.build_parser())
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; with --check 1 where the page is out of date."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    if not parser.parse_args(argv).check:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        sys.stderr.write("docs/reference.md is out of date: run python docs/make_reference.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
