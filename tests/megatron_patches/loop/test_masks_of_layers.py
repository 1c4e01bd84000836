"""Windows on some layers, sinks and query-key layer scaling in Megatron-LM's own loop, against it
without `--distca`.

Checkpoints have the tensors of the whole model, whatever ranks hold them: Adam's first moments
after two steps tell the gradients of the second one.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.parity import relative
from support.pretraining import run
from support.whole_runs import write_documents

WINDOW = 512
FLAGS = f"""
    --training-loop megatron --num-layers 4 --kv-channels 16 --hidden-dropout 0 --split 100,0,0
    --make-vocab-size-divisible-by 64 --train-iters 2 --save-interval 1
    --max-position-embeddings {WINDOW} --distca-max-document-length {WINDOW}
""".split()
MASKS = "--window-size 100,0 --window-attn-skip-freq 2".split()
SINKS = ["--softmax-type", "learnable"]
SCALING = ["--apply-query-key-layer-scaling"]
ALL = [*MASKS, *SINKS, *SCALING]
PIPELINE = """
    --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel
""".split()
BETA, MOMENT = 0.9, "optimizer.state.exp_avg."

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="megatron.training is not installed: Python 3.12 has it",
)


def sizes(seq_length: int) -> list[str]:
    """Two micro-batches of a window each, of which every data-parallel rank has so many tokens."""
    samples = 2 * WINDOW // seq_length
    return ["--seq-length", str(seq_length), "--global-batch-size", str(samples)]


def moments(checkpoints: Path, iteration: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader = FileSystemReader(str(checkpoints / f"iter_{iteration:07d}"))
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {
        name.removeprefix(MOMENT): moment
        for name, moment in found.items()
        if name.startswith(MOMENT)
    }


def gradients(first: Path, second: Path) -> dict[str, torch.Tensor]:
    """Clipped gradients of the second step, by name."""
    before = moments(first, 1)
    return {
        name: (after - BETA * before[name]) / (1 - BETA)
        for name, after in moments(second, 2).items()
    }


def logged(output: dict[int, str]) -> dict[int, float]:
    """Losses of the iterations; Megatron-LM's second line is a mean of the first two."""
    losses = {iteration: float(loss) for iteration, loss in output.items()}
    return losses | ({2: 2 * losses[2] - losses[1]} if 1 in losses else {})


@pytest.mark.parametrize("kinds", [ALL, MASKS, SINKS], ids=["together", "windows", "sinks"])
def test_losses_and_all_gradients(kinds: list[str], tmp_path: Path, full: bool) -> None:
    if kinds != ALL and not full:
        pytest.skip("all together are shown; --full shows each alone")
    data = write_documents(tmp_path / "documents", [500, 130, 256, 70] * 20)
    flags = [*FLAGS, *kinds]
    plain, begun, parallel, pipeline = (tmp_path / str(number) for number in range(4))
    # Stages of a pipeline are seeded apart, so that one goes on from the weights of plain Megatron.
    dense = ["--attention-backend", "unfused", "--save", str(plain)]
    losses = logged(run(1, data, *flags, *sizes(WINDOW), *dense)[0])
    shutil.copytree(plain / "iter_0000001", begun / "iter_0000001")
    (begun / "latest_checkpointed_iteration.txt").write_text("1")
    halves = ["--distca", *sizes(WINDOW // 2), "--save", str(parallel)]
    assert logged(run(2, data, *flags, *halves)[0]) == pytest.approx(losses, rel=2e-6)
    stages = ["--distca", *sizes(WINDOW), *PIPELINE, "--load", str(begun), "--save", str(pipeline)]
    found = logged(run(4, data, *flags, *stages)[0])
    assert found == pytest.approx({2: losses[2]}, rel=2e-6)
    expected = gradients(plain, plain)
    assert any("softmax_offset" in name for name in expected) == (kinds != MASKS)
    for ours in (gradients(parallel, parallel), gradients(plain, pipeline)):
        assert ours.keys() == expected.keys()
        for name, gradient in ours.items():
            assert relative(gradient, expected[name]) < 1e-5, name
