"""What the processes of a job tell each other about their end, beside Megatron's process groups.

They meet in the launcher's store, which outlives each of them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

_STORE_TIMEOUT = timedelta(seconds=5)
_EXIT_CODE = 49
"""Place in `/proc/PID/stat`, counted from the state."""


@dataclass(frozen=True)
class Peers:
    """The processes of a job.

    Attributes:
        store: `torch.distributed.Store` of the launcher; None: no launcher tells of others.
        rank: rank of this process.
        world_size: number of processes.
    """

    store: Any
    rank: int
    world_size: int

    @staticmethod
    def by_torchrun(told: Mapping[str, str]) -> Peers:
        """Meets the other processes, as torchrun describes them, and tells them of this one.

        Args:
            told: environment variables of this process, which are torchrun's interface.
        """
        if told.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return Peers(None, int(told.get("RANK", 0)), 1)
        server = TCPStore(
            told["MASTER_ADDR"],
            int(told["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
        )
        # The store stays when torchrun starts all processes anew.
        store = PrefixStore(f"distca/ends/{told['TORCHELASTIC_RESTART_COUNT']}", server)
        peers = Peers(store, int(told["RANK"]), int(told["WORLD_SIZE"]))
        store.set(f"process {peers.rank}", f"{socket.gethostname()} {os.getpid()}")
        return peers

    def first_to_tell(self, patience: float = 0.0) -> bool:
        """Whether this process is the first that has a message about the end of the job.

        Args:
            patience: seconds in which another, which knows more, may tell first.
        """
        if self.store is None:
            return True
        deadline = time.monotonic() + patience
        try:
            while time.monotonic() < deadline:
                if self.store.check(["told"]):
                    return False
                time.sleep(0.05)
            return bool(self.store.add("told", 1) == 1)
        except RuntimeError:
            # The launcher has gone, and its store with it.
            return True

    def lost(self, patience: float = 0.3) -> str | None:
        """Names a process of this host that has ended, and how, or returns None.

        Args:
            patience: seconds to wait for one to end.
        """
        if self.store is None:
            return None
        deadline = time.monotonic() + patience
        try:
            known = [(rank, *self._place(rank)) for rank in self._registered()]
        except RuntimeError:
            return None
        while True:
            for rank, host, pid in known:
                status = exit_status(pid) if host == socket.gethostname() else None
                if status is not None:
                    return f"rank {rank} on {host} (process {pid}) {status}"
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)

    def _registered(self) -> list[int]:
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if self.store.check([f"process {rank}"])]

    def _place(self, rank: int) -> tuple[str, int]:
        host, pid = self.store.get(f"process {rank}").decode().rsplit(" ", 1)
        return host, int(pid)


def exit_status(pid: int) -> str | None:
    """Tells how a process of this host ended; None: it runs."""
    try:
        # After the program's name, which may hold blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "has ended: the launcher says how"
    if fields[0] not in "ZX":
        return None
    status = int(fields[_EXIT_CODE])
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = ", as where memory runs out" if number == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(number).name}{hint}"
    # Without the right to know, the code is 0.
    return f"has ended with exit code {os.WEXITSTATUS(status)}" if status else "has ended"
