"""What dropped keys do to answers: needles by their distance, and perplexity by the kept share.

    python benchmarks/serving/sparse_quality.py --output benchmarks/results/serving

The small model of `benchmarks/serving/recall_model.py` is trained as in `sparse_degradation.py`. It
reads prompts that it was not trained on, with a needle at several distances from the question, and
drops keys by the paper's formula (`--sparsity P`), as eight ranks in nodes of two would.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.recall_model import trained
from benchmarks.serving.sparse_degradation import (
    CALIBRATED,
    PER_NODE,
    RANKS,
    STEPS,
    TOKENS,
    kept_rows,
    prompts,
)
from distca.cost.link import Links
from distca.inference.models import ServedModel
from distca.inference.sparse_model import SparseModel
from distca.inference.sparsity_calibration import CUE, NEEDLE
from distca.progress import track
from distca.schedule.serving.csps import LEVELS, Levels, Sparsity

DROPS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Shares of level 1's keys that are dropped."""
DISTANCES = (32, 128, 320, 592, 640, 960)
"""Tokens from the end of a needle to the question for it. At 592 it lies among the last 64 queries
of its rank, at 640 just before them."""
READ = 256
"""Tokens at the end of a prompt whose likelihood counts."""
ASKED = NEEDLE - CUE
"""Tokens of a needle that the model has to recall."""


@dataclass(frozen=True)
class Dropped:
    """What a share that is dropped does.

    Attributes:
        drop: share of level 1's keys that is dropped.
        between_nodes, between_ranks: shares of the keys that are still sent.
        perplexity: of a byte, over the last tokens of prompts without a needle.
        recalled: by distance, share of the needles' tokens that are likeliest.
        alone: the same where the prompt has the needle's bytes nowhere else.
    """

    drop: float
    between_nodes: float
    between_ranks: float
    perplexity: float
    recalled: dict[int, float]
    alone: dict[int, float]


def with_needle_at(
    prompt: Sequence[int], distance: int, seed: int, alone: bool = False
) -> list[int]:
    """Hides a needle, and asks for it at the end, so that the prompt's length stays.

    Args:
        prompt: token ids.
        distance: tokens between the needle and the question.
        seed: seed of the needle.
        alone: whether the needle's tokens give way to others wherever else they are.

    Raises:
        ValueError: the prompt is too short for the distance.
    """
    body = list(prompt[: len(prompt) - 2 * NEEDLE])
    if distance > len(body):
        raise ValueError(f"a needle {distance} tokens back does not fit into {len(body)} tokens")
    drawn = np.random.default_rng(seed).permutation(np.unique(prompt))[:NEEDLE]
    needle = [*map(int, np.resize(drawn, NEEDLE))]
    if alone:
        others = np.random.default_rng(seed).permutation(np.setdiff1d(prompt, needle))
        body = [int(others[n % len(others)]) if t in needle else t for n, t in enumerate(body)]
    depth = len(body) - distance
    return body[:depth] + needle + body[depth:] + needle


