"""Calibrations in files: what was measured on which model and prompts, readable and resumable.

A file has first what it was measured on, then for a reader what the regression found, and last what
was measured on each prompt, from which the regression is made anew whenever the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

from distca.cost.link import Links
from distca.json_files import read_text
from distca.schedule.serving.csps.degradation import (
    GRID,
    LEAST_PROMPTS,
    MEASURES,
    Calibration,
    Measured,
)
from distca.schedule.serving.csps.levels import Levels, NodeParts
from distca.schedule.serving.csps.sparsity import Ratios, Sparsity
from distca.whole_file import write_text

FORMAT = 2
_Rounded: TypeAlias = "float | list[_Rounded]"
_MAKE = "make one by `distca tune sparsity MODEL --prompts FILE`"


@dataclass(frozen=True)
class MeasuredOn:
    """What a calibration was measured on.

    Attributes:
        model: describes the model.
        digest: tells it from others.
        ranks: ranks that share a prompt.
        ranks_per_node: ranks of a node.
        nodes_per_rack: nodes of a rack; None: one rack has all.
        node_parts: how ranks of a node share its part of a prompt.
        prompts: prompts that there are.
        prompts_digest: tells them from others, and the seed of what is drawn from another.
    """

    model: str
    digest: str
    ranks: int
    ranks_per_node: int
    nodes_per_rack: int | None
    node_parts: NodeParts
    prompts: int
    prompts_digest: str

    def check_model(self, model: str, digest: str) -> None:
        """Checks that a calibration is for a model.

        Raises:
            ValueError: it is for another.
        """
        if self.digest != digest:
            raise ValueError(
                f"the calibration is of another model ({self.model}) than {model}: {_MAKE}"
            )

    def check_levels(self, levels: Levels) -> None:
        """Checks that a calibration is for ranks with levels.

        Raises:
            ValueError: it is for others.
        """
        links = Links(self.ranks_per_node, nodes_per_rack=self.nodes_per_rack)
        ours = Levels(links, self.ranks, self.node_parts)
        every = np.arange(max(self.ranks, levels.ranks))
        if (ours.ranks, ours.in_zigzag) != (levels.ranks, levels.in_zigzag) or np.any(
            ours.of(every[:, None], every) != levels.of(every[:, None], every)
        ):
            raise ValueError(
                f"the calibration is for {_layout(ours)}, not {_layout(levels)}: {_MAKE}"
            )


def _layout(levels: Levels) -> str:
    ranks, links = levels.ranks, levels.links
    racks = "" if links.nodes_per_rack is None else f", {links.nodes_per_rack} nodes a rack"
    of_node = min(links.ranks_per_node, ranks)
    return f"{ranks} ranks, {of_node} a node in {levels.node_parts} parts{racks}"


@dataclass(frozen=True)
class CalibrationFile:
    """A calibration, or what there is of one whose measuring was interrupted.

    Attributes:
        measured_on: what it was measured on.
        samples: sparsities that are measured.
        measured: what was measured on the first prompts.
    """

    measured_on: MeasuredOn
    samples: Sequence[Sparsity]
    measured: Sequence[Measured]

    @cached_property
    def calibration(self) -> Calibration:
        """The regression.

        Raises:
            ValueError: not all prompts have been measured.
        """
        missing = self.measured_on.prompts - len(self.measured)
        if missing:
            raise ValueError(
                f"the calibration lacks {missing} of its {self.measured_on.prompts} prompts, since "
                "it was interrupted: let `distca tune sparsity` go on"
            )
        return Calibration(self.samples, self.measured)

    def save(self, path: Path) -> None:
        """Writes the file, replaced if it exists."""
        on = asdict(self.measured_on) | {"lengths": [each.tokens for each in self.measured]}
        fits: dict[str, object] = {}
        if len(self.measured) == self.measured_on.prompts:
            calibration = self.calibration
            fits = {
                "held_out_prompts": len(calibration.held_out),
                "recalled_by_the_dense_model": _rounded(calibration.recalled),
            }
            for measure, fit in calibration.fits.items():
                fits[measure] = {
                    "median_relative_error_on_held_out_prompts": _rounded(fit.error),
                    "headroom": _rounded(fit.headroom),
                    "margin": _rounded(fit.margin),
                    "weights_of_mass_and_its_square_by_layers": _rounded(fit.weights),
                }
        text = json.dumps({"format": FORMAT, "measured_on": on, "found": fits}, indent=1)[:-2]
        # Tables of numbers are a line each.
        text += f',\n "kept_ratios_of_dropped_mass": {json.dumps(_rounded(GRID))}'
        for name, rows in (
            ("samples", [each.keys for each in self.samples]),
            (
                "measured",
                [
                    {"tokens": each.tokens, "recalled": _rounded(each.recalled)}
                    | {measure: _rounded(each.degraded[measure]) for measure in MEASURES}
                    | {"mass": _rounded(each.mass)}
                    for each in self.measured
                ],
            ),
        ):
            lines = ",\n  ".join(map(json.dumps, rows))
            text += f',\n "{name}": [\n  {lines}\n ]'
        write_text(path, text + "\n}\n")


def _rounded(values: ArrayLike) -> _Rounded:
    """Numbers with five digits, in lists as they are."""
    array = np.asarray(values, dtype=np.float64)
    return [_rounded(each) for each in array] if array.ndim else float(f"{float(array):.5g}")


def load_calibration(path: Path) -> CalibrationFile:
    """Reads what `CalibrationFile.save` wrote.

    Raises:
        ValueError: there is no such file.
    """
    if not path.is_file():
        raise ValueError(f"there is no calibration {path}: {_MAKE}")
    text = read_text(path, _MAKE)
    try:
        saved = json.loads(text)
        if saved["format"] != FORMAT:
            raise ValueError(f"format {saved['format']}, not {FORMAT}")
        on = {name: saved["measured_on"][name] for name in MeasuredOn.__dataclass_fields__}
        samples = [
            Sparsity(keys, Sparsity.nothing_dropped(*np.shape(keys)).queries)
            for keys in (cast("Ratios", _as_tuples(each)) for each in saved["samples"])
        ]
        measured = [
            Measured(
                int(each["tokens"]),
                np.array(each["mass"], dtype=np.float64),
                {measure: np.array(each[measure], dtype=np.float64) for measure in MEASURES},
                float(each["recalled"]),
            )
            for each in saved["measured"]
        ]
        file = CalibrationFile(MeasuredOn(**on), samples, measured)
        _check_sizes(file)
        return file
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no calibration ({type(error).__name__}: {error}): {_MAKE}"
        ) from error


def _as_tuples(values: float | list[float]) -> object:
    return tuple(map(_as_tuples, values)) if isinstance(values, list) else float(values)


def _check_sizes(file: CalibrationFile) -> None:
    """Refuses tables that are not of one model and one set of samples."""
    on = file.measured_on
    if on.prompts < LEAST_PROMPTS or len(file.measured) > on.prompts or not file.samples:
        raise ValueError("it has fewer prompts or samples than it says")
    shape = np.shape(file.samples[0].keys)
    masses = (*shape[:2], shape[2] - 1, len(GRID))
    for sample in file.samples:
        if np.shape(sample.keys) != shape:
            raise ValueError("its samples are of several models")
    for each in file.measured:
        columns = each.mass, *(each.degraded[measure] for measure in MEASURES)
        if each.mass.shape != masses or not all(np.isfinite(column).all() for column in columns):
            raise ValueError("its masses are not of its samples' model")
        if any(len(column) != len(file.samples) for column in columns[1:]):
            raise ValueError("a prompt was not measured with all samples")
