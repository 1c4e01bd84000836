"""Mistakes with rollouts: each is refused with what to do, on all ranks, before wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest

from support.refused_rollouts import with_other_attention

pytest.importorskip("transformers")


def test_models_with_another_attention_refuse_batches(ranks: Any) -> None:
    """A model that is made of the policy's config changes the policy's attention, too."""
    for found in ranks.run(with_other_attention, world_size=2):
        assert found.pop("policy") == "no error"
        assert len(found) == 10
        for name, message in found.items():
            assert 'attn_implementation="distca"' in message, (name, message)
