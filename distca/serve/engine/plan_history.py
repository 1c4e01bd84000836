"""Plans of sequences' last chunks, kept as what they are made of, so that they can be shown."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from distca.plan.saved import save_plan
from distca.schedule.serving.iteration import BatchEntry, plan_iteration
from distca.serve.engine.settings import ServerConfig

_KEPT = 256
"""Sequences whose last chunk is kept."""


class PlanHistory:
    """The last sequences that were fed in chunks, each with all parts of its iteration.

    Args:
        settings: settings of the engine.
        ranks: ranks that chunks are planned for.
    """

    def __init__(self, settings: ServerConfig, ranks: int) -> None:
        self._settings, self._ranks = settings, ranks
        self._parts: OrderedDict[int, tuple[BatchEntry, ...]] = OrderedDict()

    def keep(self, sequences: Iterable[int], parts: tuple[BatchEntry, ...]) -> None:
        """Keeps the parts of an iteration that feeds chunks of sequences."""
        for sequence in sequences:
            self._parts[sequence] = parts
            self._parts.move_to_end(sequence)
        while len(self._parts) > _KEPT:
            self._parts.popitem(last=False)

    def saved(self, sequence: int) -> str | None:
        """Returns the plan of a sequence's last chunk, of the layers with the widest mask."""
        parts = self._parts.get(sequence)
        if parts is None:
            return None
        settings = self._settings
        whole = plan_iteration(
            parts,
            settings.masks,
            settings.block_size,
            self._ranks,
            settings.strategy,
            settings.head_groups,
        )
        assert whole.chunks is not None, "parts are kept of chunks alone"
        plans, sequences = whole.chunks.plans, whole.chunks.sequences
        mask = max(settings.masks, key=lambda each: each.window_left or 1 << 62)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            save_plan(plans.by_mask[mask], path, {"sequences": list(sequences)})
            return path.read_text(encoding="utf-8")
