"""How much a sparsity changes what a model says: a regression on the attention that it drops.

The paper (Section 3.2.6) fits a function of length, levels and drop ratios to thousands of
measured accuracies, and says no more of it. This one is small enough to be read. A dense pass over
a prompt tells what attention the rows would have got that a ratio drops, by layer, head and level:
the *dropped mass* `m`. A layer then adds `a m + b m^2` of its heads' mean to the degradation, with
`a` and `b` of its group of layers, which least squares of relative errors choose and which are not
below 0, nor far from those of all layers without need. So less kept is never predicted to be
better, and layers add up.

Prompts that are held out say how far predictions are off. Choices use predictions times
the *headroom*: how many times as much as predicted those prompts were degraded, where little counts
for less; for that there is a *margin* on top, below which a bound lets nothing be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from distca.plan.span import Floats
from distca.schedule.serving.csps.sparsity import Sparsity

Measure = Literal["kl", "recall_loss"]
"""What is degraded: the mean Kullback-Leibler divergence in nats of the next tokens' distributions
from the dense model's, or the share of needles that the dense model recalls and this one does not.
"""

MEASURES: tuple[Measure, ...] = ("kl", "recall_loss")
GRID = (0.0, 1 / 64, 1 / 32, 1 / 16, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Kept ratios at which dropped masses are measured; those between are interpolated."""
LEAST_KEPT = GRID[1]
LEAST_PROMPTS = 4
_HELD_OUT = 4
"""Every so-many-th prompt of a calibration is held out."""
_GROUPS = 4
_SWEEPS = 2000
_DRAWN = 0.1


@dataclass(frozen=True)
class Measured:
    """What was measured on a prompt.

    Attributes:
        tokens: length of the prompt.
        mass: dropped mass, float64 `[layers, kv_heads, far levels, GRID]`.
        degraded: for each measure that of each sampled sparsity, float64 `[samples]`.
        recalled: share of the needle's tokens that the dense model recalls.
    """

    tokens: int
    mass: Floats
    degraded: Mapping[Measure, Floats]
    recalled: float


@dataclass(frozen=True)
class Fit:
    """A regression of one measure.

    Attributes:
        weights: weights of the masses and of their squares, float64 `[groups of layers, 2]`.
        headroom: times the prediction that held-out prompts were degraded, at least 1.
        margin: what comes on top where anything is dropped: so little is lost in noise.
        error: median relative error of predictions on held-out prompts.
    """

    weights: Floats
    headroom: float
    margin: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """The degradation of a model by a sparsity, as measured on some prompts.

    Attributes:
        samples: sparsities that were measured.
        measured: what was measured on each prompt, in their order.

    Raises:
        ValueError: there are too few prompts.
    """

    samples: Sequence[Sparsity]
    measured: Sequence[Measured]

    def __post_init__(self) -> None:
        if len(self.measured) < LEAST_PROMPTS:
            raise ValueError(
                f"{len(self.measured)} prompts were measured: give at least {LEAST_PROMPTS}, "
                "because some are held out"
            )

    @cached_property
    def fitted(self) -> Sequence[Measured]:
        """Prompts that the regression is fitted to."""
        return [each for n, each in enumerate(self.measured) if n % _HELD_OUT != _HELD_OUT - 1]

    @cached_property
    def held_out(self) -> Sequence[Measured]:
        """Prompts that it is not fitted to."""
        return self.measured[_HELD_OUT - 1 :: _HELD_OUT]

    @cached_property
    def lengths(self) -> Floats:
        """Mean lengths of the prompts that were fitted, which are grouped by their nearest power of
        two, float64, ascending."""
        return np.array([np.mean([each.tokens for each in group]) for group in self._by_length])

    @cached_property
    def _curves(self) -> Floats:
        """Mean masses of each length, float64 `[lengths, layers, kv_heads, far levels, GRID]`."""
        return np.array(
            [np.mean([each.mass for each in group], axis=0) for group in self._by_length]
        )

    @cached_property
    def _by_length(self) -> Sequence[Sequence[Measured]]:
        groups: dict[int, list[Measured]] = {}
        for each in self.fitted:
            groups.setdefault(round(math.log2(each.tokens)), []).append(each)
        return [groups[power] for power in sorted(groups)]

    def mass(self, tokens: int, layer: int, kept: Floats) -> Floats:
        """Returns the attention that a layer drops, of a query's 1, float64 `[..., kv_heads]`.

        Args:
            tokens: length of a prompt; beyond those that were measured, the nearest one counts.
            layer: the layer.
            kept: kept ratios of far levels, float64 `[..., kv_heads, far levels]`.
        """
        curves = _between(self.lengths, self._curves[:, layer], tokens)
        heads, levels = np.indices(curves.shape[:2])
        above = np.clip(np.searchsorted(GRID, kept), 1, len(GRID) - 1)
        low, high = np.array(GRID)[above - 1], np.array(GRID)[above]
        part = (kept - low) / (high - low)
        values = curves[heads, levels, above - 1] * (1 - part) + curves[heads, levels, above] * part
        result: Floats = values.sum(axis=-1)
        return result

    def kept_at(self, tokens: int, layer: int, most: float) -> Floats:
        """Returns the least ratios at which no level of a head drops more,
        `[kv_heads, far levels]`.

        Args:
            tokens, layer: as for `mass`.
            most: mass that a level may drop.
        """
        curves = _between(self.lengths, self._curves[:, layer], tokens)
        # Of masses that fall with the ratio, the first that is small enough.
        first = np.maximum((curves <= most).argmax(axis=-1), 1)
        kept: Floats = np.array(GRID)[first]
        return kept

    @cached_property
    def fits(self) -> Mapping[Measure, Fit]:
        """The regression of each measure."""
        columns = np.array([self._features(self.mean_length, sample) for sample in self.samples])
        fits: dict[Measure, Fit] = {}
        for measure in MEASURES:
            fitted, unseen = (
                np.mean([each.degraded[measure] for each in some], axis=0)
                for some in (self.fitted, self.held_out)
            )
            weights = _weights(columns, fitted)
            predicted, least = columns @ weights, _floor(fitted)
            ratios = (unseen + least) / (predicted + least)
            headroom = float(ratios.max(initial=1.0))
            fits[measure] = Fit(
                weights.reshape(-1, 2),
                headroom,
                (headroom - 1) * least,
                float(np.median(np.abs(ratios - 1))),
            )
        return fits

    @property
    def recalled(self) -> float:
        """Share of needles that the dense model recalls."""
        return float(np.mean([each.recalled for each in self.measured]))

    @property
    def mean_length(self) -> int:
        """Mean length of the prompts that were fitted."""
        return int(np.mean([each.tokens for each in self.fitted]))

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(self._curves.shape[1])

    @property
    def heads(self) -> int:
        """Key-value heads of a layer."""
        return int(self._curves.shape[2])

    @property
    def far_levels(self) -> int:
        """Levels beyond a rank's own."""
        return int(self._curves.shape[3])

    def layer_degradation(self, measure: Measure, tokens: int, layer: int, kept: Floats) -> Floats:
        """What a layer adds to the degradation at most, by the headroom, float64 `[...]`, but for
        the margin.

        Args:
            measure: what is degraded.
            tokens, layer, kept: as for `mass`.
        """
        fit, mass = self.fits[measure], self.mass(tokens, layer, kept).mean(axis=-1)
        of_mass, of_square = fit.weights[self.group(layer)]
        result: Floats = fit.headroom * (of_mass * mass + of_square * mass**2)
        return result

    def degradation(self, measure: Measure, tokens: int, sparsity: Sparsity) -> float:
        """Returns the degradation of prompts of a length at most, by the headroom and the
        margin."""
        if not sparsity.drops:
            return 0.0
        kept = np.array(sparsity.keys)[:, :, 1:]
        inner = range(1, self.layers - 1)
        degradation = sum(
            self.layer_degradation(measure, tokens, each, kept[each]) for each in inner
        )
        return float(degradation) + self.fits[measure].margin

    def _features(self, tokens: int, sparsity: Sparsity) -> Floats:
        """Masses that each group of layers drops, and their squares, `[2 * groups]`."""
        kept = np.array(sparsity.keys)[:, :, 1:]
        features = np.zeros((self.groups, 2))
        for layer in range(1, self.layers - 1):
            mass = float(self.mass(tokens, layer, kept[layer]).mean())
            features[self.group(layer)] += mass, mass**2
        return features.ravel()

    def group(self, layer: int) -> int:
        """Group of a layer; the first and the last layer are in none."""
        return (layer - 1) * self.groups // (self.layers - 2)

    @property
    def groups(self) -> int:
        """Groups of layers that have weights of their own."""
        return max(min(self.layers - 2, _GROUPS), 1)


