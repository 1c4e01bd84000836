"""What exchanges cost over a slow link: without overlap, with ping-pong, and if they were free.

    python benchmarks/slow_link.py --output results/
    python benchmarks/slow_link.py --seq-lengths 8192 --output results/ --append

Needs root: each process runs in a network namespace of its own, all joined by a bridge, and each
link lets through so many Mbit/s in each direction (token buckets). Every step is a real training
step of `--distca` in five ways, in turn, in the same processes:

* single-stream: every exchange is waited for where it starts (`--distca-ablation single-stream`);
* ping-pong: as users run it;
* head groups: ping-pong, and the heads in two or four groups (`--distca-head-groups`);
* signal: every message is one byte (`--distca-ablation signal`), so that only imbalance is left.

A step here is forward and backward; the reduction of gradients, which is the same for all, is left
out. What a way takes longer than signal is the communication that it exposes; single-stream exposes
all of it. A part of that is no waiting, but CPU seconds of sending and receiving, on the cores that
train: there is no network card to do it. Link seconds are the bytes over the speed of a link: in
each phase those that the busiest rank sends or receives, since phases of an exchange follow each
other. With `--append` the rows join those of earlier runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from throughput_run import Measured, start_process
from throughput_setting import Setting
from tqdm import tqdm

from distca.cost.profile import cpu_name
from distca.cost.volume import PHASES

WAYS = {
    "single-stream": ["--distca-ablation", "single-stream"],
    "ping-pong": [],
    "2 head groups": ["--distca-head-groups", "2"],
    "4 head groups": ["--distca-head-groups", "4"],
    "signal": ["--distca-ablation", "signal"],
}


def sized(setting: Setting, seq_length: int) -> Setting:
    return replace(setting, seq_length=seq_length)


def work(rank: int, base: Setting, sizes: list[int], store: str) -> None:
    """One process: measures when it is told to, a line on the standard input each time."""
    setting = sized(base, max(sizes))
    start_process(rank, setting, store)
    ways = {
        size: {
            name: Measured(
                sized(base, size),
                ["--distca", "--distca-scheduler", base.schedulers[0], *more],
            )
            for name, more in WAYS.items()
        }
        for size in sizes
    }
    for of_size in ways.values():
        for way in of_size.values():
            way.leave_out_reduction()
    answer(rank, {})
    for line in sys.stdin:
        size = int(line)
        # One document on all ranks: much of its attention moves.
        lengths = [size * base.processes] * base.batches
        steps: dict[str, list[Any]] = {name: [] for name in WAYS}
        for number in range(base.rounds + 1):
            for name, way in ways[size].items():
                step = way.step(lengths, number % base.batches)
                # The first round warms up.
                steps[name] += [step] if number else []
        found = {
            name: {
                "seconds": statistics.median(step.seconds for step in row),
                "cpu_seconds": statistics.median(step.cpu_seconds for step in row),
                "bytes": row[0].bytes_sent,
            }
            for name, row in steps.items()
        }
        everyones: list[Any] = [None] * base.processes
        dist.all_gather_object(everyones, found)
        answer(
            rank,
            {
                name: {
                    "seconds": everyones[0][name]["seconds"],
                    "cpu_seconds": statistics.mean(each[name]["cpu_seconds"] for each in everyones),
                    # Phases follow each other, so each takes its busiest rank's time.
                    "bytes": sum(
                        max(each[name]["bytes"].get(phase, 0) for each in everyones)
                        for phase in PHASES
                    ),
                }
                for name in WAYS
            },
        )
    dist.barrier()
    dist.destroy_process_group()


def answer(rank: int, found: dict[str, Any]) -> None:
    """Tells the parent, which reads rank 0's standard output."""
    if rank == 0:
        sys.stdout.write("FOUND " + json.dumps(found) + "\n")
        sys.stdout.flush()