def recalled_share(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """Share of the last tokens that are the likeliest ones.

    Args:
        logits: of the last `ASKED + 1` tokens, `[ASKED + 1, vocabulary]`.
        tokens: token ids of the prompt.
    """
    likeliest = logits[:-1].argmax(-1)
    return float((likeliest == torch.tensor(tokens[-ASKED:])).float().mean())


def levels_of(distances: Sequence[int], levels: Levels) -> list[str]:
    """How far the rank of a needle is from that of the question, by distance."""
    owners = np.array(levels.owners(TOKENS, 0, TOKENS))
    asks = TOKENS - ASKED - 1
    places = np.array([TOKENS - NEEDLE - distance - ASKED for distance in distances])
    found = levels.of(owners[places], np.full(len(places), owners[asks]))
    return [("same rank", "same node", "other node")[level] for level in found]


def measure(model: ServedModel, levels: Levels, texts: Sequence[Sequence[int]]) -> list[Dropped]:
    """Reads prompts with and without needles, by what is dropped."""
    sparse = SparseModel(model, levels, torch.device("cpu"))
    found = []
    for drop in track(DROPS, "sparse_quality", "shares"):
        sparsity = Sparsity.of_drop_ratio(
            drop, len(model.windows), model.shape.kv_heads, len(LEVELS)
        )
        losses = []
        recalled, alone = ({each: list[float]() for each in DISTANCES} for _ in range(2))
        for number, text in enumerate(texts):
            logits, _ = sparse.run(text, sparsity, READ + 1)
            expected = torch.tensor(text[-READ:])
            losses.append(float(torch.nn.functional.cross_entropy(logits[:-1].double(), expected)))
            for shares, of_alone in ((recalled, False), (alone, True)):
                for distance in DISTANCES:
                    tokens = with_needle_at(text, distance, 1000 + number, of_alone)
                    logits, _ = sparse.run(tokens, sparsity, ASKED + 1)
                    shares[distance].append(recalled_share(logits, tokens))
        means = [
            {distance: float(np.mean(each)) for distance, each in shares.items()}
            for shares in (recalled, alone)
        ]
        perplexity = float(np.exp(np.mean(losses)))
        found.append(Dropped(drop, *kept_rows(sparsity, levels), perplexity, *means))
    return found


def page(found: Sequence[Dropped], prompts_read: int, where: Sequence[str]) -> str:
    """The results as a page."""
    dense = found[0]
    head = ["p", "keys between nodes", "between ranks", "perplexity", "over dense"]
    places = [f"{distance}, {name}" for distance, name in zip(DISTANCES, where, strict=True)]
    rows = [
        [
            f"{each.drop:g}",
            f"{each.between_nodes:.0%}",
            f"{each.between_ranks:.0%}",
            f"{each.perplexity:.3f}",
            f"{each.perplexity / dense.perplexity:.3f}",
            *(f"{each.recalled[distance]:.0%}" for distance in DISTANCES),
        ]
        for each in found
    ]
    of_alone = [
        [f"{each.drop:g}", *(f"{each.alone[distance]:.0%}" for distance in DISTANCES)]
        for each in found
    ]
    return "\n".join(
        [
            "# Dropped keys, needles and perplexity",
            "",
            "`python benchmarks/serving/sparse_quality.py --output DIR`",
            "",
            "The model has four layers (two may drop keys), reads bytes, and was trained for "
            f"{STEPS} steps of 2,048 tokens on Python's library. It reads {prompts_read} prompts "
            f"of {TOKENS:,} other tokens as {RANKS} ranks in nodes of {PER_NODE} would, with "
            "`--sparsity P`. Keys are shares of those that dense attention sends. *Perplexity* "
            f"is of a byte, over the last {READ} tokens. The last columns are shares of recalled "
            "tokens of needles, by the tokens between needle and question, and by where the "
            f"needle's rank is as seen from the question's. Each is of {prompts_read} needles, one "
            f"in each prompt, and {ASKED} tokens of each: {prompts_read * ASKED} tokens.",
            "",
            pages.table([*head, *places], rows),
            "",
            "## Why more is recalled near, and less at 640 tokens than at 960",
            "",
            "A needle's bytes are drawn from its prompt, so they are elsewhere in the prompt, too, "
            "and what follows them there competes with the needle. In the same prompts with other "
            "bytes in those places, these shares are recalled:",
            "",
            pages.table(["p", *places], of_alone),
            "",
            "So dense attention loses needles to their competitors. Those on other ranks are "
            "dropped first, and a needle on the question's own rank stays, so that it is recalled "
            "more often the more is dropped. A model whose prompts have no such competitors gains "
            "nothing.",
            "",
            "A rank sends those of its keys that its last 64 queries attended to in the layer "
            "before. In layer 0 a head looks at the token before, so that keys among these queries "
            "are sent first. The needle at 592 tokens is among them, that at 640 just before them "
            "in the same piece of 128 tokens; that at 960 is in a piece of its own, which has "
            "none of these queries. So where a needle lies in its rank's tokens matters as much as "
            "its distance.",
        ]
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--model", type=Path, help="model that was trained before, or is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    levels, texts = Levels(Links(PER_NODE), RANKS), prompts()[CALIBRATED:]
    with tempfile.TemporaryDirectory() as scratch:
        model = trained(args.model or Path(scratch) / "model", STEPS, "sparse_quality")
        found = measure(model, levels, texts)
    text = page(found, len(texts), levels_of(DISTANCES, levels))
    pages.save(args.output, "sparse_quality", text, __file__, [asdict(each) for each in found])


if __name__ == "__main__":
    main()
