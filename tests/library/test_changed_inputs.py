"""A model that is called with other arguments than those of `inputs_of` is refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.changed_inputs import CHANGED, changed_inputs

pytest.importorskip("transformers")


def test_other_arguments_than_those_of_a_batch_are_refused(ranks: Any) -> None:
    for found in ranks.run(changed_inputs, world_size=2):
        for name, message in CHANGED.items():
            assert found[name].startswith(message), (name, found[name])