class Namespaces:
    """Network namespaces joined by a bridge in one more.

    Args:
        count: of namespaces with a process each.
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"distca{os.getpid()}"
        self._hub = f"{self._prefix}hub"
        self.names = [f"{self._prefix}n{number}" for number in range(count)]

    def __enter__(self) -> Namespaces:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge0", "up")
        for number, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("link", "add", "link0", "netns", name, "type", "veth", "peer", "name",
                f"port{number}", "netns", self._hub)  # fmt: skip
            _ip("-n", self._hub, "link", "set", f"port{number}", "master", "bridge0", "up")
            _ip("-n", name, "addr", "add", f"10.200.0.{number + 1}/24", "dev", "link0")
            _ip("-n", name, "link", "set", "link0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # BBR, which some machines have, leaves links idle at times that are busy both ways.
            choose = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
            _ip("netns", "exec", name, "sh", "-c", choose)
        return self

    def limit(self, mbit_per_s: float) -> None:
        """Lets so much through each link in each direction."""
        for number, name in enumerate(self.names):
            for where, device in ((name, "link0"), (self._hub, f"port{number}")):
                command = f"tc qdisc replace dev {device} root tbf rate {mbit_per_s}mbit"
                _ip("netns", "exec", where, *command.split(), "burst", "128kb", "latency", "4s")

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._hub):
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def processes(setting: Setting, sizes: list[int], names: list[str]) -> Iterator[list[Any]]:
    """The measuring processes, each in its namespace."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps([setting.__dict__, sizes, str(Path(folder) / "store")])
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, "--work", str(rank), job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                # gloo asks for the interface in this way.
                env=os.environ | {"GLOO_SOCKET_IFNAME": "link0"},
            )
            for rank, name in enumerate(names)
        ]
        try:
            yield started
            for process in started:
                process.stdin.close()
            for process in started:
                process.wait(60)
        finally:
            for process in started:
                process.kill()


def read_answer(process: Any) -> dict[str, Any]:
    for line in process.stdout:
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    raise SystemExit("a measuring process ended early: its message is above")


