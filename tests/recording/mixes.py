"""The training runs that are recorded: small ones, each with a mix of features of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 10


@dataclass(frozen=True)
class Mix:
    """A run.

    Attributes:
        name: as it is chosen and reported.
        world_size: processes.
        data_parallel: data-parallel size of those with a model.
        flags: added to those of `models.MODEL`.
        micro_batches: micro-batches of a step.
        tokens: tokens of each rank in a window; plans cut at multiples of 128.
    """

    name: str
    world_size: int
    data_parallel: int
    flags: str
    micro_batches: int = 2
    tokens: int = 256

    def all_flags(self, window_tokens: int) -> list[str]:
        """All of its flags.

        Args:
            window_tokens: tokens of the window that its data-parallel ranks share.
        """
        return [
            *("--seq-length", str(window_tokens // self.data_parallel)),
            *("--global-batch-size", str(self.micro_batches * self.data_parallel)),
            *("--lr", "3e-3"),
            *self.flags.split(),
        ]

    def windows(self, steps: int) -> list[list[int]]:
        """Documents by window: odd ones, whole ones, many; each step's differ from the last's."""
        tokens = max(512, self.tokens * self.data_parallel)
        each = [
            [1, 300, 5, 1, tokens - 307],
            [tokens],
            [200, tokens - 241, 41],
            [128] * (tokens // 128),
            [16] * (tokens // 16),
            [tokens - 129, 1, 128],
            [77, tokens - 180, 103],
        ]
        # A step more is read ahead.
        return [each[n % len(each)] for n in range((steps + 1) * self.micro_batches)]

    def job(self, steps: int) -> tuple[list[str], list[int]]:
        """Its flags and its documents."""
        windows = self.windows(steps)
        return self.all_flags(sum(windows[0])), [n for window in windows for n in window]

    def call(self, folder: Path) -> tuple[Any, ...]:
        """A function that each rank calls, and its arguments; it needs no folder."""
        from recording.rank import record

        return record, *self.job(STEPS), STEPS


GROUPS = "--group-query-attention --num-query-groups 2"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP2, PP4 = (f"--num-layers 4 --pipeline-model-parallel-size {n}" for n in (2, 4))
VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
WHOLE = "--distca --no-distca-ping-pong"
PING_PONG = "--distca --distca-ping-pong"
TILES, GREEDY = (f"--distca-scheduler {name}" for name in ("tiles", "greedy"))
# Queries stay at home: the other order of events.
CP = "--distca-scheduler per-document-cp --distca-context-parallel-size"
KEEP = "--distca-backward keep"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

TRAINING_MIXES: Sequence[Mix] = (
    Mix("plain, packed, DP2", 2, 2, GROUPS),
    Mix("plain, dense, PP2, bf16", 2, 1, f"{PP2} --attention-backend unfused --bf16", 3),
    Mix("plain, TP2-SP-DP2, overlap", 4, 2, f"{SP} {GROUPS} {OVERLAP}"),
    Mix("tiles, DP4", 4, 4, f"{PING_PONG} {TILES} {GROUPS}"),
    Mix("greedy, DP3, bf16, shm", 3, 3, f"{PING_PONG} {GREEDY} --bf16 --distca-transport shm"),
    Mix("greedy, DP3, whole, keep, window", 3, 3, f"{WHOLE} {GREEDY} {KEEP} {GROUPS} "
        "--window-size 100,0"),
    Mix("greedy, DP2, keep", 2, 2, f"{PING_PONG} {GREEDY} {KEEP}"),
    Mix("tiles, TP2-DP2, whole, bf16", 4, 2, f"{WHOLE} {TILES} {TP} --bf16"),
    Mix("greedy, TP2-SP-DP2, dropout", 4, 2, f"{PING_PONG} {GREEDY} {SP} --hidden-dropout 0.1"),
    Mix("tiles, PP4", 4, 1, f"{PING_PONG} {TILES} {PP4} {GROUPS}", 5),
    Mix("greedy, PP2-DP2, bf16, window", 4, 2, f"{PING_PONG} {GREEDY} {PP2} --bf16 "
        "--window-size 100,0", 3),
    Mix("tiles, PP2-VPP2, whole", 2, 1, f"{WHOLE} {TILES} {VPP}", 3),
    Mix("tiles, PP2-VPP2-DP2, overlap", 4, 2, f"{PING_PONG} {TILES} {VPP} {OVERLAP}", 3),
    Mix("tiles, TP2-SP-PP2, recompute", 4, 1, f"{PING_PONG} {TILES} {SP} {PP2} {RECOMPUTE}"),
    Mix("tiles, DP2 + 1", 3, 2, f"{PING_PONG} {TILES} {GROUPS} --bf16 "
        "--distca-servers dedicated:1", tokens=512),
    Mix("greedy, PP2 + 1, whole", 3, 1, f"{WHOLE} {GREEDY} {PP2} --distca-servers dedicated:1", 3),
    Mix("tiles, DP3, overlap, recompute", 3, 3, f"{PING_PONG} {TILES} {OVERLAP} {RECOMPUTE}"),
    Mix("tiles, DP2, whole, two windows in a micro-batch", 2, 2, f"{WHOLE} {TILES} {GROUPS} "
        "--micro-batch-size 2 --distca-placement sequential --recompute-activations", 4),
    Mix("queries at home, DP4", 4, 4, f"{PING_PONG} {CP} 2 {GROUPS}"),
    Mix("queries at home, DP3, recompute", 3, 3, f"{PING_PONG} {CP} 3 {RECOMPUTE}"),
)  # fmt: skip
