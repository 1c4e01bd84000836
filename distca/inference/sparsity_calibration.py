"""Measuring of what sparsities do to a model's answers, on the user's own prompts.

In each prompt a *needle* is hidden: some tokens of the prompt in random order, somewhere in its
first three quarters; its end repeats the first of them. The model recalls those that it then says
are likeliest. What the prompt itself is followed by is compared where it ends, before the needle is
asked for: by the divergence of the next tokens' distributions from the dense model's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from distca.inference.messages import check_tokens
from distca.inference.models import ServedModel, load_tokenizer, model_digest
from distca.inference.sampling import UnusableLogitsError, check_highest
from distca.inference.sparse_model import SparseModel
from distca.json_files import read_text
from distca.plan.span import Floats, Int64s
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.calibration_file import CalibrationFile, MeasuredOn
from distca.schedule.serving.csps.configure import layer_options
from distca.schedule.serving.csps.degradation import (
    LEAST_KEPT,
    LEAST_PROMPTS,
    Calibration,
    Measure,
    Measured,
)

NEEDLE = 8
"""Tokens of a needle."""
CUE = 3
"""Tokens of it that are repeated before the others are asked for."""
COMPARED = 64
"""Tokens at a prompt's end whose next tokens' distributions are compared."""


LEAST_TOKENS = 4 * (COMPARED + 2 * NEEDLE)
"""Tokens of a prompt, below which what is compared is most of it."""


def read_prompts(path: Path, model: ServedModel) -> list[list[int]]:
    """Reads prompts to calibrate with: a JSON list of texts, or of lists of token ids.

    Raises:
        ValueError: the file is something else, or has too few prompts, or one cannot be used.
    """
    text = read_text(path, "give a JSON list of texts or of lists of token ids", "--prompts")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--prompts {path} is not JSON: {error}") from error
    of_texts = isinstance(given, list) and all(isinstance(each, str) for each in given)
    of_ids = isinstance(given, list) and all(
        isinstance(each, list) and all(type(token) is int for token in each) for each in given
    )
    if not of_texts and not of_ids:
        raise ValueError(f"--prompts {path} is not a list of texts or of lists of token ids")
    if len(given) < LEAST_PROMPTS:
        raise ValueError(
            f"--prompts {path} has {len(given)} prompts: give at least {LEAST_PROMPTS}, because "
            "some are held out"
        )
    if of_texts:
        tokenizer = load_tokenizer(model.path)
        given = [tokenizer.encode(each) for each in given]
    for number, each in enumerate(given):
        check_tokens(model, each, 0, f"prompt {number}")
        if len(each) < LEAST_TOKENS:
            raise ValueError(
                f"prompt {number} has {len(each)} tokens: give at least {LEAST_TOKENS}, and such "
                "as are to be served"
            )
    return given


def measured_on(
    model: ServedModel, levels: Levels, prompts: Sequence[Sequence[int]], seed: int
) -> MeasuredOn:
    """Says what a calibration is measured on."""
    links, told = levels.links, json.dumps([seed, *map(list, prompts)])
    return MeasuredOn(
        model.description,
        model_digest(model).hex(),
        levels.ranks,
        min(links.ranks_per_node, levels.ranks),
        links.nodes_per_rack,
        levels.node_parts,
        len(prompts),
        hashlib.sha256(told.encode()).hexdigest(),
    )


def calibrate(
    file: CalibrationFile,
    model: ServedModel,
    levels: Levels,
    prompts: Sequence[Sequence[int]],
    samples: int,
    seed: int,
    told: Callable[[], object] = lambda: None,
) -> Iterator[CalibrationFile]:
    """Measures what a file lacks; yields it whenever something was added, and at the end.

    Args:
        file: what there is.
        model: model to measure.
        levels: levels of its ranks.
        prompts: token ids of each prompt.
        samples: sparsities to run.
        seed: seed of sparsities and needles.
        told: called after each run of the model but the first of each prompt.
    """
    if len(file.measured) < len(prompts):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        calibrated = Calibrated(SparseModel(model, levels, device), prompts, seed)
        numbers = range(len(prompts))
        if not file.samples:
            curves = [calibrated.measure(number, []) for number in numbers]
            drawn = sampled_sparsities(Calibration([], curves), samples, seed)
            file = replace(file, samples=drawn)
            yield file
        for number in numbers[len(file.measured) :]:
            measured = calibrated.measure(number, file.samples, told)
            file = replace(file, measured=[*file.measured, measured])
            yield file
    yield file


def with_needle(prompt: Sequence[int], seed: int) -> list[int]:
    """Hides a needle in a prompt, and asks for it at the end, so that its length stays."""
    random = np.random.default_rng(seed)
    body = np.array(prompt)[: len(prompt) - 2 * NEEDLE]
    needle: Int64s = random.permutation(np.unique(prompt))[:NEEDLE]
    needle = np.resize(needle, NEEDLE)
    depth = int(random.integers(0, 3 * len(body) // 4 + 1))
    return [*map(int, np.concatenate([body[:depth], needle, body[depth:], needle]))]


class Calibrated:
    """Prompts that sparsities are measured on.

    Args:
        model: model to measure.
        prompts: token ids of each; longer than what is compared.
        seed: seed of the needles.
    """

    def __init__(self, model: SparseModel, prompts: Sequence[Sequence[int]], seed: int) -> None:
        self._model = model
        self._prompts = [with_needle(each, seed + n) for n, each in enumerate(prompts)]

    def measure(
        self,
        number: int,
        samples: Sequence[Sparsity],
        told: Callable[[], object] = lambda: None,
    ) -> Measured:
        """Measures sparsities on a prompt.

        Args:
            number: number of the prompt.
            samples: sparsities.
            told: called after each run of the model.

        Raises:
            ValueError: the model's logits are not finite.
        """
        tokens = self._prompts[number]
        last = COMPARED + NEEDLE
        logits, mass = self._model.run(tokens, None, last)
        self._check(number, logits, "")
        told()
        dense, recalled = _compared(logits), _recalled(logits, tokens)
        divergences, losses = [], []
        for sample in samples:
            logits, _ = self._model.run(tokens, sample, last)
            self._check(number, logits, ", with some keys dropped,")
            told()
            sparse = _compared(logits)
            # Tokens that the model masks add nothing.
            each = torch.where(dense.isneginf(), 0.0, dense.exp() * (dense - sparse))
            divergence = each.sum(-1).mean()
            divergences.append(max(float(divergence), 0.0))
            lost = recalled & ~_recalled(logits, tokens)
            losses.append(float(lost.float().mean()))
        degraded: dict[Measure, Floats] = {
            "kl": np.array(divergences),
            "recall_loss": np.array(losses),
        }
        return Measured(len(tokens), mass, degraded, float(recalled.float().mean()))

    def _check(self, number: int, logits: torch.Tensor, how: str) -> None:
        try:
            # A maximum is NaN if any logit is, as is the least of maxima if any of them is.
            highest = logits.max(-1).values
            check_highest(float(highest.min()))
            check_highest(float(highest.max()))
        except UnusableLogitsError as error:
            raise ValueError(
                f"prompt {number}{how} cannot be measured, since the logits are {error.what}"
            ) from None


def _compared(logits: torch.Tensor) -> torch.Tensor:
    """Logarithms of the next tokens' shares where the prompt ends, `[COMPARED, vocabulary]`."""
    return logits[:COMPARED].double().log_softmax(-1)


