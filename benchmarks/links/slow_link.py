"""What exchanges cost over a slow link: without overlap, with ping-pong, and if they were free.

    python benchmarks/links/slow_link.py --output results/
    python benchmarks/links/slow_link.py --seq-lengths 8192 --output results/ --append

Needs root: each process runs in a network namespace of its own, all joined by a bridge, and each
link has a speed in each direction (token buckets) at which it is busy for
given shares of a step in which bytes are free, which is measured first. Every step is a real
training step of `--distca` in three ways, in turn, in the same processes:

* single-stream: every exchange is waited for where it starts (`--distca-ablation single-stream`);
* ping-pong: as users run it;
* signal: every message is one byte (`--distca-ablation signal`), so that only imbalance is left.

A step is forward, backward and the optimizer's; the reduction of gradients, which is the same for
all, is left out. What a way takes longer than signal is the communication that it exposes;
single-stream exposes all of it. A part of that is no waiting, but CPU seconds: of sending and
receiving, on the cores that train, as there is no network card to do it, and of computing, which is
slower after a wait. Link seconds are the bytes over the speed of a link: in each phase those that
the busiest rank sends or receives, since phases of an exchange follow each other.

A global batch is one document on all ranks, or several of equal length. One alone crosses from ping
to pong, whose exchange then has most of the bytes while ping's kernels have least to do; of several
each is whole in one of them. With `--append` the rows join those of earlier runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from operator import sub, truediv
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.training.run import Measured, start_process
from benchmarks.training.setting import Setting
from distca.cost.volume import PHASES
from distca.machine import cpu_name
from distca.palette import colour_in_turn
from distca.progress import track
from distca.whole_file import writing

WAYS = {
    "single-stream": ["--distca-ablation", "single-stream"],
    "ping-pong": [],
    "signal": ["--distca-ablation", "signal"],
}


def sized(setting: Setting, seq_length: int) -> Setting:
    return replace(setting, seq_length=seq_length)


@dataclass(frozen=True)
class Todo:
    """Order to the processes to measure ways on one global batch.

    Attributes:
        tokens: tokens of a rank in the global batch.
        documents: number of the batch's documents, which are equally long.
        ways: names of some of `WAYS`.
        rounds: number of measurements of each way.
    """

    tokens: int
    documents: int
    ways: tuple[str, ...]
    rounds: int


def work(rank: int, base: Setting, sizes: list[int], store: str) -> None:
    """Runs one process, which measures a `Todo` for each line on the standard input."""
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
        todo = Todo(**json.loads(line))
        batch = [todo.tokens * base.processes // todo.documents] * todo.documents
        steps: dict[str, list[Any]] = {name: [] for name in todo.ways}
        # The first round warms up.
        documents = batch * (todo.rounds + 1)
        batches = {name: ways[todo.tokens][name].batches(documents) for name in todo.ways}
        for number in range(todo.rounds + 1):
            # The first or the last way may be better off, so ways take turns at being it.
            first = number % len(todo.ways)
            for name in [*todo.ways[first:], *todo.ways[:first]]:
                step = ways[todo.tokens][name].step(batches[name])
                steps[name] += [step] if number else []
        for each in batches.values():
            each.close()
        found = {
            name: {
                "seconds": [step.seconds for step in row],
                "cpu_seconds": [step.cpu_seconds for step in row],
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
                    "cpu_seconds": [
                        statistics.mean(of_ranks)
                        for of_ranks in zip(
                            *(each[name]["cpu_seconds"] for each in everyones), strict=True
                        )
                    ],
                    # Phases follow each other, so each takes its busiest rank's time.
                    "bytes": sum(
                        max(each[name]["bytes"].get(phase, 0) for each in everyones)
                        for phase in PHASES
                    ),
                }
                for name in todo.ways
            },
        )
    dist.barrier()
    dist.destroy_process_group()


def answer(rank: int, found: dict[str, Any]) -> None:
    """Answers the parent, which reads rank 0's standard output."""
    if rank == 0:
        sys.stdout.write("FOUND " + json.dumps(found) + "\n")
        sys.stdout.flush()


FAST_MBIT_PER_S = 20_000.0
"""Speed of a link that is never busy for long."""

