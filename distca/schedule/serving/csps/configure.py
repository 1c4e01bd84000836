"""The sparsity with the least latency within a bound on degradation, or the other way round.

Appendix B of the paper enumerates numbers of levels, drop ratios and micro-partitions, and trains a
regression on what that finds. Layers follow each other, so their seconds add up (Eq. 6), as do
their degradations (`Calibration`). The task is to choose one option for each layer such that one
sum is least and the other within its bound. This is a knapsack problem, which dynamic programming
solves for all layers together. There is nothing left to train, and the choice is for the prompt at
hand.

A layer's options are those of Appendix B, with its formula put right: a share `p` of level 1 is
dropped, in steps of .02, and beyond it `1 - p` is halved from level to level, or kept as it is,
which, with equal ratios in all levels, is the paper's smaller number of levels. Beside them are
ratios at which each head drops, in each level, equally little of its attention: the paper's trend,
by which layers of more concentrated scores drop more, taken from the masses themselves.
Micro-partitions are those of a level, the same in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distca.plan.span import Floats, Int64s
from distca.schedule.serving.csps.degradation import LEAST_KEPT, MEASURES, Calibration, Measure
from distca.schedule.serving.csps.sparsity import Sparsity

Partitions = tuple[int, ...]
"""Micro-partitions of each far level, the last one's also those of levels beyond."""

_TRIED = ((1,), (2,), (4,))
_DROPS = np.arange(0.0, 1.0, 0.02)
_TOLERANCES = np.geomspace(1e-4, 0.5, 25)
_BINS = 4000
"""Parts in which a bound is handed out to layers, rounded up: 32 layers waste at most 1% of it."""


class Latency(Protocol):
    """Seconds of a prefill by its layers."""

    def layer_seconds(self, kept: Floats, partitions: Partitions) -> Floats:
        """Returns the seconds of a layer's attention, float64 `[options]`.

        Args:
            kept: kept ratios of far levels, float64 `[options, kv_heads, far levels]`.
            partitions: micro-partitions of its levels.
        """
        ...

    @property
    def other_seconds(self) -> float:
        """Seconds of all that is not attention: in proportion to the tokens."""
        ...


@dataclass(frozen=True)
class Configuration:
    """A choice for prompts of a length.

    Attributes:
        sparsity: kept ratios.
        partitions: micro-partitions.
        seconds: predicted seconds to the first token.
        kl: most that the mean divergence in nats is expected to be, by the headroom.
        recall_loss: likewise the share of needles that are lost.
    """

    sparsity: Sparsity
    partitions: Partitions
    seconds: float
    kl: float
    recall_loss: float


def partitions_to_try(far_levels: int) -> Sequence[Partitions]:
    """Micro-partitions that are tried: few, since each is simulated with all options."""
    return _TRIED if far_levels < 2 else (*_TRIED, (1, 4))


def layer_options(calibration: Calibration, tokens: int, layer: int) -> Floats:
    """Returns the kept ratios that are tried in a layer, float64 `[options, kv_heads, far levels]`.

    The first keeps all. The first and the last layer have no other.
    """
    heads, far = calibration.heads, calibration.far_levels
    dense = np.ones((1, heads, far))
    if layer in (0, calibration.layers - 1):
        return dense
    first = 1 - _DROPS[1:, None]
    beyond = np.concatenate([first / 2.0 ** np.arange(far), np.repeat(first, far, axis=1)])
    by_level = np.broadcast_to(beyond[:, None], (len(beyond), heads, far))
    by_mass = [calibration.kept_at(tokens, layer, most) for most in _TOLERANCES]
    options = np.maximum(np.concatenate([dense, by_level, np.array(by_mass)]), LEAST_KEPT)
    options = np.round(options, 4)
    distinct: Floats = options[np.sort(np.unique(options, axis=0, return_index=True)[1])]
    return distinct


