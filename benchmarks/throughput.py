"""Tokens per second of plain packed Megatron and of `--distca`, on real processes.

    python benchmarks/throughput.py

Each process is pinned to a core of its own. Windows of long-tailed documents, none longer than a
rank's tokens, are trained on by both in turn, in the same processes and with the same weights, so
that a machine whose speed drifts slows both. Printed beside the ratio is the *ideal* ratio: what
perfect balance of the visible pairs would give if moving bytes and planning cost nothing. The time
of a step is taken to be `rest + c * pairs of the busiest rank`; `c` and `rest` follow from the
step itself and from one whose documents are all one block long, with hardly a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.plan import BLOCK, Mask
from distca.plan.plan import max_over_mean


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        processes: data-parallel ranks, each on its own core.
        seq_length: tokens of a rank in a window.
        layers: transformer layers.
        hidden_size: width; a head has 32 elements, four heads share a key-value head.
        windows: different windows, each a training step.
        rounds: how often all windows are measured.
        scheduler: `--distca-scheduler`.
        seed: of the document lengths.
    """

    processes: int
    seq_length: int
    layers: int
    hidden_size: int
    windows: int
    rounds: int
    scheduler: str
    seed: int


def long_tailed_lengths(setting: Setting) -> list[int]:
    """Lognormal lengths; a document that reaches beyond a rank's tokens is cut there."""
    generator = np.random.default_rng(setting.seed)
    lengths = []
    for _ in range(setting.windows * setting.processes):
        left = setting.seq_length
        while left:
            drawn = int(np.exp(generator.normal(np.log(setting.seq_length / 16), 2.0)))
            lengths.append(min(max(drawn, 1), left))
            left -= lengths[-1]
    return lengths


def flags(setting: Setting, with_distca: bool) -> list[str]:
    heads = setting.hidden_size // 32
    text = f"""
        --num-layers {setting.layers} --hidden-size {setting.hidden_size}
        --num-attention-heads {heads} --group-query-attention --num-query-groups {heads // 4}
        --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --seq-length {setting.seq_length} --micro-batch-size 1
        --global-batch-size {setting.processes} --train-iters 1000 --lr 1e-4
        --tokenizer-type NullTokenizer --vocab-size 511 --data-path none --eval-iters 0
    """
    distca = ["--distca", "--distca-scheduler", setting.scheduler] if with_distca else []
    return [*text.split(), *distca]


@dataclass(frozen=True)
class LengthsOnly:
    """A corpus of which only the lengths matter."""

    lengths: np.ndarray

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        return (np.arange(start, end) * 7 + document) % 511


class Measured:
    """One way to train, whose steps can be timed one by one."""

    def __init__(self, setting: Setting, with_distca: bool, model: Any = None) -> None:
        from megatron_patches.arguments import add_distca_arguments
        from megatron_patches.data import batch_maker, window_layout
        from megatron_patches.gpt_job import GPT_JOB
        from megatron_patches.lean.arguments import parse_args
        from megatron_patches.lean.training import build_model_and_optimizer

        self.args = parse_args(add_distca_arguments, flags(setting, with_distca), setting.processes)
        self._job = GPT_JOB
        self._make = batch_maker(self.args, window_layout(self.args), torch.device("cpu"))
        self._model, self._optimizer = build_model_and_optimizer(GPT_JOB, self.args)

    def seconds(self, lengths: list[int], window: int) -> float:
        """A whole training step on a window, from barrier to barrier, planning included."""
        from megatron_patches.batch import MicroBatches
        from megatron_patches.job import DataIterators
        from megatron_patches.lean.training import Run, forward_backward
        from megatron_patches.stream import TokenStream

        column = np.asarray(lengths, dtype=np.int64)
        numbers, zeros = np.arange(len(column)), np.zeros_like(column)
        offsets = np.concatenate([[0], np.cumsum(column)])
        corpora = (LengthsOnly(column),)
        stream = TokenStream(corpora, zeros, numbers, zeros, offsets)  # type: ignore[arg-type]
        per_window = self.args.data_parallel_size
        batches = MicroBatches(
            self._make(stream, 0), window * per_window, per_window, torch.device("cpu")
        )
        data = DataIterators(batches, None, None)
        run = Run(self._job, self.args, self._model, self._optimizer, None, [data])
        for chunk in self._model:
            chunk.train()
            chunk.zero_grad_buffer()
        dist.barrier()
        start = time.perf_counter()
        forward_backward(run, "train", forward_only=False)
        self._optimizer.step()
        dist.barrier()
        took = time.perf_counter() - start
        batches.close()
        return took


