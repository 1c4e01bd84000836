"""Launches and waits of a step on simulated GPUs: now, and when they were first counted.

    python benchmarks/kernels/launches.py --output DIR

`tests/simgpu` counts what a step launches on a simulated GPU, and how often its host waits for the
device. Files of budgets hold the counts: a step that has more fails a test. This page compares them
with the first count of each job, which it reads from the repository's history.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser

ROOT = Path(__file__).parents[2]
TRAINING, ANSWERS, LAYERS = (
    f"tests/simgpu/{name}.json" for name in ("training_budgets", "budgets", "layer_budgets")
)
CALLS = "two schedule calls"
BEFORE = {"calls, ping-pong": 3607, "calls, whole": 1871}
"""Launches of two schedule calls at commit f78aba3, by a first simulator that is not in here."""
OF_LAYERS = 3
"""Layers whose launches `LAYERS` has."""
KINDS = "prefill launches", "prefill syncs", "decode launches", "decode syncs"


def versions(name: str) -> list[tuple[str, Any]]:
    """The contents of a file in all commits that changed it, the oldest first, by commit.

    Raises:
        ValueError: there is no history, as in a shallow clone.
    """
    log = ["git", "log", "--reverse", "--format=%h", "--", name]
    commits = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if not commits:
        raise ValueError(f"git has no history of {name}: run this in a whole clone")
    found = []
    for commit in commits.split():
        show = ["git", "show", f"{commit}:{name}"]
        text = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found.append((commit, json.loads(text)))
    return found


def first(history: list[tuple[str, Any]], *keys: str) -> int:
    """The count that the oldest version has which counted it."""
    for _, counts in history:
        for key in keys:
            counts = counts.get(key) if isinstance(counts, dict) else None
        if counts is not None:
            return int(counts)
    raise KeyError(keys)


def calls_table(now: Any) -> str:
    """A row for each way to run micro-batches."""
    rows = [
        [job.partition(", ")[2], before, now[job][CALLS], f"{now[job][CALLS] / before:.2f}"]
        for job, before in BEFORE.items()
    ]
    return pages.table(["micro-batches", "at f78aba3", "now", "ratio"], rows)


def layers_table(history: list[tuple[str, Any]], now: Any) -> str:
    """A row for each family of models."""
    rows = []
    for family, counts in now.items():
        plain = counts["transformers"]
        row = [family, f"{plain / OF_LAYERS:.1f}"]
        for ranks in ("1 rank", "2 ranks"):
            old = first(history, family, ranks)
            row.append(f"{old / OF_LAYERS:.1f} → {counts[ranks] / OF_LAYERS:.1f}")
            row.append(f"{counts[ranks] / plain:.2f}")
        rows.append(row)
    heads = ["family", "transformers' own", *("ours, 1 rank", "ratio", "2 ranks", "ratio")]
    return pages.table(heads, rows)


def training_table(history: list[tuple[str, Any]], now: Any) -> str:
    """A row for each job of training."""
    rows = []
    for job, counts in now.items():
        if CALLS in counts:
            continue
        cells = (f"{first(history, job, kind)} → {counts[kind]}" for kind in ("launches", "syncs"))
        rows.append([job, *cells])
    return pages.table(["job", "launches, all ranks", "waits of a rank"], rows)


def answers_table(history: list[tuple[str, Any]], now: Any) -> str:
    """A row for each number of ranks and family of models."""
    rows = [
        [
            ranks.split()[0],
            family,
            *(f"{first(history, ranks, family, k)} → {counts[k]}" for k in KINDS),
        ]
        for ranks, families in now.items()
        for family, counts in families.items()
    ]
    heads = [kind.replace("syncs", "waits") for kind in KINDS]
    return pages.table(["ranks", "family", *heads], rows)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    try:
        training, answers, layers = map(versions, (TRAINING, ANSWERS, LAYERS))
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        parser.error(str(error))
    (of_training, now), (of_answers, models), (of_layers, each_layer) = (
        (history[0][0], json.loads((ROOT / name).read_text()))
        for history, name in ((training, TRAINING), (answers, ANSWERS), (layers, LAYERS))
    )
    page = [
        "# Launches and waits of a step on simulated GPUs",
        "",
        f"`{pages.typed('benchmarks/kernels/launches.py')}`. Counted, not timed: a simulated GPU "
        "sees torch's own launches and waits, but has no clock. A launch is an operator of torch "
        "that computes or copies on the device; the replay of a CUDA graph is one. "
        "Left of each arrow is the first "
        f"count that was kept (training since commit {of_training}, models since {of_answers}, "
        f"layers since {of_layers}; some rows since later ones). "
        "Right of it is the count of this version.",
        "",
        "## A training step of two layers",
        "",
        "Launches are the sum of all ranks that have layers. All jobs except *one rank* have two "
        "ranks; "
        "[test_simulated_training.py](../../tests/simgpu/test_simulated_training.py) has their "
        "flags. The waits are Megatron-LM's, except those of the capture of graphs.",
        "",
        training_table(training, now),
        "",
        "## Two schedule calls",
        "",
        "Launches of one of the two ranks in the forward and backward passes of two global "
        "batches, without the optimizer: two layers, two micro-batches each. Micro-batches run as "
        "two nano-batches (ping-pong) or whole. The counts at commit f78aba3 are of a first "
        "simulator, with other documents.",
        "",
        calls_table(now),
        "",
        "## A layer of an eager decode step",
        "",
        "Launches of a layer in a step that decodes one token without CUDA graphs. *transformers' "
        "own* is the plain model with its own cache, and one kernel of attention. Ours runs the "
        "same layers with paged keys, and norms and rotary embeddings as one kernel each. Beside "
        "the products of experts' matrices (`gpt_oss`, `qwen3_moe`) it launches four kernels, "
        "where transformers' own experts launch 23 with biases and 14 without. Ratios are ours "
        "over transformers' own. With two ranks, the rank that has the token counts.",
        "",
        layers_table(layers, each_layer),
        "",
        "## Prefill and decode steps of small models",
        "",
        f"Models have {OF_LAYERS} layers. The rank with the most counts. Prefills run without CUDA "
        "graphs, and so did all decodes at first. A decode step of one rank is now one graph, with "
        "the copies and the choice of tokens around it. With two ranks, graphs end where ranks "
        "exchange.",
        "",
        answers_table(answers, models),
    ]
    pages.save(args.output, "launches", "\n".join(page), __file__)


if __name__ == "__main__":
    main()
