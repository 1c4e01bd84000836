"""Windows on some layers, sinks and query-key layer scaling, against runs without `--distca`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.own_loop import OwnLoop, sizes

MASKS = "--window-size 100,0 --window-attn-skip-freq 2".split()
SINKS = ["--softmax-type", "learnable"]
SCALING = ["--apply-query-key-layer-scaling"]
ALL = [*MASKS, *SINKS, *SCALING]
HEADS = "--group-query-attention --num-query-groups 2".split()
PIPELINE = """
    --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel
""".split()


@pytest.mark.parametrize("kinds", [ALL, MASKS, SINKS], ids=["together", "windows", "sinks"])
def test_losses_and_all_gradients(kinds: list[str], tmp_path: Path, full: bool) -> None:
    if kinds != ALL and not full:
        pytest.skip("all together are shown; --full shows each alone")
    loop = OwnLoop(tmp_path, [*HEADS, *kinds])
    assert any("softmax_offset" in name for name in loop.expected) == (kinds != MASKS)
    loop.check(2, "--distca", *sizes(256, 2))
    loop.check(4, "--distca", *sizes(512), *PIPELINE)