def measure(rank: int, setting: Setting, store: str, output: str) -> None:
    """One process of the measurement."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, setting.processes),
        rank=rank,
        world_size=setting.processes,
    )
    from megatron_patches.arguments import add_distca_arguments
    from megatron_patches.lean.arguments import parse_args
    from megatron_patches.lean.training import initialize_megatron

    initialize_megatron(parse_args(add_distca_arguments, flags(setting, False), setting.processes))
    plain, distca = Measured(setting, False), Measured(setting, True)
    lengths = long_tailed_lengths(setting)
    tokens = setting.windows * setting.processes * setting.seq_length
    short_documents = [BLOCK] * (tokens // BLOCK)
    for way in (plain, distca):
        way.seconds(lengths, 0)
    times: dict[str, list[list[float]]] = {"plain": [], "distca": [], "short": []}
    for window in range(setting.windows):
        rows: dict[str, list[float]] = {name: [] for name in times}
        for _ in range(setting.rounds):
            rows["plain"].append(plain.seconds(lengths, window))
            rows["distca"].append(distca.seconds(lengths, window))
            rows["short"].append(plain.seconds(short_documents, window))
        for name in times:
            times[name].append(rows[name])
    if rank == 0:
        Path(output).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def pairs_of_ranks(setting: Setting) -> np.ndarray:
    """Visible pairs of each rank's documents, `[windows, ranks]`."""
    loads = np.zeros(setting.windows * setting.processes, dtype=np.int64)
    at = 0
    for length in long_tailed_lengths(setting):
        loads[at // setting.seq_length] += Mask().pairs(0, length, 0, length)
        at += length
    return loads.reshape(setting.windows, setting.processes)


def summarize(setting: Setting, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians, ratios and the ideal."""
    median = {name: [statistics.median(row) for row in rows] for name, rows in times.items()}
    short = statistics.median(median["short"])
    pairs = pairs_of_ranks(setting)
    short_pairs = setting.seq_length // BLOCK * Mask().pairs(0, BLOCK, 0, BLOCK)
    ideal_seconds = []
    for plain, loads in zip(median["plain"], pairs, strict=True):
        seconds_per_pair = max(plain - short, 0.0) / (loads.max() - short_pairs)
        ideal_seconds.append(plain - seconds_per_pair * (loads.max() - loads.mean()))
    tokens = setting.processes * setting.seq_length * setting.windows
    ratio = sum(median["plain"]) / sum(median["distca"])
    ideal = sum(median["plain"]) / sum(ideal_seconds)
    return {
        "setting": asdict(setting),
        "windows": [
            {"most_over_mean_pairs": m, "plain_s": p, "distca_s": d, "ratio": p / d, "ideal": p / i}
            for m, p, d, i in zip(
                map(max_over_mean, pairs),
                median["plain"],
                median["distca"],
                ideal_seconds,
                strict=True,
            )
        ],
        "short_documents_s": short,
        "plain_tokens_per_second": tokens / sum(median["plain"]),
        "distca_tokens_per_second": tokens / sum(median["distca"]),
        "ratio": ratio,
        "ideal_ratio": ideal,
        "ratio_over_ideal": ratio / ideal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scheduler", default="greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    args = vars(parser.parse_args())
    output = args.pop("json")
    setting = Setting(**args)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "times.json"
        torch.multiprocessing.spawn(
            measure,
            args=(setting, str(Path(folder) / "store"), str(found)),
            nprocs=setting.processes,
        )
        summary = summarize(setting, json.loads(found.read_text()))
    print(f"{'window':>6} {'pairs max/mean':>14} {'plain s':>8} {'distca s':>8} {'ratio':>6} ideal")
    for number, row in enumerate(summary["windows"]):
        print(
            f"{number:6} {row['most_over_mean_pairs']:14.2f} {row['plain_s']:8.3f} "
            f"{row['distca_s']:8.3f} {row['ratio']:6.2f} {row['ideal']:5.2f}"
        )
    print(f"documents of one block: {summary['short_documents_s']:.3f} s a step")
    print(f"plain packed Megatron:  {summary['plain_tokens_per_second']:.0f} tokens/s")
    print(f"with --distca:          {summary['distca_tokens_per_second']:.0f} tokens/s")
    print(
        f"ratio {summary['ratio']:.3f}, ideal {summary['ideal_ratio']:.3f}: "
        f"{summary['ratio_over_ideal']:.1%} of the ideal"
    )
    if output is not None:
        output.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
