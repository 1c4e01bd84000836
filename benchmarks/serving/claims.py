"""Claims of four papers on serving: one row for each figure, table and equation.

    python benchmarks/serving/claims.py

Reads the stored results in `benchmarks/results/serving`, simulates nothing, and writes `claims.md`
there. Counts and formulae are computed from the code that has them. The rows of each paper are in
`benchmarks/serving/papers`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.claims import Claim, claims_table
from benchmarks.serving.papers import context_parallel, csps, runahead, tetris, tetris_load


@dataclass(frozen=True)
class Paper:
    """A paper.

    Attributes:
        title: title of its section.
        where: where it is published.
        claims: its rows.
        note: what a reader must know of them, or nothing.
    """

    title: str
    where: str
    claims: Sequence[Claim]
    note: str = ""

    def section(self) -> list[str]:
        """Lines of its section."""
        note = [self.note, ""] if self.note else []
        rows = claims_table(self.claims, "verdict")
        return [f"## {self.title}", "", f"{self.where}.", "", *note, rows, ""]


def papers() -> list[Paper]:
    """The four papers, with their claims."""
    return [
        Paper(
            "Context parallelism (pass-KV and pass-Q)",
            "Context Parallelism for Scalable Million-Token Inference, "
            "[arXiv:2411.01783](https://arxiv.org/abs/2411.01783)",
            context_parallel.claims(),
        ),
        Paper(
            "KV-Runahead",
            "Scalable Causal LLM Inference by Parallel Key-Value Cache Generation, ICML 2024",
            runahead.claims(),
        ),
        Paper(
            "Tetris (CDSP)",
            "Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism",
            tetris.claims(),
            tetris_load.NOTE,
        ),
        Paper(
            "CSPS",
            "A Communication-Efficient Sequence-Parallelism based Serving System for Transformer "
            "based Models with Long Prompts",
            csps.claims(),
        ),
    ]


def counted(claims: Sequence[Claim]) -> str:
    """How many claims have each verdict."""
    kinds = ("reproduced", "differs by", "not possible here", "missing", "no claim")
    found = Counter(
        next(kind for kind in kinds if claim.comparison.startswith(kind)) for claim in claims
    )
    return ", ".join(f"{kind.removesuffix(' by')} {found[kind]}" for kind in kinds)


def claims_page() -> str:
    """The page."""
    every = papers()
    counts = [f"* {paper.title}: {counted(paper.claims)}." for paper in every]
    return "\n".join(
        [
            "# Claims of the papers on serving",
            "",
            "`python benchmarks/serving/claims.py`, from the stored results.",
            "",
            "Times that [published.md](published.md) simulates are its figures: what its fits, "
            "with rates of each system, predict for numbers that they did not see, and its "
            "comparisons by the fit to all. That page also says how far the commands' defaults, "
            "which know no system, are from the same numbers.",
            "",
            "No GPU was used: figures are simulated, or measured on CPU processes with small "
            "models, and rows say which. *Reproduced*: within 10% of the published figure, or a "
            "test shows that the code does the same. *Differs by*: by how much or in what, and "
            "why. *Missing*: not built, or not measured. *No claim*: the paper says nothing that "
            "could be wrong.",
            "",
            *counts,
            "",
            *(line for paper in every for line in paper.section()),
        ]
    ).rstrip()


def main() -> None:
    parser = Parser(__doc__)
    default = pages.RESULTS / "serving"
    parser.add_argument("--output", type=Path, metavar="DIR", default=default)
    args = parser.parse_args()
    pages.save(args.output, "claims", claims_page(), __file__)


if __name__ == "__main__":
    main()
