"""This rank's part of every window of tokens, and its place among the stages and servers."""

from __future__ import annotations

from dataclasses import dataclass

from distca.plan.span import Int64s


@dataclass(frozen=True)
class WindowLayout:
    """Division of the token stream into samples and windows, and of windows among ranks.

    Attributes:
        data_parallel_rank: number of this rank's part in every window.
        data_parallel_size: ranks that share a window.
        seq_length: tokens of a window that each rank owns.
        micro_batch_size: windows in a micro-batch.
    """

    data_parallel_rank: int
    data_parallel_size: int
    seq_length: int
    micro_batch_size: int

    @property
    def window_tokens(self) -> int:
        return self.data_parallel_size * self.seq_length

    @property
    def samples_per_micro_batch(self) -> int:
        return self.data_parallel_size * self.micro_batch_size

    def windows(self, first_sample: int, chain: int = 1) -> list[tuple[int, int]]:
        """Returns the stream positions of a micro-batch's windows.

        Args:
            first_sample: sample at which the micro-batch starts.
            chain: number of micro-batches that share documents, whose windows are longer.
        """
        start, tokens = first_sample * self.seq_length, chain * self.window_tokens
        return [
            (start + n * tokens, start + (n + 1) * tokens) for n in range(self.micro_batch_size)
        ]


@dataclass(frozen=True)
class PipelineLayout:
    """Stages of a pipeline, and their attention servers.

    Attributes:
        stage: stage of this rank; None: this rank is a dedicated server.
        chunks: number of model chunks (virtual stages) of each stage.
        servers: server numbers of each stage, int64 `[stages, servers of a stage]`: one of each
            data-parallel rank, or of the ranks that share heads.
        server: server number of this rank.
        dedicated: number of servers that hold no model, which are numbered after all others.
    """

    stage: int | None
    chunks: int
    servers: Int64s
    server: int
    dedicated: int = 0

    @property
    def stages(self) -> int:
        return len(self.servers)

    @property
    def world_size(self) -> int:
        """Number of all servers."""
        return int(self.servers.size) + self.dedicated