def _recalled(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Which tokens of the needle are likeliest, bool `[NEEDLE - CUE]`."""
    likeliest = logits[-(NEEDLE - CUE) - 1 : -1].argmax(-1)
    return likeliest == torch.tensor(tokens[-(NEEDLE - CUE) :])


def sampled_sparsities(curves: Calibration, number: int, seed: int = 0) -> list[Sparsity]:
    """Draws sparsities as a configurator may choose them, from next to nothing dropped to most.

    Args:
        curves: a calibration whose masses are known.
        number: how many.
        seed: seed of what is drawn.
    """
    random = np.random.default_rng(seed)
    dense = Sparsity.nothing_dropped(curves.layers, curves.heads, curves.far_levels + 1)
    options = [layer_options(curves, curves.mean_length, layer) for layer in range(curves.layers)]
    # Options of a layer by what they drop.
    orders = [
        np.argsort(curves.mass(curves.mean_length, layer, each).mean(axis=-1), kind="stable")
        for layer, each in enumerate(options)
    ]
    sparsities = []
    for _ in range(number):
        # Groups of layers drop more and less, and some nothing, so that their effects can be
        # separated; most of them little, as tight bounds allow.
        of_group = random.random(curves.groups) ** 2 * random.integers(0, 2, curves.groups)
        of_group[random.integers(curves.groups)] = random.random() ** 2
        kept = np.ones((curves.layers, curves.heads, curves.far_levels))
        for layer in range(1, curves.layers - 1):
            place = of_group[curves.group(layer)]
            if place:
                place = np.clip(place * random.uniform(0.7, 1.3), 0, 1)
            kept[layer] = options[layer][orders[layer][int(place * (len(options[layer]) - 1))]]
        kept = np.concatenate([np.ones((*kept.shape[:2], 1)), np.maximum(kept, LEAST_KEPT)], axis=2)
        ratios = tuple(tuple(map(tuple, heads)) for heads in kept.tolist())
        sparsities.append(Sparsity(ratios, dense.queries))
    return sparsities
