"""Sparsity chosen within a bound, and what it does to prompts that nobody measured.

    python benchmarks/serving/sparse_degradation.py --output benchmarks/results/serving

A small model that recalls (`benchmarks/serving/recall_model.py`) is trained, and calibrated as
`distca tune sparsity` does it. For some bounds the configurator then chooses ratios, which are run
on prompts that were neither fitted nor held out: do they stay within the bound?
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.recall_model import text, trained
from distca.cost.link import Links
from distca.inference.models import ServedModel, model_size
from distca.inference.sparse_model import SparseModel
from distca.inference.sparsity_calibration import Calibrated, calibrate, measured_on
from distca.plan import Mask
from distca.progress import progress, track
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.csps import LEVELS, Levels, Sparsity
from distca.schedule.serving.csps.calibration_file import CalibrationFile, load_calibration
from distca.schedule.serving.csps.configure import Configuration, Configurator
from distca.schedule.serving.csps.pipeline import NearToFar, thinned
from distca.simulate import CLUSTERS
from distca.simulate.serving import InferenceCosts
from distca.simulate.serving.sparse import SparseLatency
from distca.whole_file import write_text

RANKS, PER_NODE, TOKENS, STEPS = 8, 2, 1024, 400
CALIBRATED, UNSEEN, SAMPLES = 12, 12, 20
BOUNDS = (
    (0.003, 1.0),
    (0.01, 1.0),
    (0.03, 1.0),
    (0.1, 1.0),
    (1.0, 0.02),
    (1.0, 0.1),
    (1.0, 0.3),
)
"""Bounds on the divergence, in nats, and on the share of needles that are lost."""
ALONE = (0.2, 0.5)
"""Shares of level 1 that are dropped of keys alone, and of queries alone."""
ENDS = (TOKENS, 3 * TOKENS // 4)
"""Lengths at which prompts end whose next token is compared then."""


@dataclass(frozen=True)
class Found:
    """A bound, what was chosen within it, and what that did to prompts that were not measured."""

    most_kl: float
    most_recall_loss: float
    between_nodes: float
    between_ranks: float
    seconds: float
    predicted_kl: float
    predicted_loss: float
    kl: float
    recall_loss: float

    @property
    def holds(self) -> bool:
        """Whether both bounds hold, but for rounding."""
        slack = 1 + 1e-6
        holds = self.kl <= self.most_kl * slack
        return holds and self.recall_loss <= self.most_recall_loss * slack


@dataclass(frozen=True)
class Alone:
    """What rows of one kind that are dropped do to the token that follows a prompt: its mean
    divergence in nats, and how often another one is likeliest."""

    what: str
    share: float
    kl: float
    changed: float


def kept_rows(sparsity: Sparsity, levels: Levels) -> tuple[float, float]:
    """Shares of the keys that are still sent: between nodes, and between ranks at all."""
    strategy = NearToFar(levels, sparsity, (None,) * sparsity.layers)
    new = strategy.shard(np.array([0]), np.array([TOKENS]))
    dense = strategy.plan(nobody_holds(levels.ranks), new, Mask())
    of_layers = [
        thinned(dense, levels, *ratios).kept_keys
        for ratios in zip(sparsity.keys, sparsity.queries, strict=True)
    ]
    kept = np.mean([each.counts.mean(axis=1) for each in of_layers], axis=0)
    rows = of_layers[0].end - of_layers[0].start
    apart = levels.of(of_layers[0].owner, of_layers[0].server) > 1
    return float(kept[apart].sum() / rows[apart].sum()), float(kept.sum() / rows.sum())


def prompts() -> list[list[int]]:
    """Prompts of text that the model was not trained on, none of which overlap."""
    _, unseen = text()
    starts = np.arange(CALIBRATED + UNSEEN) * (TOKENS + 100)
    return [unseen[start : start + TOKENS].tolist() for start in starts.tolist()]


def run(model: ServedModel, kept: Path | None) -> tuple[CalibrationFile, list[Found], float, float]:
    """Calibrates, chooses and measures; returns also what the dense model recalls of the needles of
    prompts that were not measured before, and the seconds with nothing dropped. A calibration is
    kept in a file, if one is given."""
    levels, every = Levels(Links(PER_NODE), RANKS), prompts()
    seen, unseen = every[:CALIBRATED], every[CALIBRATED:]
    file = CalibrationFile(measured_on(model, levels, seen, 0), [], [])
    if kept is not None and kept.exists():
        file = load_calibration(kept)
    with progress(
        "sparse_degradation", "samples", CALIBRATED * SAMPLES, doing="calibration"
    ) as shown:
        for each in calibrate(file, model, levels, seen, SAMPLES, 0, shown.update):
            file = each
            if kept is not None:
                file.save(kept)
    cluster = replace(CLUSTERS["dgx-a100"], gpus_per_node=PER_NODE, network_gb_per_s=1.0)
    costs = InferenceCosts(model_size(model), cluster, dtype_bytes=4)
    latency = SparseLatency(costs, cluster.inference_cost(costs.shape), levels, 64 * TOKENS)
    configurator = Configurator(file.calibration, latency, TOKENS)
    chosen = [configurator.fastest(*bounds) for bounds in BOUNDS]
    calibrated = Calibrated(SparseModel(model, levels, torch.device("cpu")), unseen, seed=1000)
    samples = [each.sparsity for each in chosen]
    measured = [
        calibrated.measure(number, samples)
        for number in track(range(UNSEEN), "sparse_degradation", "unseen prompts")
    ]
    kl = np.mean([each.degraded["kl"] for each in measured], axis=0)
    losses = np.mean([each.degraded["recall_loss"] for each in measured], axis=0)
    rows = [
        found(bounds, each, levels, float(divergence), float(loss))
        for bounds, each, divergence, loss in zip(BOUNDS, chosen, kl, losses, strict=True)
    ]
    dense = configurator.fastest(0.0)
    return file, rows, float(np.mean([each.recalled for each in measured])), dense.seconds


def found(
    bounds: tuple[float, float], chosen: Configuration, levels: Levels, kl: float, loss: float
) -> Found:
    """A row of the table."""
    kept = kept_rows(chosen.sparsity, levels)
    return Found(*bounds, *kept, chosen.seconds, chosen.kl, chosen.recall_loss, kl, loss)


def dropped_alone(model: ServedModel, levels: Levels) -> list[Alone]:
    """Drops keys alone and queries alone, of prompts that were not measured."""
    sparse = SparseModel(model, levels, torch.device("cpu"))
    sizes = len(model.windows), model.shape.kv_heads, len(LEVELS)
    ways = [(what, share) for share in ALONE for what in ("keys", "queries")]
    samples = [
        Sparsity.of_drop_ratio(*((share, *sizes) if what == "keys" else (0.0, *sizes, share)))
        for what, share in ways
    ]
    ended = [each[:end] for each in prompts()[CALIBRATED:] for end in ENDS]
    found = np.zeros((len(ended), len(ways), 2))
    for number, tokens in enumerate(track(ended, "sparse_degradation", "shortened prompts")):
        dense, *others = (
            sparse.run(tokens, each, 1)[0][0].double().log_softmax(-1) for each in (None, *samples)
        )
        for way, other in enumerate(others):
            kl = float((dense.exp() * (dense - other)).sum())
            found[number, way] = kl, float(dense.argmax() != other.argmax())
    means = found.mean(axis=0).tolist()
    return [Alone(*way, *each) for way, each in zip(ways, means, strict=True)]


def page(
    file: CalibrationFile,
    rows: Sequence[Found],
    recalled: float,
    dense: float,
    alone: Sequence[Alone],
) -> str:
    """The results as a page."""
    fits = file.calibration.fits
    lines = [
        "# Sparsity within a bound, on prompts that nobody measured",
        "",
        "    python benchmarks/serving/sparse_degradation.py --output benchmarks/results/serving",
        "",
        "The demo's own model has two layers, which both stay dense: with it nothing is dropped.",
        f"This one has four ({file.measured_on.model}) and reads bytes; it begins with a circuit",
        f"for induction, and is trained for {STEPS} steps of 2,048 tokens on Python's library.",
        f"It was calibrated on {CALIBRATED} prompts of {TOKENS:,} tokens",
        f"({len(file.calibration.held_out)} held out), for {RANKS} ranks, {PER_NODE} a node, by",
        f"{SAMPLES} sparsities. On the held-out prompts, predictions of the divergence are",
        f"{fits['kl'].error:.0%} off (median; headroom {fits['kl'].headroom:.2f}, margin",
        f"{fits['kl'].margin:.4f}), those of lost needles {fits['recall_loss'].error:.0%}",
        f"({fits['recall_loss'].headroom:.2f}, {fits['recall_loss'].margin:.1%}). A bound below",
        "its margin lets nothing be dropped.",
        "",
        f"*Realised* is the mean over {UNSEEN} other prompts with other needles, of whose tokens",
        f"the dense model recalls {recalled:.0%}. *Lost* are those tokens of needles that the",
        "dense model recalls and the sparse one does not. Keys are shares of those that dense",
        "attention sends. Seconds are of prompts 64 times as long, simulated, on A100 with",
        f"1 GB/s between nodes: {dense:.3g} s with nothing dropped.",
        "",
        "| bound | keys between nodes | between ranks | seconds | predicted at most | realised |"
        " within |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        on_kl = row.most_kl < 1
        bound = f"{row.most_kl:g} nats" if on_kl else f"{row.most_recall_loss:.0%} lost"
        lines.append(
            f"| {bound} | {row.between_nodes:.0%} | {row.between_ranks:.0%} | {row.seconds:.3g} | "
            f"{row.predicted_kl:.4f} nats, {row.predicted_loss:.1%} lost | {row.kl:.4f} nats, "
            f"{row.recall_loss:.1%} lost | {'yes' if row.holds else '**no**'} |"
        )
    lines += [
        "",
        "## Keys or queries",
        "",
        "A dropped query is computed with none of a level's keys, and no byte less travels. Beside",
        "as large a share of keys, which are as many pairs, for the token that follows",
        f"{len(ENDS) * UNSEEN} prompts, the query of whose last token is always kept:",
        "",
        "| dropped | share of level 1 | divergence, nats | another token is likeliest |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.what} | {each.share:.0%} | {each.kl:.4f} | {each.changed:.0%} |" for each in alone
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the page")
    parser.add_argument("--model", type=Path, help="model that was trained before, or is written")
    parser.add_argument("--calibration", type=Path, help="its calibration, likewise")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = trained(args.model or Path(scratch) / "model", STEPS, "sparse_degradation")
        results = run(model, args.calibration)
        alone = dropped_alone(model, Levels(Links(PER_NODE), RANKS))
    pages.write(args.output / "sparse_degradation.md", page(*results, alone), __file__)
    saved = {
        "rows": [asdict(row) for row in results[1]],
        "recalled": results[2],
        "alone": [asdict(each) for each in alone],
    }
    write_text(args.output / "sparse_degradation.json", json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