ENVIRONMENT = {
    # gloo reads its interface from this variable.
    "GLOO_SOCKET_IFNAME": "link0",
    # glibc keeps the memory that a step used for the next one. Else the kernel clears pages for
    # each large tensor again, which takes as long as some exchanges, and not always the same.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Environment of the processes that are measured."""


class Namespaces:
    """Network namespaces joined by a bridge in one more.

    Args:
        count: number of namespaces with a process each.
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
            # Clusters have large frames, too: with 1,500 bytes 4% of a link are headers.
            _ip("-n", self._hub, "link", "set", f"port{number}", "mtu", "9000")
            _ip("-n", name, "link", "set", "link0", "mtu", "9000")
            _ip("-n", name, "addr", "add", f"10.200.0.{number + 1}/24", "dev", "link0")
            _ip("-n", name, "link", "set", "link0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # BBR, which some machines have, leaves links idle at times that are busy both ways.
            choose = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
            _ip("netns", "exec", name, "sh", "-c", choose)
        return self

    def limit(
        self, mbit_per_s: float, pairs: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        """Limits the speed of each link in each direction.

        Args:
            mbit_per_s: speed of all links.
            pairs: speed from one process to another, where it is less; one for each source.
        """
        for number, name in enumerate(self.names):
            for where, device in ((name, "link0"), (self._hub, f"port{number}")):
                command = f"tc qdisc replace dev {device} root tbf rate {mbit_per_s}mbit"
                _ip("netns", "exec", where, *command.split(), "burst", "128kb", "latency", "4s")
        for (source, destination), speed in (pairs or {}).items():
            self._limit_pair(source, destination, speed, mbit_per_s)

    def _limit_pair(self, source: int, destination: int, speed: float, others: float) -> None:
        """Limits what a process sends to another."""
        link, burst = "dev link0", "burst 128kb"
        for command in (
            f"qdisc del {link} root",
            f"qdisc add {link} root handle 1: htb default 10",
            f"class add {link} parent 1: classid 1:1 htb rate {others}mbit {burst}",
            f"class add {link} parent 1:1 classid 1:10 htb rate {others}mbit {burst}",
            f"class add {link} parent 1:1 classid 1:11 htb rate {speed}mbit {burst}",
            f"filter add {link} parent 1: protocol ip u32 match ip dst "
            f"10.200.0.{destination + 1}/32 flowid 1:11",
        ):
            _ip("netns", "exec", self.names[source], "tc", *command.split())

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._hub):
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def processes(setting: Setting, sizes: list[int], names: list[str]) -> Iterator[list[Any]]:
    """Starts the measuring processes, each in its namespace, and ends them on exit."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps([setting.__dict__, sizes, str(Path(folder) / "store")])
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, "--work", str(rank), job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
            for rank, name in enumerate(names)
        ]
        try:
            yield started
            for process in started:
                process.stdin.close()  # type: ignore[union-attr]
            for process in started:
                process.wait(60)
        finally:
            for process in started:
                process.kill()


def measure(processes: list[Any], todo: Todo) -> dict[str, Any]:
    """Has the processes measure; returns their figures."""
    for process in processes:
        process.stdin.write(json.dumps(asdict(todo)) + "\n")
        process.stdin.flush()
    return read_answer(processes[0])


def read_answer(process: Any) -> dict[str, Any]:
    for line in process.stdout:
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    raise SystemExit("a measuring process ended early: its message is above")