@dataclass(frozen=True)
class Configurator:
    """A choice of kept ratios and micro-partitions for prompts of a length.

    Attributes:
        calibration: degradation of the model.
        latency: seconds of the prompt's prefill.
        tokens: length of the prompt.
        partitions: micro-partitions that are tried; None: `partitions_to_try`.
        options: kept ratios that are tried in each layer; None: `layer_options`.
    """

    calibration: Calibration
    latency: Latency
    tokens: int
    partitions: Sequence[Partitions] | None = None
    options: Sequence[Floats] | None = None

    def fastest(self, most_kl: float, most_recall_loss: float = 1.0) -> Configuration:
        """Returns the configuration of least latency within bounds on degradation.

        Args:
            most_kl: bound on the mean divergence, in nats; 0: nothing is dropped.
            most_recall_loss: bound on the share of needles that are lost.

        Raises:
            ValueError: a bound is below 0.
        """
        for name, bound in (("divergence", most_kl), ("recall loss", most_recall_loss)):
            if not bound >= 0:
                raise ValueError(f"a {name} of at most {bound:g} is none: give 0 or more")
        options = self._options()
        # A layer's part of both bounds is that of the one it uses more: neither is exceeded.
        used = [
            np.maximum(
                _parts(self._degradation("kl", layer, each), self._left("kl", most_kl)),
                _parts(
                    self._degradation("recall_loss", layer, each),
                    self._left("recall_loss", most_recall_loss),
                ),
            )
            for layer, each in enumerate(options)
        ]
        configured = []
        for partitions in self._partitions():
            seconds = self._seconds(options, partitions)
            configured.append(self._configured(options, knapsack(seconds, used), partitions))
        return min(configured, key=lambda each: each.seconds)

    def least_degraded(self, most_seconds: float) -> Configuration:
        """Returns the configuration of least divergence within a bound on the seconds to the first
        token.

        Raises:
            ValueError: nothing is as fast; says what the best is.
        """
        options, configured, best = self._options(), [], np.inf
        divergence = [self._degradation("kl", *each) for each in enumerate(options)]
        for partitions in self._partitions():
            seconds = self._seconds(options, partitions)
            least = sum(float(each.min()) for each in seconds) + self.latency.other_seconds
            best = min(best, least)
            if least > most_seconds:
                continue
            used = [_parts(each - each.min(), most_seconds - least) for each in seconds]
            configured.append(self._configured(options, knapsack(divergence, used), partitions))
        if not configured:
            raise ValueError(
                f"no sparsity reaches a first token after {most_seconds:.4g} s: the best possible "
                f"is {best:.4g} s with all far keys but {LEAST_KEPT:.1%} dropped; give that or more"
            )
        return min(configured, key=lambda each: (each.kl, each.seconds))

    def _partitions(self) -> Sequence[Partitions]:
        if self.partitions is not None:
            return self.partitions
        return partitions_to_try(self.calibration.far_levels)

    def _options(self) -> Sequence[Floats]:
        if self.options is not None:
            return self.options
        layers = range(self.calibration.layers)
        return [layer_options(self.calibration, self.tokens, layer) for layer in layers]

    def _left(self, measure: Measure, bound: float) -> float:
        """What the margin leaves of a bound."""
        return max(bound - self.calibration.fits[measure].margin, 0.0)

    def _degradation(self, measure: Measure, layer: int, kept: Floats) -> Floats:
        if len(kept) == 1 and (kept == 1).all():
            return np.zeros(1)
        return self.calibration.layer_degradation(measure, self.tokens, layer, kept)

    def _seconds(self, options: Sequence[Floats], partitions: Partitions) -> Sequence[Floats]:
        """Returns the seconds of each layer's options; of those of all layers at once."""
        counts = np.cumsum([len(each) for each in options])[:-1]
        every = self.latency.layer_seconds(np.concatenate(options), partitions)
        return np.split(every, counts)

    def _configured(
        self, options: Sequence[Floats], chosen: Int64s, partitions: Partitions
    ) -> Configuration:
        kept = np.array([each[number] for each, number in zip(options, chosen, strict=True)])
        keys = np.concatenate([np.ones((*kept.shape[:2], 1)), kept], axis=2)
        ratios = tuple(tuple(map(tuple, heads)) for heads in keys.tolist())
        dense = Sparsity.nothing_dropped(*keys.shape)
        sparsity = Sparsity(ratios, dense.queries)
        kl, loss = (
            self.calibration.degradation(measure, self.tokens, sparsity) for measure in MEASURES
        )
        seconds = float(self.latency.layer_seconds(kept, partitions).sum())
        return Configuration(sparsity, partitions, seconds + self.latency.other_seconds, kl, loss)


def _parts(values: Floats, bound: float) -> Int64s:
    """Returns the parts of a bound that values use, rounded up; what is above it uses more than
    all."""
    if bound == 0:
        return np.where(values > 0, _BINS + 1, 0).astype(np.int64)
    parts = np.ceil(np.minimum(values / bound, 2.0) * _BINS - 1e-9)
    return np.maximum(parts, 0).astype(np.int64)


def knapsack(values: Sequence[Floats], parts: Sequence[Int64s]) -> Int64s:
    """Chooses an option of each layer, so that values add up to the least there is.

    Args:
        values: values of the options of each layer.
        parts: parts of the bound that they use, out of `_BINS`; each layer has an
            option that uses none.

    Returns:
        Number of each layer's option.
    """
    best = np.zeros(_BINS + 1)
    chosen = np.zeros((len(values), _BINS + 1), dtype=np.int64)
    for layer, (of_layer, used) in enumerate(zip(values, parts, strict=True)):
        least = np.full(_BINS + 1, np.inf)
        for option in _worthwhile(of_layer, used):
            part = used[option]
            total = best[: _BINS + 1 - part] + of_layer[option]
            better = total < least[part:]
            least[part:][better] = total[better]
            chosen[layer, part:][better] = option
        best = least
    left, result = _BINS, np.zeros(len(values), dtype=np.int64)
    for layer in reversed(range(len(values))):
        result[layer] = chosen[layer, left]
        left -= parts[layer][result[layer]]
    return result


def _worthwhile(values: Floats, parts: Int64s) -> Int64s:
    """Options that no other beats in both, and that are within the bound."""
    order = np.lexsort((values, parts))
    order = order[parts[order] <= _BINS]
    before = np.minimum.accumulate(np.concatenate([[np.inf], values[order][:-1]]))
    result: Int64s = order[values[order] < before]
    return result
