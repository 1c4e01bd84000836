"""Setting of `throughput.py`: sizes, ways to train, and documents."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lengths_only import VOCABULARY
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.plan import Mask
from distca.plan.span import Int64s, distinct

MODES = ("ping-pong", "whole")
PLAIN, SHORT, APART = "plain", "documents of one block", ", stages apart"
MIXES = tuple(DISTRIBUTIONS)
_SCALE = 65_536


@dataclass(frozen=True)
class DistcaWay:
    """A way to train with `--distca`.

    Attributes:
        scheduler: value of `--distca-scheduler`.
        mode: one of `MODES`.
        tolerance: value of `--distca-tolerance`.
        variant: further flags.
    """

    scheduler: str
    mode: str
    tolerance: float
    variant: str = ""

    def flags(self) -> list[str]:
        """Flags beside those of every run."""
        flags = ["--distca", "--distca-scheduler", self.scheduler]
        flags += ["--distca-tolerance", str(self.tolerance)]
        flags += [] if self.mode == "ping-pong" else ["--no-distca-ping-pong"]
        return flags + self.variant.split()


@dataclass(frozen=True)
class Setting:
    """Sizes, ways and mixes of a measurement.

    Attributes:
        processes: number of processes of all stages and tensor-parallel groups.
        stages: number of pipeline stages.
        micro_batches: number of micro-batches in a global batch.
        seq_length: tokens of a data-parallel rank in a micro-batch.
        layers: number of transformer layers.
        hidden_size: width of the model.
        batches: number of different global batches of each mix, each a training step.
        rounds: number of measurements of all batches.
        schedulers: values of `--distca-scheduler`.
        modes: "ping-pong", or "whole" micro-batches (`--no-distca-ping-pong`).
        tolerances: values of `--distca-tolerance`.
        mixes: names of mixes of document lengths, as `document_lengths` takes them.
        seed: seed of the document lengths.
        tensor_parallel: number of processes that share each layer.
        megatron_flags: all other flags of every way to train; they win over those set here.
        peak_tflops: dense operations of a process's device, 10^12 a second; None: not known.
        variants: further flags of ways with `--distca`, each a variant of all of them.
        shares_cores: whether there are fewer cores than processes, without stages, whose steps are
            replayed.
    """

    processes: int
    stages: int
    micro_batches: int
    seq_length: int
    layers: int
    hidden_size: int
    batches: int
    rounds: int
    schedulers: tuple[str, ...]
    modes: tuple[str, ...]
    tolerances: tuple[float, ...]
    mixes: tuple[str, ...]
    seed: int
    tensor_parallel: int = 1
    megatron_flags: tuple[str, ...] = ()
    peak_tflops: float | None = None
    variants: tuple[str, ...] = ("",)
    shares_cores: bool = False

    @staticmethod
    def of_json(saved: dict[str, Any]) -> Setting:
        """Restores a setting that was saved by `dataclasses.asdict` as JSON."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in saved.items()
        }
        return Setting(**fields)

    @property
    def data_parallel_size(self) -> int:
        return self.processes // (self.stages * self.tensor_parallel)

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.data_parallel_size * self.micro_batches * self.seq_length

    def flags(self) -> list[str]:
        """Megatron's flags of every run; by default a head has 32 elements, and four share keys."""
        heads = max(self.hidden_size // 32, 1)
        flags = f"""
            --num-layers {self.layers} --hidden-size {self.hidden_size}
            --num-attention-heads {heads} --group-query-attention
            --num-query-groups {max(heads // 4, 1)}
            --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
            --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
            --seq-length {self.seq_length} --micro-batch-size 1
            --global-batch-size {self.data_parallel_size * self.micro_batches}
            --tensor-model-parallel-size {self.tensor_parallel}
            --pipeline-model-parallel-size {self.stages}
            --train-iters 1000 --lr 1e-4 --eval-iters 0 --split 100,0,0
            --max-position-embeddings {self.seq_length}
            --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --data-path none
        """
        return [*flags.split(), *self.megatron_flags]

    def distca_ways(self) -> dict[str, DistcaWay]:
        """Every scheduler in every mode with every tolerance and variant, by name."""
        ways = {}
        every = itertools.product(self.schedulers, self.modes, self.tolerances, self.variants)
        for each in every:
            way = DistcaWay(*each)
            name = way.scheduler if len(self.modes) == 1 else f"{way.scheduler}, {way.mode}"
            name += f", tolerance {way.tolerance:g}" if len(self.tolerances) > 1 else ""
            name += f" {way.variant}" if way.variant else ""
            ways[name] = way
        return ways

    def ways(self) -> dict[str, list[str]]:
        """All ways to train by name, each with its flags beside those of every run."""
        ways: dict[str, list[str]] = {PLAIN: []}
        for name, way in self.distca_ways().items():
            if self.stages > 1:
                ways[f"{name}{APART}"] = [*way.flags(), "--no-distca-pool-stages"]
            ways[name] = way.flags()
        return ways


def document_lengths(setting: Setting, mix: str, ranks_of_longest: int = 1) -> list[int]:
    """Draws lengths of documents that fill all batches.

    The mixes are the distributions of `distca/documents/lengths.py`, scaled so that 65,536 of their
    tokens are a rank's. Documents follow each other as in Megatron's packed sequences: one that is
    cut goes on in the next sequence, as a document of its own.

    Args:
        setting: sizes, and the seed.
        mix: name of the mix.
        ranks_of_longest: number of ranks whose tokens make a sequence; it divides the number of all
            ranks.
    """
    ranks = setting.batches * setting.micro_batches * setting.data_parallel_size
    ends = np.cumsum(draw(DISTRIBUTIONS[mix], ranks * _SCALE, setting.seed))
    # Ends are scaled, not lengths, so that the sum is exact.
    ends = ends * setting.seq_length // _SCALE
    sequence = ranks_of_longest * setting.seq_length
    cuts = np.arange(sequence, ranks * setting.seq_length + 1, sequence)
    found = np.diff(distinct(np.concatenate([ends, cuts])), prepend=0)
    lengths: list[int] = found[found > 0].tolist()
    return lengths


def pairs_of_ranks(setting: Setting, mix: str, mask: Mask) -> Int64s:
    """Visible pairs of documents as drawn, `[batches, micro-batches, data-parallel ranks]`."""
    shape = (setting.batches, setting.micro_batches, setting.data_parallel_size)
    loads = np.zeros(int(np.prod(shape)), dtype=np.int64)
    at = 0
    for length in document_lengths(setting, mix):
        loads[at // setting.seq_length] += mask.pairs(0, length, 0, length)
        at += length
    return loads.reshape(shape)