def report(runs: list[dict[str, Any]]) -> str:
    """Formats runs as a page of Markdown.

    Args:
        runs: command, setting in words, and rows of each run.
    """
    rows = [row for run in runs for row in run["rows"]]
    return "\n".join(
        [
            "# Steps over slow links",
            "",
            *(f"    {run['command']}" for run in runs),
            "",
            "; ".join(dict.fromkeys(run["setting"] for run in runs))
            + "; fp32, documents of equal length on all ranks; steps without the reduction of "
            "gradients. Every figure is the median of the rounds. Each way is compared with "
            "signal, which sends one byte for each message, in the same round, because the "
            "machine's speed changes. Link s: bytes divided by link speed. Busy: link s over the "
            "step time of signal. Exposed: how much longer a step takes than with signal; "
            "single-stream exposes all communication. Of it CPU: how much longer the mean "
            "process computes than with signal, because TCP runs on the cores that train, and "
            "computing is slower after a wait.",
            "",
            table(rows),
            "",
            "![Step times](slow_link.png)",
        ]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Formats the figures as a Markdown table."""
    columns = ["width", "layers", "tokens of a rank", "documents", "Mbit/s", "MB", "link s", "busy"]
    columns += [f"{name}, s" for name in WAYS]
    compared = [name for name in WAYS if name != "signal"]
    for title, names in (
        ("exposed s", compared),
        ("of it CPU s", compared),
        ("over signal", compared),
    ):
        columns += [f"{title}: {names[0]}", *names[1:]]
    cells = []
    for row in rows:
        sent = row["ways"]["ping-pong"]["bytes"] / 1e6
        seconds = [statistics.median(row["ways"][name]["seconds"]) for name in WAYS]
        exposed = [over_signal(row, name, "seconds", sub) for name in compared]
        computed = [over_signal(row, name, "cpu_seconds", sub) for name in compared]
        link = row["link_seconds"]
        cells.append(
            [f"{row[name]:g}" for name in ("width", "layers", "tokens", "documents", "mbit_per_s")]
            + [f"{sent:.1f}", f"{link:.2f}", f"{link / seconds[-1]:.0%}"]
            + [f"{figure:.2f}" for figure in (*seconds, *exposed, *computed)]
            + [f"{over_signal(row, name, 'seconds', truediv):.3f}" for name in compared]
        )
    return pages.table(columns, cells)


def over_signal(
    row: dict[str, Any], name: str, what: str, compare: Callable[[float, float], float]
) -> float:
    """Compares a way with signals in the same round; the median of the rounds."""
    pairs = zip(row["ways"][name][what], row["ways"]["signal"][what], strict=True)
    return statistics.median(itertools.starmap(compare, pairs))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plots step times over link seconds, both relative to steps with signals, for each size."""
    from matplotlib.figure import Figure

    def size_of(row: dict[str, Any]) -> tuple[int, int, int]:
        return row["width"], row["tokens"], row["documents"]

    sizes = sorted({size_of(row) for row in rows})
    across = min(len(sizes), 4)
    down = -(-len(sizes) // across)
    figure = Figure(figsize=(1 + 4 * across, 4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel()
    colour_in_turn(*panels)
    for axes in panels[len(sizes) :]:
        axes.remove()
    for axes, size in zip(panels, sizes, strict=False):
        of_size = [row for row in rows if size_of(row) == size]
        mine = sorted(of_size, key=lambda r: r["link_seconds"])
        busy = [r["link_seconds"] / statistics.median(r["ways"]["signal"]["seconds"]) for r in mine]
        for name in WAYS:
            ratios = [over_signal(r, name, "seconds", truediv) for r in mine]
            axes.plot(busy, ratios, marker="o", label=name)
        axes.axhline(1.1, color="grey", linewidth=0.6, linestyle="--")
        axes.axvline(1.0, color="grey", linewidth=0.6, linestyle="--")
        axes.set(
            title=f"width {size[0]}, {size[1]:,} tokens a rank, documents: {size[2]}",
            xlabel="link seconds / seconds of a step with signals",
            xlim=(0, None),
        )
    panels[0].set_ylabel("step seconds / the same")
    panels[0].legend()
    with writing(path) as written:
        figure.savefig(written, dpi=150)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        given, sizes, store = json.loads(sys.argv[3])
        work(int(sys.argv[2]), Setting.of_json(given), sizes, store)
        return
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 1], help="of a batch")
    parser.add_argument(
        "--busy",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75, 0.95],
        help="shares of a step with signals for which links are busy",
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True, help="folder for table and plot")
    parser.add_argument("--append", action="store_true", help="to the rows that are there")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo")
    for size, documents in itertools.product(args.seq_lengths, args.documents):
        if documents < 1 or size * args.processes % documents:
            parser.error(f"{args.processes} x {size} tokens are not {documents} equal documents")
    if min(args.busy) <= 0:
        parser.error("--busy must be above 0")
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
        megatron_flags=("--num-query-groups", "4"),
    )
    saved = args.output / "slow_link.json"
    runs = json.loads(saved.read_text()) if args.append and saved.exists() else []
    if not all("rounds" in run for run in runs):
        parser.error(f"{saved} is of an earlier version: remove it, or leave out --append")
    rows = []
    with (
        Namespaces(args.processes) as namespaces,
        processes(setting, args.seq_lengths, namespaces.names) as started,
    ):
        read_answer(started[0])
        jobs = list(itertools.product(args.seq_lengths, args.documents, args.busy))
        for size, documents, busy in track(jobs, "slow_link", "cases"):
            namespaces.limit(FAST_MBIT_PER_S)
            free = measure(started, Todo(size, documents, ("ping-pong", "signal"), args.rounds))
            mbit = free["ping-pong"]["bytes"] * 8 / 1e6
            speed = float(f"{mbit / busy / statistics.median(free['signal']['seconds']):.3g}")
            namespaces.limit(speed)
            rows.append(
                {
                    "width": setting.hidden_size,
                    "layers": setting.layers,
                    "tokens": size,
                    "documents": documents,
                    "mbit_per_s": speed,
                    "link_seconds": mbit / speed,
                    "ways": measure(started, Todo(size, documents, tuple(WAYS), args.rounds)),
                }
            )
    run = {
        "command": pages.typed("benchmarks/links/slow_link.py"),
        "setting": f"{setting.processes} processes on {cpu_name()}, torch {torch.__version__}",
        "rounds": args.rounds,
        "rows": rows,
    }
    runs.append(run)
    pages.save(args.output, "slow_link", report(runs), __file__, runs)
    plot([row for run in runs for row in run["rows"]], args.output / "slow_link.png")


if __name__ == "__main__":
    main()
