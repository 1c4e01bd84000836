"""How much of the transfer of a prefill's keys and values is exposed, by the speed of the links.

    python benchmarks/serving/prefill_trace.py --output benchmarks/results/serving

An engine asks ranks for a long prompt, as vLLM does. Each rank is a process, and has a link to the
engine of a given speed: a thread sends what the rank hands over, one message after the other, and
waits as long as such a link would take. Everything that is computed or sent is noted with its time,
layer by layer. The transfer is exposed where nothing computes: from the end of the last layer on
any rank until the engine has all rows. It is exposed inside, too, while the thread that computes
hands rows over.

Speeds are chosen so that a link is busy for given shares of the prefill without a limit, since
processors compute far more slowly than GPUs. The last part takes the same plans to GPUs, and is
simulated: rows of a layer leave at its end, in order.
"""

from __future__ import annotations

import functools
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.prefill_ranks import Job, ask, join
from benchmarks.serving.ring_prefill import save_model
from distca.cost.model_sizes import MODELS
from distca.inference.messages import Iteration
from distca.machine import cpu_name
from distca.prefill.messages import Receiving
from distca.prefill.outbox import Connection, Outbox, Parcel, TcpConnection
from distca.prefill.ranks import PrefillRank
from distca.simulate import CLUSTERS
from distca.simulate.requests.vllm import PrefillRanks
from distca.simulate.serving import InferenceCosts


@dataclass(frozen=True)
class Span:
    """What a rank did from one moment to another, in seconds of the machine's clock.

    Attributes:
        what: `computed` a layer, or `sent` its rows.
        prompt: number of the prompt.
        chunk: number of the chunk.
        layer: number of the layer.
        begin: when it began.
        end: when it ended.
    """

    what: str
    prompt: int
    chunk: int
    layer: int
    begin: float
    end: float


