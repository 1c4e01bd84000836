"""The numbers of ranks that share a run's work."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class ParallelSizes:
    """Numbers of ranks that share a run's work.

    Attributes:
        data: data-parallel ranks.
        tensor: tensor-parallel ranks.
        stages: pipeline stages.
        chunks: model chunks (virtual stages) of each pipeline stage.
        sequence_shards: ranks that divide a micro-batch's tokens; 1 without sequence parallelism.
        timeout: time limit of a collective.
        head_parallel: data-parallel ranks of an attention server, which share heads.
    """

    data: int
    tensor: int
    stages: int
    chunks: int
    sequence_shards: int
    timeout: timedelta
    head_parallel: int = 1

    @classmethod
    def from_args(cls, args: Namespace, head_parallel: int = 1) -> ParallelSizes:
        """Makes the value of Megatron-LM's checked arguments.

        Args:
            args: the arguments.
            head_parallel: data-parallel ranks of an attention server, which share heads.
        """
        tensor = args.tensor_model_parallel_size
        return cls(
            data=args.data_parallel_size,
            tensor=tensor,
            stages=args.pipeline_model_parallel_size,
            chunks=args.virtual_pipeline_model_parallel_size or 1,
            sequence_shards=tensor if args.sequence_parallel else 1,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
            head_parallel=head_parallel,
        )

    def servers(self, dedicated: int) -> int:
        """Returns the number of attention servers that exchange with each other.

        Args:
            dedicated: processes that only serve.
        """
        return self.data // self.head_parallel * self.stages + dedicated // self.tensor