def _between(lengths: Floats, curves: Floats, tokens: int) -> Floats:
    """Curves of a length between others, or of the nearest one."""
    above = int(np.clip(np.searchsorted(lengths, tokens), 0, len(lengths) - 1))
    below = max(above - 1, 0)
    if tokens >= lengths[above] or above == below:
        return curves[above]
    part = max(tokens - lengths[below], 0) / (lengths[above] - lengths[below])
    result: Floats = curves[below] * (1 - part) + curves[above] * part
    return result


def _floor(values: Floats) -> float:
    """Degradation below which relative errors count for less: what is lost in noise."""
    return float(np.median(values)) * 0.1 + 1e-6


def _weights(columns: Floats, values: Floats) -> Floats:
    """Weights of masses and squares in each group of layers, as far as measurements separate them.

    They are drawn to weights that all layers share: else a group that was measured little could
    have weights of 0, and a configurator would drop all that it has.
    """
    alike = columns.reshape(len(columns), -1, 2).sum(axis=1)
    of_all = nonnegative_least_squares(alike, values, np.zeros(2), 0.0)
    expected = np.tile(of_all, columns.shape[1] // 2)
    return nonnegative_least_squares(columns, values, expected, _DRAWN)


def nonnegative_least_squares(
    columns: Floats, values: Floats, expected: Floats, drawn: float
) -> Floats:
    """Weights, not below 0, by which columns add up to values with the least relative errors.

    Args:
        columns: float64 `[values, columns]`.
        values: float64 `[values]`.
        expected: weights that others are drawn to.
        drawn: how much the difference from them counts, beside errors.
    """
    scale = 1 / (values + _floor(values))
    scaled = columns * scale[:, None]
    weights = expected.copy()
    rest = values * scale - scaled @ weights
    squares = (scaled**2).sum(axis=0)
    for _ in range(_SWEEPS):
        for number in np.flatnonzero(squares):
            column, pull = scaled[:, number], expected[number] - weights[number]
            step = (column @ rest / squares[number] + drawn * pull) / (1 + drawn)
            moved = max(weights[number] + step, 0.0)
            rest, weights[number] = rest - column * (moved - weights[number]), moved
    return weights