class PacedConnection(TcpConnection):
    """Messages that leave one after the other, as by a link of a given speed.

    Args:
        inbox: address of the process.
        rate: bytes a second.
        spans: where it is noted when messages were sent.
    """

    def __init__(self, inbox: str, rate: float, spans: list[Span]) -> None:
        super().__init__(inbox)
        self._rate, self._spans = rate, spans
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, parcel: Parcel) -> None:
        """See `Connection`."""
        self._parcels.put(parcel)

    def pump(self) -> None:
        """See `Connection`: the thread sends."""

    def close(self) -> list[Parcel]:
        """See `Connection`."""
        self._parcels.put(None)
        self._thread.join()
        return super().close()

    def _run(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            begin, rows = time.monotonic(), parcel.rows
            time.sleep((parcel.keys.nbytes + parcel.values.nbytes) / self._rate)
            TcpConnection.send(self, parcel)
            TcpConnection.pump(self)
            of = rows.transfer.request, rows.chunk, rows.layer
            self._spans.append(Span("sent", *of, begin, time.monotonic()))


class PacedOutbox(Outbox):
    """An outbox whose connections are paced.

    Args:
        rank: number of the rank.
        rate: bytes a second.
        spans: where it is noted when messages were sent.
    """

    def __init__(self, rank: int, rate: float, spans: list[Span]) -> None:
        super().__init__(rank, torch.device("cpu"), None)
        self._rate, self._spans = rate, spans

    def _connection(self, to: Receiving) -> Connection:
        if to.inbox not in self._connections:
            self._connections[to.inbox] = PacedConnection(to.inbox, self._rate, self._spans)
        return self._connections[to.inbox]


class TracedRank(PrefillRank):
    """A rank that notes what it computes and sends.

    Attributes:
        spans: what was noted.
        handing_over: CPU seconds of the computing thread in which rows were handed over.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spans: list[Span] = []
        self.handing_over = 0.0
        self._under_way, self._begun = (0, 0), 0.0

    def pace(self, rate: float) -> None:
        """Sends rows at `rate` bytes a second."""
        self._outbox.close()
        self._outbox = PacedOutbox(self._rank, rate, self.spans)

    def _run(self, begun: Iteration) -> None:
        super()._run(begun)
        self._note(self._layers - 1)

    def begins(self, layer: int) -> None:
        """See `LayerWatch`."""
        if layer:
            self._note(layer - 1)
        else:
            # One prompt at a time, and a chunk of the hand-off in each iteration.
            ((prompt, end),) = self._feeding.items()
            self._under_way = prompt, (end - 1) // self._chunk
        self._begun = time.monotonic()
        super().begins(layer)

    def _note(self, layer: int) -> None:
        """Notes that a layer is computed: until the next one has its own keys and values."""
        now = time.monotonic()
        self.spans.append(Span("computed", *self._under_way, layer, self._begun, now))

    def _computed(self, number: int, layer: int, end: int) -> None:
        begin = time.thread_time()
        super()._computed(number, layer, end)
        self.handing_over += time.thread_time() - begin


def prefill(rank: int, job: Job, store: str, results: Any, rate: float) -> None:
    """Computes all prompts on a rank: the main function of its process."""
    one = join(TracedRank, rank, job, store, results)
    one.pace(rate)
    for number in range(job.rounds + 1):
        while one.counts.prompts == number:
            one.iterate()
    # Until it is noted when the last rows were sent.
    one.close()
    results.put((rank, one.spans, one.handing_over, one.counts.bytes_rows))


def run(job: Job, rate: float, folder: Path) -> dict[str, Any]:
    """Runs the ranks, and traces them."""
    main = functools.partial(prefill, rate=rate)
    ranks = ask(job, main, str(folder / f"store-{rate}"), lambda *_: None)
    asked, there, told = ranks.asked, ranks.there, ranks.told
    spans = [{"rank": rank, **asdict(span)} for rank, of_rank, *_ in told for span in of_rank]
    last = [
        max(each["end"] for each in spans if (each["what"], each["prompt"]) == ("computed", number))
        for number in range(1, job.rounds + 1)
    ]
    return {
        "rate": rate,
        "bytes_of_a_rank": max(sent for *_, sent in told) / (job.rounds + 1),
        "seconds": [b - a for a, b in zip(asked[1:], there[1:], strict=True)],
        "computing": [b - a for a, b in zip(asked[1:], last, strict=True)],
        "exposed": [max(b - a, 0.0) for a, b in zip(last, there[1:], strict=True)],
        "handing_over": max(handed for _, _, handed, _ in told) / (job.rounds + 1),
        "asked": asked[-1],
        "spans": [each for each in spans if each["prompt"] == job.rounds],
    }


def share(found: dict[str, Any]) -> float:
    """Exposed part of a prefill, in the median: at its end, and inside."""
    parts = [
        (end + found["handing_over"]) / seconds
        for end, seconds in zip(found["exposed"], found["seconds"], strict=True)
    ]
    return float(statistics.median(parts))


def measured_rows(found: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """A row for each speed."""
    for each in found:
        rate, seconds = each["rate"], statistics.median(each["seconds"])
        busy = each["bytes_of_a_rank"] / rate
        yield [
            "no limit" if np.isinf(rate) else f"{rate / 1e6:.3g}",
            f"{busy / statistics.median(each['computing']):.2f}",
            f"{seconds:.2f}",
            f"{1e3 * statistics.median(each['exposed']):.1f}",
            f"{1e3 * each['handing_over']:.1f}",
            f"{100 * share(each):.2f}%",
        ]


def trace_rows(found: dict[str, Any], rank: int, chunk: int) -> Iterator[list[str]]:
    """What a rank did in the layers of a chunk, in milliseconds since the prompt was asked for."""
    of = [each for each in found["spans"] if (each["rank"], each["chunk"]) == (rank, chunk)]
    for layer in range(max(each["layer"] for each in of) + 1):
        cells = [str(layer)]
        for what in ("computed", "sent"):
            (one,) = (each for each in of if (each["what"], each["layer"]) == (what, layer))
            cells += [f"{1e3 * (one[at] - found['asked']):.1f}" for at in ("begin", "end")]
        yield cells


@dataclass(frozen=True)
class Prefilled:
    """A simulated prefill.

    Attributes:
        seconds: until the last layer is computed.
        exposed: from then until the last row is there.
        busy: seconds of a rank's link.
    """

    seconds: float
    exposed: float
    busy: float


def simulate(ranks: PrefillRanks, tokens: int) -> Prefilled:
    """Simulates one prompt, whose rows leave layer by layer, each rank's by its own link."""
    engine, layers = ranks.engine(), ranks.costs.model.layers
    engine.add(0, [0] * tokens, 0)
    row, now, free, busy = ranks.costs.shape.kv_row_bytes, 0.0, 0.0, 0.0
    while (begun := engine.begin()) is not None:
        now += ranks.host_seconds
        fed = sum(entry.count for entry in begun.batch.feeds)
        sending = -(-fed // ranks.number) * row / ranks.bytes_per_second
        for _ in range(layers):
            now += begun.seconds / layers
            free = max(free, now) + sending
            busy += sending
        engine.end()
    return Prefilled(now, free - now, busy)


def simulated_rows(
    ranks: PrefillRanks, rates: Sequence[float], lengths: Sequence[int]
) -> Iterator[list[str]]:
    """A row for each speed, and three columns for each length."""
    for rate in rates:
        cells = [f"{rate:g}"]
        for length in lengths:
            one = simulate(replace(ranks, bytes_per_second=1e9 * rate), length)
            whole = one.seconds + one.exposed
            cells += [
                f"{one.seconds:.2f}",
                f"{one.busy / one.seconds:.2f}",
                f"{100 * one.exposed / whole:.2f}%",
            ]
        yield cells


def page(job: Job, found: Sequence[dict[str, Any]], args: Any) -> str:
    """The page of the results."""
    traced, last = found[args.trace], -(-job.tokens // job.chunk) - 1
    head = [
        *(
            "MB/s of each rank's link",
            "busy part of it",
            "s until all rows",
            "exposed ms at the end",
        ),
        *("inside", "exposed"),
    ]
    ranks = PrefillRanks(
        InferenceCosts(MODELS[args.model], CLUSTERS[args.cluster]), args.gpus, 1024, 1.0
    )
    ranks = replace(ranks, host_seconds=0.01)
    of_lengths = [f"{each // 1024}K tokens, s" for each in args.lengths]
    columns = ["GB/s of each rank's link"]
    for each in of_lengths:
        columns += [each, "busy part of the link", "exposed"]
    return "\n\n".join(
        (
            "# The transfer of a prefill, layer by layer",
            f"`{pages.typed('benchmarks/serving/prefill_trace.py')}`",
            f"{cpu_name()}, one thread a rank, torch {torch.__version__}. {job.ranks} ranks "
            f"prefill {job.tokens:,} tokens of a random Llama of {args.layers} layers of "
            f"{args.hidden_size} in chunks of {job.chunk:,} with {job.strategy}, and send "
            f"{found[0]['bytes_of_a_rank'] / 1e6:.1f} MB each to the engine; medians of "
            f"{job.rounds} prompts.",
            pages.table(head, measured_rows(found), "---:"),
            "The busy part is that of the prefill's computing in which the link carries bytes. "
            "Exposed at the end: from the end of computing until the engine has all rows. Inside: "
            "CPU time in which ranks hand rows over. The last column is both over all seconds.",
            f"## The last chunk on rank 0 at {traced['rate'] / 1e6:.3g} MB/s",
            "Milliseconds since the engine asked for the prompt:",
            pages.table(
                ("layer", "computed from", "to", "sent from", "to"),
                trace_rows(traced, 0, last),
                "---:",
            ),
            f"## {args.gpus} GPUs, simulated",
            f"No GPU was used. {args.model} in 16 bits on {args.gpus} GPUs of {args.cluster}, "
            f"pass-KV, {ranks.tokens:,} tokens an iteration, 10 ms of the host before each (an "
            "assumption). Rows of a layer leave when it is computed, in order.",
            pages.table(columns, simulated_rows(ranks, args.rates, args.lengths), "---:"),
        )
    )


def main() -> int:
    """Measures all speeds."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--busy", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 1.0], help="shares"
    )
    parser.add_argument(
        "--trace", type=int, default=2, help="number of the share that is shown, from 1"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-8b")
    parser.add_argument("--cluster", choices=sorted(CLUSTERS), default="dgx-h100")
    parser.add_argument("--gpus", type=int, default=4, help="prefill ranks that are simulated")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.25, 3.125, 12.5, 25.0, 50.0, 225.0]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--output", type=Path, required=True, help="folder for the page")
    args = parser.parse_args()
    if args.trace > len(args.busy):
        parser.error(f"--trace {args.trace}: --busy has {len(args.busy)} shares")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = str(folder / "model")
        save_model(model, args.layers, args.hidden_size)
        job = Job(model, args.ranks, "pass-kv", args.tokens, args.chunk, args.rounds)
        found = [run(job, float("inf"), folder)]
        for busy in args.busy:
            rate = found[0]["bytes_of_a_rank"] / (busy * statistics.median(found[0]["computing"]))
            found.append(run(job, rate, folder))
    figures = [{k: v for k, v in each.items() if k not in ("spans", "asked")} for each in found]
    figures[0]["rate"] = None
    pages.save(args.output, "prefill_trace", page(job, found, args), __file__, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
