"""A prefill rank: it computes prompts with others, and sends the rows that it holds.

All ranks have an engine and the sending side of the hand-off, and take in the same messages between
two iterations. So all decide the same, and each knows by itself which of its rows are due.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch.distributed as dist

from distca.inference.config import EngineConfig
from distca.inference.engine import Engine
from distca.inference.messages import AddRequest, Iteration
from distca.inference.models import ServedModel
from distca.inference.processes import Processes
from distca.inference.profiled_room import agreed_room
from distca.inference.sampling import SamplingParams
from distca.inference.worker import Worker
from distca.plan.span import Int64s
from distca.prefill.front import Front
from distca.prefill.heads import HeadSlices
from distca.prefill.messages import (
    TRANSFERS,
    Agreed,
    Join,
    Left,
    Pong,
    Prefill,
    Receiving,
    Rows,
    TransferChoice,
    TransferName,
    decoder,
    encode,
    event_of,
)
from distca.prefill.nixl import NixlAgent, NixlError
from distca.prefill.outbox import Outbox
from distca.schedule.serving.handoff import Sender, protocol, send
from distca.schedule.serving.handoff.protocol import Transfer

logger = logging.getLogger(__name__)

_SECONDS_A_REPORT = 10.0
_SECONDS_IDLE = 0.5
"""Seconds after which the first rank says that nothing has come: others wait for it meanwhile."""
_SECONDS_WRITING = 0.005
"""The same while NIXL writes rows, which all ranks look after."""


@dataclass
class _Prompt:
    """A prompt from its arrival until all of its rows are received.

    Attributes:
        prefill: what was asked for.
        receiving: processes that receive its rows.
        chunk: tokens of a chunk of the hand-off.
        computed: for each layer how many chunks are computed.
    """

    prefill: Prefill
    receiving: list[Receiving]
    chunk: int
    computed: list[int] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """Chunks of the rows that are wanted."""
        return -(-(len(self.prefill.tokens) - self.prefill.start) // self.chunk)

    def span(self, chunk: int) -> tuple[int, int]:
        """Positions of a chunk, `[start, end)`."""
        start = self.prefill.start + chunk * self.chunk
        return start, min(start + self.chunk, len(self.prefill.tokens))

    def computed_until(self, end: int) -> int:
        """Returns how many chunks are computed when all positions before `end` are."""
        if end == len(self.prefill.tokens):
            return self.chunks
        return max(end - self.prefill.start, 0) // self.chunk


@dataclass
class PrefillCounts:
    """What the ranks have done so far.

    Attributes:
        prompts: prompts that were received whole.
        ended: prompts that ended before.
        tokens: tokens of rows that were wanted.
        computed: tokens that were fed to the model.
        bytes_rows: bytes of keys and values that this rank has sent to engines.
    """

    prompts: int = 0
    ended: int = 0
    tokens: int = 0
    computed: int = 0
    bytes_rows: int = 0


class PrefillRank:
    """One rank. All ranks make one each, and call `serve`.

    Args:
        config: configuration of the engine.
        model: the model.
        chunk: tokens of a chunk of the hand-off.
        lease: seconds without a word after which an engine counts as dead.
        transfer: how rows may be sent.

    Attributes:
        counts: what was done so far.
        slices: heads of all ranks.
        transfers: how rows can be sent.
        agents: what NIXL needs to know to connect to each rank; empty if it is not used.

    Raises:
        NixlError: NIXL alone is allowed, and a rank cannot use it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        chunk: int,
        lease: float,
        transfer: TransferChoice = "auto",
    ) -> None:
        size = config.parallel.tensor_parallel_size
        self.slices = HeadSlices(model.kv_heads, size, config.processes)
        self._processes = Processes(config)
        device = self._processes.device
        self._config, self._chunk, self._lease = config, chunk, lease
        self._rank = dist.get_rank()
        self._worker = Worker(config, device, model=model)
        blocks = agreed_room(self._worker, config, self._processes)
        self._worker.runner.resize_pool(blocks)
        self._worker.runner.attention.watch = self
        self._engine = Engine(config, blocks)
        self._layers = len(config.model.windows)
        self._front: Front | None = None
        self._sender, self._now = Sender(lease), 0.0
        self._prompts: dict[int, _Prompt] = {}
        agent = self._meet(transfer)
        self._outbox = Outbox(self._rank, device, agent)
        # End of what the iteration under way feeds, by prompt.
        self._feeding: dict[int, int] = {}
        self._idle, self._report_due = False, 0.0
        self._agreed = decoder(Agreed)
        self.counts = PrefillCounts()

    def _meet(self, choice: TransferChoice) -> NixlAgent | None:
        """Chooses how rows are sent; returns this rank's agent of NIXL, if all have one."""
        agent, why = None, ""
        if choice != "tcp":
            try:
                agent = NixlAgent()
            except NixlError as error:
                why = str(error)
        said = self._processes.gather((b"" if agent is None else agent.metadata, why))
        missing = [(number, each) for number, (metadata, each) in enumerate(said) if not metadata]
        self.transfers: tuple[TransferName, ...] = ("tcp",)
        self.agents: tuple[bytes, ...] = ()
        if choice == "tcp":
            return None
        if missing:
            number, why = missing[0]
            if choice == "nixl":
                raise NixlError(f"rank {number}: {why}")
            if self._rank == 0:
                logger.info("rows are sent by TCP: rank %d: %s", number, why)
            return None
        self.transfers = ("nixl",) if choice == "nixl" else TRANSFERS
        self.agents = tuple(metadata for metadata, _ in said)
        return agent

    @property
    def capacity(self) -> int:
        """Most tokens of a prompt."""
        return min(self._engine.scheduler.capacity, self._config.model.positions)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks."""
        return self._worker.runner.bytes_sent

    @property
    def state(self) -> Pong:
        """What the ranks announce to engines."""
        scheduler, cache, counts = self._engine.scheduler, self._engine.cache, self.counts
        return Pong(
            scheduler.waiting,
            scheduler.running,
            scheduler.held,
            counts.prompts,
            counts.ended,
            counts.tokens,
            counts.computed,
            sum(map(cache.referenced, range(self._config.parallel.world_size))),
        )

    @property
    def engine(self) -> Engine:
        """Prompts and blocks, the same on all ranks."""
        return self._engine

    def listen(self, front: Front) -> None:
        """Gives the first rank its sockets."""
        assert self._rank == 0, "the first rank alone has a front"
        self._front = front

    def serve(self) -> NoReturn:
        """Computes what engines ask for. Collective; it ends by an exception alone."""
        while True:
            self.iterate()

    def iterate(self) -> bool:
        """Takes in what was said, and runs an iteration, if there is one. Collective.

        Returns:
            Whether an iteration has run.
        """
        self._take(self._agree())
        if self._front is not None:
            self._front.state = self.state
        begun = self._engine.schedule()
        if begun is not None:
            self._run(begun)
        self._idle = begun is None
        return begun is not None

    # Between two iterations.

    def _agree(self) -> Agreed:
        """What all ranks take in."""
        told = b""
        self._outbox.pump()
        if self._front is not None:
            writing = any(
                self._outbox.sends_later(each)
                for prompt in self._prompts.values()
                for each in prompt.receiving
            )
            wait = _SECONDS_WRITING if writing else min(_SECONDS_IDLE, self._lease / 4)
            self._front.pump(wait if self._idle else 0.0)
            told = encode(Agreed(time.monotonic(), self._front.take()))
        agreed: Agreed = self._agreed.decode(self._processes.broadcast(told))
        return agreed

    def _take(self, agreed: Agreed) -> None:
        self._now = agreed.now
        for message in agreed.messages:
            if isinstance(message, Join):
                self._join(message)
            elif isinstance(message, Left):
                self._leave(message.inbox)
            else:
                event = event_of(message.event)
                assert isinstance(event, protocol.ToSender), "what a receiver says"
                self._apply(event)
        self._apply(protocol.Tick())

    def _join(self, join: Join) -> None:
        prefill, number = join.prefill, join.number
        try:
            if len(prefill.tokens) > self._config.model.positions:
                raise ValueError(
                    f"a prompt of {len(prefill.tokens):,} tokens is longer than the "
                    f"{self._config.model.positions:,} positions of the model"
                )
            self._engine.add(
                AddRequest(
                    number,
                    prefill.tokens,
                    SamplingParams(max_tokens=0),
                    priority=prefill.priority,
                    salt=prefill.salt,
                    arrived=self._now,
                )
            )
        except ValueError as error:
            if self._front is not None:
                self._front.say(number, protocol.Drained.__name__, str(error))
                self._front.forget(number)
            return
        prompt = _Prompt(prefill, join.receiving, self._chunk, [0] * self._layers)
        self._prompts[number] = prompt
        self._apply(protocol.Begin(Transfer(number), prompt.chunks, self._layers))

    def _leave(self, inbox: str) -> None:
        """Ends the prompts of a process that is not connected any more."""
        for number, prompt in list(self._prompts.items()):
            if any(each.inbox == inbox for each in prompt.receiving):
                self._apply(
                    protocol.Abort(Transfer(number), "the engine is not connected any more")
                )
        self._outbox.disconnect(inbox)

    # Iterations.

    def _run(self, begun: Iteration) -> None:
        feeds = begun.batch.feeds
        self._feeding = {feed.sequence: feed.start + feed.count for feed in feeds}
        done = self._worker.execute(begun)
        self.counts.computed += sum(feed.count for feed in feeds)
        self._engine.finish({} if done is None else {self._rank: done})
        # Ranks without a part in it know by this what is computed.
        feeding, self._feeding = self._feeding, {}
        for number, end in feeding.items():
            for layer in range(self._layers):
                self._computed(number, layer, end)

    def begins(self, layer: int) -> None:
        """See `LayerWatch`: rows of earlier tokens are where they belong."""

    def written(self, layer: int) -> None:
        """Sends the rows of a layer that are due; see `LayerWatch`."""
        for number, end in self._feeding.items():
            self._computed(number, layer, end)
        self._outbox.pump()
        if self._front is not None:
            self._front.pump()

    def _computed(self, number: int, layer: int, end: int) -> None:
        """Notes that a layer of a prompt is computed up to a position."""
        prompt = self._prompts.get(number)
        if prompt is None:
            return
        first, prompt.computed[layer] = prompt.computed[layer], prompt.computed_until(end)
        for chunk in range(first, prompt.computed[layer]):
            self._apply(protocol.Computed(Transfer(number), chunk, layer))

    # The hand-off.

    def _apply(self, event: protocol.SenderEvent) -> None:
        """Applies an event to the sending side, and does what it asks for."""
        self._sender, actions = send(self._sender, event, self._now)
        for action in actions:
            match action:
                case protocol.Write(transfer, chunk, layer):
                    self._write(transfer.request, chunk, layer)
                    # What is sent later has its own copy.
                    self._apply(protocol.Written(transfer, chunk, layer))
                case protocol.Send(protocol.Drained(transfer)):
                    if self._front is not None:
                        self._front.say(transfer.request, protocol.Drained.__name__)
                case protocol.Fence(transfer):
                    logger.warning("an engine is silent: a prompt is given up")
                    if self._front is not None:
                        self._front.give_up(transfer.request)
                    self._apply(protocol.Fenced(transfer))
                case protocol.Free(transfer, reason):
                    self._free(transfer.request, reason)

    def _write(self, number: int, chunk: int, layer: int) -> None:
        """Sends this rank's rows of a layer of a chunk to all who receive them."""
        prompt = self._prompts[number]
        start, end = prompt.span(chunk)
        positions, keys, values = self._worker.read_rows(number, layer, start, end)
        if not len(positions):
            return
        pieces, first = _pieces(positions), self.slices.held(self._rank).start
        for each in prompt.receiving:
            sent = self.slices.sent(self._rank, each.worker, each.wanted)
            if not sent:
                continue
            of_heads = [
                of[:, sent.start - first : sent.stop - first].contiguous() for of in (keys, values)
            ]
            rows = Rows(
                *(prompt.prefill.transfer, chunk, layer, pieces, end - start),
                *(sent.start, len(sent)),
            )
            self.counts.bytes_rows += sum(of.nbytes for of in of_heads)
            self._outbox.send(each, rows, *of_heads)

    def _free(self, number: int, reason: str) -> None:
        """Gives the blocks of a prompt back, once all is received or it has ended."""
        prompt = self._prompts.pop(number)
        self._outbox.forget(prompt.receiving, prompt.prefill.transfer)
        self._engine.abort(number)
        if reason:
            self.counts.ended += 1
            logger.debug("a prompt has ended: %s", reason)
        else:
            self.counts.prompts += 1
            self.counts.tokens += len(prompt.prefill.tokens) - prompt.prefill.start
        if self._front is not None:
            self._front.forget(number)
            self._report()

    def _report(self) -> None:
        """Logs what was done, every few seconds in which something was."""
        now = time.monotonic()
        if now >= self._report_due:
            self._report_due = now + _SECONDS_A_REPORT
            state = self.state
            logger.info(
                "%d prompts were received, %d have ended before; %s tokens were received, %s "
                "computed; now %d wait, %d run, %d are held",
                *(state.received, state.ended, f"{state.tokens:,}", f"{state.computed:,}"),
                *(state.waiting, state.running, state.held),
            )

    def close(self) -> None:
        """Ends the connections."""
        self._outbox.close()
        if self._front is not None:
            self._front.close()


def _pieces(positions: Int64s) -> list[tuple[int, int]]:
    """Starts and ends of the runs of rising positions."""
    opens = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    closes = np.append(opens[1:], len(positions)) - 1
    return [*zip(positions[opens].tolist(), (positions[closes] + 1).tolist(), strict=True)]
