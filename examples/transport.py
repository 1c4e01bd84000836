"""A complete transport: one message to each peer, over any backend with tagged sends and receives.

A transport moves bytes and knows nothing of attention (`distca/transport/base.py`). It is a ragged
all-to-all whose sizes every rank reads off the plan:

- `reserve(sizes)` allocates the buffers of each channel (a direction and a nano-batch) between
  steps. Exchanges allocate nothing.
- `staging(channel, nbytes)` is where the runtime writes its messages, to rank 0, 1, ... in order.
- `start` counts the bytes and calls `_start`, which sends them and returns at once. All ranks start
  a channel's exchanges in the same order, also without messages, unless the transport is made with
  `members_only`. Exchanges of different channels overlap.
- `Pending.wait()` returns what arrived, from rank 0, 1, ..., in the channel's buffer; `release()`
  lets others write there again.
- Where `wait` does not block the CPU, override `check`: it raises if an exchange has failed, and
  training calls it before the optimizer's step.

To add one:

1. Put it in a file in `distca/transport`, and choose it in
   `megatron_patches/pipeline/transports.py`.
2. It must pass `tests/runtime/test_core_attention.py` and `tests/training/test_parity.py`.
3. A dead rank must end the others with a message: never wait for ever.
4. Measure it: `python benchmarks/links/transports.py --help`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from distca.transport import DIRECTIONS, Pending, Transport
from distca.transport.base import first_bytes


class MessagesTransport(Transport):
    def __init__(self, group, device):
        super().__init__(group.rank(), group.size())
        self._group, self._device = group, device
        self._staging, self._received = {}, {}

    def reserve(self, sizes):
        for channel, room in sizes.items():
            self._staging[channel] = self._allocate(room.send)
            self._received[channel] = self._allocate(room.receive)

    def _allocate(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def staging(self, channel, nbytes):
        return first_bytes(self._staging[channel], nbytes)

    def close(self):
        self._staging.clear()
        self._received.clear()

    def _start(self, channel, sizes):
        received = first_bytes(self._received[channel], sum(sizes.receive))
        sent = first_bytes(self._staging[channel], sum(sizes.send))
        # Channels are under way together: the tag tells their messages apart.
        tag = 2 * channel.slot + DIRECTIONS.index(channel.direction)
        work = []
        for start, pieces in (
            (dist.irecv, received.split(list(sizes.receive))),
            (dist.isend, sent.split(list(sizes.send))),
        ):
            for peer, piece in enumerate(pieces):
                if piece.numel():
                    to = dist.get_global_rank(self._group, peer)
                    work.append(start(piece, to, group=self._group, tag=tag))
        return _Messages(work, received)


class _Messages(Pending):
    def __init__(self, work, received):
        self._work, self._received = work, received

    def wait(self):
        for each in self._work:
            each.wait()
        return self._received

    def release(self):
        pass
