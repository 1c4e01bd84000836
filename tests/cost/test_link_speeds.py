"""Seconds of links, and the bytes of published models."""

from __future__ import annotations

import numpy as np
import pytest

from distca.cost.link import Links
from distca.cost.model_sizes import MODELS
from distca.cost.volume import AttentionShape, Messages, PlanBytes


def test_links() -> None:
    links = Links(ranks_per_node=2, node_gb_per_s=100, network_gb_per_s=10)
    assert links.seconds_per_byte(0, 1) == pytest.approx(1e-11)
    assert links.seconds_per_byte(1, 2) == pytest.approx(1e-10)
    matrix = np.zeros((4, 4), dtype=np.int64)
    matrix[0, 1], matrix[0, 2], matrix[3, 2] = 1000, 500, 300
    messages = Messages.of_matrix(matrix)
    moved = PlanBytes({"dispatch": messages, "combine": messages.back})
    assert links.between_nodes(moved) == 1000
    # Rank 0 sends 500 bytes to the network, then receives as many; rank 3 sends inside its node.
    assert links.busy_seconds(moved) == pytest.approx([1e-7, 2e-8, 1e-7, 6e-9])
    zero, unknown = {"ranks_per_node": 0}, {"network_gb_per_s": float("nan")}
    for wrong in (zero, {"node_gb_per_s": 0.0}, unknown):
        with pytest.raises(ValueError, match=r"at least one rank|must be positive"):
            Links(**wrong)  # type: ignore[arg-type]


def test_the_models_of_the_paper() -> None:
    assert MODELS["llama-34b"].attention_shape() == AttentionShape(64, 16, 128)
    assert MODELS["llama-34b"].attention_shape().q_row_bytes == 16384
    assert MODELS["llama-8b"].attention_shape(8) == AttentionShape(4, 1, 128)
