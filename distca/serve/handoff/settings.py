"""The settings of a server whose ranks prefill or decode."""

from __future__ import annotations

from dataclasses import dataclass

from distca.schedule.serving.cdsp import ImprovementRates, PrefillModel
from distca.schedule.serving.cdsp.handoff import Transfer


@dataclass(frozen=True)
class Roles:
    """Which ranks prefill and which decode, and how prompts get from the ones to the others.

    Processes `0 .. prefill - 1` are the prefill ranks; those of decode rank `d` follow each other.

    Attributes:
        prefill: ranks that prefill, of a process each.
        decode: ranks that decode.
        decode_tensor: processes of each of those.
        strategy: name of what gives a prompt its ranks.
        times: seconds of a prefill; None: they are measured before requests are taken.
        rates: improvement rates by load.
        smallest_chunk: fewest tokens of a chunk before the last one.
        backends: requests that a decode rank receives at a time.
        lease: seconds without a word after which the other side of a hand-off counts as dead.
        keep_times: file that measured times are kept in; None: they are not.
    """

    prefill: int
    decode: int
    decode_tensor: int
    strategy: str
    times: PrefillModel | None
    rates: ImprovementRates
    smallest_chunk: int = 128
    backends: int = 4
    lease: float = 10.0
    keep_times: str | None = None

    @property
    def processes(self) -> int:
        """Processes of all ranks."""
        return self.prefill + self.decode * self.decode_tensor

    def leader(self, decode: int) -> int:
        """The first process of a decode rank, which speaks with the engine."""
        return self.prefill + decode * self.decode_tensor

    def decode_rank(self, process: int) -> int:
        """The decode rank of a process."""
        return (process - self.prefill) // self.decode_tensor


def sequence_of(transfer: Transfer) -> int:
    """The number by which workers know a try of a request."""
    return transfer.request << 8 | transfer.epoch


def transfer_of(sequence: int) -> Transfer:
    """The try of a request that workers know by a number."""
    return Transfer(*divmod(sequence, 1 << 8))
