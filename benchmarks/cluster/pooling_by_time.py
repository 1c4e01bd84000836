"""What it gains that servers share a pipeline's ticks by time, not by attention alone; simulated.

    python benchmarks/cluster/pooling_by_time.py --published DIR --output results/

Every case is planned three times for the same documents: sharing out attention alone; giving more
to idle stages; and giving less to the last stage for its output layer, too, as training does
(`distca/schedule/training/tick_speeds.py`). `DIR` is as in `../plans/schedulers.py`. Writes
`pooling_by_time.md`, and prints it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.published_lengths import published
from distca.cost.model_sizes import MODELS
from distca.progress import track
from distca.schedule import ExecutionOptions, LinearWork, ScheduleConfig
from distca.simulate import (
    CLUSTERS,
    ModelCosts,
    Outcome,
    pack_sequences,
    plan_global_batch,
    simulate_ticks,
)

CLUSTER = CLUSTERS["dgx-h200"]


class Case(NamedTuple):
    """A job: its documents are of a published list, at most of `context` tokens."""

    model: str
    tensor: int
    stages: int
    data: int
    micro_batches: int
    sequences: int
    context: int
    documents: str
    upsampled: bool
    chunks: int = 1

    def __str__(self) -> str:
        sizes = f"TP{self.tensor} PP{self.stages} DP{self.data}, {self.micro_batches} micro-batches"
        return sizes + (f", {self.chunks} virtual stages" if self.chunks > 1 else "")


CASES = [
    Case("llama-34b", 8, 8, 8, 16, 16, 524_288, "prolong", True),
    Case("llama-34b", 8, 8, 8, 16, 16, 524_288, "wlbllm", True),
    Case("llama-34b", 8, 4, 4, 16, 16, 131_072, "wlbllm", False),
    Case("llama-8b", 8, 8, 4, 16, 32, 131_072, "wlbllm", True),
    Case("llama-8b", 8, 8, 4, 16, 32, 131_072, "wlbllm", True, 2),
    Case("llama-8b", 8, 2, 4, 8, 16, 131_072, "wlbllm", True),
    Case("llama-8b", 2, 4, 8, 8, 32, 131_072, "prolong", False),
    Case("llama-8b", 1, 4, 8, 16, 32, 65_536, "prolong", True),
    Case("llama-8b", 1, 8, 4, 32, 32, 65_536, "prolong", True),
    Case("llama-8b", 1, 2, 8, 8, 32, 65_536, "wlbllm", False),
    Case("llama-8b", 4, 8, 2, 16, 32, 32_768, "prolong", False),
    Case("llama-8b", 8, 8, 2, 16, 64, 8192, "wlbllm", False),
]


def outcomes(case: Case, folder: Path, seed: int) -> list[Outcome]:
    """Simulates a batch that is shared out in the three ways."""
    model = MODELS[case.model]
    costs = ModelCosts(model, CLUSTER, case.tensor)
    make = published(folder / f"document_lengths_{case.documents}.json", case.upsampled)
    lengths = make(case.context * case.sequences, case.context, seed)
    sequences = pack_sequences(lengths, case.sequences, case.context)
    each = case.sequences // case.micro_batches
    windows = [np.concatenate(sequences[n : n + each]) for n in range(0, case.sequences, each)]
    config = ScheduleConfig(
        shape=costs.shape,
        cost_model=CLUSTER.attention_cost(costs.shape),
        links=CLUSTER.links(case.tensor),
    )
    work = LinearWork.of_parameters(
        model.layer_parameters,
        model.vocabulary_parameters,
        model.layers // case.stages // case.chunks,
        model.heads * model.head_dim,
    )
    options = ExecutionOptions("tiles", chunks=case.chunks)
    return [
        simulate_ticks(
            plan_global_batch(
                windows, case.stages, case.data, config, options, linear_work=counted
            ),
            costs,
        )
        for counted in (None, replace(work, head=0.0), work)
    ]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--published", type=Path, metavar="DIR", required=True)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = []
    for case in track(CASES, "pooling_by_time", "cases"):
        before, idle, both = outcomes(case, args.published, args.seed)
        sent = [sum(int(each.sum()) for each in o.bytes_sent.values()) for o in (before, both)]
        memory = [float(o.memory_bytes.max()) for o in (before, both)]
        documents = f"{case.documents}, {'upsampled' if case.upsampled else 'as is'}"
        gains = before.seconds / idle.seconds, before.seconds / both.seconds
        lines.append(
            [
                *(case.model, case, documents, f"{case.context // 1024}K"),
                f"{before.seconds:.2f}",
                *(f"{gain:.3f}" for gain in gains),
                *(f"{sent[1] / sent[0]:.2f}", f"{memory[1] / memory[0]:.3f}"),
            ]
        )
    head = ["model", "sizes", "documents", "longest", "s", "idle stages take more"]
    head += ["and the last less", "bytes", "peak memory"]
    report = "\n".join(
        [
            "# Sharing ticks out by time",
            "",
            "`python benchmarks/cluster/pooling_by_time.py --published DIR --output DIR`: "
            f"simulated steps on {CLUSTER.name}, one global batch each. Speeds, bytes "
            "and memory are ratios over sharing out attention alone.",
            "",
            pages.table(head, lines),
        ]
    )
    pages.save(args.output, "pooling_by_time", report, __file__)


if __name__ == "__main__":
    main()