def report(runs: list[dict[str, Any]]) -> str:
    """As Markdown.

    Args:
        runs: their commands, settings in words, and rows.
    """
    rows = [row for run in runs for row in run["rows"]]
    return "\n".join(
        [
            "# Steps over slow links",
            "",
            *(f"    {run['command']}" for run in runs),
            "",
            "; ".join(dict.fromkeys(run["setting"] for run in runs))
            + "; fp32, one document on all ranks; forward and backward without the reduction of "
            "gradients; medians of the rounds. Link s: the bytes over the speed of a link. Busy: "
            "link s over the step with signals. Exposed: what a way takes longer than signal; "
            "single-stream exposes all communication. Of it CPU: what a process computes longer "
            "than with signals, a mean of all: TCP runs on the cores that train.",
            "",
            table(rows),
            "",
            "![Step times](slow_link.png)",
        ]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The figures."""
    columns = ["width", "layers", "tokens of a rank", "Mbit/s", "MB", "link s", "busy"]
    columns += [f"{name}, s" for name in WAYS]
    compared = [name for name in WAYS if name != "signal"]
    for title, names in (
        ("exposed s", compared),
        ("of it CPU s", compared[1:]),
        ("over signal", compared),
    ):
        columns += [f"{title}: {names[0]}", *names[1:]]
    table = [columns, ["---"] * len(columns)]
    for row in rows:
        seconds = [row["ways"][name]["seconds"] for name in WAYS]
        sent = row["ways"]["ping-pong"]["bytes"] / 1e6
        *others, signal = seconds
        exposed = [each - signal for each in others]
        link = row["link_seconds"]
        cpu = [row["ways"][name]["cpu_seconds"] for name in WAYS]
        computed = [each - cpu[-1] for each in cpu[1:-1]]
        table.append(
            [f"{row[name]:g}" for name in ("width", "layers", "tokens", "mbit_per_s")]
            + [f"{sent:.1f}", f"{link:.2f}", f"{link / signal:.0%}"]
            + [f"{figure:.2f}" for figure in (*seconds, *exposed, *computed)]
            + [f"{each / signal:.3f}" for each in others]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Step times over link seconds, both relative to the step with signals, for each size."""
    from matplotlib.figure import Figure

    sizes = sorted({(row["width"], row["tokens"]) for row in rows})
    figure = Figure(figsize=(1 + 4 * len(sizes), 4), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False, sharex=True, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        of_size = [row for row in rows if (row["width"], row["tokens"]) == size]
        mine = sorted(of_size, key=lambda r: r["link_seconds"])
        at = [r["link_seconds"] / r["ways"]["signal"]["seconds"] for r in mine]
        for name in WAYS:
            seconds = [r["ways"][name]["seconds"] / r["ways"]["signal"]["seconds"] for r in mine]
            axes.plot(at, seconds, marker="o", label=name)
        axes.axhline(1.1, color="grey", linewidth=0.6, linestyle="--")
        axes.axvline(1.0, color="grey", linewidth=0.6, linestyle="--")
        axes.set(
            title=f"width {size[0]}, {size[1]:,} tokens a rank",
            xlabel="link seconds / seconds of a step with signals",
            xlim=(0, None),
        )
    panels[0].set_ylabel("step seconds / the same")
    panels[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        given, sizes, store = json.loads(sys.argv[3])
        work(int(sys.argv[2]), Setting.of_json(given), sizes, store)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--mbit-per-s", type=float, nargs="+", default=[50, 200, 800])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True, help="folder for table and plot")
    parser.add_argument("--append", action="store_true", help="to the rows that are there")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo")
    setting = Setting(
        processes=args.processes,
        stages=1,
        micro_batches=1,
        seq_length=max(args.seq_lengths),
        layers=args.layers,
        hidden_size=args.hidden_size,
        batches=args.rounds + 1,
        rounds=args.rounds,
        schedulers=("tiles",),
        modes=("ping-pong",),
        tolerances=(0.1,),
        mixes=(),
        seed=0,
        # As many key-value heads as head groups.
        megatron_flags=("--num-query-groups", "4"),
    )
    saved = args.output / "slow_link.json"
    runs = json.loads(saved.read_text()) if args.append and saved.exists() else []
    if not all("rows" in run for run in runs):
        parser.error(f"{saved} is of an earlier version: remove it, or leave out --append")
    rows = []
    with (
        Namespaces(args.processes) as namespaces,
        processes(setting, args.seq_lengths, namespaces.names) as started,
    ):
        read_answer(started[0])
        todo = [(size, speed) for size in args.seq_lengths for speed in args.mbit_per_s]
        for size, speed in tqdm(todo):
            namespaces.limit(speed)
            for process in started:
                process.stdin.write(f"{size}\n")
                process.stdin.flush()
            ways = read_answer(started[0])
            seconds = ways["ping-pong"]["bytes"] * 8 / 1e6 / speed
            rows.append(
                {
                    "width": setting.hidden_size,
                    "layers": setting.layers,
                    "tokens": size,
                    "mbit_per_s": speed,
                    "link_seconds": seconds,
                    "ways": ways,
                }
            )
    command = " ".join(["python", "benchmarks/slow_link.py", *sys.argv[1:]])
    run = {
        "command": command.replace(str(args.output), "DIR"),
        "setting": f"{setting.processes} processes on {cpu_name()}, torch {torch.__version__}",
        "rows": rows,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    runs.append(run)
    text = report(runs)
    (args.output / "slow_link.md").write_text(text + "\n")
    saved.write_text(json.dumps(runs, indent=1) + "\n")
    plot([row for run in runs for row in run["rows"]], args.output / "slow_link.png")
    print(text)


if __name__ == "__main__":
    main()
