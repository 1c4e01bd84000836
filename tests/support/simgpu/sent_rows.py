"""Rows that leave a prefill rank's simulated GPU by TCP: what comes, and what the host waits for.

It writes to standard output, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from distca.prefill.inbox import RowForm, TcpInbox
from distca.prefill.messages import Receiving, Rows
from distca.prefill.outbox import Outbox
from distca.schedule.serving.handoff.protocol import Transfer
from support.simgpu import cuda
from support.simgpu.races import count, races

LAYERS, TOKENS = 3, 5
HEADS, HEAD_DIM = 2, 4
SHAPE = TOKENS, HEADS, HEAD_DIM
EXPECTED = {
    "rows": [[[10.0 * layer], [10.0 * layer + 1]] for layer in range(LAYERS)],
    "syncs": {},
    "races": [],
}


def main() -> dict[str, Any]:
    """Sends the rows of some layers. The memory of a layer's rows is reused at once."""
    device = torch.device("cuda", 0)
    inbox = TcpInbox("127.0.0.1", RowForm(range(HEADS), HEAD_DIM, torch.float32))
    outbox, to = Outbox(0, device, None), Receiving(inbox.address, 0, 0, HEADS)
    cuda.native.start()
    for layer in range(LAYERS):
        keys, values = (torch.full(SHAPE, 10.0 * layer + each, device=device) for each in range(2))
        rows = Rows(Transfer(1), 0, layer, [(0, TOKENS)], TOKENS, 0, HEADS)
        outbox.send(to, rows, keys, values)
        del keys, values
        # It may have their memory.
        torch.full(SHAPE, torch.nan, device=device)
    outbox.pump()
    log = cuda.native.stop()
    found = []
    while len(found) < LAYERS and inbox.socket.poll(5000):
        arrival = inbox.receive()
        found.append([sorted(set(each.flatten().tolist())) for each in arrival.tensors()])
        arrival.done()
    outbox.close()
    inbox.close()
    return {"rows": found, "syncs": dict(count(log).syncs), "races": races(log)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()))
