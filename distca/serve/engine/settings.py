"""The configuration of a server: of its engine, its machines, and the roles of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from distca.inference.config import EngineConfig
from distca.serve.handoff.settings import Roles


@dataclass(frozen=True)
class Nodes:
    """The machines of a server, each of which has as many processes of ranks.

    Attributes:
        count: machines.
        rank: this one; 0 is the head, which has the engine.
        address: address by which others reach the head, the only one that it listens on.
        port: port of the head.
        key: key of the job, by which machines know each other.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29501
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class ServerConfig(EngineConfig):
    """Configuration of a server's engine and its workers.

    Attributes:
        nodes: machines of the server.
        roles: ranks that prefill and ranks that decode; None: all do both.
    """

    nodes: Nodes = Nodes()
    roles: Roles | None = None

    @property
    def processes(self) -> int:
        """Processes of all ranks; those of a rank are neighbours."""
        return super().processes if self.roles is None else self.roles.processes

    @property
    def own_processes(self) -> range:
        """Those of this machine."""
        each = self.processes // self.nodes.count
        return range(self.nodes.rank * each, (self.nodes.rank + 1) * each)
